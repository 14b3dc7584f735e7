"""Outputs in containers of all kinds, none, and losses that inner units compute."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Block, Case, Net, case, loss_of


@dataclass
class Record:
    y: torch.Tensor
    extra: torch.Tensor | None = None
    text: str = "a"


@dataclass(frozen=True)
class FrozenRecord:
    y: torch.Tensor
    extra: Any = None


Named = namedtuple("Named", ["y", "extra"])


class ModelOutput(OrderedDict):
    """Like Hugging Face's: a dataclass that is an ordered dict of the fields that are not None."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class BlockOutput(ModelOutput):
    y: torch.Tensor | None = None
    extra: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None


class Custom:
    """An object with nothing but attributes, as caches of keys and values are."""

    def __init__(self, y: torch.Tensor, extra: torch.Tensor) -> None:
        self.layers = [{"y": y}, (extra, None)]


class Slotted:
    __slots__ = ("extra", "y")

    def __init__(self, y: torch.Tensor, extra: torch.Tensor) -> None:
        self.y, self.extra = y, extra


PACK: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "tuple": (lambda y, e: (y, e), lambda o: o),
    "list": (lambda y, e: [y, [e, None]], lambda o: (o[0], o[1][0])),
    "dict": (lambda y, e: {"y": y, "more": {"extra": e, "n": 3}}, lambda o: (o["y"], o["more"]["extra"])),
    "ordered dict": (lambda y, e: OrderedDict(y=y, extra=e), lambda o: (o["y"], o["extra"])),
    "named tuple": (Named, lambda o: (o.y, o.extra)),
    "dataclass": (Record, lambda o: (o.y, o.extra)),
    "frozen dataclass": (FrozenRecord, lambda o: (o.y, o.extra)),
    "ModelOutput": (lambda y, e: BlockOutput(y=y, extra=e, states=(y,)), lambda o: (o.y, o["extra"])),
    "custom object": (Custom, lambda o: (o.layers[0]["y"], o.layers[1][0])),
    "object with slots": (Slotted, lambda o: (o.y, o.extra)),
    "nested": (
        lambda y, e: (None, [Named(Record(y), {"a": FrozenRecord(e)})], 3),
        lambda o: (o[1][0].y.y, o[1][0].extra["a"].y),
    ),
}


class Packing(Block):
    """Takes and gives its tensors in some container. ``extra`` comes from other weights than ``y``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.side = nn.Linear(DIM, 2)

    def forward(self, packed: Any) -> Any:
        pack, unpack = PACK[self.kind]
        x, extra = unpack(packed)
        return pack(super().forward(x), torch.tanh(self.side(x)) + extra)


class PackingNet(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList(Packing(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        pack, unpack = PACK[self.kind]
        packed = pack(self.first(x), x[:, :2])
        for block in self.blocks:
            packed = block(packed)
        y, extra = unpack(packed)
        return pack(self.head(y), extra)


class Containers(Case):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(self) -> nn.Module:
        return PackingNet(self.kind)

    def train(self, model: Any, batch: Batch) -> Any:
        y, extra = PACK[self.kind][1](model(batch.x))
        # Each part of the output alone, and both, must find the weights.
        parts = [(y, extra), (y,), (extra,)][batch.step]
        loss_of(*parts).backward()
        return y, extra


for _kind in PACK:
    case(f"output: {_kind}", _kind)(Containers)


@case("output: None")
class NoOutput(Case):
    """A unit that returns nothing leaves its result in a list it is given."""

    class Into(Block):
        def forward(self, x: torch.Tensor, into: list[torch.Tensor]) -> None:  # type: ignore[override]
            into.append(x.detach())

    class Root(Net):
        def __init__(self) -> None:
            super().__init__(2)
            self.silent = NoOutput.Into()

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen: list[torch.Tensor] = []
            x = self.first(x)
            assert self.silent(x, seen) is None
            return self.head(self.blocks[1](self.blocks[0](x))) + seen[0][:, :4]

    def build(self) -> nn.Module:
        return self.Root()

    def units(self, model: Any) -> list[Any]:
        return [model.silent, *super().units(model)]


@case("loss from an inner unit", through_root=True)
@case("loss from an inner unit by a list outside", through_root=False)
class InnerLoss(Case):
    """The loss is computed in an inner unit; the root's own output has no part in it."""

    class WithLoss(Block):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            losses.append(loss_of(y))
            return y

    class Root(Net):
        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            x = self.first(x)
            x = self.blocks[0](x, [])
            x = self.blocks[1](x, losses)
            with torch.no_grad():
                return self.head(x)

    def __init__(self, through_root: bool) -> None:
        self.through_root = through_root

    def build(self) -> nn.Module:
        return self.Root(2, self.WithLoss if not self.through_root else ReturnsLoss)

    def train(self, model: Any, batch: Batch) -> Any:
        losses: list[torch.Tensor] = []
        y = model(batch.x, losses)
        losses[-1].backward()
        return y, losses[-1]


class ReturnsLoss(Block):
    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        y, loss = self.both(x)
        losses.append(loss)
        return y

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, loss_of(y)


@case("loss of hidden states of inner units")
class HiddenStates(Case):
    """Outputs of inner units, kept by the caller through forward hooks, as feature extractors do."""

    sums_differ_in_bf16 = True

    def train(self, model: Any, batch: Batch) -> Any:
        states: list[torch.Tensor] = []
        handles = [b.register_forward_hook(lambda m, a, o: states.append(o)) for b in model.blocks]
        y = model(batch.x)
        for handle in handles:
            handle.remove()
        # In one step backward does not start from the root's output at all.
        loss_of(*(states[:2] if batch.step == 1 else [*states, y])).backward()
        return states
