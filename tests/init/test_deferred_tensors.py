"""Tensors of other kinds, memory and files that constructors use, in deferred models.

They equal the plain build or refuse by name; most of this once was silently wrong.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import shardwright as sw
from tests.init.models import assert_built_alike, assert_same
from tests.support import multirank


def test_what_numpy_would_write_into_a_deferred_tensor_is_refused() -> None:
    with sw.deferred_init():
        weight = nn.Linear(2, 2).weight.detach()
        for array in (weight.numpy(), numpy.asarray(weight)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 7
        assert numpy.array(weight).sum() == weight.sum().item()


def test_memory_of_numpy_that_is_written_again_is_noticed() -> None:
    given = numpy.zeros((2, 2), dtype=numpy.float32)

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.data.copy_(torch.from_numpy(given))
        return model

    assert_built_alike(build, 0)
    with sw.deferred_init():
        model = build()
    given[:] = 1
    with pytest.raises(RuntimeError, match=r"shape \(2, 2\) was changed after"):
        sw.materialize(model)


@pytest.mark.parametrize("form", ["torch", "mapped", "legacy", "safetensors"])
def test_files_that_a_constructor_reads(tmp_path: Any, form: str) -> None:
    stored = {"weight": torch.randn(3, 2).t(), "mean": torch.arange(2)}
    file = tmp_path / "stored"
    if form == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({key: value.contiguous() for key, value in stored.items()}, file)
    else:
        torch.save(stored, file, _use_new_zipfile_serialization=form != "legacy")

    def build() -> nn.Module:
        found = (
            safetensors.load_file(file) if form == "safetensors" else torch.load(file, mmap=form == "mapped")
        )
        model = nn.Linear(3, 2)
        model.load_state_dict({"weight": found["weight"], "bias": found["mean"].float()})
        model.register_buffer("mean", found["mean"])
        model.register_buffer("first", model.mean[:1])
        return model

    assert_built_alike(build, 0)


def test_memory_that_is_given_to_a_tensor() -> None:
    given = torch.ones(2, 2)

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("taken", torch.empty(0).set_(given))
        model.register_buffer("shared", torch.empty(0).set_(model.weight.detach()))
        return model

    assert_built_alike(build, 0)


def test_copies_of_buffers_keep_their_geometry() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        rows = torch.rand(3, 4)
        model.register_buffer("rows", rows)
        model.register_buffer("row", rows[1])
        model.register_buffer("wide", torch.rand(1, 3).expand(4, 3))
        return copy.deepcopy(model)

    model: Any = assert_built_alike(build, 0)
    model.rows.fill_(3)
    assert model.row.tolist() == [3.0] * 4


def test_autocast_and_inference_mode_do_not_change_what_was_recorded() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("product", torch.randn(5, 5) @ torch.randn(5, 5))
        return model

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        sw.materialize(model)
    assert_same(model, plain)


def test_containers_that_hold_themselves() -> None:
    def build() -> nn.Module:
        model: Any = nn.LSTM(2, 2)
        model.cache = {"weight": model.weight_ih_l0, "all": []}
        model.cache["all"].append(model.cache)
        return model

    model: Any = assert_built_alike(build, 0)
    assert model.cache["weight"] is model.weight_ih_l0 and model.cache["all"][0] is model.cache


def test_lazy_modules_wait_for_their_first_forward() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))

    torch.manual_seed(0)
    plain = build()
    plain(torch.ones(1, 3))
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    sw.materialize(model)(torch.ones(1, 3))
    assert_same(model, plain)


class Marked(nn.Parameter):
    pass


class Named(torch.Tensor):
    """As libraries have them that keep units or names of dimensions with tensors."""


class Made(torch.Tensor):
    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data)


class Halves(torch.Tensor):
    """A wrapper of two tensors, as quantised weights are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.low, self.high = data.chunk(2)

    def __tensor_flatten__(self) -> Any:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(torch.cat([args[0].low, args[0].high]))


