"""Tied weights and shared modules, within units and between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Block, Case, case, loss_of


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Reading(Language):
    """Reads the embedding's weight without calling it, as tied output layers often do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embed.weight) + self.head(x)


def tie_head(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_blocks(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def share_layer(model: Any) -> None:
    model.blocks[1].down = model.blocks[0].down


def share_unit(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def tie_everything(model: Any) -> None:
    tie_head(model)
    tie_blocks(model)


TIES: dict[str, tuple[type, Callable[[Any], None], Callable[[Any], list[Any]]]] = {
    "inside the root": (Language, tie_head, lambda m: [*m.blocks, m]),
    "inside a list unit": (Language, tie_head, lambda m: [*m.blocks, [m.embed, m.head], m]),
    "embedding unit and root": (Language, tie_head, lambda m: [m.embed, *m.blocks, m]),
    "head unit and root": (Language, tie_head, lambda m: [*m.blocks, m.head, m]),
    "embedding unit and head unit": (Language, tie_head, lambda m: [m.embed, *m.blocks, m.head, m]),
    "embedding unit and list unit": (Language, tie_head, lambda m: [m.embed, *m.blocks, [m.norm, m.head], m]),
    "two blocks": (Language, tie_blocks, lambda m: [*m.blocks, m]),
    "two blocks inside one unit": (Language, tie_blocks, lambda m: [m]),
    "everything": (Language, tie_everything, lambda m: [m.embed, *m.blocks, m.head, m]),
    "a layer shared by two blocks": (Language, share_layer, lambda m: [*m.blocks, m]),
    "a layer shared by two blocks, as a unit": (
        Language,
        share_layer,
        lambda m: [m.blocks[0].down, *m.blocks, m],
    ),
    "a layer shared inside one unit": (Language, share_layer, lambda m: [m]),
    "a block that is there twice": (Language, share_unit, lambda m: [m.blocks[0], m]),
    "weight read without a call": (Reading, lambda m: None, lambda m: [m.embed, *m.blocks, m]),
    "weight tied and read without a call": (Reading, tie_head, lambda m: [m.embed, *m.blocks, m.head, m]),
}


class Tied(Case):
    def __init__(self, kind: str, frozen: bool = False) -> None:
        self.kind, self.frozen = kind, frozen

    def build(self) -> nn.Module:
        cls, tie, _ = TIES[self.kind]
        model = cls()
        tie(model)
        return model

    def units(self, model: Any) -> list[Any]:
        return TIES[self.kind][2](model)

    def edit(self, model: Any, step: int) -> None:
        if self.frozen:
            model.embed.requires_grad_(step == 1)

    def train(self, model: Any, batch: Batch) -> Any:
        y = model(batch.ids)
        loss_of(y).backward()
        return y


for _kind in TIES:
    case(f"tied: {_kind}", _kind)(Tied)
case("tied: embedding unit and head unit, frozen in some steps", "embedding unit and head unit", True)(Tied)
