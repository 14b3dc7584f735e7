"""Wrong arguments of the functions that find corrupt values: one line says what was expected and what was found."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwright as sw


def hashed(model: object) -> object:
    with sw.hash_gradients(model) as hashes:  # type: ignore[arg-type]
        return hashes


MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hashed(3), "sw.hash_gradients expects a model (torch.nn.Module), got int."),
        (
            lambda: sw.compare_gradients(hashed(MODEL), sw.hash_gradients(MODEL)),  # type: ignore[arg-type]
            "sw.compare_gradients expects two results of sw.hash_gradients (the value after `as`), got "
            "_GeneratorContextManager.",
        ),
        (lambda: sw.compare_copies(3), "sw.compare_copies expects a model (torch.nn.Module), got int."),  # type: ignore[arg-type]
        (lambda: sw.compare_copies(MODEL, 3), "sw.compare_copies expects an optimizer or several, got int."),  # type: ignore[arg-type]
        (
            lambda: sw.compare_copies(MODEL, [3]),  # type: ignore[arg-type]
            "sw.compare_copies expects an optimizer or several, got int among them.",
        ),
    ],
)
def test_wrong_arguments_are_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()


def test_optimizers_may_come_in_any_iterable() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    for optimizers in (optimizer, [optimizer], (each for each in [optimizer])):
        assert sw.compare_copies(MODEL, optimizers) == []
