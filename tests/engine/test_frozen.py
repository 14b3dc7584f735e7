"""Frozen parameters: no gradient memory, weights released as soon as gradients have passed, adapters beside them."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.engine.memory import Slab
from tests.engine.kit.counting import counted
from tests.engine.kit.models import full
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank
from tests.support.matrix import select, together
from tests.support.scripts import printed_by

ROOT = Path(__file__).parents[2]
WIDTH, RANK, DEPTH = 40, 3, 5


class Layer(nn.Module):
    """A frozen matrix and, with a rank, a trainable one of low rank beside it."""

    def __init__(self, rank: int = RANK) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.rank = rank
        if rank:
            self.a = nn.Parameter(torch.randn(rank, WIDTH) / WIDTH**0.5)
            self.b = nn.Parameter(torch.randn(WIDTH, rank) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight) * self.scale
        return torch.tanh(y + F.linear(F.linear(x, self.a), self.b)) if self.rank else torch.tanh(y)


class Stack(nn.Module):
    """Layers one after another. ``passed`` is called when the gradient of a layer's input is there."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(rank) for rank in ranks)
        self.passed: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.passed is not None and x.requires_grad:
                x.register_hook(lambda gradient, number=number: self.passed(number))
            x = layer(x)
        return x


def stack(*ranks: int) -> Stack:
    torch.manual_seed(0)
    return Stack(*ranks)


def shard(model: Stack, **options: Any) -> Any:
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


CASES = select(
    itertools.product(
        [*on("zero3", (1,), (2,), (3,)), *on("zero1", (2,)), *on("hsdp", (2, 2)), *on("hfsdp", (2, 2))],
        ["per_parameter", "ragged", sw.Ragged("element")],
        [None, torch.bfloat16],
        ["single", "communicate", "hold"],
        [(RANK,) * DEPTH, (0, 0, RANK, 0, RANK), (RANK, 0, 0, 0, 0)],
    ),
    lambda row, strength: together(strength, *row),
)


@on_meshes(CASES)
def test_adapters_on_a_frozen_base(
    rank: int, world_size: int, at: On, layout: Any, dtype: Any, accumulation: str, ranks: tuple[int, ...]
) -> None:
    plain = stack(*ranks)
    policy = sw.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = shard(copy.deepcopy(plain), strategy=at.strategy, mesh=at.mesh, layout=layout, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(trained, lr=1e-2))
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    frozen = [p.clone() for p in plain.parameters() if not p.requires_grad]
    micros = 1 if accumulation == "single" else 2
    for step in range(3):
        for micro in range(micros):
            model.set_requires_gradient_sync(accumulation != "hold" or micro == micros - 1)
            model.set_is_last_backward(micro == micros - 1)
            model(batch(rank, 10 * step + micro)).float().square().sum().backward()
            for r in range(world_size):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = plain(batch(r, 10 * step + micro)).float().square().sum()
                (loss / world_size).backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    tolerance = 1e-5 if dtype is None else 3e-2
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.detach()), q.detach(), rtol=tolerance, atol=tolerance, msg=name)
    after = [full(p) for p in model.parameters() if not p.requires_grad]
    assert all(map(torch.equal, after, frozen))
    assert len(optimizer.state) == len(trained)


# -- memory ----------------------------------------------------------------------------------------------------------


@contextmanager
def leases() -> Iterator[tuple[Counter[str], Counter[str], list[Slab]]]:
    """The most bytes of each kind that are leased at once, how often each unit's weights were, and what is leased."""
    most, times, now = Counter[str](), Counter[str](), list[Slab]()
    originals = Slab.lease, Slab.release

    def lease(slab: Slab) -> None:
        if not slab.leased:
            now.append(slab)
            if slab.kind == "parameters":
                times[slab.owner.name] += 1
        originals[0](slab)
        for kind in {s.kind for s in now}:
            most[kind] = max(most[kind], sum(s.nbytes for s in now if s.kind == kind))

    def release(slab: Slab, *given: Any) -> Any:
        if slab in now:
            now.remove(slab)
        return originals[1](slab, *given)

    Slab.lease, Slab.release = lease, release  # type: ignore[method-assign]
    try:
        yield most, times, now
    finally:
        Slab.lease, Slab.release = originals  # type: ignore[method-assign]


@multirank(2)
def test_gradients_take_the_memory_of_adapters(rank: int, world_size: int) -> None:
    model = shard(stack(*(RANK,) * DEPTH))
    with leases() as (most, times, _):
        for step in range(2):
            times.clear()
            model(batch(rank, step)).square().sum().backward()
    unit = 4 * (
        WIDTH * WIDTH + 2 * 2 * WIDTH * 2 + 8
    )  # the matrix, the adapter padded to two ranks, the scale
    adapter = 4 * (2 * 2 * WIDTH + WIDTH * RANK)  # rows of A are padded from 3 to 4
    flags = 2 * 16
    assert most["reduction"] <= adapter + flags
    assert most["gradients"] <= DEPTH * (adapter + flags) // 2
    assert most["parameters"] <= 2 * unit
    # Forward and backward; the last layer is used twice with one gather where it stays.
    assert all(1 <= count <= 2 for name, count in times.items() if name)


@multirank(2)
def test_frozen_weights_go_when_gradients_have_passed(rank: int, world_size: int) -> None:
    """In front of all that learns nothing is gathered for backward; behind, it is, and released at once."""
    model = shard(stack(0, 0, RANK, 0, 0))
    held: dict[int, set[str]] = {}
    with leases() as (most, times, now):
        for step in range(3):
            times.clear()
            held.clear()

            def passed(number: int) -> None:
                held[number] = {s.owner.name for s in now if s.kind == "parameters"}

            model.passed = passed
            with counted() as calls:
                model(batch(rank, step)).square().sum().backward()
    assert times["layers.0"] == times["layers.1"] == 1  # forward alone
    assert times["layers.2"] == times["layers.3"] == 2
    assert calls["reduce_scatter"] == 1
    # When the gradient of a layer's input is there, its weights are gone; those before it may be on their way.
    assert held[4] <= {"layers.3"} and held[3] <= {"layers.2"}
    assert "gradients" in most and most["gradients"] <= 4 * (2 * 2 * WIDTH + WIDTH * RANK) // 2 + 16


@pytest.mark.extensive("an example trains")
@multirank(2)
def test_the_example_of_adapters(rank: int, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the extra train")
    script = ROOT / "examples" / "finetune_lora.py"
    printed = printed_by(script, "--to", tmp_path / "adapters", scratch=tmp_path)
    if rank:
        return
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.7
    header = (tmp_path / "adapters" / "adapter_model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    names.pop("__metadata__", None)
    assert len(names) == 8 and all("q_proj.lora_" in name or "v_proj.lora_" in name for name in names)
