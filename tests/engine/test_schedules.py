"""Several forwards in flight, of one model and of several that share their communication, in any order.

As pipeline schedules run them. Every schedule is compared with plain models that see every rank's data.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import shardwright as sw
from tests.engine.kit.models import Block, build, full, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

Event = tuple[str, int, int]  #: ("F" or "B", model, micro-batch)


def parse(text: str) -> list[Event]:
    """ "FA0 BA0": forward and backward of model A's micro-batch 0."""
    return [(word[0], "ABC".index(word[1]), int(word[2])) for word in text.split()]


def shuffled(seed: int, models: int, micros: int) -> list[Event]:
    """Any order in which every backward comes after its forward."""
    order = random.Random(seed)
    waiting = [("F", m, i) for m in range(models) for i in range(micros)]
    schedule: list[Event] = []
    while waiting:
        schedule.append(event := waiting.pop(order.randrange(len(waiting))))
        if event[0] == "F":
            waiting.append(("B", *event[1:]))
    return schedule


SCHEDULES = {
    "all forward, all backward": parse("FA0 FA1 FA2 FA3 BA0 BA1 BA2 BA3"),
    "the latest first": parse("FA0 FA1 FA2 BA2 BA1 BA0"),
    "1F1B": parse("FA0 FA1 BA0 FA2 BA1 FA3 BA2 BA3"),
    "A B, A B": parse("FA0 FB0 BA0 BB0"),
    "B A, A B": parse("FB0 FA0 BA0 BB0"),
    "interleaved": parse("FA0 FB0 FA1 BB0 FB1 BA0 BB1 FA2 BA2 BA1"),
    **{f"shuffled {seed}": shuffled(seed, 1 + seed % 3, 3) for seed in (1, 2)},
}


class Row(NamedTuple):
    at: On
    schedule: str
    layout: Any
    accumulation: str
    keeps: str
    memory: str

    def shows(self, strength: int) -> Iterator[Hashable]:
        """Not each schedule at each place, which would be most of the rows: neither knows of the other."""
        for settings in together(strength, *self):
            if strength > 2 or {i for i, _ in settings} != {0, 1}:
                yield settings


WHERE = [
    *on("zero1", (2,)),
    *on("zero2", (2,)),
    *on("zero3", (3,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2)),
]
LAYOUTS = ("per_parameter", "ragged")
#: When gradients are communicated: by each backward, held, or reduced late; and what stays gathered between calls.
ACCUMULATIONS = ("each", "held", "late")
KEEPS = ("nothing", "after forward", "after backward")
ROWS = select(
    [
        Row(*r)
        for r in itertools.product(WHERE, SCHEDULES, LAYOUTS, ACCUMULATIONS, KEEPS, ("dynamic", "arena"))
    ],
    Row.shows,
)


@on_meshes(ROWS)
def test_schedules_are_those_of_plain_models(
    rank: int, world_size: int, at: On, schedule: str, layout: Any, accumulation: str, keeps: str, memory: str
) -> None:
    events = SCHEDULES[schedule]
    count = 1 + max(model for _, model, _ in events)
    plain = [build(seed) for seed in range(count)]
    options: dict[str, Any] = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout}
    options["reshard_after_forward"] = False if keeps == "after forward" else None
    options["memory"] = memory
    models = [sw.wrap.auto_wrap(build(seed), {Block}, **options) for seed in range(count)]
    sw.share_comm_ctx(models)
    for model in models:
        model.set_reshard_after_backward(keeps != "after backward")
    last = {
        m: max(i for i, (kind, model, _) in enumerate(events) if (kind, model) == ("B", m))
        for m in range(count)
    }
    for step in range(2):
        losses: dict[tuple[int, int], torch.Tensor] = {}
        for i, (kind, m, micro) in enumerate(events):
            batch = tokens(step, 10 * m + micro, rank)
            if kind == "F":
                losses[m, micro] = loss_of(models[m](batch), batch)
                continue
            models[m].set_requires_gradient_sync(accumulation != "held" or i == last[m])
            models[m].set_is_last_backward(accumulation != "late" or i == last[m])
            losses.pop((m, micro)).backward()
            for r in range(world_size):
                batch = tokens(step, 10 * m + micro, r)
                (loss_of(plain[m](batch), batch) / world_size).backward()
        for model, expected in zip(models, plain, strict=True):
            for (name, p), q in zip(model.named_parameters(), expected.named_parameters(), strict=True):
                grad, wanted = full(p.grad), q[1].grad
                torch.testing.assert_close(
                    grad, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
                )
            with torch.no_grad():
                for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                    p.add_(p.grad, alpha=-0.1)
                    q.add_(q.grad, alpha=-0.1)
            model.zero_grad()
            expected.zero_grad()


@multirank(2)
@pytest.mark.parametrize("joined", [False, True])
def test_one_root_feeds_another(rank: int, world_size: int, joined: bool) -> None:
    """In one graph, or cut between the two as stages of a pipeline are."""
    plain = [build(0).blocks, build(1)]
    ours = [build(0).blocks, build(1)]
    for block in ours[0]:
        sw.fully_shard(block, mesh=world_mesh(2))
    models = [ours[0][0], ours[0][1], shard(ours[1], mesh=world_mesh(2)).blocks[0]]
    sw.share_comm_ctx(models)

    def run(first: Block, second: Block, third: Block, x: torch.Tensor, scale: float) -> None:
        ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        for stage in (first, second, third):
            y = stage(x)
            x = y if joined else y.detach().requires_grad_()
            ends.append((y, x))
        (ends[-1][0].square().mean() * scale).backward()
        if not joined:
            for y, x in reversed(ends[:-1]):
                y.backward(x.grad)

    for step in range(3):
        data = [torch.randn(3, 7, generator=torch.Generator().manual_seed(7 * step + r)) for r in range(2)]
        run(*models, data[rank], 1.0)
        for x in data:
            run(plain[0][0], plain[0][1], plain[1].blocks[0], x, 0.5)
        for a, b in zip(models, (plain[0][0], plain[0][1], plain[1].blocks[0]), strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6)


@multirank(2)
def test_a_failure_between_forwards_in_flight(rank: int, world_size: int) -> None:
    """``reset_iter_state`` is not needed, and right: the graphs of before are still there."""
    for reset in (False, True):
        model, plain = shard(build(), mesh=world_mesh(2)), build()
        losses = [loss_of(model(tokens(0, m, rank)), tokens(0, m, rank)) for m in range(3)]
        losses[0].backward()
        with pytest.raises(IndexError):
            model(torch.full((2, 2), 99))
        boom = loss_of(model(tokens(0, 3, rank)), tokens(0, 3, rank))
        handle = model.blocks[0].register_forward_pre_hook(lambda *_: None)
        handle.remove()
        hooked = boom * 1.0
        hooked.register_hook(lambda g: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            hooked.backward()
        if reset:
            model.reset_iter_state()
        for loss in losses[1:]:
            loss.backward()
        for r, m in itertools.product(range(2), range(3)):
            (loss_of(plain(tokens(0, m, r)), tokens(0, m, r)) / 2).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-6)
