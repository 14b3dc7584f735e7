"""torch's FSDPMemTracker on a sharded model: it changes no number, reads the memory, and leaves the hooks in place."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.kit.training import local_of
from tests.support import multirank, seed_all, world_mesh
from tests.support.matrix import select, together

tracker_module = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
needs_handles = pytest.mark.skipif(
    not hasattr(tracker_module, "FSDPMemTracker"), reason="this torch has no tracker of FSDP2"
)


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.way = way
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyError("a mistake of the user")
        if self.way == "checkpoint":
            return x + checkpoint(lambda h: self.down(self.up(h).relu()), x, use_reentrant=False)
        return x + self.down(self.up(x).relu())


class Row(NamedTuple):
    strategy: str
    layout: str
    way: str  #: how the model is built and used
    reshard: bool | None
    micros: int
    hooks: bool

    def shows(self, strength: int) -> Iterator[Hashable]:
        yield from together(strength, *self)


ROWS = select(
    [
        Row(*row)
        for row in itertools.product(
            ("zero3", "zero2", "ddp", "hsdp"),
            ("per_parameter", "ragged"),
            ("nested", "list", "checkpoint", "frozen", "checkpointed unit"),
            (None, False, True),
            (1, 2),
            (False, True),
        )
        if row[0] in ("zero3", "hsdp") or row[3] is None
    ],
    Row.shows,
)


def build(row: Row) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(row.way), Block(row.way), nn.Linear(8, 4))
    if row.way == "frozen":
        model[0].requires_grad_(False)
    mesh = world_mesh(2, 2, names=("replicate", "shard")) if row.strategy == "hsdp" else world_mesh(2)
    units = [[model[0], model[1]], model] if row.way == "list" else [*model, model]
    if row.way == "checkpointed unit":
        model.forward = lambda x: model[2](checkpoint(model[1], model[0](x), use_reentrant=False))
    for unit in units:
        sw.fully_shard(
            unit,
            mesh=mesh,
            strategy=row.strategy,
            layout=row.layout,
            reshard_after_forward=row.reshard,
        )
    if row.hooks:
        for part in (*model, model):
            part.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
            part.register_forward_hook(lambda m, a, o: o * 0.5)
    return model, sw.fully_shard_optimizer(torch.optim.Adam(model.parameters(), 0.1))


def step(model: Any, optimizer: Any, row: Row, number: int, rank: int, tracker: Any = None) -> list[float]:
    seed_all(100 * number + rank)
    losses = []
    for micro in range(row.micros):
        if tracker is not None:
            tracker.reset_mod_stats()  # it refuses a second forward without
        model.set_requires_gradient_sync(micro == row.micros - 1)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def hooks_of(model: nn.Module) -> list[list[Any]]:
    return [[*m._forward_pre_hooks.values(), None, *m._forward_hooks.values()] for m in model.modules()]


def local_bytes(model: nn.Module) -> int:
    return sum(local_of(p).nbytes for p in model.parameters())


@pytest.mark.extensive("a row after another")
@needs_handles
@multirank(2, 4)
def test_a_tracked_run_has_the_same_numbers(rank: int, world_size: int) -> None:
    for row in ROWS:
        if (row.strategy == "hsdp") != (world_size == 4):
            continue
        model, optimizer = build(row)
        twin, its_optimizer = build(row)
        before = hooks_of(model)
        tracker = tracker_module.FSDPMemTracker(model, optimizer)
        with tracker:
            tracked = [step(model, optimizer, row, number, rank, tracker) for number in range(2)]
        assert tracked == [step(twin, its_optimizer, row, number, rank) for number in range(2)], row
        assert hooks_of(model) == before, row
        assert step(model, optimizer, row, 3, rank) == step(twin, its_optimizer, row, 3, rank), row
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(local_of(p), local_of(q)), row
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        kinds = {getattr(kind, "value", kind): size for kind, size in peak.items()}
        # If nothing is sharded, the full parameters are the shards.
        assert kinds["Sharded Param"] + kinds["Unsharded Param"] >= local_bytes(model), (row, kinds)
        assert sum(size for name, size in kinds.items() if name != "Total") == kinds["Total"], (row, kinds)


@needs_handles
@multirank(2)
def test_memory_of_each_kind(rank: int, world_size: int) -> None:
    """Sizes that follow from the model, with no more than padding and the flags of used parameters added."""
    model, optimizer = build(Row("zero3", "per_parameter", "nested", None, 1, False))
    tracker = tracker_module.FSDPMemTracker(model, optimizer)
    own = [sum(local_of(p).nbytes for p in part.parameters()) for part in model]
    with tracker:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    kinds = {str(k): v for k, v in tracker.get_tracker_snapshot()[torch.device("cpu")].items()}
    states = tracker.memory_tracking[model[1]].snapshots
    by_name = {state.value: shots[0][torch.device("cpu")] for state, shots in states.items()}
    sizes = {
        name: {getattr(kind, "value", str(kind)): size for kind, size in shot.items()}
        for name, shot in by_name.items()
    }
    padding = 3 * 512
    full = 2 * own[1]
    shown = sizes["After Pre-Forward"]["Unsharded Param"] - sizes["Before Pre-Forward"]["Unsharded Param"]
    assert full <= shown + sizes["Before Pre-Forward"]["Unsharded Param"], (sizes, kinds)
    assert sizes["Before Post-Backward"]["Unsharded Grad"] >= full
    gradients = sizes["After Post-Backward"]["Sharded Grad"]
    assert sum(own[1:]) <= gradients <= sum(own[1:]) + padding, (gradients, own)
    last = tracker.memory_tracking[model[0]].snapshots
    end = next(s[-1] for state, s in last.items() if state.value == "After Post-Backward")
    total = {getattr(kind, "value", str(kind)): size for kind, size in end[torch.device("cpu")].items()}
    assert sum(own) <= total["Sharded Grad"] <= sum(own) + padding


@needs_handles
@multirank(2)
@pytest.mark.parametrize("place", [0, 1])
def test_a_failed_forward_of_a_tracked_model(rank: int, world_size: int, place: int) -> None:
    row = Row("zero3", "per_parameter", "nested", None, 1, False)
    model, optimizer = build(row)
    twin, its_optimizer = build(row)
    tracker = tracker_module.FSDPMemTracker(model, optimizer)
    with tracker:
        model[place].fails = True
        with pytest.raises(KeyError, match="a mistake of the user"):
            model(torch.randn(4, 8))
        model[place].fails = False
        tracker.reset_mod_stats()
        assert step(model, optimizer, row, 0, rank) == step(twin, its_optimizer, row, 0, rank)
    assert step(model, optimizer, row, 1, rank) == step(twin, its_optimizer, row, 1, rank)


@needs_handles
@multirank(2)
def test_an_untracked_model_beside_a_tracked_one(rank: int, world_size: int) -> None:
    """The tracker may end between forward and backward, and the model may be tracked again."""
    row = Row("zero3", "per_parameter", "nested", None, 1, False)
    model, optimizer = build(row)
    twin, its_optimizer = build(row)
    for number in range(2):
        tracker = tracker_module.FSDPMemTracker(model, optimizer)
        seed_all(rank)
        batch = torch.randn(4, 8)
        with tracker:
            loss = model(batch).square().mean()
        loss.backward()
        twin(batch).square().mean().backward()
        for each in (optimizer, its_optimizer):
            each.step()
            each.zero_grad()
        assert step(model, optimizer, row, number, rank) == step(twin, its_optimizer, row, number, rank)
