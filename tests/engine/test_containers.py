"""Containers of users among inputs and outputs: with casts they keep their class, attributes and constructor."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.edits import average, check_same
from tests.support import multirank, world_mesh

Tensor = torch.Tensor


class Attributes(dict[str, Any]):
    """Raises KeyError for missing attributes, as many such classes do."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Named(dict[str, Any]):
    def __init__(self, name: str, **values: Any) -> None:
        super().__init__(**values)
        self.name = name


class Images(list[Any]):
    def __init__(self, tensors: list[Tensor], sizes: tuple[int, ...]) -> None:
        super().__init__(tensors)
        self.sizes = sizes

    def append(self, item: Any) -> None:
        raise AssertionError("Images do not grow")

    extend = append


class Couple(tuple[Any, ...]):
    note: str

    def __new__(cls, first: Any, second: Any) -> Couple:
        return super().__new__(cls, (first, second))


class Point(NamedTuple):
    x: Tensor
    text: str


class Checked(Point):
    def __new__(cls, x: Tensor) -> Checked:
        return super().__new__(cls, x, "checked")


class Ordered(collections.OrderedDict[str, Any]):
    def __init__(self, tag: int, **values: Any) -> None:
        super().__init__(**values)
        self.tag = tag


class Mirrored(collections.OrderedDict[str, Any]):
    """Values are attributes, too, as in outputs of transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Frozen(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclasses.dataclass
class Record:
    x: Tensor
    size: int = 4
    twice: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.twice += 2


@dataclasses.dataclass(frozen=True)
class Fixed:
    x: Tensor
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)


class Slots(list[Any]):
    __slots__ = ("label",)
    label: str


def couple(x: Tensor) -> Couple:
    result = Couple(x, 1)
    result.note = "note"
    return result


def slots(x: Tensor) -> Slots:
    result = Slots([x])
    result.label = "label"
    return result


def mirrored(x: Tensor) -> Mirrored:
    result = Mirrored()
    result["x"] = x
    return result


#: For each container: how to make it, how to read the tensor, and its other contents.
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"x": x, "n": 1}, lambda c: c["x"], lambda c: (c["n"], list(c))),
    "list": (lambda x: [x, 1], lambda c: c[0], lambda c: c[1]),
    "tuple": (lambda x: (1, x), lambda c: c[1], lambda c: c[0]),
    "attributes": (lambda x: Attributes(x=x, n=2), lambda c: c.x, lambda c: c.n),
    "named": (lambda x: Named("me", x=x), lambda c: c["x"], lambda c: c.name),
    "images": (lambda x: Images([x], (2, 4)), lambda c: c[0].view(c.sizes), lambda c: c.sizes),
    "couple": (couple, lambda c: c[0], lambda c: (c[1], c.note)),
    "namedtuple": (lambda x: Point(x, "t"), lambda c: c.x, lambda c: c.text),
    "namedtuple with a constructor": (Checked, lambda c: c.x, lambda c: c.text),
    "ordered": (
        lambda x: Ordered(3, b=1, x=x),
        lambda c: c["x"],
        lambda c: (c.tag, list(c), list(reversed(c))),
    ),
    "mirrored": (mirrored, lambda c: c.x, lambda c: c["x"] is c.x),
    "defaultdict": (
        lambda x: collections.defaultdict(int, x=x),
        lambda c: c["x"],
        lambda c: (c.default_factory, c["missing"]),
    ),
    "userdict": (lambda x: collections.UserDict(x=x, n=1), lambda c: c["x"], lambda c: c["n"]),
    "chainmap": (lambda x: collections.ChainMap({"x": x}, {"n": 1}), lambda c: c["x"], lambda c: c["n"]),
    "mapping": (lambda x: Frozen(x=x, n=1), lambda c: c["x"], lambda c: c["n"]),
    "proxy": (lambda x: types.MappingProxyType({"x": x}), lambda c: c["x"], len),
    "dataclass": (Record, lambda c: c.x, lambda c: (c.size, c.twice)),
    "frozen dataclass": (
        lambda x: Fixed(x, {"y": [x]}),
        lambda c: c.x + c.rest["y"][0],
        lambda c: list(c.rest),
    ),
    "slots": (slots, lambda c: c[0], lambda c: c.label),
    "nested": (
        lambda x: [Named("me", inner=couple(x))],
        lambda c: c[0]["inner"][0],
        lambda c: (c[0].name, c[0]["inner"].note),
    ),
    "result of torch": (
        lambda x: torch.max(x.unsqueeze(0), 0),
        lambda c: c.values,
        lambda c: c.indices.sum().item(),
    ),
}


class Unit(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.make, self.take, self.rest = CONTAINERS[case]
        self.linear = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, container: Any) -> Any:
        self.seen = type(container), self.rest(container)
        return self.make(self.linear(self.take(container)))


POLICIES = (
    sw.MixedPrecisionPolicy(param_dtype=torch.float64),
    sw.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32),
    sw.MixedPrecisionPolicy(output_dtype=torch.float64),
    sw.MixedPrecisionPolicy(),
)


@pytest.mark.extensive("both ways")
@multirank(2)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_containers_keep_their_class_and_attributes(rank: int, world_size: int, needs_grad: bool) -> None:
    mesh = world_mesh(world_size)
    for case, (make, take, rest) in CONTAINERS.items():
        for policy in POLICIES:
            torch.manual_seed(0)
            plain = Unit(case)
            model: Any = sw.fully_shard(copy.deepcopy(plain), mesh=mesh, mp_policy=policy)
            torch.manual_seed(rank)
            x = torch.randn(2, 4)
            outputs = []
            for each in (plain, model):
                output = each(make(x.clone().requires_grad_(needs_grad)))
                take(output).square().sum().backward()
                outputs.append((type(output), rest(output), each.seen))
            assert outputs[0] == outputs[1], (case, policy)
            average(plain)
            check_same(plain, model)


@multirank(2)
def test_a_container_of_itself_is_an_error_that_names_the_cycle(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    x = torch.randn(2, 4)
    ring: list[Any] = [x]
    ring.append({"parent": (ring,)})
    record = Fixed(x, {})
    record.rest["self"] = record
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for tree, path in (
        (ring, r"\[1\]\['parent'\]\[0\]"),
        ({"a": ring}, r"x at \['a'\]"),
        (record, r"\.rest\['self'\]"),
    ):
        model: Any = sw.fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
        with pytest.raises(ValueError, match=f"Unit .*contains itself.*{path}"):
            model(tree)
    cyclic: Any = nn.Linear(4, 4)
    cyclic.register_forward_hook(lambda *_: ring)
    with pytest.raises(ValueError, match="contains itself"):
        sw.fully_shard(cyclic, mesh=mesh)(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.own = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.own


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_a_shallow_copy_is_another_module_of_the_same_parts(rank: int, world_size: int, layout: str) -> None:
    mesh = world_mesh(world_size)
    for at, keeps in ((at, keeps) for at in ("", "first") for keeps in (True, False)):
        torch.manual_seed(0)
        plain = Tower()
        model: Any = copy.deepcopy(plain)
        for module in (model.first, model):
            sw.fully_shard(module, mesh=mesh, layout=layout)
        torch.manual_seed(rank)
        if at:
            model.first = copy.copy(model.first)
        else:
            other = copy.copy(model)
            assert other is not model and type(other) is type(model)
            assert other.first is model.first and other.own is model.own
            other.note = 1
            assert not hasattr(model, "note")
            model = other if not keeps else model
            if keeps:
                assert torch.equal(other(torch.ones(1, 4)).detach(), model(torch.ones(1, 4)).detach())
        for _ in range(2):
            x = torch.randn(2, 4)
            plain(x).square().sum().backward()
            model(x).square().sum().backward()
        average(plain)
        check_same(plain, model)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert list(model.state_dict()) == list(plain.state_dict())


class Copied(Tower):
    def __copy__(self) -> Copied:
        result = type(self)()
        result.first = self.first
        return result


@multirank(2)
def test_a_users_own_copy_is_used(rank: int, world_size: int) -> None:
    model: Any = sw.fully_shard(Copied(), mesh=world_mesh(world_size))
    assert copy.copy(model).first is model.first and type(copy.copy(model)) is Copied
