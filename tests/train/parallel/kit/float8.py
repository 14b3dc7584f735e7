"""Products in float8 on a machine without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def emulated() -> Iterator[None]:
    """torchao's own stand-in for products in float8."""
    settings = pytest.importorskip("torchao.float8", reason="torchao is not installed").Float8LinearConfig
    chosen = settings.from_recipe_name
    settings.from_recipe_name = lambda name: dataclasses.replace(chosen(name), emulate=True)
    try:
        yield
    finally:
        settings.from_recipe_name = chosen
