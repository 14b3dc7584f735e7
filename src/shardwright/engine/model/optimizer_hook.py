"""Hooks before and after an optimizer's step: they check its parameters and finish every gradient."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.engine import heartbeat
from shardwright.engine.base.companion import companion_of
from shardwright.engine.base.precision import refuse_gradient_dtypes
from shardwright.engine.compat.autograd import increment_version
from shardwright.engine.compat.dtensor import subclasses_dispatch
from shardwright.engine.compat.modes import quick_attributes
from shardwright.engine.compat.optimizers import watch_zero_grad
from shardwright.engine.compat.storages import storage_key
from shardwright.engine.model.root import Root, root_of, roots
from shardwright.engine.model.unfinished import BegunStep
from shardwright.engine.tensors.direct import watch
from shardwright.engine.tensors.parameter import (
    DEFERRED,
    UNIT_OF,
    Managed,
    RaggedParameter,
    ShardedParameter,
    is_cut_like,
    unit_of,
)
from shardwright.engine.tensors.same_object import acting_class, count_of_objects, refuse_if_old
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import reduce


@functools.cache
def hook_optimizers() -> None:
    """Install the hooks around the steps of all torch optimizers of this process. Done once."""
    stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Root]] = weakref.WeakKeyDictionary()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not getattr(type(optimizer), COUNTS_STEPS, False):
            stepping[optimizer] = before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count_step(stepping.pop(optimizer, ()))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    watch_zero_grad(_after_zero_grad)


def _after_zero_grad(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients of these parameters that units hold, after torch has dropped those in ``.grad``."""
    watch.begin()
    if not any(unit.gradients.held for root in roots for unit in root.units()):
        return
    parameters = list(parameters)
    for unit in {id(u): u for p in parameters if (u := unit_of(p)) is not None}.values():
        unit.gradients.drop(set(map(id, parameters)))


#: The attribute of a class of optimizers whose step calls :func:`before_optimizer_step` and :func:`count_step` itself.
COUNTS_STEPS = "_shardwright_counts_steps"


def count_step(roots: Collection[Root]) -> None:
    """Count a step of an optimizer with parameters of these models."""
    if heartbeat.current is not None and roots:
        heartbeat.current.count_step()
    heartbeat.at(heartbeat.OUTSIDE)
    if watch.used:
        watch.begin()
    for root in roots:
        root.count_step()


def before_optimizer_step(optimizer: torch.optim.Optimizer) -> list[Root]:
    """Check for diverged ranks, clean up after a failed backward, and finish every gradient.

    Returns the models whose step count increases. A model of ``sw.optim.in_backward`` is not among them, since its
    remaining steps differ by rank. Nor is one if the step changes nothing, as torch's step that only makes state.
    """
    heartbeat.at(heartbeat.OPTIMIZER)
    watch.end()
    for each in list(roots):
        if each.begun_step is not None:
            each.notice_interrupted_step(optimizer)
        each.agreement.check()
        each.recover_if_failed()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = refuse_dead(parameters)
    companion = companion_of(optimizer)
    first = not companion.stepped
    if companion.objects != count_of_objects():
        _refuse_whole_state(optimizer)
        companion.objects = count_of_objects()
    if first:
        _refuse_deferred_state(optimizer)
        if parameters and all(p.is_meta and p.grad is None for p in parameters):
            raise RuntimeError(
                "Every parameter of the optimizer is on the meta device and has no gradient: it was built before the "
                "model got memory (for example by to_empty), so its step would train nothing. Build it from "
                "model.parameters() after that."
            )
    stepped = list(_units_of(parameters, kinds))
    if first:
        _refuse_state_on_device(optimizer, stepped)
        companion.stepped = True
    for unit in stepped:
        if unit.watch.unsharded:
            unit.refuse_unsharded("An optimizer's step of")
        unit.drop_kept()  # some kernels write without increasing a version counter
        if (root := root_of(unit)) is not None:
            root.pools.step()
    reduce_held(parameters)
    fit_gradients(parameters)
    if first and not any(root_of(unit) is not None for unit in stepped):
        _warn_of_other_model(optimizer, parameters)
    if any(unit.gradients.chooses_dtype for unit in stepped):
        refuse_gradient_dtypes(optimizer, parameters)
    if not subclasses_dispatch:  # else the written tensors increase their counters themselves
        increment_version([p for p in parameters if unit_of(p) is not None and p.grad is not None])
    if all(type(lr := group.get("lr")) in (int, float) and lr == 0 for group in optimizer.param_groups):
        return []
    counted = list(
        {id(r): r for u in stepped if (r := root_of(u)) is not None and u.stepping is None}.values()
    )
    if counted:
        written = [p for p in parameters if p.grad is not None]
        begun = BegunStep(optimizer, written) if written else None
        for root in counted:
            root.agreement.refuse_if_interrupted()
            root.begun_step = begun
    return counted


