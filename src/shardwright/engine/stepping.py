"""Optimizers that step a unit while backward still runs: when a unit's gradients are all there, and who is told.

How a step is made is the optimizer's business (``optim/in_backward.py``); nothing here knows what an optimizer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shardwright._torch import quick_attributes

if TYPE_CHECKING:
    from shardwright.engine.unit import Unit


class Stepper(Protocol):
    """An optimizer that steps some parameters of a unit."""

    def open_step(self, unit: Unit) -> Any:
        """What :meth:`step_unit` is given for ``unit``, soon: options as they are now. What it needs may be fetched."""

    def step_unit(self, unit: Unit, step: Any) -> None:
        """Step those of its parameters that belong to ``unit`` and have a gradient, and set these to None."""

    def backward_ended(self) -> bool:
        """Units stepped from now on belong to another step. Returns whether any were in this one."""


class Stepping:
    """Whether a unit is to be stepped, and by whom. It holds them, as nobody else may. Other units have none.

    Attributes:
        due: whether gradients of the last micro-batch are in, or on their way, and were not stepped yet.
    """

    def __init__(self) -> None:
        self.steppers: list[Stepper] = []
        self.due = False
        self._steps: list[tuple[Stepper, Any]] = []
        #: How many root calls had begun before the backward that is to be stepped, and before the one stepped last.
        self._due_in = self._stepped_in = -1

    def expect(self, unit: Unit, last: bool, calls_begun: int) -> None:
        """A reduction of the unit begins, in the ``last`` backward of a step or in an earlier one."""
        self.due = last
        if last:
            self._due_in = calls_begun
            self._steps = [(stepper, stepper.open_step(unit)) for stepper in self.steppers]

    def run(self, unit: Unit) -> None:
        """Step the unit, whose gradients were reduced. Its weights are not read any more in this backward.

        Raises:
            RuntimeError: it was stepped already since the forward that these gradients belong to.
        """
        self.due = False
        steps, self._steps = self._steps, []
        with quick_attributes():
            present = any([p.sharded.grad is not None for p in unit.parameters])
        if not present or not steps:
            return
        if self._stepped_in == self._due_in:
            raise RuntimeError(
                f"Gradients of unit {unit.name!r} came after its optimizer had stepped it in backward, so they are "
                "those of weights that are gone. With several backwards for one step call "
                "set_is_last_backward(False) before all but the last; use weights inside the unit's forward alone; "
                "and checkpoint units that are used more than once with use_reentrant=False."
            )
        self._stepped_in = self._due_in
        unit.drop_kept()
        for stepper, step in steps:
            stepper.step_unit(unit, step)
        unit.release_unused_gradients()
