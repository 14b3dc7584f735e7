"""Optimizers that step a unit while backward still runs: this file decides when, and calls them.

The optimizer makes the step (``optim/backward_steps.py``). Nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.tensors import foreach_zero, make_wrapper, tree_leaves
from shardwright.engine.tensors.parameter import ManagedParameter


class Stepped(Protocol):
    """The attributes of a unit that steps need."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> list[ManagedParameter]: ...

    @property
    def gradients(self) -> Any: ...

    @property
    def generation(self) -> int: ...

    def drop_kept(self) -> None: ...


class Stepper(Protocol):
    """An optimizer that steps some parameters of a unit."""

    def open_step(self, unit: Any) -> Any:
        """Prepare a step of ``unit`` with the present options. :meth:`step_unit` gets the result. May fetch state."""

    def step_unit(self, unit: Any, step: Any) -> None:
        """Step the optimizer's parameters in ``unit`` that have a gradient, and set these gradients to None."""

    def backward_ended(self) -> bool:
        """End the step: later units belong to the next one. Returns whether any unit was in this step."""


class SteppedGradient(torch.Tensor):
    """``.grad`` of a parameter that was stepped in backward. It has no memory. Each use of its values raises an error.

    With None instead, ``torch.nn.utils.clip_grad_norm_`` would return a norm of 0 without an error.
    """

    unit: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, unit: str) -> SteppedGradient:
        return make_wrapper(
            cls, parameter.shape, dtype=parameter.grad_dtype or parameter.dtype, device=parameter.device
        )

    def __init__(self, parameter: torch.Tensor, unit: str) -> None:
        self.unit = unit

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SteppedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, unit={self.unit!r})"

    def full_tensor(self) -> torch.Tensor:
        self._refuse()

    def to_local(self) -> torch.Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"The gradient of a parameter of unit {self.unit!r}, of shape {tuple(self.shape)}, is gone: its "
            "optimizer has stepped in backward. To use all gradients before a step (clipping by norm, GradScaler), "
            "use sw.fully_shard_optimizer without in_backward. To clip each gradient by value, use "
            "in_backward(clip_value=)."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:  # zero_grad
            return args[0]
        if func is foreach_zero:
            for gradient in args[0]:
                gradient.zero_()
            return None
        next(value for value in tree_leaves((args, kwargs)) if isinstance(value, cls))._refuse()


def forget_stepped(parameters: Iterable[torch.Tensor]) -> None:
    """Set each ``.grad`` that is a ``SteppedGradient`` to None, at the end of a step or the begin of another."""
    with quick_attributes():
        for p in parameters:
            if type(p.grad) is SteppedGradient:
                p.grad = None


class Stepping:
    """The optimizers that step a unit in backward. It holds them, since perhaps nothing else does. Other units have
    none.

    Attributes:
        due: whether gradients of the last micro-batch have arrived or will arrive, and were not stepped yet.
        running: whether an optimizer steps the unit now, or was interrupted while it did.
    """

    def __init__(self) -> None:
        self.steppers: list[Stepper] = []
        self.due = False
        self.running = False
        self._steps: list[tuple[Stepper, Any]] = []
        self._marks = WeakTensorKeyDictionary()
        #: Number of root calls before the backward whose gradients will be stepped, and before the one stepped last.
        self._due_in = self._stepped_in = -1

    def expect(self, unit: Stepped, last: bool, calls_begun: int) -> None:
        """Note that a reduction of the unit begins, in the ``last`` backward of a step or in an earlier one."""
        self.due = last
        if last:
            self._due_in = calls_begun
            self._steps = [(stepper, stepper.open_step(unit)) for stepper in self.steppers]

    def run(self, unit: Stepped) -> None:
        """Step the unit, whose gradients are reduced. This backward does not read its weights any more.

        Raises:
            RuntimeError: it was stepped already since the forward that these gradients belong to.
        """
        self.due = False
        steps, self._steps = self._steps, []
        with quick_attributes():
            present = [p.sharded for p in unit.parameters if p.sharded.grad is not None]
        if not present or not steps:
            return
        if self._stepped_in == self._due_in:
            raise RuntimeError(
                f"Gradients of unit {unit.name!r} came after its optimizer had stepped it in backward, so they "
                "belong to weights that no longer exist. If several backwards make one step, call "
                "set_is_last_backward(False) before all except the last. Use weights only inside the unit's forward. "
                "Checkpoint units that are used more than once with use_reentrant=False."
            )
        self._stepped_in = self._due_in
        unit.drop_kept()
        self.running = True
        for stepper, step in steps:
            stepper.step_unit(unit, step)
        self.running = False
        self.mark(unit, present)
        unit.gradients.release_unused()

    def has_stepped(self, calls_begun: int) -> bool:
        """Return whether the unit was stepped with gradients of the last root call, given how many have begun."""
        return self._stepped_in == calls_begun

    def mark(self, unit: Stepped, parameters: Iterable[torch.Tensor]) -> None:
        """Set ``.grad`` to a ``SteppedGradient`` if the gradient was used, or will be used when it has arrived."""
        with quick_attributes():
            for p in parameters:
                if p.grad is None:
                    mark = self._marks.get(p)
                    if mark is None or mark.dtype != (p.grad_dtype or p.dtype):
                        mark = self._marks[p] = SteppedGradient(p, unit.name)
                    p.grad = mark
