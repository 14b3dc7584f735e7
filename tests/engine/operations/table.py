"""Torch's table of operations: its samples, the forms in which a sample runs, and the tensors that become sharded.

This file knows no process groups and no sharding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

SEED = 1234
#: They return memory without values, so only shapes and dtypes are compared.
WITHOUT_VALUES = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip
#: Torch ignores ``out`` of these for every subclass of tensors, before it asks the subclass.
IGNORES_OUT = {"linalg.matrix_rank"}
#: Torch reads the memory of this argument, by number, before it asks the subclass.
READS_MEMORY = {"tensor_split": 1}
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


def operations() -> list[Any]:
    """The entries of torch's table, which needs the package expecttest."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def seed() -> None:
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed also formats stacks, for devices
    random.seed(SEED)


@dataclass(frozen=True)
class Form:
    """How a sample runs.

    Attributes:
        kind: ``value``, ``in place`` or ``out``.
        which: the number of the one tensor that is sharded, ``all`` tensors, or ``out`` alone.
    """

    kind: str
    which: int | str

    def __str__(self) -> str:
        return f"{self.kind}/{self.which if isinstance(self.which, str) else 'one'}"


@dataclass
class Outcome:
    """A result and everything else that a sharded run must have equal."""

    result: Any
    arguments: list[torch.Tensor]  #: after the operation, which may have changed them
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    generator: Any = None


class Sample:
    """One sample of an operation: its arguments as a flat list, of which some are tensors."""

    def __init__(self, op: Any, number: int, sample: Any) -> None:
        self.op = op
        self.number = number
        self._leaves, self._spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [
            i
            for i, leaf in enumerate(self._leaves)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_quantized
        ]
        if op.name in READS_MEMORY:
            del self.places[READS_MEMORY[op.name] :]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that may be sharded, contiguous and without graph."""
        return [self._plain(self._leaves[i]) for i in self.places]

    @staticmethod
    def _plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

    @cached_property
    def needs_gradient(self) -> list[bool]:
        return [self._leaves[i].requires_grad for i in self.places]

    @cached_property
    def expected(self) -> dict[str, Outcome | None]:
        """By kind: the plain tensors' outcome, or None if torch has no such form of this sample."""
        return {kind: self._plain_outcome(kind) for kind in ("value", "in place", "out")}

    @cached_property
    def changes_arguments(self) -> bool:
        """Whether the form ``value`` writes into its arguments."""
        after = self.expected["value"]
        return after is None or any(
            a._version or (not torch.equal(a, b) and not (a != a).any())
            for a, b in zip(after.arguments, self.tensors, strict=True)
        )

    def forms(self) -> Iterator[Form]:
        """The forms that plain tensors have."""
        count = len(self.tensors)
        for kind in ("value", "in place"):
            if count and self.expected[kind] is not None:
                yield Form(kind, "all")
                if count > 1:
                    yield from (Form(kind, i) for i in range(count))
        if self.expected["out"] is not None:
            yield Form("out", "out")
            if count:
                yield Form("out", "all")

    def call(self, kind: str, tensors: list[torch.Tensor], out: Any = None) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        input, args, kwargs = tree_unflatten(leaves, self._spec)
        if kind == "out":
            return self.op.op(input, *args, **kwargs, out=out)
        function = self.op.op if kind == "value" else self.op.get_inplace()
        return function(input, *args, **kwargs)

    def copies(self, gradient: bool) -> list[torch.Tensor]:
        wanted = self.needs_gradient if gradient else [False] * len(self.tensors)
        return [t.clone().requires_grad_(g) for t, g in zip(self.tensors, wanted, strict=True)]

    def _plain_outcome(self, kind: str) -> Outcome | None:
        try:
            if kind == "value":
                return run(self, kind, self.copies(True), weight=lambda weight, result: weight)
            tensors = self.copies(False)
            if kind == "in place":
                if self.op.get_inplace() is None:
                    return None
                return run(self, kind, tensors)
            if not self.op.supports_out or self.op.name in IGNORES_OUT:
                return None
            result = self.call("value", tensors)
            if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in results(result)):
                return None
            outs = [torch.zeros_like(t) for t in results(result)]
            outcome = run(self, kind, tensors, out=rebuilt(result, outs))
            return outcome if outcome.result is not None else None
        except Exception:
            return None


def samples(op: Any, limit: int, numbers: Collection[int] | None = None) -> list[Sample]:
    """Torch's samples with these ``numbers``, or at most ``limit`` of them, evenly drawn."""
    supported = op.supported_dtypes("cpu")
    dtype = next((d for d in _DTYPES if d in supported), None)
    if dtype is None:
        return []
    seed()
    try:
        gradient = op.supports_autograd and dtype.is_floating_point
        drawn = list(op.sample_inputs_func(op, "cpu", dtype, gradient))
    except Exception:
        return []  # such as kernels of other devices
    count = min(limit, len(drawn))
    chosen = {i * len(drawn) // count for i in range(count)} if numbers is None else numbers
    return [Sample(op, n, drawn[n]) for n in sorted(chosen) if n < len(drawn)]


def results(result: Any) -> list[Any]:
    return tree_flatten(result)[0]


def rebuilt(result: Any, tensors: list[Any]) -> Any:
    return tensors[0] if isinstance(result, torch.Tensor) else tuple(tensors)


def run(
    sample: Sample,
    kind: str,
    tensors: list[torch.Tensor],
    weight: Callable[[torch.Tensor, Any], Any] | None = None,
    out: Any = None,
) -> Outcome:
    """Run the sample, and for values with a gradient backward of the sum of the result times a fixed random weight."""
    seed()
    if kind == "value":
        result = sample.call(kind, tensors)
    else:
        with torch.no_grad():
            result = sample.call(kind, tensors, out)
    outcome = Outcome(result, tensors, generator=torch.get_rng_state())
    if weight is not None:
        _backward(result, weight)
        outcome.gradients = [t.grad for t in tensors]
    return outcome


def _backward(result: Any, wrapped: Callable[[torch.Tensor, Any], Any]) -> None:
    loss: Any = None
    for each in results(result):
        if isinstance(each, torch.Tensor) and each.requires_grad and each.layout is torch.strided:
            generator = torch.Generator().manual_seed(SEED)
            weight = torch.randn(each.shape, generator=generator).to(each.dtype)
            term = (each * wrapped(weight, each)).sum()
            term = term.abs() if term.is_complex() else term
            loss = term if loss is None else loss + term
    if loss is not None:
        loss.backward()
