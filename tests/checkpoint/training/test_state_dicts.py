"""``torch.distributed.checkpoint.state_dict`` with every strategy, layout and kind of optimizer: this is how a sharded
model gives and takes full and sharded state, on the CPU, on rank 0 only, and optimizer state by parameter name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwright as sw
from tests.engine.kit.models import Model, build, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support.matrix import select, together

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "Muon": lambda m: sw.Muon(m.named_parameters(), lr=0.01),
    "AdamW8bit": lambda m: sw.AdamW8bit(m.parameters(), lr=0.01, block_size=32, min_size=1),
}
WHERE = [*on("zero1", (2,)), *on("zero3", (3,)), *on("hsdp", (2, 2)), *on("hfsdp", (2, 2))]


class Row(NamedTuple):
    at: On
    layout: Any
    optimizer: str
    tied: bool

    def shows(self, strength: int) -> Iterator[Hashable]:
        """Not each optimizer at each place, which would be most of the rows: neither knows of the other."""
        for settings in together(strength, *self):
            if strength > 2 or {i for i, _ in settings} != {0, 2}:
                yield settings


LAYOUTS = ("per_parameter", "ragged", sw.Ragged("element"))
ROWS = select([Row(*r) for r in itertools.product(WHERE, LAYOUTS, OPTIMIZERS, (False, True))], Row.shows)


def plain_model(seed: int, tied: bool) -> Model:
    model = build(seed)
    model.register_buffer("scale", torch.tensor([float(seed)]))
    if tied:
        model.head.weight = model.embed.weight
    return model


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@on_meshes(ROWS)
def test_full_state_leaves_and_enters_by_name(
    rank: int, world_size: int, at: On, layout: Any, optimizer: str, tied: bool
) -> None:
    if optimizer == "AdamW8bit":
        layout = sw.Ragged(32)  # the one that leaves its blocks whole

    def sharded(seed: int) -> tuple[Any, Any]:
        model = shard(plain_model(seed, tied), True, mesh=at.mesh, strategy=at.strategy, layout=layout)
        return model, sw.fully_shard_optimizer(OPTIMIZERS[optimizer](model))

    plain = plain_model(0, tied)
    expected = OPTIMIZERS[optimizer](plain)
    model, ours = sharded(0)
    for step in range(2):
        for r in range(world_size):
            (loss_of(plain(tokens(step, 0, r)), tokens(step, 0, r)) / world_size).backward()
        loss_of(model(tokens(step, 0, rank)), tokens(step, 0, rank)).backward()
        for each in (expected, ours):
            each.step()
            each.zero_grad()

    # Sharded: what is cut is a DTensor; the plain state dict has the same names.
    values, state = get_state_dict(model, ours)
    assert list(values) == list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(v, DTensor) for name, v in values.items() if name != "scale")
    # Full, on the CPU: the first rank has all of it, by name, the others nothing.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, ours, options=options)
    wanted, wanted_moments = get_state_dict(plain, expected)
    assert list(state["state"]) == list(wanted_moments["state"])
    if rank:
        assert whole == moments == {}
    else:
        assert list(whole) == list(wanted) and list(moments["state"]) == list(wanted_moments["state"])
        for name, value in whole.items():
            assert type(value) is torch.Tensor and value.device.type == "cpu"
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-5)
        for name, found in moments["state"].items():
            assert list(found) == list(wanted_moments["state"][name]), name
            for key, value in wanted_moments["state"][name].items():
                if optimizer != "AdamW8bit":  # whose blocks begin elsewhere
                    torch.testing.assert_close(found[key], value, rtol=1e-2, atol=1e-5, msg=f"{name} {key}")
                elif isinstance(value, torch.Tensor):
                    assert type(found[key]) is torch.Tensor and found[key].dtype == value.dtype
    # From the first rank into another model: broadcast, and cut on arrival. torch changes the dicts that it is given.
    other, theirs = sharded(1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(whole), options=options)
    set_optimizer_state_dict(other, theirs, copy.deepcopy(moments), options=options)
    options = StateDictOptions(full_state_dict=True)
    again = get_model_state_dict(other, options=options)
    again_moments = get_optimizer_state_dict(other, theirs, options=options)
    if not rank:
        assert equal(whole, dict(again)) and equal(moments, again_moments)
    # And it goes on as the first.
    for m, o in ((model, ours), (other, theirs)):
        loss_of(m(tokens(2, 0, rank)), tokens(2, 0, rank)).backward()
        o.step()
    assert equal(get_model_state_dict(model, options=options), get_model_state_dict(other, options=options))
