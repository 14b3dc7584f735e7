"""torch's optimizers: their steps, hooks and schedulers, and watches over what torch has no hook for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwright.engine.compat.probe import probe, when_imported


def muon_functions() -> tuple[Callable[..., torch.Tensor], Callable[..., Any]] | None:
    """Return two functions of torch's Muon, or None if this torch does not have them under these names.

    The first orthogonalizes a direction, the second adjusts the learning rate to a shape.
    """
    module = getattr(torch.optim, "_muon", None)
    functions = [getattr(module, name, None) for name in ("_zeropower_via_newtonschulz", "_adjust_lr")]
    return None if None in functions else tuple(functions)  # type: ignore[return-value]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Return the original step of an optimizer class. torch wraps it, for hooks, when it makes the first instance."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that were registered on this optimizer to run before or after its step."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]


def seen_by_schedulers(step: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a step so that learning-rate schedulers do not wrap it. It reports its calls to them itself.

    Otherwise they would put a wrapper into the optimizer, which would still call the step of the old class.
    """
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def tell_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Note on an optimizer that its step was called, so that a scheduler that steps next does not warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def only_schedulers_wrap(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step in the optimizer's own attributes is its class's step, wrapped by a scheduler."""
    step = vars(optimizer)["step"]
    return (
        hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    )


def watch_zero_grad(after: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """Call ``after`` with the parameters after each ``zero_grad`` of an optimizer or a module, from now on.

    torch has no hooks for it.
    """

    def watched(kind: Any, parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> None:
        original = kind.zero_grad

        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            if not torch.compiler.is_compiling():
                after(parameters_of(self))

        kind.zero_grad = zero_grad

    watched(torch.optim.Optimizer, lambda optimizer: (p for g in optimizer.param_groups for p in g["params"]))
    watched(torch.nn.Module, lambda module: module.parameters())


def watch_optimizer_states(make: Callable[..., None], read: Callable[..., Any]) -> None:
    """Let ``make`` and ``read`` serve torch's functions of ``torch.distributed.checkpoint.state_dict`` from now on.

    ``make`` makes the state of an optimizer that has none, ``read`` returns states.

    They are called as ``make(original, optimizer)`` and ``read(original, model, optimizers, info)``. The module is not
    imported here, since it takes long.
    """

    def install(module: Any) -> None:
        for name, run in (("_init_optim_state", make), ("_get_optim_state_dict", read)):
            original = probe(module, name)
            setattr(module, name, functools.wraps(original)(functools.partial(run, original)))

    when_imported("torch.distributed.checkpoint.state_dict", install)
