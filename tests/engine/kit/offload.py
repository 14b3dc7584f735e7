"""Offloaded training, and how it is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwright.engine.base.offload import HostSlab
from shardwright.engine.memory import Slab
from tests.engine.kit.models import Model, full


def set_more(model: Model, way: str, more: bool) -> None:
    if way == "not synced":
        model.set_requires_gradient_sync(not more)
    elif way == "not last":
        model.set_is_last_backward(not more)
    elif way == "not all-reduced":
        model.set_requires_all_reduce(not more)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(full(p), full(q[1])), name


@contextlib.contextmanager
def counted() -> Iterator[dict[tuple[bool, str], int]]:
    """The most bytes leased at once, by whether they are the host's and by kind."""
    alive: dict[Slab, tuple[tuple[bool, str], int]] = {}
    most: dict[tuple[bool, str], int] = {}

    def watch(kind: type[Slab], patch: pytest.MonkeyPatch) -> None:
        lease, release = kind.lease, kind.release

        def leased(slab: Slab) -> None:
            lease(slab)
            key = isinstance(slab, HostSlab), slab.kind
            if slab.nbytes:
                alive[slab] = key, slab.nbytes
            most[key] = max(most.get(key, 0), sum(n for k, n in alive.values() if k == key))

        def released(slab: Slab) -> None:
            release(slab)
            alive.pop(slab, None)

        patch.setattr(kind, "lease", leased)
        patch.setattr(kind, "release", released)

    with pytest.MonkeyPatch.context() as patch:
        watch(Slab, patch)
        watch(HostSlab, patch)
        yield most
