"""Steps of the trainer as they are measured and as they are planned: rank 0 of a group without other ranks."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from shardwright.engine.compat import absent_ranks, local_of
from shardwright.planner import STEP, Alloc, Program
from shardwright.train.config import Config, load_config
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.native.styles import even_routing
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData
from shardwright.train.planning.programs import program_of
from shardwright.train.step.trainer import Trainer

EXAMPLES = Path(__file__).parents[3] / "examples"


def config_of(words: str, example: str = "llama_debug", ranks: int = 2) -> Config:
    """The configuration of an example, with keys as SECTION.KEY=VALUE."""
    overrides = [cast(tuple[str, str], tuple(word.split("=", 1))) for word in words.split()]
    return load_config(EXAMPLES / f"{example}.toml", [*overrides, ("data.workers", "0")], ranks=ranks)


def plain(program: Program) -> list[Any]:
    """The events, with the owners themselves."""
    return [
        (each._replace(owner=0), program.owners[each.owner]) if isinstance(each, Alloc) else each
        for each in program.events
    ]


def real_step(config: Config) -> tuple[int, dict[str, int]]:
    """Bytes at the peak of the second step above those at its begin, and bytes of each group of tensors that stay."""
    data: Any = AbsentData.of(config, 2)
    with absent_ranks(2), even_routing():
        trainer = Trainer(config, World.of(config.parallel, 0, 2, torch.device("cpu")), data)
        trainer.train_step(StopRequest())
        gc.collect()
        top = peak_of(functools.partial(trainer.train_step, StopRequest()))
        kept = {
            "parameters": _bytes([*trainer.model.parameters(), *trainer.model.buffers()]),
            "optimizer": _bytes([t for state in trainer.optimizer.state.values() for t in tensors_in(state)]),
        }
        trainer.close()
        del trainer
    gc.collect()
    return top, kept


def peak_of(action: Callable[[], object]) -> int:
    """The most bytes of torch's allocator while ``action`` runs, above those at its begin."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events: Any = profiled.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        top = max(top, now)
    return top


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for each in tensors:
        local = local_of(each) if hasattr(each, "_local_tensor") else each
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for each in values for t in tensors_in(each)]


def planned_step(program: Program) -> tuple[int, dict[str, int]]:
    """The same figures of the last step of a plan."""
    *_, start = (i for i, name in program.phase_starts() if name == STEP)
    live = sum(each.nbytes for each in program.live(start))
    kept: dict[str, int] = {}
    for each in program.live():
        group = program.owners[each.owner].group
        kept[group] = kept.get(group, 0) + each.nbytes
    return program.peak(start).nbytes - live, kept


def compare(config: Config, words: str, part: float) -> None:
    """Plan the step and measure it: the peaks differ by at most this part, and what stays does not."""
    real, real_kept = real_step(config)
    planned, kept = planned_step(program_of(config, 2, "cpu"))
    assert abs(planned - real) <= part * real, f"{words}: {planned} bytes planned, {real} measured"
    for group, nbytes in real_kept.items():
        if not nbytes:
            continue  # other ranks send what was in memory; if the loss is not finite, the optimizer makes no step
        assert kept.get(group, 0) == nbytes, (
            f"{words}: {group}: {kept.get(group, 0)} planned, {nbytes} measured"
        )
