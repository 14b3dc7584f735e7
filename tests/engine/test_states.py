"""Ranks that start different: made the same from the first rank, or found and named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import digest
from shardwright.extend import ExtensionError, NamedLayout
from tests.engine.kit.models import Model, build, full
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh


def different(rank: int) -> Model:
    """A model of other values on every rank, with buffers, a tie and a channels-last weight."""
    model = build(seed=rank)
    model.head.weight = model.embed.weight
    model.norm.register_buffer("count", torch.tensor(rank))
    model.blocks[0].register_buffer("table", torch.full((3, 2), float(rank)).bfloat16(), persistent=False)
    model.blocks[1].image = nn.Parameter(torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last))
    model.blocks[1].register_buffer("nothing", torch.empty(0, 4))
    return model


def shard(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard([model.norm, model.head, model.embed], **options)
    return sw.fully_shard(model, **options)


@on_meshes([on("zero3", (3,))[0], on("hsdp", (2, 2))[0], on("hfsdp", (2, 2))[0]])
def test_every_rank_gets_the_values_of_the_first(rank: int, world_size: int, at: On) -> None:
    model = shard(
        different(rank), mesh=at.mesh, strategy=at.strategy, sync_module_states=True, check_module_states=True
    )
    expected = different(0)
    assert model.head.weight is model.embed.weight
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(full(p), q), name
    for (name, a), b in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(a, b), name


@multirank(3)
def test_ranks_that_start_different_are_named(rank: int, world_size: int) -> None:
    mesh = world_mesh(3)
    block = build().blocks[0]
    with torch.no_grad():
        if rank == 2:
            block.up.weight[-1, -1] = torch.nextafter(block.up.weight[-1, -1], torch.tensor(9.0))
        if rank:
            block.norm.bias[0] = -0.0  # equal to zero, and other bits
    expected = r"values of Block.* 'norm.bias' on ranks 1, 2; 'up.weight' on rank 2\. .*the same seed"
    with pytest.raises(ValueError, match=expected):
        sw.fully_shard(block, mesh=mesh, check_module_states=True)
    sw.fully_shard(block, mesh=mesh, sync_module_states=True)  # nothing was cut by the call that failed
    buffers = nn.Linear(2, 2)
    buffers.register_buffer("steps", torch.tensor([rank]))
    torch.nn.init.zeros_(buffers.weight), torch.nn.init.zeros_(buffers.bias)
    with pytest.raises(ValueError, match=r"'steps' on ranks 1, 2"):
        sw.fully_shard(buffers, mesh=mesh, check_module_states=True)


@multirank(2)
@pytest.mark.parametrize("option", ["sync_module_states", "check_module_states"])
def test_other_tensors_are_named_before_anything_is_sent(rank: int, world_size: int, option: str) -> None:
    with pytest.raises(ValueError, match=r"rank 0 has .*'weight', \(2, 2\).*rank 1 .*'weight', \(2, 3\)"):
        sw.fully_shard(nn.Linear(2 + rank, 2), mesh=world_mesh(2), **{option: True})
    with pytest.raises(ValueError, match=r"Linear' inside was sharded without it.*True to every"):
        model = nn.Sequential(sw.fully_shard(nn.Linear(2, 2), mesh=world_mesh(2)), nn.Linear(2, 2))
        sw.fully_shard(model, mesh=world_mesh(2), **{option: True})


def test_a_hash_tells_bits_and_places() -> None:
    one = torch.zeros(3_000_001, dtype=torch.bfloat16)
    assert digest(one) == digest(one.clone())
    assert digest(one[1:]) == digest(one[:-1])  # one begins between words
    seen = {int(digest(one)), int(digest(one[:-1]))}
    for place in (0, 1, 2_999_999, 3_000_000):
        other = one.clone()
        other[place] = 1
        seen.add(int(digest(other)))
    other = one.clone()
    other[7] = -0.0
    seen.add(int(digest(other)))
    assert len(seen) == 7
    assert digest(torch.tensor([True])) != digest(torch.tensor([False]))


@multirank(3)
def test_deferred_models_of_different_seeds_are_named(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with sw.deferred_init():
        same = nn.Linear(3, 3)
    torch.manual_seed(int(rank == 1))
    with sw.deferred_init():
        other = nn.Linear(3, 3)
    torch.manual_seed(rank)  # afterwards every rank may have a seed of its own
    sw.fully_shard(same, check_module_states=True)
    with pytest.raises(
        ValueError, match=r"these tensors differ from rank 0: 'weight' on rank 1; 'bias' on rank 1\."
    ):
        sw.fully_shard(other, check_module_states=True)


class Recorded(nn.Module):
    """On rank 1 what is recorded of some of its tensors is another thing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        other = rank == 1
        self.same = nn.Linear(3, 3)
        self.full = nn.Parameter(torch.full((4,), float(other)))
        self.register_buffer("data", torch.tensor([1.0, 2.0 + other]), persistent=False)
        self.register_buffer("twice", self.data * 2)
        self.operation = nn.Parameter(torch.ones(3).cos() if other else torch.ones(3).sin())
        self.scaled = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.scaled, std=1.0 + other)
        self.after_scaled = nn.Parameter(torch.randn(3))  # the same numbers
        table = torch.arange(6.0)
        self.register_buffer("place", table[other : 3 + other])
        table[0] = 9.0 + other
        self.overwritten = nn.Parameter(torch.full((2,), float(other)))
        nn.init.zeros_(self.overwritten)
        if rank == 0:  # as when one rank logs
            self.norm = self.after_scaled.norm().item()
            torch.get_rng_state()
        self.after_reading = nn.Parameter(torch.rand(3))
        nn.init.trunc_normal_(self.after_reading, std=0.1)
        torch.rand(2 + 2 * other)
        self.later = nn.Parameter(torch.rand(3))


