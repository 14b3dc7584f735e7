"""The GPUs: how much of their memory is free, and which of them reach each other's memory.

nvidia-smi shows what else a GPU may suffer from: errors of its memory, heat, and lanes of PCIe. Nothing here computes
on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.cli.doctor.children import Unmeasured, measure_in_children
from shardwright.cli.doctor.findings import Finding, size, unmeasured

SECONDS = 25.0
"""Limit of the look at the GPUs, which starts CUDA on each."""
LEAST_FREE = 0.9
"""Free share of a GPU that nobody uses. The driver and the context of this program take the rest."""


def find_devices(count: int) -> list[Finding]:
    """Look at the GPUs, and judge them.

    Args:
        count: the number of GPUs that torch found.
    """
    if not count:
        return [Finding("devices", "no GPU, ranks train on the CPU", figures={"gpus": 0})]
    try:
        (seen,) = measure_in_children(measure_gpus, [()], SECONDS)
    except Unmeasured as error:
        advice = "see the end of `dmesg` for Xid errors, and restart the host's driver or the host"
        return [unmeasured("devices", f"torch's look at the GPUs failed: {error}", advice)]
    found = [judge_gpu(number, gpu) for number, gpu in enumerate(seen["gpus"])]
    return [*found, judge_pairs(count, seen["without_peer_access"])] if count > 1 else found


def judge_gpu(number: int, gpu: Mapping[str, Any]) -> Finding:
    """Return the finding for a GPU, from its name and its bytes total and free."""
    advice = ""
    if gpu["free"] < LEAST_FREE * gpu["total"]:
        advice = (
            "another program or container holds its memory: nvidia-smi on the host names it; end it, or choose other "
            "GPUs with CUDA_VISIBLE_DEVICES"
        )
    text = f"{gpu['name']}, {size(gpu['free'])} free of {size(gpu['total'])}"
    return Finding(f"device {number}", text, advice, {"index": number, **gpu})


def judge_pairs(count: int, without_access: Sequence[Sequence[int]]) -> Finding:
    """Return the finding for all pairs of GPUs, from those that do not reach each other's memory."""
    figures = {"without_peer_access": [list(pair) for pair in without_access]}
    if not without_access:
        return Finding("GPU links", f"{count} GPUs, peer access between all pairs", figures=figures)
    shown = ", ".join("-".join(map(str, pair)) for pair in without_access[:4])
    text = f"{count} GPUs, no peer access between {shown}{', ...' if len(without_access) > 4 else ''}"
    advice = (
        "NCCL copies through the host's memory: turn off ACS and the IOMMU for the GPUs, or take GPUs with a common "
        "switch (nvidia-smi topo -m)"
    )
    return Finding("GPU links", text, advice, figures)


def measure_gpus() -> dict[str, Any]:
    """Return the name and the memory of each GPU, and the pairs without peer access."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append({"name": torch.cuda.get_device_name(index), "free": free, "total": total})
    pairs = [
        [one, other]
        for one in range(len(gpus))
        for other in range(one + 1, len(gpus))
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    return {"gpus": gpus, "without_peer_access": pairs}
