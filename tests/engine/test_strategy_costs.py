"""Collectives and bytes of every strategy, counted and compared with formulas."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.engine.comm import Communicator, Pending
from shardwright.engine.weights.gather import edits_are_seen
from tests.engine.kit.counting import counted
from tests.engine.kit.models import build, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.strategies import EVERYWHERE
from tests.engine.kit.training import (
    BF16,
    FP32,
    UNITS,
    backward,
    check_gradients,
    expected_gradients,
    local_of,
    part_of,
    set_micro,
    sharded,
    units_of,
)
from tests.support.matrix import select, together

# -- counted: collectives --------------------------------------------------------------------------------------------


THREE = [(True, True)] * 3
THREE_LATE = [(True, False), (True, False), (True, True)]
THREE_HELD = [(False, True), (False, True), (True, True)]
#: For each unit and step: all-gathers, reduce-scatters, all-reduces.
COLLECTIVES = [
    (at, name, *numbers)
    for strategy, shape, name, *numbers in [
        ("zero3", (2,), "single", 2, 1, 0),
        ("zero3", (3,), "late", 6, 3, 0),
        ("zero3", (2,), "hold", 6, 1, 0),
        ("zero2", (2,), "single", 1, 1, 0),
        ("zero2", (3,), "late", 1, 3, 0),
        ("zero2", (2,), "hold", 1, 1, 0),
        ("zero1", (2,), "single", 1, 1, 0),
        ("zero1", (3,), "late", 1, 1, 0),
        ("zero1", (2,), "hold", 1, 1, 0),
        ("ddp", (2,), "single", 0, 0, 1),
        ("ddp", (3,), "late", 0, 0, 1),
        ("ddp", (2,), "each", 0, 0, 3),
        ("ddp", (1,), "each", 0, 0, 0),
        ("hsdp", (2, 2), "single", 2, 1, 1),
        ("hsdp", (2, 2), "late", 6, 3, 1),
        ("hsdp", (2, 2), "each", 6, 3, 3),
        ("hsdp", (2, 2), "hold", 6, 1, 1),
        ("hsdp", (1, 2), "late", 6, 3, 0),
        ("hsdp", (2, 1), "late", 0, 0, 1),
        ("0-2", (2, 2), "late", 1, 3, 1),
        ("0-1", (2, 2), "late", 1, 1, 1),
        ("0-1", (2, 2), "each", 1, 3, 3),
        ("3-0", (2, 2), "late", 6, 3, 1),
        # Over two axes: the outer gather fills a copy that lasts for the step, the outer reduce-scatter ends it.
        ("hfsdp", (2, 2), "single", 3, 2, 0),
        ("hfsdp", (2, 2), "late", 7, 4, 0),
        ("hfsdp", (1, 2), "late", 6, 3, 0),
        ("hfsdp", (2, 1), "late", 1, 1, 0),
        ("hfsdp", (2, 2), "each", 7, 6, 0),
        ("zero1", (2, 2), "late", 2, 2, 0),
        ("zero2", (2, 2), "late", 2, 6, 0),
        ("zero3", (2, 2), "late", 12, 6, 0),
        ("1-2", (2, 2), "late", 2, 4, 0),
        ("2-3", (2, 2), "late", 7, 6, 0),
        ("3-1", (2, 2), "late", 7, 4, 0),
        ("3-2", (2, 2), "single", 3, 2, 0),
    ]
    for at in on(strategy, shape)
]


@pytest.mark.extensive(
    "each strategy", but=("zero3@3-*", "hsdp@2x2-*", "ddp@*", "zero2@3-*", "zero1@*", "3-1@2x2-*")
)
@on_meshes(COLLECTIVES)
def test_collectives_per_unit_and_step(
    rank: int, world_size: int, at: On, micros: str, gathers: int, scatters: int, reductions: int
) -> None:
    model = sharded(at, reshard_after_forward=True if True in at.reshards else None)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    plan = {"single": [(True, True)], "each": THREE, "late": THREE_LATE, "hold": THREE_HELD}[micros]
    if not edits_are_seen:  # each axis gathers for each use of the weights
        stages = [stage for stage, ranks in zip(at.stages, at.shape, strict=True) if stage and ranks > 1]
        gathers = len(plan) * len(stages) * (2 if 3 in stages else 1)
    for step in range(2):
        with counted() as seen:
            for micro, flags in enumerate(plan):
                set_micro(model, *flags)
                backward(model, rank, step, micro)
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = {kind: seen[kind] / UNITS for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        assert found == {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reductions}


@on_meshes(on("hsdp", (2, 2)))
def test_without_all_reduce_nothing_crosses_the_outer_axis(rank: int, world_size: int, at: On) -> None:
    model = sharded(at)
    with counted() as seen:
        for micro in range(3):
            model.set_requires_all_reduce(micro == 2)
            backward(model, rank, 0, micro)
    assert (seen["reduce_scatter"], seen["all_reduce"]) == (3 * UNITS, UNITS)


@on_meshes([*on("hsdp", (2, 2)), *on("0-2", (2, 2)), *on("hfsdp", (2, 2))])
def test_what_crosses_the_outer_axis_overlaps_with_the_next_units(rank: int, world_size: int, at: On) -> None:
    """It is awaited only after the next unit's gather and reduce-scatter were issued, and one is under way at most."""
    model = sharded(at, reshard_after_forward=True if True in at.reshards else None)
    backward(model, rank)
    model.zero_grad()
    log: list[tuple[str, int]] = []
    numbers: dict[int, tuple[str, int]] = {}
    seen: Counter[str] = Counter()
    originals = {name: getattr(Communicator, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    wait = Pending.wait
    outer = {comm for unit in units_of(model) for comm in (*unit.ranks.replicas, *unit.ranks.late)}

    def issuing(name: str) -> Callable[..., Any]:
        def method(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            kind = "outer" if self in outer and name != "all_gather" else name
            log.append((f"issue {kind}", seen[kind]))
            pending = originals[name](self, *args, **kwargs)
            numbers[id(pending)] = (kind, seen[kind])
            kept.append(pending)
            seen[kind] += 1
            return pending

        return method

    def waiting(self: Pending) -> None:
        if id(self) in numbers:
            kind, number = numbers.pop(id(self))
            log.append((f"wait {kind}", number))
        wait(self)

    kept: list[Pending] = []  # so that ids stay theirs
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)
    try:
        for name in originals:
            setattr(Communicator, name, issuing(name))
        Pending.wait = waiting  # type: ignore[method-assign]
        loss.backward()
    finally:
        Pending.wait = wait  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(Communicator, name, original)
    place = {event: i for i, event in enumerate(log)}
    assert seen["outer"] == UNITS == seen["reduce_scatter"]
    for n in range(UNITS - 2):
        # Unit n's sum crosses while unit n + 1 is reduced and unit n + 2 computes.
        assert place["issue outer", n] < place["issue reduce_scatter", n + 1] < place["wait outer", n], log
        assert place["wait outer", n] < place["issue outer", n + 1], log
    check_gradients(model, expected_gradients(world_size))


# -- counted: bytes --------------------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Bytes of every memory that a tensor of this process stands on, by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing) is not DTensor:
            storage = local_of(thing).untyped_storage()
            with suppress(RuntimeError):  # a subclass around other tensors has no memory
                if storage.nbytes():
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def nbytes_on(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


RAGGED: list[sw.Ragged] = [sw.Ragged("row"), sw.Ragged(2), sw.Ragged("element")]
AT_REST = select(
    list(itertools.product(EVERYWHERE, (FP32, BF16), ["per_parameter", *RAGGED])),
    lambda row, strength: together(strength, row[0].stages[:-1], row[0].stages[-1], row[0].shape, *row[1:]),
)


def numbers_at_rest(
    model: nn.Module, at: On, storage: torch.dtype, layout: str | sw.Ragged
) -> tuple[int, int, int]:
    """Bytes of parameters and of moments by arithmetic, and elements of padding in the unit that has most."""
    plain = build()
    parameters = states = gaps = 0
    if not isinstance(layout, sw.Ragged):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            row = q[0].numel() * storage.itemsize
            parameters += -(-len(q) // at.parts) * row
            states += 2 * len(part_of(q, p)) * row
        return parameters, states, gaps
    last = [*plain.norm.parameters(), *plain.head.parameters()]
    for unit in ([plain.embed.weight], *(list(block.parameters()) for block in plain.blocks), last):
        planned = sw.layout.plan([p.shape for p in unit], at.parts, layout, dtypes=[storage] * len(unit))
        parameters += sum(segment.chunk for segment in planned.segments) * storage.itemsize
        owned = planned.owned(units_of(model)[0].ranks.part)
        states += 2 * sum(stop - start for _, start, stop in owned) * storage.itemsize
        gaps = max(gaps, planned.numel - sum(p.numel() for p in unit))
    return parameters, states, gaps


@on_meshes(AT_REST)
def test_bytes_at_rest(
    rank: int, world_size: int, at: On, storage: torch.dtype, layout: str | sw.Ragged
) -> None:
    """Parameters: ceil(rows / parts) rows each, in ragged layouts what `plan` says of the shapes alone, padding
    included. AdamW: twice what the rank owns of them.

    Nothing else but tables of a few numbers for each parameter is alive: no gathered copy, no gradient, no buffer. Of
    the padding that ragged segments have on all ranks zeros are kept, once for all units.
    """
    before = storages()
    model = sharded(at, build().to(storage), layout=layout)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(2):
        for micro, flags in enumerate(THREE_LATE):
            set_micro(model, *flags)
            backward(model, rank, step, micro)
        optimizer.step()
        optimizer.zero_grad()
    parameters, states, gaps = numbers_at_rest(model, at, storage, layout)
    locals_ = [local_of(p) for p in model.parameters()]
    assert nbytes_on(locals_) == parameters
    moments = [local_of(s[key]) for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert sum(t.numel() * t.element_size() for t in moments) == states == nbytes_on(moments)
    if storage is FP32:
        others = {a: n for a, n in storages().items() if before.get(a) != n}
        ours = {t.untyped_storage().data_ptr() for t in [*moments, *locals_]}
        rest = sum(n for a, n in others.items() if a not in ours)
        count = len(list(model.parameters()))
        # Padding between packed gradients and a flag (16 bytes each at least) for each part, a step for each state.
        tables = count * (2 * 16 * at.parts * 2 + 64) + UNITS * 64 * (at.parts + 1)
        assert rest <= tables + 4 * gaps, rest


@on_meshes(on("zero3", (4,)))
def test_padding_of_all_ranks_is_kept_once(rank: int, world_size: int, at: On) -> None:
    """A block of 32 rows is not cut, so one rank has all of a small matrix and three have none: 960 zeros to reduce."""
    before = storages()
    model = nn.Sequential(*[nn.Linear(64, 5, bias=False) for _ in range(8)])
    for layer in model:
        sw.fully_shard(layer, mesh=at.mesh, layout=sw.Ragged(32))
    unit = units_of(model)[0]
    assert sw.layout.plan([(5, 64)], 4, sw.Ragged(32)).padding == 3.0
    assert [shard.numel() for shard in unit.weights.shards] == [320]
    after = storages()
    found = sum(n for a, n in after.items() if before.get(a) != n)
    assert found <= 8 * 320 * 4 + 960 * 4 + 8 * 512, found


@on_meshes(on("zero3", (2,)))
def test_padding_ends_with_its_units(rank: int, world_size: int, at: On) -> None:
    """One rank has all 5 rows, since a block is not cut. The zeros that the other has instead go with the model."""

    def has_zeros() -> bool:
        return 4 * (2 * 15008 - 15005) in storages().values()  # 2 rows of 15,005 elements, padded to 16 bytes

    model = sw.fully_shard(nn.Linear(3001, 5, bias=False), mesh=at.mesh, layout=sw.Ragged(32))
    model(torch.ones(2, 3001)).sum().backward()
    assert has_zeros()
    del model
    assert not has_zeros()