OF_OTHER_CLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "as_subclass": (
        lambda: torch.rand(2).as_subclass(Named),
        "a Named, in Holder at 'self.scale = nn.Parameter",
    ),
    "_make_subclass": (lambda: Made(torch.rand(2)), "a Made, in Holder at 'self.scale = nn.Parameter"),
    "constructor": (lambda: Named([1.0, 2.0]), "a Named, in Holder at 'self.scale = nn.Parameter"),
    "like": (lambda: torch.zeros_like(GIVEN), "a Named, in Holder at 'self.scale = nn.Parameter"),
    "wrapper": (lambda: Halves(torch.rand(4)), "'scale' of Holder, a Halves that holds deferred tensors"),
    "parameter": (lambda: Marked(torch.rand(2)), "a Marked, in Holder at 'self.scale = nn.Parameter"),
}
GIVEN = torch.ones(2).as_subclass(Named)


class Holder(nn.Module):
    def __init__(self, make: Callable[[], Any], buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if buffer:
            self.register_buffer("scale", make())
        else:
            self.scale = nn.Parameter(make())


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("kind", OF_OTHER_CLASSES)
def test_tensors_of_other_classes_are_refused_by_name(kind: str, buffer: bool) -> None:
    make, said = OF_OTHER_CLASSES[kind]
    new = nn.Parameter.__dict__["__new__"]
    said = re.escape(f"cannot build {said}").replace("self\\.scale\\ =\\ nn\\.Parameter", "self.*scale.*")
    with pytest.raises(NotImplementedError, match=f"{said}.*outside"), sw.deferred_init():
        Holder(make, buffer)
    assert nn.Parameter.__dict__["__new__"] is new
    if kind != "parameter":
        Holder(make, buffer)  # the context has left nothing behind
    assert_built_alike(lambda: Holder(lambda: torch.ones(2), buffer), 0)


def test_tensors_of_other_classes_from_outside_stay() -> None:
    given = Halves(torch.arange(4.0))
    with sw.deferred_init():
        model = nn.ParameterList([nn.Parameter(GIVEN, requires_grad=False)])
        model.register_buffer("halves", given)
    sw.materialize(model)
    assert type(model[0]) is Named and model[0].data_ptr() == GIVEN.data_ptr()
    assert model.halves is given


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("sparse_coo", lambda: torch.eye(3).to_sparse()),
        ("sparse_coo", lambda: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,))),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused(kind: str, make: Callable[[], Any]) -> None:
    with (
        pytest.raises(NotImplementedError, match=f"a {kind} one. Build .* outside"),
        sw.deferred_init(),
    ):
        Holder(make, True)


def test_a_context_in_another_thread_is_refused() -> None:
    def build() -> str:
        try:
            with sw.deferred_init():
                return "built for real"
        except RuntimeError as error:
            return str(error)

    with sw.deferred_init(), futures.ThreadPoolExecutor(1) as threads:
        assert "active in another thread" in threads.submit(build).result()
    with futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(build).result() == "built for real"


def test_what_was_read_is_let_go_once_nothing_is_deferred() -> None:
    given = torch.ones(3, 3)
    there = weakref.ref(given)
    with sw.deferred_init():
        model = nn.Linear(3, 3)
        model.weight.data.copy_(given)
    sw.materialize(model)
    del given
    gc.collect()
    assert there() is None


@multirank(1)
def test_nothing_is_done_inside_the_context(rank: int, world_size: int, tmp_path: Any) -> None:
    with sw.deferred_init():
        model = nn.Linear(3, 3)
        for action in (sw.materialize, sw.fully_shard, lambda m: sw.load_pretrained(m, tmp_path)):
            with pytest.raises(RuntimeError, match="was called inside deferred_init"):
                action(model)
    sw.materialize(sw.fully_shard(model))


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged", sw.Ragged("element")])
def test_loading_one_parameter_leaves_the_others_to_be_initialised(
    rank: int, world_size: int, layout: Any
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    torch.manual_seed(0)
    plain: Any = build()
    torch.manual_seed(0)
    with sw.deferred_init():
        model = build()
    sw.fully_shard(model, layout=layout)
    model.load_state_dict({"1.weight": torch.ones(4, 4)}, strict=False)
    sw.materialize(model)
    nn.init.ones_(plain[1].weight)
    assert_same(model, plain)
