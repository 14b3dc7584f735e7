"""No value of a weak dictionary holds its key: then neither would ever be freed."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardwright.engine.comm import Communicator, HostStreams
from shardwright.engine.tensors.numbers import averaging
from tests.engine.kit.models import build, loss_of, shard, tokens
from tests.support import multirank

#: They hold everything.
OUTSIDE = (types.ModuleType, type, types.FrameType, types.BuiltinFunctionType)


def reached(value: Any) -> dict[int, Any]:
    """All objects that a value holds, without what modules and classes hold."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, OUTSIDE):
            continue
        found[id(each)] = each
        if isinstance(each, types.FunctionType):
            waiting += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        elif not isinstance(each, weakref.ReferenceType):
            waiting += gc.get_referents(each)
    return found


def dictionaries() -> dict[str, weakref.WeakKeyDictionary[Any, Any]]:
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.startswith("shardwright")
        for attribute, value in vars(module).items()
        if isinstance(value, weakref.WeakKeyDictionary)
    }


def test_a_value_that_holds_its_key_is_seen() -> None:
    class Key: ...

    key = Key()
    assert id(key) in reached({"a": [lambda: key]}) and id(key) not in reached({"a": weakref.ref(key)})


@multirank(2)
def test_no_value_holds_its_key(rank: int, world_size: int) -> None:
    """After a training that fills the dictionaries of groups, and a secondary copy, penalties and two groups."""
    model = shard(build(), layout="ragged")
    model.set_separate_reduce_scatter_group()
    other = shard(build(), shard_placement_fn=lambda p: Shard(0), mesh=init_device_mesh("cpu", (2, 1)))
    for each in (model, other):
        loss = loss_of(each(tokens(0, 0, rank)), tokens(0, 0, rank))
        (loss + sum(p.square().sum() for p in each.parameters())).backward()
    filled = {name: found for name, found in dictionaries().items() if len(found)}
    assert len(filled) >= 2, dictionaries()
    for name, found in filled.items():
        for key, value in found.items():
            assert id(key) not in reached(value), name


@pytest.mark.parametrize("used", [False, True])
def test_the_flag_of_streams_ends_with_them(used: bool) -> None:
    before = len(averaging._differs)
    streams = HostStreams()
    comm: Communicator = SimpleNamespace(streams=streams, device=torch.device("cpu"))  # type: ignore[assignment]
    flag = averaging._flag_of(comm)
    assert averaging._flag_of(comm) is flag and len(averaging._differs) == before + 1
    if used:
        flag.set_after(torch.ones(1, dtype=torch.bool))
        with pytest.raises(RuntimeError, match="different penalties"):
            averaging.check_values()
    del comm, streams, flag
    assert len(averaging._differs) == before
