"""Figures of plans that are exact: parameters, gradients, optimizer state and each slab, beside real ranks' steps.

The ranks run the engine's code for accelerators on the CPU, so that offload has a host and a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.engine import Host
from shardwright.engine.comm import use_streams
from shardwright.engine.compat import in_backward, local_of
from shardwright.engine.memory import Slab, observe
from shardwright.planner import Phase, Program
from shardwright.planner.tracing import ProgramRecorder
from shardwright.planner.tracing.streams import RecordedStreams
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData
from shardwright.train.planning.programs import program_of
from shardwright.train.step.trainer import Trainer
from tests.support.matrix import generate
from tests.support.pool import WorkerPools, run_case
from tests.train.kit.jobs import train_step
from tests.train.planning.kit import config_of, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AXES: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 1, 3, 4),
    "strategy": ("parallel.strategy=zero3", "parallel.strategy=zero1", "parallel.strategy=zero2",
                 "parallel.strategy=ddp", "parallel.strategy=hsdp parallel.replicas=2",
                 "parallel.strategy=hfsdp parallel.replicas=2"),
    "layout": ("", "parallel.layout=ragged", "parallel.layout=element", "parallel.layout=32"),
    "memory": ("", "parallel.memory=double_buffer", "parallel.memory=max_pool", "parallel.memory=arena"),
    "precision": ("", "parallel.param_dtype=bfloat16",
                  "parallel.param_dtype=bfloat16 parallel.reduce_dtype=bfloat16 parallel.accumulate_dtype=float32"),
    "offload": ("", "parallel.offload=cpu", "parallel.offload=optimizer"),
    "optimizer": ("", "optimizer.in_backward=true train.max_norm=0", "optimizer.name=adamw8bit",
                  "optimizer.name=muon"),
    "tensor": ("", "parallel.tensor=2"),
    "more": ("", "train.micro_batch=1", "parallel.prefetch=2", "activations.checkpoint=full"),
}  # fmt: skip


#: Strategies that keep full parameters.
KEEPING = {
    "parallel.strategy=zero1",
    "parallel.strategy=zero2",
    "parallel.strategy=hfsdp parallel.replicas=2",
}
POOLS = {"parallel.memory=double_buffer", "parallel.memory=max_pool"}


def words_of(row: dict[str, Any]) -> str:
    batch = f"train.global_batch={12 if row['ranks'] == 3 else 8} train.micro_batch=2 validation.every=0"
    return " ".join([batch, *(each for key, each in row.items() if key != "ranks" and each)])


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    """Whether two settings do not go together, as the configuration says."""
    if "optimizer.name=adamw8bit" in (a, b) and {a, b} & {"parallel.tensor=2", "parallel.layout=element"}:
        return True  # its blocks would be cut
    if {a, b} & KEEPING and {a, b} & POOLS:
        return True  # no slot would become free
    row: dict[str, Any] = {"ranks": 4, one: a, other: b}
    try:
        config_of(words_of(row), ranks=row["ranks"]).parallel.dims(row["ranks"])
    except UserError:
        return True
    return False


ROWS = generate(AXES, excluded, 2)
#: A row that `make test` runs.
HANDFUL: dict[str, dict[str, Any]] = {
    "offload, element": {
        "ranks": 2, "strategy": "parallel.strategy=zero1", "layout": "parallel.layout=element",
        "precision": "parallel.param_dtype=bfloat16", "offload": "parallel.offload=optimizer",
    },
}  # fmt: skip


class Leases:
    """The slabs that get memory, in their order."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def leased(self, slab: Slab) -> None:
        self.seen.append([slab.kind, slab.unit, slab.nbytes])

    def releases(self, slab: Slab) -> None:
        return None

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        return None

    def resized(self, storage: torch.UntypedStorage) -> None:
        return None

    def exchanged(self, one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        return None


@contextmanager
def blocks_of_host() -> Iterator[list[torch.UntypedStorage]]:
    """The memory that the engine takes on the host."""
    found: list[torch.UntypedStorage] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("zeros", "copy_of"):
            plain = getattr(Host, name)

            def noted(self: Host, *arguments: Any, plain: Any = plain) -> Tensor:
                made = plain(self, *arguments)
                found.append(made.untyped_storage())
                return made  # type: ignore[no-any-return]

            patch.setattr(Host, name, noted)
        yield found


def measure(rank: int, world_size: int, config: Config, folder: Path) -> None:
    """Make two steps, and write what the first rank holds: by group the bytes of the device and of the host."""
    device, leases = torch.device("cpu"), Leases()
    figures: dict[str, list[int]] = {}
    data: Any = AbsentData.of(config, world_size)
    with use_streams(device, RecordedStreams(ProgramRecorder())), observe(leases), blocks_of_host() as host:
        trainer = Trainer(config, World.of(config.parallel, rank, world_size, device), data)

        def note(group: str, tensors: Iterable[Tensor], of_host: bool = False) -> None:
            on_host = {storage._cdata for storage in host}
            storages = {}
            for each in tensors:
                local = local_of(each) if hasattr(each, "_local_tensor") else each
                there = of_host or local.untyped_storage()._cdata in on_host
                storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes(), there
            figures[group] = [sum(n for n, there in storages.values() if there == of) for of in (False, True)]

        def note_gradients(*_: Any) -> None:
            if not in_backward():
                note("gradients", [p.grad for p in trainer.model.parameters() if p.grad is not None])

        handle = register_optimizer_step_pre_hook(note_gradients)
        try:
            for _ in range(2):
                train_step(trainer)
        finally:
            handle.remove()
        note("parameters", [*trainer.model.parameters(), *trainer.model.buffers()])
        state = [each for values in trainer.optimizer.state.values() for each in tensors_in(values)]
        # An optimizer keeps its state where its parameters are.
        note("optimizer", state, of_host=config.parallel.offload == "cpu")
        trainer.close()
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps({"leases": leases.seen, **figures}))


