"""Random models as descriptions: trees of modules, and what is done to their tensors while they are built.

A description is printed as the code that makes it, pickled to other ranks, and shrunk by hypothesis: every part of it
means something whatever the others are, since places are counted around what there is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

import shardwright as sw

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _sparse(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.sparse_(weight, 0.3) if weight.dtype != torch.bfloat16 else weight


def _orthogonal(weight: torch.Tensor) -> torch.Tensor:  # which has no kernel for bfloat16 on the CPU
    return nn.init.orthogonal_(weight) if weight.dtype != torch.bfloat16 else weight


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.1, a=-0.1, b=0.2),
    "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": _orthogonal,
    "sparse": _sparse,
}
ONLY_MATRICES = {
    "eye",
    "xavier_uniform",
    "xavier_normal",
    "kaiming_uniform",
    "kaiming_normal",
    "orthogonal",
    "sparse",
}
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "embedding": lambda n, m: nn.Embedding(n, m, padding_idx=0),
    "gru": nn.GRU,
    "convolution": lambda n, m: nn.Conv1d(n, m, 2),
    "batch_norm": lambda n, m: nn.BatchNorm1d(n),
    "attention": lambda n, m: nn.MultiheadAttention(2 * n, 2),
}


class Layer(NamedTuple):
    """A module with parameters of its own."""

    kind: str
    n: int
    m: int


class Inner(NamedTuple):
    """A module that is built in the same way, below this one."""

    steps: tuple[Any, ...]


class Fill(NamedTuple):
    at: int
    how: str


class Change(NamedTuple):
    """Something done to the parameter, or to its module, at a place."""

    at: int
    what: str


class Convert(NamedTuple):
    at: int
    dtype: torch.dtype


class Tie(NamedTuple):
    """One parameter under another name; or a whole module."""

    at: int
    module: bool


class Seed(NamedTuple):
    seed: int


class Built(nn.Module):
    """The model of a description."""

    def __init__(self, steps: tuple[Any, ...]) -> None:
        super().__init__()
        with torch.no_grad():
            for number, step in enumerate(steps):
                self._do(number, step)

    def _do(self, number: int, step: Any) -> None:
        if isinstance(step, Layer):
            self.add_module(f"{step.kind}{number}", LAYERS[step.kind](step.n, step.m))
        elif isinstance(step, Inner):
            self.add_module(f"inner{number}", Built(step.steps))
        elif isinstance(step, Seed):
            torch.manual_seed(step.seed)
        elif places := [
            (m, name) for m in self.modules() for name, p in m._parameters.items() if p is not None
        ]:
            self._change(number, step, *places[step.at % len(places)])

    def _change(self, number: int, step: Any, module: nn.Module, name: str) -> None:
        p: Any = getattr(module, name)
        if isinstance(step, Fill):
            if p.ndim == 2 or step.how not in ONLY_MATRICES:
                INITIALISERS[step.how](p)
        elif isinstance(step, Convert):
            module.to(step.dtype)
        elif isinstance(step, Tie):
            if not step.module:
                self.register_parameter(f"tie{number}", p)
            elif module is not self:
                self.add_module(f"tie{number}", module)
        elif step.what == "scale":
            p.mul_(0.5)
        elif step.what == "row":
            p[:1].uniform_()
        elif step.what == "buffer":
            self.register_buffer(f"buffer{number}", p.detach().float().cumsum(0), persistent=False)
        elif step.what == "alias":
            self.register_buffer(f"buffer{number}", p.detach()[-1:])
        elif step.what == "branch":
            if p.float().sum().item() + torch.rand(1).item() > 0.5:
                self.add_module(f"branch{number}", nn.Linear(2, 3))
        elif step.what == "copy":
            if module is not self:
                self.add_module(f"copy{number}", copy.deepcopy(module))
        elif step.what == "transpose":
            p.data = p.detach().clone().t() if p.ndim == 2 else p.detach() + 1
        elif step.what == "computed":
            module.register_parameter(name, nn.Parameter(p.detach() * 2 + torch.rand(1)))
        elif step.what == "freeze":
            p.requires_grad_(False)
        elif name == "bias":
            assert step.what == "none"
            module.register_parameter(name, None)


CHANGES = ("scale", "row", "buffer", "alias", "branch", "copy", "transpose", "computed", "freeze", "none")

#: What ``fully_shard`` is told, on one axis of ranks.
SHARDINGS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero1, ragged": {"layout": "ragged", "strategy": "zero1"},
    "Ragged(32)": {"layout": sw.Ragged(32)},
    "zero2, elements": {"layout": sw.Ragged("element"), "strategy": "zero2"},
    "ddp": {"strategy": "ddp"},
    "last dimension": {"shard_placement_fn": lambda p: Shard(p.ndim - 1) if p.ndim else None},
}


class Described(NamedTuple):
    """A model, the seed it is built from, and how it is sharded: whether its children are units, too."""

    sharding: str
    units: bool
    seed: int
    steps: tuple[Any, ...]

    def build(self) -> nn.Module:
        return Built(self.steps)

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        options |= SHARDINGS[self.sharding]
        for child in model.children() if self.units else ():
            sw.fully_shard(child, **options)
        return sw.fully_shard(model, **options)


def descriptions() -> st.SearchStrategy[Described]:
    at = st.integers(0, 20)
    size = st.integers(1, 20)
    layer = st.builds(Layer, st.sampled_from(tuple(LAYERS)), size, size)
    change = st.one_of(
        st.builds(Fill, at, st.sampled_from(tuple(INITIALISERS))),
        st.builds(Change, at, st.sampled_from(CHANGES)),
        st.builds(Convert, at, st.sampled_from(DTYPES)),
        st.builds(Tie, at, st.booleans()),
        st.builds(Seed, st.integers(0, 2)),
    )

    def steps(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
        return st.lists(st.one_of(layer, change, change, inner), min_size=1, max_size=7).map(tuple)

    tree = st.recursive(layer, lambda inner: st.builds(Inner, steps(inner)), max_leaves=12)
    first = st.tuples(layer)
    model = st.builds(lambda a, b: a + b, first, steps(tree))
    return st.builds(Described, st.sampled_from(tuple(SHARDINGS)), st.booleans(), st.integers(0, 3), model)
