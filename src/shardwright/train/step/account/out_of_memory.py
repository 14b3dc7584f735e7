"""The owners of a rank's memory after it has run out of memory, and settings that need less.

The rank leaves them as lines in a file, and who prints its error prints them, too. Nothing here raises: the error of
the run must stay the one that is seen.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import shardwright as sw
from shardwright.common.durable import replace_file
from shardwright.engine import in_units
from shardwright.engine.compat import dump_memory_history
from shardwright.train.config import Config
from shardwright.train.config.load import checked_config
from shardwright.train.config.plans.memory_edits import Keys, edits_of, in_words
from shardwright.train.errors import UserError
from shardwright.train.launch.forecast import shortage_file
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.trainer import Trainer

SETTINGS = 3  #: named at most
#: Keys with which a run computes something else, beside the order of sums.
CHANGE_NUMBERS = ("optimizer.name", "parallel.param_dtype", "train.seq_len")
GROUPS = {
    "parameters": "shards of parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "slabs": "gathered parameters and reductions",
    "activations": "activations and the rest",
}
"""Owners in words, by the names of groups of memory in plans."""


def leave_owners(trainer: Trainer, folder: RunFolder) -> None:
    """Leave the lines of this rank, which replace those of another one."""
    with suppress(Exception):
        lines = list(_lines(trainer, folder))
        folder.logs.mkdir(parents=True, exist_ok=True)
        replace_file(shortage_file(folder), ("\n".join(lines) + "\n").encode())


def _lines(trainer: Trainer, folder: RunFolder) -> Iterator[str]:
    rank, step = trainer.world.rank, trainer.position.step + 1
    owners = owners_of(trainer)
    shown = sorted(((nbytes, group) for group, nbytes in owners.items() if nbytes), reverse=True)
    words = ", ".join(f"{in_units(nbytes)} {GROUPS[group]}" for nbytes, group in shown)
    yield f"memory of rank {rank} by owner, after the error of step {step}: {words}"
    world = trainer.world
    edits = settings_that_need_less(trainer.config, world.size, world.device.type, owners)
    if settings := [in_words(keys) for keys in edits]:
        yield f"settings that need less memory, best first: {'; '.join(settings)}"
    history = folder.memory_history(step, rank)
    if history.exists():
        yield f"history of its GPU memory: {history}; open it at pytorch.org/memory_viz"
    elif trainer.world.device.type == "cuda":
        segments = folder.memory_segments(step, rank)
        if _dumps_segments(segments):
            yield (
                f"snapshot of its GPU memory, blocks without stacks: {segments}; open it at pytorch.org/memory_viz"
            )
        yield f"to see each allocation: --train.memory_snapshot '[{step}]'"


def _dumps_segments(path: Path) -> bool:
    """Write torch's snapshot of the allocator. It needs no history, which would take time in every step."""
    with suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        dump_memory_history(str(path))
        return True
    return False


def owners_of(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of this rank now, by group. On a GPU the last group is all that torch has allocated beside the
    others."""
    if trainer.config.parallel.facts.reports_memory:
        report = sw.memory_report(trainer.model, trainer.optimizer)
        owners = {
            "parameters": report.shards + report.rest + report.buffers,
            "gradients": report.gradients,
            "optimizer": report.optimizer,
            "slabs": sum(report.leased.values()),
        }
    else:
        parameters = list(trainer.model.parameters())
        state = [each for values in trainer.optimizer.state.values() for each in values.values()]
        owners = {
            "parameters": _bytes_of(parameters),
            "gradients": _bytes_of([p.grad for p in parameters]),
            "optimizer": _bytes_of(state),
        }
    if trainer.world.device.type == "cuda":
        owners["activations"] = max(torch.cuda.memory_allocated() - sum(owners.values()), 0)
    return owners


def _bytes_of(values: Sequence[object]) -> int:
    return sum(
        getattr(each, "_local_tensor", each).nbytes for each in values if isinstance(each, torch.Tensor)
    )


def settings_that_need_less(config: Config, ranks: int, kind: str, owners: dict[str, int]) -> list[Keys]:
    """Changes of three keys that save memory on devices of this kind, those first that shrink the largest owners; last
    those that change the numbers of the run. Fewer if the configuration leaves no more."""
    shorter = [("train.seq_len", str(config.train.seq_len // 2))]
    edits = [*edits_of(config, kind), (shorter, ("activations",))]
    strongest = {keys[0][0]: (keys, groups) for keys, groups in edits if _is_allowed(config, ranks, keys)}
    ordered = list(strongest.values())
    if "activations" in owners:  # else the largest owner is perhaps not known, and the order is that of plans
        ordered.sort(
            key=lambda edit: (
                edit[0][0][0] in CHANGE_NUMBERS,
                -sum(owners.get(group, 0) for group in edit[1]),
            )
        )
    return [keys for keys, _ in ordered][:SETTINGS]


def _is_allowed(config: Config, ranks: int, keys: Keys) -> bool:
    with suppress(UserError):
        checked_config(tomllib.loads(config.to_toml()), "config.toml", keys, ranks=ranks)
        return True
    return False
