"""Optimizer in backward: a unit is stepped when its gradients are reduced, and they are freed at once.

It is one optimizer with its groups and its state. Each call sees one unit's part of them.
``engine/gradients/stepping.py`` decides when a unit is stepped. ``sharded.py`` steps the local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from shardwright.engine import (
    UNIT_OF,
    Stepping,
    Unit,
    complete,
    fit_gradients,
    forget_stepped,
    reduce_held,
    refuse_dead,
    refuse_gradient_dtypes,
    root_of,
    unit_of,
)
from shardwright.engine.compat import (
    foreach_clamp_,
    increment_version,
    local_of,
    seen_by_schedulers,
    step_hooks,
    step_without_hooks,
    tell_schedulers,
)
from shardwright.optim.calls import CallsInBackward
from shardwright.optim.companion import BackwardSteps, sharded_companion
from shardwright.optim.needs import Needs
from shardwright.optim.sharded import fully_shard_optimizer
from shardwright.optim.stand_ins import SHARDED

O = TypeVar("O", bound=Optimizer)  # noqa: E741


def in_backward(optimizer: O, *, needs: Needs | None = None, clip_value: float | None = None) -> O:
    """Let a torch optimizer step each unit as soon as backward has reduced its gradients, in place, and return it.

        optimizer = sw.optim.in_backward(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for batch in batches:
            loss_of(model, batch).backward()  # steps
            optimizer.step()
            scheduler.step()

    A unit's gradients are freed when it is stepped, so only the gradients of one or two units exist at once. After
    backward ``.grad`` has no values, and reading it raises an error; after ``step`` it is None. Parameters get the same
    bits as with ``fully_shard_optimizer``. Schedulers, groups and state dicts work as usual. ``step`` steps the
    parameters that backward did not: parameters that are not sharded, and gradients that you set yourself. Every
    backward is a step, unless ``set_is_last_backward(False)``, ``set_requires_all_reduce(False)`` or
    ``set_requires_gradient_sync(False)`` says that more micro-batches come. In a program that calls ``step``, a second
    backward before it raises an error. ``torch.autograd.grad`` and ``backward(inputs=)`` of tensors that are no
    parameters never step.

    The model holds the optimizer until its method ``leave_backward`` makes it an ordinary one again. If backward
    raises, the units that it had finished are stepped and the others are not.

    Args:
        optimizer: built on the parameters of a sharded model; also one that went through ``fully_shard_optimizer``.
            Several optimizers may have different parameters of one model.
        needs: as in :func:`fully_shard_optimizer`.
        clip_value: clamp each gradient to [-clip_value, clip_value] first. Clipping by the global norm is not possible,
            since the norm is known only when backward is over: ``sw.clip_grad_norm_`` and torch's raise an error.

    Raises:
        TypeError, ValueError: as :func:`fully_shard_optimizer`; no parameter is sharded, or another optimizer steps
            one in backward; ``clip_value`` is not positive, or an earlier call had another one.
        RuntimeError: ``grad_dtype`` differs from the parameters' dtype, and this optimizer does not support that.
        NotImplementedError: the optimizer needs whole tensors, or has step hooks; the step runs in parts.
    """
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"clip_value must be positive or None, got {clip_value!r}")
    optimizer = fully_shard_optimizer(optimizer, needs=needs)
    if isinstance(optimizer, _InBackward):
        _refuse_other_clip(optimizer, clip_value)
        return optimizer
    _refuse_whole(optimizer)
    _refuse_hooks(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(unit_of(p) is not None for p in parameters):
        raise ValueError(
            f"in_backward needs a {type(optimizer).__name__} over parameters of a sharded model, found none. Call "
            "fully_shard before, and build the optimizer from model.parameters()."
        )
    _refuse_taken(optimizer, parameters)
    refuse_gradient_dtypes(optimizer, parameters)
    sharded_companion(optimizer).backward = BackwardSteps(type(optimizer).__bases__[1], clip_value)
    optimizer.__class__ = _class_in_backward(type(optimizer))  # type: ignore[arg-type]
    optimizer._attach_units()  # type: ignore[attr-defined]
    optimizer.register_state_dict_pre_hook(_complete)
    optimizer.register_load_state_dict_pre_hook(_complete)
    optimizer.register_load_state_dict_post_hook(_end_step)
    return optimizer


def _complete(optimizer: Any, *_: Any) -> None:
    if isinstance(optimizer, _InBackward):
        optimizer._complete()


def _end_step(optimizer: Any) -> None:
    if isinstance(optimizer, _InBackward):
        _steps_of(optimizer).end_step()


def _refuse_other_clip(optimizer: Any, clip_value: float | None) -> None:
    steps = sharded_companion(optimizer).backward
    if steps is not None and clip_value is not None and clip_value != steps.clip_value:
        raise ValueError(
            f"clip_value: expected {steps.clip_value!r}, as in the first call of in_backward for this "
            f"{type(optimizer).__name__}, got {clip_value!r}. Call optimizer.leave_backward() first, then in_backward "
            "again."
        )


def _refuse_whole(optimizer: Any) -> None:
    whole = sharded_companion(optimizer).whole
    if whole:
        shape = tuple(next(iter(whole)).shape)
        raise NotImplementedError(
            f"{type(optimizer).__name__} needs whole tensors (one of shape {shape}), which move between ranks in a "
            "step, so it cannot step in backward. Use fully_shard_optimizer without in_backward, or pass the other "
            "parameters to a second optimizer."
        )


def _refuse_hooks(optimizer: Optimizer) -> None:
    if step_hooks(optimizer):
        raise NotImplementedError(
            f"This {type(optimizer).__name__} has step hooks, but in backward the step runs in parts, unit by unit. "
            "Remove the hooks, or use fully_shard_optimizer without in_backward."
        )


def _refuse_taken(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    mine = set(map(id, parameters))
    for p in parameters:
        unit = unit_of(p)
        for other in unit.stepping.steppers if unit is not None and unit.stepping is not None else ():
            if other is not optimizer and any(
                id(q) in mine for params in other._params_of(unit) for q in params
            ):
                raise ValueError(
                    f"Another {type(other).__name__} steps parameters of unit {unit.name!r} in backward. Call its "
                    "leave_backward() first."
                )


class _InBackward:
    """A mixin in front of a sharded optimizer's class; see :func:`in_backward`."""

    calls_another_step = True
    param_groups: list[dict[str, Any]]
    state: Any

    def _attach_units(self) -> None:
        for unit in self._units():
            if unit.stepping is None:
                unit.stepping = Stepping()
            if not any(stepper is self for stepper in unit.stepping.steppers):
                unit.stepping.steppers.append(self)

    def _refuse_later_units(self) -> None:
        """Raise if a later ``fully_shard`` made units of this optimizer's parameters: backward would not step them."""
        for unit in self._units():
            if unit.stepping is None or all(stepper is not self for stepper in unit.stepping.steppers):
                raise RuntimeError(
                    f"The parameters of unit {unit.name!r} were sharded after sw.optim.in_backward, so backward does "
                    "not step them. Call shardwright.fully_shard_optimizer(optimizer) after fully_shard, or "
                    "in_backward after it."
                )

    def _followed(self) -> None:
        _refuse_whole(self)
        _refuse_taken(self, parameters := [p for group in self.param_groups for p in group["params"]])  # type: ignore[arg-type]
        refuse_gradient_dtypes(self, parameters)  # type: ignore[arg-type]
        _steps_of(self).units.clear()
        self._attach_units()

    def leave_backward(self) -> None:
        """Become an ordinary optimizer again, which steps only in ``step``."""
        self._complete()
        forget_stepped(p for group in self.param_groups for p in group["params"])
        for unit in self._units():
            if unit.stepping is not None:
                unit.stepping.steppers = [
                    stepper for stepper in unit.stepping.steppers if stepper is not self
                ]
                if not unit.stepping.steppers:
                    unit.stepping = None
        self.__class__ = type(self).__bases__[1]

    def _params_of(self, unit: Unit) -> list[list[torch.Tensor]]:
        """Return the parameters of the unit, group by group. They are cached, since groups and units seldom change."""
        units = _steps_of(self).units
        key = unit.generation, [len(group["params"]) for group in self.param_groups]
        entry = units.get(unit)
        if entry is None or entry[0] != key:
            params = [[p for p in group["params"] if unit_of(p) is unit] for group in self.param_groups]
            entry = units[unit] = key, params
        return entry[1]  # type: ignore[no-any-return]

    def open_step(self, unit: Unit) -> CallsInBackward:
        steps = _steps_of(self)
        if steps.step_called and unit in steps.stepped:
            raise RuntimeError(_twice(self, unit.name))
        if steps.calls is None or not steps.calls.open:
            _refuse_hooks(self)  # type: ignore[arg-type]
            refuse_dead([p for group in self.param_groups for p in group["params"]])
            self._refuse_later_units()
            tell_schedulers(self)  # type: ignore[arg-type]
            steps.calls = CallsInBackward(self)  # type: ignore[arg-type]
        self._send_state(unit, [p for mine in self._params_of(unit) for p in mine])  # type: ignore[attr-defined]
        return steps.calls

    @torch.no_grad()
    def step_unit(self, unit: Unit, step: CallsInBackward) -> None:
        params, steps = self._params_of(unit), _steps_of(self)
        stepped = [p for mine in params for p in mine if p.grad is not None]
        fit_gradients(stepped)
        if stepped and unit in steps.stepped:
            steps.again = unit.name
        elif stepped:
            steps.stepped.add(unit)
        if steps.clip_value is not None and stepped:
            foreach_clamp_([_local(p.grad) for p in stepped], steps.clip_value)
        real = self.param_groups
        self.param_groups = called = step.groups(params)
        try:
            outside, inside = self._enter()  # type: ignore[attr-defined]
            try:
                self._put_in(*inside)  # type: ignore[attr-defined]
                with self._on_device(unit):  # type: ignore[attr-defined]
                    step_without_hooks(steps.kind)(self)
            finally:
                self._leave(*outside)  # type: ignore[attr-defined]
        finally:
            self.param_groups = real
        step.keep(called, real)
        increment_version([_local(p) for p in stepped])  # some kernels write without increasing the version
        for p in stepped:
            p.grad = None

    def _complete(self, *_: Any) -> None:
        """Step the units whose gradients were still on their way to the host."""
        for unit in self._units():
            complete(unit)

    def _units(self) -> list[Unit]:
        refs = {
            id(ref): ref
            for group in self.param_groups
            for p in group["params"]
            if (ref := p.__dict__.get(UNIT_OF))
        }
        return [unit for ref in refs.values() if (unit := ref()) is not None]

    def backward_ended(self) -> bool:
        self._settle_state()  # type: ignore[attr-defined]
        calls = _steps_of(self).calls
        if calls is None or not calls.open:
            return False
        calls.open = False
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that still have a gradient, because backward did not step them."""
        _refuse_hooks(self)  # type: ignore[arg-type]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tell_schedulers(self)  # type: ignore[arg-type]
        steps = _steps_of(self)
        parameters = [p for group in self.param_groups for p in group["params"]]
        refuse_dead(parameters)
        self._refuse_later_units()
        for root in {id(r): r for unit in self._units() if (r := root_of(unit)) is not None}.values():
            root.agreement.check()
            root.recover_if_failed()
        reduce_held(parameters)
        self._complete()
        forget_stepped(parameters)
        steps.step_called, again = True, steps.again
        steps.end_step()
        if again is not None:
            raise RuntimeError(_twice(self, again))
        calls, steps.calls = steps.calls, None
        if any(p.grad is not None for p in parameters):
            if calls is not None:
                calls.rewind()
            super().step()  # type: ignore[misc]
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    seen_by_schedulers(step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            _refuse_whole(self)
            _refuse_taken(self, self.param_groups[-1]["params"])  # type: ignore[arg-type]
            refuse_gradient_dtypes(self, self.param_groups[-1]["params"])  # type: ignore[arg-type]
        except BaseException:
            del self.param_groups[before:]
            raise
        self._attach_units()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise RuntimeError(
            "This optimizer has stepped in backward with scaled gradients, before GradScaler could check and unscale "
            "them. Train without GradScaler (bfloat16 needs none), or use fully_shard_optimizer without in_backward."
        )


def _twice(optimizer: Any, unit: str) -> str:
    return (
        f"Two backwards of one step reached unit {unit!r}, whose {_steps_of(optimizer).kind.__name__} steps in "
        "backward: the first has stepped it, and step() was not called after that. If several backwards make one step, "
        "call set_is_last_backward(False) before all except the last; else call step() after each. For gradients of "
        "inputs alone use torch.autograd.grad, or backward(inputs=). After a backward that failed half-way, load model "
        "and optimizer again, or call step() to go on with what it has stepped."
    )


def _steps_of(optimizer: Any) -> BackwardSteps:
    steps = sharded_companion(optimizer).backward
    assert steps is not None
    return steps


def _local(tensor: Any) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, SHARDED) else tensor


@functools.cache
def _class_in_backward(kind: type) -> type:
    return type(kind.__name__, (_InBackward, kind), {})
