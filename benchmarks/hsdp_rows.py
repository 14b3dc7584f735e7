"""Plans beside published times of FSDP and HSDP: what an overlap of collectives is worth.

    python -m benchmarks.hsdp_rows

Source of the rows: https://github.com/pytorch/pytorch/pull/106080 (July 2023). A Transformer of 6 encoder and 6 decoder
layers, 8,192 wide with 64 heads, on 32 A100 with 40 GB in 4 nodes. Its collectives had the bytes of 16-bit parameters.
The text names neither the batch nor the length of sequences, and says that the job is bound by communication. The rows
here have 512 tokens; with 16 they change by less than 1%. The bandwidth of the network is from the same text
(``a100-40gb-p4d.toml``), so the rows check streams and waits, and not the network.

"serial" has the all-reduce between nodes on the stream of reduce-scatters, as the source had before its change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.planner.devices import parse_devices
from shardwright.planner.program import Program
from shardwright.planner.speed import speed_of
from shardwright.planner.tracing import local_device
from shardwright.planner.tracing.loop import program_of_loop

RANKS, NODE, TOKENS = 32, 8, 512
DEVICE = Path(__file__).with_name("a100-40gb-p4d.toml")
#: Replicas, whether all-reduces have a stream of their own, and published seconds.
ROWS = {
    "FSDP": (1, True, 1.160),
    "HSDP, serial": (RANKS // NODE, False, 0.665),
    "HSDP": (RANKS // NODE, True, 0.597),
}


def loop_of(replicas: int) -> Callable[[], Any]:
    def loop() -> Any:
        mesh = init_device_mesh("cpu", (replicas, RANKS // replicas), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if replicas > 1 else mesh["shard"]
        model = nn.Transformer(8192, 64, 6, 6, batch_first=True, dropout=0.0)
        policy = sw.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
        for layer in [*model.encoder.layers, *model.decoder.layers]:
            sw.fully_shard(layer, mesh=mesh, mp_policy=policy)
        sw.fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.zeros(1, TOKENS, 8192), torch.zeros(1, TOKENS, 8192)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return loop


def serial(program: Program) -> None:
    """Move all-reduces to the stream of reduce-scatters."""
    program.events = [
        each._replace(stream="reduce") if getattr(each, "stream", "") == "all_reduce" else each  # type: ignore[union-attr]
        for each in program.events
    ]


def main() -> None:
    device = parse_devices(str(DEVICE), local_device)[1]
    print(f"{'row':14}{'planned':>9}{'range':>15}{'published':>11}{'error':>8}")
    for name, (replicas, overlaps, published) in ROWS.items():
        program = program_of_loop(loop_of(replicas), RANKS)
        program.tokens = TOKENS
        if not overlaps:
            serial(program)
        speed = speed_of(program, device, RANKS)
        assert speed is not None
        fast, likely, slow = (seconds * 1e3 for seconds in speed.seconds)
        between = f"{fast:,.0f}-{slow:,.0f}"
        error = likely / published / 1e3 - 1
        print(f"{name:14}{likely:6,.0f} ms{between:>15}{published * 1e3:8,.0f} ms{error:8.1%}", flush=True)


if __name__ == "__main__":
    main()
