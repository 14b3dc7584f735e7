"""The pieces of a parameter that an optimizer needs whole: single elements, blocks of elements, or the whole tensor.

This file finds the need of an optimizer, and raises an error if a layout cuts such a piece. ``whole`` steps whole
tensors. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from shardwright.engine import unit_of
from shardwright.optim.cuts import cut_inside, is_cut_twice

#: Elements in a block, counted in row-major order from the tensor's first (1: each element alone), or the whole tensor.
Need = int | Literal["tensor"]
Needs = Need | Callable[[torch.Tensor], Need]

#: torch's own optimizers. The first ones update every element from that element's gradient and state alone.
NEEDS_OF_CLASSES: dict[type, Need] = {
    torch.optim.Adadelta: 1,
    torch.optim.Adagrad: 1,
    torch.optim.Adam: 1,
    torch.optim.AdamW: 1,
    torch.optim.Adamax: 1,
    torch.optim.ASGD: 1,
    torch.optim.NAdam: 1,
    torch.optim.RAdam: 1,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 1,
    torch.optim.SGD: 1,
    torch.optim.Adafactor: "tensor",
    torch.optim.Muon: "tensor",
}
_NEVER = {
    torch.optim.LBFGS: (
        "its search direction needs inner products over all parameters, and a step evaluates the model several "
        "times. Use it without fully_shard_optimizer"
    ),
    torch.optim.SparseAdam: (
        "it accepts only sparse gradients, and gradients of sharded parameters are dense. Use torch.optim.Adam"
    ),
}


def needs_of(optimizer: Optimizer, needs: Needs | None) -> Callable[[torch.Tensor], Need]:
    """Return the function from a parameter to its need; ``needs`` as in :func:`fully_shard_optimizer`.

    Raises:
        TypeError: ``needs`` has a wrong type.
        ValueError: the optimizer cannot step on a sharded model, or is unknown and ``needs`` is not given.
    """
    kind = type(optimizer)
    for never, reason in _NEVER.items():
        if isinstance(optimizer, never):
            raise ValueError(f"{kind.__name__} cannot step on shards: {reason}.")
    own = getattr(optimizer, "shard_needs", None) or NEEDS_OF_CLASSES.get(kind)
    if needs is None:
        needs = own
        if needs is None:
            raise ValueError(
                f"fully_shard_optimizer does not know which pieces of a parameter {kind.__name__} needs whole. Pass "
                "needs=1 if it updates each element from that element alone. Pass needs=n if it needs blocks of n "
                'consecutive elements, and needs="tensor" if it needs whole tensors. Or pass a function of the '
                f"parameter that returns one of these. Or give {kind.__name__} a method shard_needs(self, p) that "
                "returns one."
            )
    chosen = _function(needs, "needs")
    if own is None or own is needs:
        return chosen
    least = _function(own, "what the optimizer needs")

    def both(p: torch.Tensor) -> Need:
        need, minimum = chosen(p), least(p)
        if need != "tensor" and (minimum == "tensor" or (isinstance(need, int) and need % minimum)):
            raise ValueError(
                f"needs={need!r} is too small: {kind.__name__} needs {minimum!r} of parameter {name_of(p)}. Do not "
                "pass needs."
            )
        return need

    return both


def _function(needs: Needs, what: str) -> Callable[[torch.Tensor], Need]:
    if callable(needs):
        return needs
    constant = _checked(needs, what)
    return lambda p: constant


def check(
    groups: Iterable[dict[str, Any]], needs: Callable[[torch.Tensor], Need]
) -> list[tuple[str, torch.Tensor, Need]]:
    """Name, parameter and need of every parameter of these groups.

    Raises:
        ValueError: a block that must stay whole is cut.
    """
    needs_of_parameters = []
    for group in groups:
        names = group.get("param_names")
        for index, p in enumerate(group["params"]):
            name = names[index] if names else name_of(p)
            need = _checked(needs(p), f"the optimizer's need of parameter {name!r}")
            if need != "tensor" and need > 1:
                _refuse_cut_blocks(name, p, need)
            needs_of_parameters.append((name, p, need))
    return needs_of_parameters


def cost_of(optimizer: Optimizer) -> Callable[[torch.Tensor], float]:
    """Return the cost of a step on a whole tensor, for balance: the class's ``shard_cost(self, p)``, else
    its elements."""
    own = getattr(optimizer, "shard_cost", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    if isinstance(optimizer, torch.optim.Muon):
        return newton_schulz_cost
    return lambda p: float(p.numel())


def newton_schulz_cost(p: torch.Tensor) -> float:
    """Multiplications of one iteration on a matrix, up to a constant factor."""
    return float(p.numel()) * min(p.shape)


def name_of(p: torch.Tensor) -> str:
    """Return the parameter's name in messages: its name in its unit, else its shape."""
    unit = unit_of(p)
    for managed in unit.parameters if unit is not None else ():
        if managed.sharded is p:
            return f"{managed.name} of {unit.name}"
    return f"of shape {tuple(p.shape)}"


def _checked(need: Any, what: str) -> Need:
    if need == "tensor" or (isinstance(need, int) and not isinstance(need, bool) and need >= 1):
        return need  # type: ignore[no-any-return]
    raise TypeError(f'{what} must be "tensor" or a number of elements, at least 1, got {need!r}')


def _refuse_cut_blocks(name: str, p: torch.Tensor, block: int) -> None:
    if is_cut_twice(p):
        raise ValueError(
            f"The optimizer needs blocks of {block} consecutive elements of parameter {name!r} of shape "
            f"{tuple(p.shape)} in one piece. Tensor parallelism has cut the parameter, and the blocks of its parts "
            "are not blocks of the whole. Use an optimizer that updates single elements for it, or do not "
            "parallelize it."
        )
    cut = cut_inside(p, block)
    if cut is None:
        return
    row = (
        p.shape[-1] if p.dim() > 1 else 256
    )  # of 1-D parameters Ragged(k) keeps blocks of 256 elements whole
    rows = block // math.gcd(block, row)
    if p.dim() > 1:
        fix = f"layout=sw.Ragged({rows}): its granules of {rows * row} elements are whole blocks"
    elif rows == 1:
        fix = "layout=sw.Ragged(1): it never cuts a 1-D parameter inside 256 elements"
    else:
        fix = (
            'a strategy that replicates it ("ddp"), or pass it in ignored_params: no layout keeps such blocks of a '
            "1-D parameter whole"
        )
    raise ValueError(
        f"The optimizer needs blocks of {block} consecutive elements of parameter {name!r} of shape {tuple(p.shape)} "
        f"in one piece. The layout cuts it before element {cut}, inside a block. Shard its unit with {fix}."
    )
