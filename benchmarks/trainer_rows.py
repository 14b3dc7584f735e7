"""Plans of the trainer beside speeds that others have published: their settings, in a configuration of ours.

    python -m benchmarks.trainer_rows [--only TEXT] [--losses]

torchtitan's selective policy is ``activations.checkpoint = "half_ops"``. Its H100 have 2.4 TB/s and a limit of 500 W
(``h100-96gb-500w.toml``), and 400 Gb/s of network each. For context parallelism the trainer divides heads among
ranks, and torchtitan passes keys around a ring. The LoRA row is NVIDIA's, on usual H100. Its program has fused
kernels of Liger for norms, rotary embeddings, SwiGLU and the loss, so this row has ``train.compile``, which fuses the
same operations. Sources, by letter:

- A: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
- B: https://github.com/pytorch/torchtitan/commit/2887250bbd9103d0bc997ea2efb3a525b5e5dbc0, June 2025
- C: https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md
- D: docs/performance-summary.md of https://github.com/NVIDIA-NeMo/Automodel, October 2025
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.planner.devices import parse_devices
from shardwright.planner.speed import speed_of
from shardwright.planner.tracing import local_device
from shardwright.train.config.load import checked_config
from shardwright.train.planning.programs import program_of

H100, A100 = str(Path(__file__).with_name("h100-96gb-500w.toml")), "a100"


class Row(NamedTuple):
    """A job, and its published speed.

    Attributes:
        preset: the model.
        ranks: devices.
        device: as on the command line.
        seq_len: tokens of a sample.
        batch: the micro-batch.
        checkpoint: ``activations.checkpoint``.
        rate: published tokens a second of each device.
        source: a letter of this file's first lines.
        train, parallel, finetune: further settings of these sections.
    """

    preset: str
    ranks: int
    device: str
    seq_len: int
    batch: int
    checkpoint: str
    rate: float
    source: str
    train: Mapping[str, Any] = {}
    parallel: Mapping[str, Any] = {}
    finetune: Mapping[str, Any] = {}


COMPILED = {"compile": "inductor"}
FLOAT8 = {"compile": "inductor", "float8": "tensorwise"}
LORA = {"method": "lora", "base_dtype": "bfloat16"}
ROWS = {
    "8B": Row("8B", 8, H100, 8192, 2, "half_ops", 5762, "A"),
    "8B, compiled": Row("8B", 8, H100, 8192, 2, "half_ops", 6667, "A", COMPILED),
    "8B, compiled, float8": Row("8B", 8, H100, 8192, 2, "half_ops", 8532, "A", FLOAT8),
    "8B, 128 ranks": Row("8B", 128, H100, 8192, 2, "half_ops", 5605, "A"),
    "8B, 128 ranks, compiled": Row("8B", 128, H100, 8192, 2, "half_ops", 6514, "A", COMPILED),
    "8B, 128 ranks, compiled, float8": Row("8B", 128, H100, 8192, 2, "half_ops", 8380, "A", FLOAT8),
    "8B, 64 A100": Row("8B", 64, A100, 8192, 1, "half_ops", 2973, "C"),
    "70B, 64 A100": Row("70B", 64, A100, 8192, 1, "full", 331, "C"),
    "context 1, 32k": Row("8B", 8, H100, 32768, 1, "full", 3890, "A", FLOAT8),
    "context 2, 64k": Row("8B", 8, H100, 65536, 1, "full", 2540, "A", FLOAT8, {"context": 2}),
    "context 4, 128k": Row("8B", 8, H100, 131072, 1, "full", 1071, "A", FLOAT8, {"context": 4}),
    "context 8, 256k": Row("8B", 8, H100, 262144, 1, "full", 548, "A", FLOAT8, {"context": 8}),
    "8B, tensor 8, 64 ranks": Row(
        "8B", 64, H100, 8192, 12, "half_ops", 4378, "B", COMPILED, {"tensor": 8}
    ),
    "70B, tensor 8, 256 ranks": Row(
        "70B", 256, H100, 8192, 16, "full", 597.3, "B", COMPILED, {"tensor": 8}
    ),
    "8B, LoRA, 1 rank, compiled": Row("8B", 1, "h100", 4096, 2, "none", 12473, "D", COMPILED, finetune=LORA),
}  # fmt: skip


def job_of(row: Row) -> dict[str, Any]:
    tensor, context = row.parallel.get("tensor", 1), row.parallel.get("context", 1)
    return {
        "model": {"kind": "llama", "preset": row.preset, "max_seq_len": row.seq_len},
        "data": {"workers": 0, "document_mask": False},
        "train": {
            "steps": 1000, "seq_len": row.seq_len, "micro_batch": row.batch,
            "global_batch": row.batch * row.ranks // tensor // context, **row.train,
        },
        "activations": {"checkpoint": row.checkpoint},
        "parallel": {"param_dtype": "bfloat16", "reduce_dtype": "float32", **row.parallel},
        **({"finetune": dict(row.finetune)} if row.finetune else {}),
    }  # fmt: skip


def lines(rows: Mapping[str, Row], losses: bool = False) -> Iterable[str]:
    yield f"{'row':36}{'likely':>8}{'range':>14}{'published':>10}{'error':>8}  inside"
    for name, row in rows.items():
        device = parse_devices(row.device, local_device)[1]
        config = checked_config(job_of(row), name, ranks=row.ranks)
        speed = speed_of(program_of(config, row.ranks), device, row.ranks)
        assert speed is not None
        low, likely, high = speed.tokens_per_second
        between = f"{low:,.0f}-{high:,.0f}"
        inside = "yes" if low <= row.rate <= high else "no"
        yield f"{name:36}{likely:8,.0f}{between:>14}{row.rate:10,.0f}{likely / row.rate - 1:8.1%}  {inside}"
        if losses:
            yield from (f"  {text}" for _, text in speed.lines())
            yield f"  {dict(speed.timeline.busy)} {dict(speed.timeline.communication)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose names have this text")
    parser.add_argument("--losses", action="store_true", help="print where the time of each step goes")
    options = parser.parse_args()
    rows = {name: row for name, row in ROWS.items() if options.only in name}
    for line in lines(rows, options.losses):
        print(line, flush=True)


if __name__ == "__main__":
    main()
