"""Recipes and habits that FSDP2's documentation does not warn of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.kit.subclasses import LIBRARIES, backward, check, data, full, gradients, loss_of
from tests.engine.kit.surface import Collectives, averaged, both, build, need, ours, shard
from tests.support import multirank, world_mesh


class Chunked(nn.Module):
    """The head is called apart from the model, on pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


@multirank(2)
@both
def test_chunked_loss(rank: int, world_size: int, library: str) -> None:
    """The recipe for list units: the model's forward runs only the norm of [norm, head], the loss runs the head."""
    need(library, "reset_iter_state")  # as old as the recipe: before, torch's process dies

    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        return sum(loss_of(model.head(chunk)) for chunk in model(data(r)).chunk(2))

    torch.manual_seed(0)
    plain = Chunked()
    expected = averaged(plain, world_size, loss=loss)
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(world_size)
    fully_shard(plain.body, mesh=mesh)
    fully_shard([plain.norm, plain.head], mesh=mesh)
    model: Any = fully_shard(plain, mesh=mesh)
    for _ in range(2):
        with Collectives() as seen:
            hidden = model(data(rank))
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(2):
                loss_of(model.head(chunk)).backward()
            hidden.backward(cut.grad)
        assert seen.count("reduce") == 4  # of each chunk, and of the rest
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@ours
def test_the_modules_show_sharded_parameters_after_an_evaluation(
    rank: int, world_size: int, library: str
) -> None:
    """FSDP2's root shows full ones then: zero_grad and clipping miss its gradients, a new optimizer gets the wrong."""
    model, expected = shard(library, build()), averaged(build(), world_size)
    backward(model, rank)
    with torch.no_grad():
        model(data(rank))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(full(norm), total, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model(data(rank))
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@multirank(2)
@ours
def test_training_after_a_first_forward_in_inference_mode(rank: int, world_size: int, library: str) -> None:
    """FSDP2's full parameters are inference tensors for ever then."""
    model = shard(library, build())
    with torch.inference_mode():
        model(data(rank))
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
@pytest.mark.parametrize("what", ["blocks", "model", "blocks before sharding"])
def test_torch_compile_goes_around_the_hooks(rank: int, world_size: int, library: str, what: str) -> None:
    """Dynamo breaks its graph at each unit and compiles what is between; here with the backend that changes nothing."""
    expected = averaged(build(), world_size)
    plain = build()
    if what == "blocks before sharding":
        for block in plain.blocks:
            block.compile(backend="eager")
    model = shard(library, plain)
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    called = torch.compile(model, backend="eager") if what == "model" else model
    for _ in range(2):
        loss_of(called(data(rank))).backward()
        check(gradients(model), expected)
        model.zero_grad()
