"""Methods besides forward, and several models, as with torch's ``fully_shard``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.subclasses import LIBRARIES, backward, check, data, gradients, loss_of
from tests.engine.kit.surface import Block, Net, Policy, averaged, both, build, ours, shard
from tests.support import multirank, world_mesh


class Generator(Net):
    def generate(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Reads the root's own weights and calls the inner units."""
        for _ in range(times):
            for block in self.blocks:
                x = block(x)
        return nn.functional.linear(x, self.head.weight, self.head.bias)

    def both_ways(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x) + self(x)


@multirank(2)
@both
def test_a_registered_method_is_a_forward(rank: int, world_size: int, library: str) -> None:
    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        return loss_of(model.generate(data(r), times=2))

    torch.manual_seed(0)
    plain = Generator()
    expected = averaged(plain, world_size, loss=loss)
    outputs = plain.generate(data(rank), times=2)
    model = shard(library, plain)
    assert LIBRARIES[library].register_fsdp_forward_method(model, "generate") is None
    assert model.generate.__doc__ == Generator.generate.__doc__ and model.generate.__name__ == "generate"
    with torch.no_grad():
        torch.testing.assert_close(model.generate(data(rank), times=2), outputs)
    for _ in range(2):
        loss(model, rank, 0).backward()
        check(gradients(model), expected)
        model.zero_grad()
    backward(model, rank)
    check(gradients(model), averaged(build(), world_size))


@multirank(2)
@both
def test_a_registered_method_casts_as_forward_does(rank: int, world_size: int, library: str) -> None:
    torch.manual_seed(0)
    policy = Policy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard = LIBRARIES[library].fully_shard
    model: Any = fully_shard(Generator(), mesh=world_mesh(world_size), mp_policy=policy)
    LIBRARIES[library].register_fsdp_forward_method(model, "generate")
    seen = []
    model.blocks[0].norm.register_forward_pre_hook(lambda m, a: seen.append(a[0].dtype))
    assert model.generate(data(rank)).dtype == torch.float64
    assert seen == [torch.bfloat16]


@multirank(2)
@both
def test_a_registered_method_of_an_inner_unit(rank: int, world_size: int, library: str) -> None:
    class Encoder(Block):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Encoder(8), Block(16)])
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: Any = self.blocks[0]
            return self.head(self.blocks[1](first.encode(x)))

    torch.manual_seed(0)
    plain = Outer()
    expected = averaged(plain, world_size)
    model = shard(library, plain)
    LIBRARIES[library].register_fsdp_forward_method(model.blocks[0], "encode")
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_methods_that_cannot_be_registered(rank: int, world_size: int, library: str) -> None:
    register = LIBRARIES[library].register_fsdp_forward_method
    plain = nn.Linear(2, 2)
    register(plain, "forward")  # not sharded: nothing is done, nor asked
    register(plain, "no_such_method")
    assert "forward" not in vars(plain)
    model = shard(library, build())
    with pytest.raises(ValueError, match="no_such_method"):
        register(model, "no_such_method")


@multirank(2)
@both
def test_models_that_share_their_streams(rank: int, world_size: int, library: str) -> None:
    share = LIBRARIES[library].share_comm_ctx
    models = [shard(library, build(seed)) for seed in range(2)]
    share([])
    assert share(models) is None
    with pytest.raises(ValueError, match="Linear"):
        share([models[0], nn.Linear(2, 2)])
    for _ in range(3):
        for seed, model in enumerate(models):
            backward(model, rank)
            check(gradients(model), averaged(build(seed), world_size))
            model.zero_grad()


@multirank(2)
@ours
def test_models_that_share_their_streams_interleaved(rank: int, world_size: int, library: str) -> None:
    """As pipeline stages run. FSDP2 raises IndexError in the first of these steps."""
    models = [shard(library, build(seed)) for seed in range(2)]
    sw.share_comm_ctx(models)
    for _ in range(2):
        losses = [loss_of(model(data(rank))) for model in models]
        for loss in losses:
            loss.backward()
        for seed, model in enumerate(models):
            check(gradients(model), averaged(build(seed), world_size))
            model.zero_grad()
