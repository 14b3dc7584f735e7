"""Tied weights after ``load_state_dict(assign=True)``, which gives each name a parameter of its own: tied again.

Compared with a plain model whose weights stay tied. Ranks have different data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh

State = dict[str, torch.Tensor]


class Tied(nn.Module):
    """Seven words, so that no rank has half of them; one more layer of the same weights in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False), nn.Linear(7, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.middle[1].weight = self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(x)))


NAMES = ("embed.weight", "middle.1.weight", "head.weight")


def build(units: str, on_meta: bool, **options: Any) -> Any:
    torch.manual_seed(5)
    with torch.device("meta" if on_meta else "cpu"):
        model = Tied()
    for name in units.split():
        sw.fully_shard(model.get_submodule(name), **options)
    return sw.fully_shard(model, **options)


def values() -> tuple[Tied, State]:
    torch.manual_seed(0)
    plain = Tied()
    return plain, {name: value.clone() for name, value in plain.state_dict().items()}


def as_dtensors(model: Any, state: State) -> None:
    """As FSDP2's users load: cut each tensor, wrap it, assign it."""
    mesh = world_mesh(dist.get_world_size())
    cut = {n: nn.Parameter(distribute_tensor(v.clone(), mesh, [Shard(0)])) for n, v in state.items()}
    model.load_state_dict(cut, assign=True)


def as_whole(model: Any, state: State) -> None:
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)


def as_one_object(model: Any, state: State) -> None:
    one = nn.Parameter(state["embed.weight"].clone())
    model.load_state_dict({**state, **dict.fromkeys(NAMES, one)}, assign=True)


def without(*names: str) -> Callable[[Any, State], None]:
    def load(model: Any, state: State) -> None:
        some = {name: value.clone() for name, value in state.items() if name not in names}
        missing = model.load_state_dict(some, assign=True, strict=False).missing_keys
        assert set(missing) == set(names)

    return load


def from_rank_0(model: Any, state: State) -> None:
    mine = state if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model, mine, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


WAYS = [
    as_dtensors, as_whole, as_one_object, without(NAMES[0]), without(NAMES[1], NAMES[2]), without(*NAMES[:2]),
    from_rank_0,
]  # fmt: skip
LAYOUTS = ("per_parameter", "ragged", sw.Ragged("element"))


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def check_training(model: Any, plain: Tied, where: str, steps: int = 2) -> None:
    """One parameter has three names, and trains as the plain model's does on all ranks' data."""
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()], where
    assert model.embed.weight is model.head.weight is model.middle[1].weight, where
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(steps):
        model(data(step, dist.get_rank())).square().mean().backward()
        world = dist.get_world_size()
        for rank in range(world):
            (plain(data(step, rank)).square().mean() / world).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, msg=lambda m, n=name: f"{where}: {n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = {name: full(value) for name, value in model.state_dict().items()}
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.extensive("each way of assigning")
@multirank(2)
def test_tied_weights_stay_tied_however_they_are_assigned(rank: int, world_size: int) -> None:
    units = ("", "embed", "embed middle", "middle head", "middle.1 middle embed head")
    settings = zip(
        itertools.product(WAYS, units), itertools.cycle(LAYOUTS), itertools.cycle((True, True, False))
    )
    for (way, of_units), layout, on_meta in settings:
        where = f"{getattr(way, '__name__', way)}, units {of_units!r}, {layout}, meta {on_meta}"
        model = build(of_units, on_meta, layout=layout)
        plain, state = values()
        way(model, state)
        check_training(model, plain, where, steps=1)


@pytest.mark.extensive("every strategy")
@multirank(4)
def test_tied_weights_stay_tied_with_every_strategy(rank: int, world_size: int) -> None:
    for strategy, shape in (
        ("ddp", (4,)),
        ("zero1", (4,)),
        ("zero2", (4,)),
        ("hsdp", (2, 2)),
        ("hfsdp", (2, 2)),
    ):
        mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
        model = build("embed", True, strategy=strategy, mesh=mesh)
        plain, state = values()
        as_whole(model, state)
        check_training(model, plain, strategy)
        as_whole(model, state)  # again, after steps
        plain.load_state_dict(state)
        check_training(model, plain, f"{strategy}, again", steps=1)


@multirank(2)
def test_different_values_for_one_tied_parameter_are_refused_on_every_rank(
    rank: int, world_size: int
) -> None:
    for units, layout in itertools.product(("", "embed"), LAYOUTS):
        model = build(units, True, layout=layout)
        _, state = values()
        state["head.weight"][6] += 1  # a row that rank 0 does not have
        with pytest.raises(
            RuntimeError, match=r"'embed.weight' and 'head.weight' are names of one tied parameter"
        ):
            as_dtensors(model, state)
        plain, state = values()
        state["embed.weight"][2, 1] = state["head.weight"][2, 1] = state["middle.1.weight"][2, 1] = torch.nan
        as_whole(model, state)  # equal, NaN as well
        plain, state = values()
        as_whole(model, state)
        check_training(model, plain, f"{units!r}, {layout}", steps=1)


@multirank(2)
def test_names_that_were_untied_by_hand_stay_untied(rank: int, world_size: int) -> None:
    model = build("embed", False)
    plain, state = values()
    for each in (model, plain):
        each.load_state_dict(state)
        each.head.weight = nn.Parameter(full(each.head.weight.detach()).clone())
    model.load_state_dict({n: v.clone() for n, v in plain.state_dict().items()}, assign=True)
    assert model.head.weight is not model.embed.weight and model.middle[1].weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