def planned(config: Config, ranks: int) -> dict[str, Any]:
    """The same figures of a plan."""
    leases = Leases()
    with observe(leases):
        program = program_of(config, ranks)
    steps = [i for i, each in enumerate(program.events) if each == Phase("optimizer")]
    figures: dict[str, Any] = {"leases": leases.seen}
    for group in ("parameters", "optimizer"):
        figures[group] = bytes_of(program, group, None)
    if has_gradients(config):
        figures["gradients"] = bytes_of(program, "gradients", steps[-1])
    return figures


def has_gradients(config: Config) -> bool:
    """Whether gradients are there before the optimizer steps, in memory of their own. An arena has them in its
    block."""
    return not config.optimizer.in_backward and config.parallel.memory != "arena"


def bytes_of(program: Program, group: str, stop: int | None) -> list[int]:
    blocks = [each for each in program.live(stop) if program.owners[each.owner].group == group]
    return [sum(each.nbytes for each in blocks if each.on_host == of) for of in (False, True)]


def check(row: dict[str, Any], pools: WorkerPools, folder: Path) -> None:
    try:
        config = config_of(words_of(row), ranks=row["ranks"])
        plan = planned(config, row["ranks"])
    except UserError as error:
        pytest.skip(f"three of these settings do not go together: {error}")
    run_case(pools, measure, row["ranks"], 120, config=config, folder=folder)
    real = json.loads((folder / "figures.json").read_text())
    if not has_gradients(config):
        real.pop("gradients", None)
    assert plan == real


@pytest.mark.parametrize("row", HANDFUL.values(), ids=HANDFUL)
def test_exact_figures_are_exact(row: dict[str, Any], worker_pools: WorkerPools, tmp_path: Path) -> None:
    check(row, worker_pools, tmp_path)


@pytest.mark.extensive("each pair of settings")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_exact_figures_are_exact_with_each_pair_of_settings(
    row: dict[str, Any], worker_pools: WorkerPools, tmp_path: Path
) -> None:
    check(row, worker_pools, tmp_path)
