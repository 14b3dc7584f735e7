"""The largest rate at which devices multiply matrices, from the makers' data sheets.

Nothing here imports torch or a package, so that benchmarks can use the table where only torch is installed.
"""

from __future__ import annotations

import re

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # of one of its two dies; torch calls each die a device
)
"""Dense bf16 FLOP/s by words of the device's name, from the makers' data sheets. The first row that matches counts."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of a device that computes in `dtype`. None if the table lacks it: it has bfloat16 on some GPUs."""
    if dtype != "bfloat16":
        return None
    # Whole words: an L4 is no L40, an A30 no A3000.
    return next((peak for name, peak in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name, re.I)), None)
