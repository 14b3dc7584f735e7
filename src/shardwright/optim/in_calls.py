"""A step in several calls of the optimizer's own code: on whole tensors, and on local tensors unit by unit.

Here local tensors stand in for the sharded ones. If an optimizer needs neither, ``sharded.py`` makes its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from shardwright.engine import Unit, unit_of
from shardwright.optim.calls import PartialSteps
from shardwright.optim.companion import ShardedCompanion, sharded_companion
from shardwright.optim.host_state import HostState, part_of_state

Groups = list[list[Any]]  #: parameters, or the local tensors of them, group by group


def step_in_calls(optimizer: Any, plain_step: Callable[[Any], Any], groups: Groups, outer: Any) -> None:
    """Step whole tensors on their owners. While the first ones move, step the other tensors on their ranks.

    Args:
        optimizer: with local tensors in its groups and its state.
        plain_step: the optimizer's own code.
        groups: the parameters that the local tensors stand in for.
        outer: the state in the outer form.
    """
    companion = sharded_companion(optimizer)
    locals_, inner = [group["params"] for group in optimizer.param_groups], optimizer.state
    number = {id(t): i for i, params in enumerate(locals_) for t in params}
    calls = PartialSteps(optimizer, plain_step)
    others = [lambda: _step_local_tensors(companion, calls, groups, locals_, inner)]
    failures = []
    try:
        for owners in companion.owners.values():
            owned = {o.index: companion.stand_ins[o.p].local for o in owners.owned}
            numbers = {index: number[id(t)] for index, t in owned.items()}
            meanwhile = others.pop() if others else lambda: None
            failures.append(owners.step(owned, calls, numbers, outer, meanwhile, companion.host_state))
        if others:
            others.pop()()
    finally:
        optimizer.state = inner
        for group, params in zip(optimizer.param_groups, locals_, strict=True):
            group["params"] = params
    for failure in (calls.failure, *failures):
        if failure is not None:
            raise failure


def _step_local_tensors(
    companion: ShardedCompanion, calls: PartialSteps, groups: Groups, locals_: Groups, inner: Any
) -> None:
    """Step the parameters that the optimizer does not need whole."""
    pairs = [
        [(p, local) for p, local in zip(*both, strict=True) if p not in companion.whole]
        for both in zip(groups, locals_, strict=True)
    ]
    if companion.host_state is None:
        calls([[local for _, local in each] for each in pairs], inner)
    else:
        _step_through_device(companion.host_state, calls, pairs, inner)


def _step_through_device(
    host_state: HostState, calls: PartialSteps, pairs: list[list[tuple[Any, torch.Tensor]]], inner: Any
) -> None:
    """Step pairs of parameter and local tensor. State from the host moves to the device unit by unit."""
    rest: list[list[torch.Tensor]] = [[] for _ in pairs]
    units: dict[Unit, list[list[torch.Tensor]]] = {}
    for i, each in enumerate(pairs):
        for p, local in each:
            unit = unit_of(p)
            if unit is None or unit.state_host is None:
                rest[i].append(local)
            elif local.grad is not None:
                units.setdefault(unit, [[] for _ in pairs])[i].append(local)
    parts = [
        (unit, host, mine, part_of_state(inner, itertools.chain(*mine)))
        for unit, mine in units.items()
        if (host := unit.state_host) is not None
    ]
    host_state.settle()  # drop copies of a backward that failed
    for unit, host, _, state in parts[:1]:
        host_state.send(unit, host, state.values())
    if any(rest) or not parts:
        calls(rest, inner)
    for (unit, host, mine, state), following in itertools.zip_longest(parts, parts[1:]):
        if calls.failure is None:
            with host_state.on_device(unit, host, state) as on_device:
                if following is not None:
                    host_state.send(following[0], following[1], following[3].values())
                calls(mine, on_device)
            inner.update(state)
    host_state.settle()
