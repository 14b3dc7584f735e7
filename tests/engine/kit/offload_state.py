"""Training whose optimizer state is offloaded, and how it is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine.comm import DeviceStreams
from shardwright.engine.compat import local_of
from shardwright.optim.host_state import HostState
from tests.engine.kit.models import loss_of, tokens
from tests.engine.kit.offload import set_more

STATE = sw.Offload(parameters=False, gradients=False)


def train(model: nn.Module, optimizer: Any, rank: int, steps: int, way: str = "none", first: int = 0) -> None:
    for step in range(first, first + steps):
        micros = 1 if way == "none" else 2
        for micro in range(micros):
            set_more(model, way, micro + 1 < micros)
            batch = tokens(step, micro, rank)
            loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Assert that state dicts have the same keys and the same bits."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, both in enumerate(zip(one, other, strict=True)):
            assert_equal(*both, f"{where}/{i}")
    elif isinstance(one, torch.Tensor):
        local, its = (local_of(t) if hasattr(t, "to_local") else t for t in (one, other))
        assert type(one) is type(other) and torch.equal(local, its), where
    else:
        assert one == other, where


def unawaited(take: Callable[..., Any]) -> Callable[..., Any]:
    def taken(self: HostState, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceStreams, "join", lambda self, mark: None)
            return take(self, *given)

    return taken