#: The classes that sharded parameters show. A user's subclass of ``nn.Parameter`` is behind some of them.
_FACES = {ShardedParameter, RaggedParameter}
#: Classes of parameters that a unit owns. Parameters of other classes may be without values, or old objects.
_SHARDED = {
    kind for face in (ShardedParameter, RaggedParameter) for kind in (face, acting_class(face, nn.Parameter))
}


def refuse_dead(parameters: list[torch.Tensor]) -> set[type]:
    """Raise if one of an optimizer's parameters has no values yet, or if another object has replaced it at sharding.

    This runs in every step, because users may change groups. So it skips sharded parameters. Returns the classes of the
    parameters.
    """
    kinds = set(map(type, parameters))
    if kinds <= _SHARDED:
        return kinds
    deferred = {kind for kind in kinds if getattr(kind, DEFERRED, False)}
    for p in parameters:
        refuse_if_old(p)
        if type(p) in deferred:
            raise RuntimeError(
                f"The optimizer holds a deferred parameter of shape {tuple(p.shape)}, which has no values yet. Call "
                "shardwright.materialize(model) first."
            )
    return kinds


def _refuse_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer has state of whole parameters that were sharded since."""
    for p, state in optimizer.state.items():
        for key, value in state.items() if isinstance(p, Managed) else ():
            is_whole = isinstance(value, torch.Tensor) and value.ndim and value.shape == p.shape
            if is_whole and not hasattr(value, "to_local"):
                raise RuntimeError(
                    f"The state {key!r} of this {type(optimizer).__name__} is that of a whole parameter of shape "
                    f"{tuple(p.shape)}, from before the model was sharded. Call "
                    "shardwright.fully_shard_optimizer(optimizer), which cuts it like the parameter, or build the "
                    "optimizer from model.parameters() after fully_shard."
                )


def _refuse_deferred_state(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if getattr(type(value), DEFERRED, False):
                raise RuntimeError(
                    f"Optimizer state {key!r} is deferred: the optimizer made it from deferred parameters. Call "
                    "shardwright.fully_shard_optimizer(optimizer), or build the optimizer after materialize."
                )


def _units_of(parameters: list[torch.Tensor], kinds: set[type]) -> Iterable[Unit]:
    """The units of these parameters or local tensors."""
    refs = {id(ref): ref for p in parameters if (ref := p.__dict__.get(UNIT_OF)) is not None}  # each once
    units = {id(u): u for ref in refs.values() if (u := ref()) is not None}
    if not kinds.isdisjoint((torch.Tensor, nn.Parameter)):
        plain = {storage_key(p) for p in parameters if type(p) in (torch.Tensor, nn.Parameter)}
        for unit in (unit for root in list(roots) for unit in root.units() if id(unit) not in units):
            if any(storage_key(shard) in plain for shard in unit.weights.shards):
                units[id(unit)] = unit
    return units.values()


def _warn_of_other_model(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Warn if no parameter of the optimizer has a gradient, and parameters of a sharded model do: torch would train
    nothing and raise nothing. The optimizer's are of no sharded model that has run: of two such models, as in a GAN,
    one may step first."""
    if not parameters or any(p.grad is not None for p in parameters):
        return
    for root in list(roots):
        for unit in root.units():
            for p in unit.parameters:
                if p.sharded.grad is not None:
                    warnings.warn(
                        f"None of the {len(parameters)} parameters of this {type(optimizer).__name__} has a gradient, "
                        f"so its step trains nothing; parameter {p.name!r} of a sharded model has one. If the "
                        "optimizer is to train that model, build it from the model's parameters().",
                        stacklevel=3,
                    )
                    return


def fit_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Cut each gradient like its sharded parameter, because the user may have replaced it by one that is not."""
    with quick_attributes():
        others = [
            p
            for p in parameters
            if p.__class__ in _FACES and (gradient := p.grad) is not None and not is_cut_like(gradient, p)
        ]
    for p in others:
        unit = unit_of(p)
        managed = unit.managed(p) if unit is not None else None
        if managed is not None:
            p.grad = managed.fitted(p.grad)  # type: ignore[arg-type]


def reduce_held(parameters: Iterable[torch.Tensor]) -> None:
    """Reduce the held gradients of these parameters, because they are needed now."""
    if not any(unit.gradients.held for root in roots for unit in root.units()):
        return
    units = {id(u): u for p in parameters if (u := unit_of(p)) is not None and u.gradients.held}
    for unit in units.values():
        reduce(unit, needed=True)
        root = root_of(unit)
        assert root is not None
        root.finish_held()


def _refuse_state_on_device(optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
    """Raise if the optimizer does not keep its state in the place that the units' policy requires."""
    if not companion_of(optimizer).brings_state:
        for unit in units:
            if unit.state_host is not None:
                raise RuntimeError(
                    f"Unit {unit.name!r} has Offload(parameters=False), so optimizer state must be in the CPU's "
                    f"memory, but this {type(optimizer).__name__} would keep it on {unit.ranks.device}. Wrap the "
                    "optimizer with shardwright.fully_shard_optimizer first."
                )
