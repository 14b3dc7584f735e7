"""Policies that choose units, and modules that are left out of them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import shardwright as sw
from shardwright import wrap
from tests.engine.kit.models import Block, Model, build, full, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import backward, expected_gradients, is_cut_as, units_of
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together


class Tower(nn.Module):
    """Nested blocks, containers, a layer that is there twice, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.stages = nn.ModuleList(nn.Sequential(Block(7, 12), Block(7, 12)) for _ in range(2))
        self.stages[1].append(self.stages[0][0])
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for stage in self.stages:
            h = stage(h)
        return self.head(h) * self.extra[0].sum()


def names(model: nn.Module, units: list[Any]) -> list[Any]:
    known = {m: n for n, m in model.named_modules()}
    return [[known[m] for m in u] if isinstance(u, list) else known[u] for u in units]


BLOCKS = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
#: A block has 189 parameters (768 bytes less 12), the embedding 77, a Linear "up" 96 and "down" 84.
CHOICES: list[tuple[Any, list[Any]]] = [
    (wrap.by_class(Block), ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", ""]),
    (wrap.by_class("Block", "Embedding"), ["embed", *BLOCKS, ""]),
    (wrap.by_class(nn.Sequential, Block), [*BLOCKS[:2], "stages.0", *BLOCKS[2:], "stages.1", ""]),
    (wrap.by_class(Block, group=2), [BLOCKS[:2], BLOCKS[2:], ""]),
    (wrap.by_class(Block, group=3), [BLOCKS[:2], BLOCKS[2:], ""]),
    (wrap.by_class(nn.Embedding, nn.Linear) | wrap.by_class(Block), "leaves first"),
    (wrap.by_size(190), [*BLOCKS, ""]),
    (wrap.by_size(195), ["stages.0", "stages.1", ""]),
    (wrap.by_size("1 KiB"), ["stages.0", "stages.1", ""]),
    (wrap.by_size(77), "embedding once"),
    (wrap.by_class(Block) | wrap.by_size(70), ["embed", *BLOCKS, ""]),
    (wrap.by_predicate(lambda m: getattr(m, "out_features", 0) == 11), ["head", ""]),
    (wrap.by_predicate(lambda m: True), "everything"),
    (wrap.as_policy({Block}), [*BLOCKS, ""]),
    (wrap.as_policy(lambda m: isinstance(m, Block)), [*BLOCKS, ""]),
    (wrap.as_policy(ModuleWrapPolicy({Block})), [*BLOCKS, ""]),
    # torch's rule counts the layer that is there twice in both places, so the second stage reaches 190, too.
    (
        wrap.as_policy(functools.partial(size_based_auto_wrap_policy, min_num_params=190)),
        [*BLOCKS, "stages.1", ""],
    ),
]


@pytest.mark.parametrize("case", range(len(CHOICES)))
def test_units_are_chosen_inner_first_and_once(case: int) -> None:
    policy, expected = CHOICES[case]
    with torch.device("meta"):
        model = Tower()
    before = copy.deepcopy(model.state_dict())
    units = policy(model)
    found = names(model, units)
    if isinstance(expected, list):
        assert found == expected
    # Inner modules come before outer ones, nothing comes twice, and containers do not come.
    flat = [m for u in units for m in (u if isinstance(u, list) else [u])]
    assert len(set(flat)) == len(flat) and flat[-1] is model
    for i, m in enumerate(flat):
        assert not any(later in list(m.modules())[1:] for later in flat[i:])
        assert not isinstance(m, nn.ModuleList | nn.ParameterList)
    if expected == "leaves first":
        assert found[:3] == ["embed", "stages.0.0.up", "stages.0.0.down"] and "head" in found
    if expected == "embedding once":  # the head has no parameters left that are not the embedding's
        assert "embed" in found and "head" not in found
    if expected == "everything":
        assert len(flat) == sum(wrap.is_called(m) for m in model.modules())
    assert list(before) == list(model.state_dict()) and not units_of(model)


def test_a_policy_is_refused_by_name_or_told() -> None:
    model = build()
    with pytest.raises(
        ValueError, match=r"Model has no module of class Conv2d; its modules are of Block, Emb"
    ):
        wrap.by_class(nn.Conv2d)(model)
    with pytest.raises(ValueError, match="no module of class Blok;"):
        wrap.by_class(Block, "Blok")(model)
    for wrong in (0, True, 1.5, "64 GB", "MiB"):
        with pytest.raises(ValueError, match='number of elements, or bytes such as "64 MiB"'):
            wrap.by_size(wrong)  # type: ignore[arg-type]
    for make in (lambda: wrap.by_class(), lambda: wrap.by_class(3), lambda: wrap.by_predicate(Block)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expects"):
            make()
    with pytest.raises(TypeError, match="a function of a module"):
        wrap.as_policy(7)
    with pytest.raises(ValueError, match="group must be a number"):
        wrap.by_class(Block, group=0)
    with pytest.raises(
        ValueError, match=r"prefetch: pass this to the call for the whole model; ModuleList has no"
    ):
        wrap.auto_wrap(model.blocks, {Block}, prefetch=2)
    # What is left out counts for nothing and becomes nothing.
    left = wrap.by_size(90)(
        model, ignored_modules=[model.blocks[0]], ignored_params=[model.blocks[1].up.weight]
    )
    assert names(model, left) == ["blocks.1", ""]
    tower = Tower()
    assert str(wrap.by_class(Block, nn.Embedding, nn.Linear, group=2)(tower)).splitlines()[0].split() == [
        "unit",
        "class",
        "parameters",
        "bytes",
    ]
    table = str((wrap.by_class(nn.Embedding, nn.Linear) | wrap.by_class(Block, group=2))(tower))
    assert "\nembed                   Embedding          77    308\n" in table, table
    assert "shares weights with embed" in next(r for r in table.splitlines() if r.startswith("head "))
    assert "\nstages.0.0, stages.0.1  Block              28    112\n" in table, table
    assert table.endswith("\n(the model)             Tower               3     12"), table


# -- applied ---------------------------------------------------------------------------------------------------------

POLICIES: dict[str, Any] = {
    "class": {Block},
    "group": wrap.by_class(Block, group=2),
    "size": wrap.by_size(190),
    "both": wrap.by_class(nn.Linear) | wrap.by_size(20),
    "torch": ModuleWrapPolicy({Block, nn.Embedding}),
}
WHERE = [*on("zero2", (3,)), *on("zero3", (2,)), *on("hfsdp", (2, 2))]


class Row(NamedTuple):
    at: On
    policy: str
    layout: str
    tied: bool

    def shows(self, strength: int) -> Iterator[Hashable]:
        return iter(together(strength, *self))


ROWS = select(
    [Row(*r) for r in itertools.product(WHERE, POLICIES, ("per_parameter", "ragged"), (False, True))],
    Row.shows,
)


@on_meshes(ROWS)
def test_auto_wrap_trains_as_the_plain_model(
    rank: int, world_size: int, at: On, policy: str, layout: str, tied: bool
) -> None:
    plain = Tower() if tied else build()
    torch.manual_seed(0)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.3)
    model = wrap.auto_wrap(
        copy.deepcopy(plain), POLICIES[policy], mesh=at.mesh, strategy=at.strategy, layout=layout, prefetch=2
    )
    assert len(units_of(model)) > 1 and units_of(model)[0].options.prefetch == 2
    assert not tied or model.head.weight is model.embed.weight
    for r in range(world_size):
        batch = tokens(0, 0, r)
        (loss_of(plain(batch), batch) / world_size).backward()
    backward(model, rank)
    if layout == "per_parameter":
        assert all(is_cut_as(p, at) for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- modules that are left out ---------------------------------------------------------------------------------------


def with_island(rank: int) -> Model:
    """A model whose second block, of other values on every rank, stays out, and has buffers."""
    model = build()
    model.blocks[1].register_buffer("seen", torch.tensor([float(rank)], dtype=torch.float64))
    model.blocks[1].norm.register_buffer("rate", torch.tensor(rank + 1), persistent=False)
    with torch.no_grad():
        for p in model.blocks[1].parameters():
            p += 0.1 * rank
    return model


@on_meshes([*on("zero3", (2,)), *on("zero1", (3,)), *on("hfsdp", (2, 2))])
def test_ignored_modules_are_left_alone(rank: int, world_size: int, at: On) -> None:
    plain = with_island(rank)
    model = copy.deepcopy(plain)
    island = model.blocks[1]
    known = {**dict(island.named_parameters()), **dict(island.named_buffers())}
    values = {name: t.clone() for name, t in known.items()}
    model = wrap.auto_wrap(
        model,
        {Block},
        mesh=at.mesh,
        strategy=at.strategy,
        ignored_modules={island},
        sync_module_states=True,
        check_module_states=True,
        mp_policy=sw.MixedPrecisionPolicy(param_dtype=torch.float64),  # which casts what it may
    )
    assert island not in wrap.by_class(Block)(build()) and type(island) is Block

    def untouched(each: nn.Module) -> None:
        now = {**dict(each.named_parameters()), **dict(each.named_buffers())}
        assert list(now) == list(known)
        for name, t in now.items():
            assert type(t) in (torch.Tensor, nn.Parameter) and t.dtype == values[name].dtype
            assert torch.equal(t, values[name]), name

    untouched(island)
    assert all(
        t is known[n] for n, t in (*island.named_parameters(), *island.named_buffers())
    )  # the very same objects
    # With another island on every rank the gradients are averages all the same, and those of the island its own.
    island.double(), values.update({n: v.double() for n, v in values.items() if v.is_floating_point()})
    mine = copy.deepcopy(plain).double()
    loss_of(mine(tokens(0, 0, rank)), tokens(0, 0, rank)).backward()
    backward(model, rank)
    for p, q in zip(island.parameters(), mine.blocks[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    expected = [p.grad for p in mine.parameters()]
    for g in expected:
        torch.distributed.all_reduce(g)
    outside = [
        (p, g / world_size)
        for (n, p), g in zip(model.named_parameters(), expected, strict=True)
        if "blocks.1" not in n
    ]
    for p, g in outside:
        torch.testing.assert_close(full(p.grad), g.float(), rtol=1e-5, atol=1e-7)
    model.zero_grad()
    # A copy leaves its own island alone, and one that gets other parameters stays what it is.
    other = copy.deepcopy(model)
    assert other.blocks[1].up.weight is not island.up.weight
    untouched(other.blocks[1])
    for each in (model, other):
        each.blocks[1].up.weight = nn.Parameter(each.blocks[1].up.weight.detach().clone())
        each.head.weight = nn.Parameter(full(each.head.weight).clone())  # makes the unit's memory anew
        backward(each, rank)
        untouched(each.blocks[1])
        assert type(each.blocks[1].up.weight) is nn.Parameter and type(each.head.weight) is not nn.Parameter


@multirank(2)
def test_ignored_modules_are_refused_by_name(rank: int, world_size: int) -> None:
    model = build()
    for wrong, told in (
        (model.blocks, "ignored_modules expects a collection of modules, got a ModuleList"),
        ([model.head.weight], "expects modules, got Parameter"),
        ([model], "got a Model that is also in its ignored_modules"),
    ):
        with pytest.raises(ValueError, match=told):
            sw.fully_shard(model, mesh=world_mesh(2), ignored_modules=wrong)  # type: ignore[arg-type]
    # A weight that an ignored module shares with others is the ignored one's.
    model.head.weight = model.embed.weight
    sw.fully_shard(model, mesh=world_mesh(2), ignored_modules=[model.embed])
    assert type(model.head.weight) is nn.Parameter and model.head.weight is model.embed.weight
    assert expected_gradients(2)[0].shape == model.embed.weight.shape
