"""Where tensors go: a device that a constructor names is kept; one that is not there fails as in the plain build."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.init.models import assert_built_alike, assert_same
from tests.support import multirank

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def under_default(device: str, build: Callable[[], nn.Module]) -> nn.Module:
    torch.set_default_device(device)
    try:
        return build()
    finally:
        torch.set_default_device(None)


def in_context(device: str, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device(device):
        return build()


def linear(**options: Any) -> nn.Module:
    return nn.Linear(3, 3, **options)


#: How a constructor names a device.
NAMES: dict[str, Callable[[str], nn.Module]] = {
    "argument": lambda device: linear(device=device),
    "to": lambda device: linear().to(device),
    "context": lambda device: in_context(device, linear),
    "default": lambda device: under_default(device, linear),
    "factory": lambda device: nn.ParameterList([torch.ones(2, device=device)]),
}


@NO_CUDA
@pytest.mark.parametrize("how", [*NAMES, "cuda"])
def test_a_device_that_is_not_there_fails_as_in_the_plain_build(how: str) -> None:
    build = partial(NAMES[how], "cuda") if how in NAMES else lambda: linear().cuda()
    with pytest.raises(Exception) as plain:
        build()
    with pytest.raises(type(plain.value)) as told, sw.deferred_init():
        build()
    assert str(told.value) == str(plain.value)
    torch.manual_seed(0)
    assert_built_alike(linear, 0)  # nothing of it is left


@pytest.mark.parametrize("how", [name for name in NAMES if name != "to"])
def test_the_cpu_is_kept_where_it_was_named(how: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(NAMES[how]("cpu"), linear())
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Sequential(NAMES[how]("cpu"), linear())
    sw.materialize(model, "meta")  # another device than the named one, on any machine
    assert_same(model[0], plain[0])
    assert {p.device.type for p in model[1].parameters()} == {"meta"}


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.cpu()])
def test_what_a_constructor_moves_to_the_cpu_is_drawn_where_it_was(
    move: Callable[[nn.Module], nn.Module],
) -> None:
    def build() -> nn.Module:
        model: Any = move(linear(bias=False))
        nn.init.normal_(model.weight)
        return model

    assert_built_alike(build, 0)
    with sw.deferred_init():
        model = build()
        schedule = [rate.cpu().item() for rate in torch.linspace(0, 1, 3)]
    assert schedule == [0, 0.5, 1]
    sw.materialize(model, "meta")  # of another device than the CPU, on any machine
    assert model.weight.device.type == "cpu"
    with sw.deferred_init():
        model = move(linear())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        sw.materialize(model, "meta")  # which a plain build does, too
    torch.manual_seed(0)


def test_changes_that_depend_on_whether_a_move_is_a_copy_are_refused() -> None:
    for first in (True, False):
        with pytest.raises(NotImplementedError, match="moved to the CPU"), sw.deferred_init():
            weight = torch.rand(3)
            moved = weight.cpu()
            (weight if first else moved).fill_(1)


@multirank(1, 2)
@pytest.mark.parametrize("how", [name for name in NAMES if name not in ("to", "factory")])
def test_modules_that_a_constructor_leaves_on_meta(rank: int, world_size: int, how: str) -> None:
    """They are initialised after all others, as those of the plain build are by ``materialize``."""

    def build() -> nn.Module:
        return nn.Sequential(NAMES[how]("meta"), linear(), nn.BatchNorm1d(3))

    torch.manual_seed(0)
    plain = sw.materialize(build())
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    assert model[0].weight.is_meta and not model[1].weight.is_meta
    sw.materialize(sw.fully_shard(model, layout="ragged"))
    assert_same(model, plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", [in_context, under_default])
def test_nothing_can_be_recorded_where_all_is_on_meta(name: Callable[[str, Any], Any]) -> None:
    def deferred() -> nn.Module:
        with sw.deferred_init():
            return linear()

    with pytest.raises(RuntimeError, match=r"deferred_init was called under torch.device\('meta'\)"):
        name("meta", deferred)
    model = deferred()
    name("meta", lambda: sw.materialize(model))  # every device was recorded
    assert model.weight.device.type == "cpu"
    on_meta = linear(device="meta")
    with pytest.raises(RuntimeError, match=r"materialize was called under torch.device\('meta'\)"):
        name("meta", lambda: sw.materialize(on_meta))


def test_a_default_device_that_was_set_before_names_none() -> None:
    for name in (in_context, under_default):
        torch.manual_seed(0)
        plain = linear()
        torch.manual_seed(0)

        def deferred() -> nn.Module:
            with sw.deferred_init():
                return linear()

        model = name("cpu", deferred)
        assert_same(sw.materialize(model), plain)
        model = name("cpu", deferred)
        assert sw.materialize(model, "meta").weight.is_meta


class Mixed(nn.Module):
    """On the CPU by name: a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.named = nn.Parameter(torch.randn(4, device="cpu"))
        self.register_buffer("table", torch.rand(4, device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sharded", [False, True])
def test_the_cpu_named_under_a_mesh_of_gpus(sharded: bool, tmp_path: Any) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = Mixed()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = Mixed()
    if sharded:
        torch.cuda.set_device(0)
        torch.distributed.init_process_group(
            "nccl", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"
        )
        try:
            sw.materialize(sw.fully_shard(model))
            assert torch.equal(model.named.full_tensor().cpu(), plain.named)
            assert torch.equal(model.linear.weight.full_tensor(), plain.linear.weight)
        finally:
            torch.distributed.destroy_process_group()
    else:
        assert_same(sw.materialize(model, "cuda"), plain)
    assert model.table.device.type == "cpu" and torch.equal(model.table, plain.table)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
