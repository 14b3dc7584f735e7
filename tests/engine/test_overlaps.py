"""Two names for one memory: parameters of one object stay tied; what shares memory otherwise is refused.

A generated table: what shares the memory of a parameter x the units x the layout x deferred or not. No row may train
anything but what a plain model trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


class Criterion(nn.Module):
    """A loss outside of the model, with weights."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output @ self.weight).pow(2).mean()


def tied(model: Words) -> None:
    model.head.weight = model.embed.weight


def data(model: Words) -> None:
    model.head.weight.data = model.embed.weight.data


def detached(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach())


def transposed(model: Words) -> None:
    model.body.weight.data = model.embed.weight.data[:4].t()


def a_row(model: Words) -> None:
    model.body.bias.data = model.embed.weight.data[5]


def a_column(model: Words) -> None:
    model.extra = nn.Parameter(model.embed.weight.data[:, 1])


def assigned(model: Words) -> None:
    state = model.state_dict()
    model.load_state_dict(state | {"head.weight": state["embed.weight"]}, assign=True)


def buffer(model: Words) -> None:
    model.register_buffer("table", model.embed.weight.data)


def buffer_of_a_view(model: Words) -> None:
    model.body.register_buffer("first", model.embed.weight[:1].detach(), persistent=False)


def frozen(model: Words) -> None:
    model.head.weight.data = model.embed.weight.requires_grad_(False).data


def outside(model: Words) -> Any:
    other = nn.Linear(4, 6, bias=False)
    other.weight.data = model.embed.weight.data
    return other


def buffer_outside(model: Words) -> Any:
    other = nn.Module()
    other.register_buffer("table", model.head.weight.data)
    return other


REFUSED: dict[str, tuple[Callable[[Words], Any], set[str]]] = {
    "data": (data, {"embed.weight", "head.weight"}),
    "detached": (detached, {"embed.weight", "head.weight"}),
    "transposed": (transposed, {"embed.weight", "body.weight"}),
    "a row": (a_row, {"embed.weight", "body.bias"}),
    "a column": (a_column, {"embed.weight", "extra"}),
    "assigned": (assigned, {"embed.weight", "head.weight"}),
    "frozen": (frozen, {"embed.weight", "head.weight"}),
    "buffer": (buffer, {"embed.weight", "table"}),
    "buffer of a view": (buffer_of_a_view, {"embed.weight", "body.first"}),
    "outside": (outside, {"embed.weight", "weight of a Linear outside of this call"}),
    "buffer outside": (buffer_outside, {"head.weight", "table of a Module outside of this call"}),
}
UNITS = [(), ("embed",), ("head",), ("embed", "head", "body")]


def build(deferred: bool, share: Callable[[Words], Any]) -> tuple[Words, Any]:
    torch.manual_seed(0)
    if not deferred:
        model = Words()
        return model, share(model)
    with sw.deferred_init():
        model = Words()
        return model, share(model)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("deferred", [False, True], ids=["built", "deferred"])
def test_shared_memory_is_refused_with_both_names(
    rank: int, world_size: int, layout: str, deferred: bool
) -> None:
    for row, (share, names) in REFUSED.items():
        for units in UNITS:
            model, other = build(deferred, share)
            with pytest.raises(ValueError, match="share memory") as error:
                for name in units:
                    sw.fully_shard(model.get_submodule(name), layout=layout)
                sw.fully_shard(model, layout=layout)
            for name in names:
                assert name.rpartition(".")[2] in str(error.value), (row, units, str(error.value))
            del other


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_neighbours_in_one_memory_share_none(rank: int, world_size: int, layout: str) -> None:
    """As weights of one flat memory, of one file, or the columns of one matrix."""
    model, flat, matrix = nn.Linear(3, 4), torch.randn(16), torch.randn(5, 4)
    model.weight.data, model.bias.data = flat[:12].view(4, 3), flat[12:]
    model.left, model.right = nn.Parameter(matrix[:, ::2]), nn.Parameter(matrix[:, 1::2])
    model.register_buffer("rest", matrix[4:, :1].clone())
    before = [p.detach().clone() for p in model.parameters()]
    other = nn.Linear(1, 1)
    other.weight.data = flat[:1].clone()
    sw.fully_shard(model, layout=layout)
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(full(p), value)


ATTRIBUTES: dict[str, Callable[[Words], Any]] = {
    "view": lambda model: model.embed.weight.t(),
    "data": lambda model: model.embed.weight.data,
    "row": lambda model: model.embed.weight[2],
    "in a list": lambda model: [model.embed.weight.detach()],
    "in a dict": lambda model: {"w": model.embed.weight.data},
    "parameter in a list": lambda model: [nn.Parameter(model.embed.weight.data)],
}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "product": lambda t: torch.ones(4, 4) @ t[:4, :4],
    "sum": lambda t: t.sum(),
    "item": lambda t: t.flatten()[0].item(),
    "in place": lambda t: t.detach().mul_(2),
    "numpy": lambda t: t.detach().numpy(),
    "copy": lambda t: torch.empty(t.shape).copy_(t),
    "into it": lambda t: t.data.zero_(),
}


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_uses_of_views_in_attributes_are_refused(rank: int, world_size: int, layout: str, where: str) -> None:
    for row, make in ATTRIBUTES.items():
        model = Words()
        holder = model.body if where == "inside" else nn.Identity()
        holder.kept = make(model)
        sw.fully_shard(model.embed, layout=layout)
        sw.fully_shard(model, layout=layout)
        kept = holder.kept
        kept = kept[0] if isinstance(kept, list) else kept["w"] if isinstance(kept, dict) else kept
        for name, read in READS.items():
            with pytest.raises(RuntimeError) as error:
                read(kept)
            assert "kept" in str(error.value), (row, name, str(error.value))
            assert "was a view of parameter 'weight' of unit" in str(error.value), (row, name)
        holder.kept = full(model.embed.weight)  # as spectral_norm, which makes it again in each forward
        holder.kept.sum()


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_tied_parameters_and_criteria_train_as_plain_ones(
    rank: int, world_size: int, layout: str, strategy: str
) -> None:
    """One object under several names, one of them in a module outside of the model, which is used in the loss."""

    def train(units: tuple[str, ...] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Words()
        tied(model)
        criterion = Criterion(model.head.weight)
        if units is not None:
            for name in units:
                sw.fully_shard(model.get_submodule(name), layout=layout, strategy=strategy)
            sw.fully_shard(model, layout=layout, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randint(0, 6, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            criterion(model(x)).backward()
            for p in model.parameters() if units is None else ():
                dist.all_reduce(p.grad)
                p.grad /= world_size
            optimizer.step()
        return [full(p.detach()) for p in model.parameters()]

    expected = train(None)
    for units in UNITS:
        try:
            found = train(units)
        except (RuntimeError, NotImplementedError) as error:
            assert "'embed.weight'" in str(error) or "'weight' of unit" in str(error), str(error)
            continue
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
