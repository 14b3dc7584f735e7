"""torch's instruments around a sharded model: counters of collectives and flops, the profiler."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.engine.kit.subclasses import LIBRARIES, backward
from tests.engine.kit.surface import Policy, both, build, shard
from tests.support import multirank


@multirank(2)
@both
def test_comm_debug_mode_sees_operations_on_sharded_parameters(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    backward(model, rank)
    with CommDebugMode() as comm:
        model.head.weight.full_tensor()
        (2 * model.head.weight).sum().full_tensor()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert comm.get_total_counts() == 3


@pytest.mark.extensive("each dtype", but=("None-*",))
@multirank(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_comm_debug_mode_counts_as_many_as_with_fsdp2(
    rank: int, world_size: int, reshard: bool | None, param_dtype: torch.dtype | None
) -> None:
    """How the reduction is made (reduce-scatter, all-to-all) is the engine's business, how many there are is not."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for library in LIBRARIES:
        model = shard(
            library, build(), reshard_after_forward=reshard, mp_policy=Policy(param_dtype=param_dtype)
        )
        counts[library] = []
        for _ in range(2):
            with CommDebugMode() as comm:
                backward(model, rank)
            found = comm.get_comm_counts()
            gather = sum(n for op, n in found.items() if "allgather" in str(op))
            counts[library].append((gather, comm.get_total_counts() - gather))
    assert counts["shardwright"] == counts["torch"]


@multirank(2)
@both
def test_the_flop_counter_sees_the_plain_models_flops(rank: int, world_size: int, library: str) -> None:
    with FlopCounterMode(display=False) as expected:
        backward(build(), rank)
    model = shard(library, build())
    for _ in range(2):
        with FlopCounterMode(display=False) as found:
            backward(model, rank)
        assert found.get_total_flops() == expected.get_total_flops()
        per_module = {k: sum(v.values()) for k, v in expected.get_flop_counts().items()}
        for name, flops in found.get_flop_counts().items():
            assert sum(flops.values()) == per_module[name.removeprefix("FSDP")]


RANGES = {
    "FSDP::root_pre_forward", "FSDP::root_post_backward_callback", "FSDP::pre_forward", "FSDP::all_gather",
    "FSDP::post_forward", "FSDP::pre_backward", "FSDP::post_backward_reduce",
} | {
    f"FSDP::{what} (blocks.{i})"
    for what in ("pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward_reduce")
    for i in range(3)
}  # fmt: skip


@multirank(2)
@both
def test_the_profiler_shows_named_ranges(rank: int, world_size: int, library: str) -> None:
    """Under FSDP2's names: scripts that read traces look for them."""
    model = shard(library, build())
    backward(model, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(model, rank)
    found = {event.key for event in profiler.key_averages()}
    assert found >= RANGES, sorted(RANGES - found)