@multirank(3)
def test_deferred_models_that_were_recorded_otherwise_are_named(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    with sw.deferred_init():
        models = [Recorded(0 if rank == 1 else rank), Recorded(rank)]
    sw.fully_shard(models[0], check_module_states=True)
    names = ("full", "operation", "scaled", "later", "data", "twice", "place")
    told = "; ".join(f"'{name}' on rank 1" for name in names)
    with pytest.raises(
        ValueError, match=rf"these tensors differ from rank 0: {told}\. .*seed, code and data"
    ):
        sw.fully_shard(models[1], check_module_states=True)
    sw.materialize(models[0])
    torch.manual_seed(0)


@multirank(2)
def test_deferred_on_one_rank_only(rank: int, world_size: int) -> None:
    with sw.deferred_init() if rank else nullcontext():
        model = nn.Linear(2, 2)
    expected = r"rank 0 has .*'weight', \(2, 2\), 'torch.float32'\).*rank 1 .*'torch.float32', 'deferred'\)"
    with pytest.raises(ValueError, match=expected):
        sw.fully_shard(model, check_module_states=True)


def test_comparing_what_was_recorded_computes_nothing() -> None:
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Linear(2**20, 2**20)  # 4 TiB
        with torch.no_grad():
            for _ in range(3000):  # more than Python's stack is deep
                model.weight.add_(1)
    assert isinstance(model.weight.origin, int)
    torch.manual_seed(0)  # nobody will have the model


@multirank(2)
def test_conjugates_are_compared_and_sent(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0) + rank).conj())
    expected = torch.polar(torch.ones(3), torch.arange(3.0)).conj()
    sw.fully_shard(model, sync_module_states=True, check_module_states=True)
    assert torch.equal(model.turns, expected)


@multirank(2)
def test_an_edit_of_one_ragged_parameter_is_none_of_its_neighbours(rank: int, world_size: int) -> None:
    model: Any = sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layout="ragged")
    before = model[1].weight._version + model[1].weight.to_local()._version
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert model[1].weight._version + model[1].weight.to_local()._version == before


@pytest.mark.parametrize("checked", [True, False])
@multirank(2)
def test_a_layout_that_differs_between_ranks_is_named(rank: int, world_size: int, checked: bool) -> None:
    """By the comparison at the start, with the parameters; else by the first gather of unequal sizes."""
    layout = NamedLayout("ranked", lambda shape: 1 + 999 * rank, "")
    model = build()
    if checked:
        expected = (
            r"different results of layout 'ranked' in Model.* of shape \(.*\): 1 on rank 0, \d+ on rank 1"
        )
        with pytest.raises(ExtensionError, match=expected):
            sw.fully_shard(model, mesh=world_mesh(2), layout=layout, check_module_states=True)
        return
    sw.fully_shard(model, mesh=world_mesh(2), layout=layout)
    with pytest.raises(RuntimeError, match=r"layout Ragged\(.*must return the same number .* on every rank"):
        model(torch.zeros(2, 3, dtype=torch.int64))
