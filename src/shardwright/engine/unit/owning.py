"""Gives a unit its parameters: at ``fully_shard``, after users replaced some, and in copies of a model."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.build import build_memory
from shardwright.engine.assembly.find import UNIT, UnitParameters, find_parameters, is_cut, own_modules
from shardwright.engine.compat.modes import untransformed
from shardwright.engine.tensors.naming import remember
from shardwright.engine.tensors.numbers.hooks import ScaleGradient, forget_scale, register
from shardwright.engine.tensors.parameter import UNIT_OF, Managed, ManagedParameter, has_no_values, unit_of
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.same_object import Exchanged, Taken, refuse_old_object
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import complete

_units: weakref.WeakSet[Unit] = weakref.WeakSet()  #: all units that own parameters or may come to do so


def units_of(model: nn.Module) -> list[Unit]:
    """Every unit at or below a module, once, each with its siblings."""
    mains: dict[Unit, None] = dict.fromkeys(
        u for m in model.modules() if (u := m.__dict__.get(UNIT)) is not None
    )
    return [unit for main in mains for unit in (main, *main.siblings)]


def newest_serial() -> int:
    """The number of the newest unit that exists; -1: none does."""
    return max((unit.serial for unit in _units), default=-1)


@torch.inference_mode(False)
def own_parameters(
    unit: Unit, unit_parameters: UnitParameters, exchanged: list[Exchanged] | None = None
) -> None:
    """Make the unit's memory, and put the sharded parameters into the modules.

    Adds to ``exchanged`` the objects that become sharded parameters.
    """
    owned = unit_parameters.owned
    unset = unit.without_values()  # a change of dtype does not give them any
    moved = [p for _, p, _, _ in owned if isinstance(p, Managed) and unit.managed(p) is None]
    for other in _units if moved else ():
        unset.update(other.values.give_up(moved))
    built = build_memory(owned, unit.site, unit.arguments, exchanged)
    unit.own(built)
    parameters = built.parameters
    for p, (_, original, _, _), before in zip(parameters, owned, built.before, strict=True):
        if original in unset or has_no_values(before):
            unit.values.expect(p, unset.get(original, before), unit.name)
    ref = weakref.ref(unit)
    for p, (_, original, _, _) in zip(parameters, owned, strict=True):
        setattr(p.sharded, UNIT_OF, ref)
        remember(unit, p.sharded)
        scale_direct_gradients(unit, p.sharded)
        if original is not p.sharded:
            refuse_old_object(original, Taken(f"{p.name} of {unit.name}", p.sharded))
        p.show(p.sharded)


def scale_direct_gradients(unit: Unit, sharded: nn.Parameter) -> None:
    """Divide gradients that reach a sharded parameter outside of its modules (a penalty's) as the unit's others.

    They are means over the ranks already.
    """
    forget_scale(sharded)
    if unit.settings.divide_by is None or not (sharded.is_floating_point() or sharded.is_complex()):
        return
    ref = weakref.ref(unit)

    def factor() -> float:
        unit = ref()
        divide_by = unit.settings.divide_by if unit is not None else None
        return 1.0 if unit is None or divide_by is None else unit.ranks.size / divide_by

    requires_grad = sharded.requires_grad
    sharded.requires_grad_(True)  # a hook needs this once
    register(sharded, ScaleGradient(factor))
    sharded.requires_grad_(requires_grad)


def borrow_parameters(unit: Unit, unit_parameters: UnitParameters) -> None:
    """Put the sharded parameters of other units into this unit's modules, under the names that they have there."""
    watch = unit.watch
    watch.lenders, watch.borrowed = [], unit_parameters.borrowed
    watch.look()
    for sharded, slot in unit_parameters.borrowed:
        lender = unit_of(sharded)
        if lender not in watch.lenders:
            watch.lenders.append(lender)
        lent = lender.managed(sharded)
        assert lent is not None
        if not any(s.registry is slot.registry and s.name == slot.name for s in lent.slots):
            lent.slots.append(slot)
            lender.weights.forms.index()
        slot.show(
            lent.full if lender.weights.forms.full_shown else sharded
        )  # its call may be around this one


def take_over(
    units: list[Unit],
    parameters_of_units: list[UnitParameters],
    exchanged: list[Exchanged] | None = None,
) -> None:
    """Let a unit and its siblings own the parameters that were found for each. The first borrows those of the
    others. Adds to ``exchanged`` the objects that become sharded parameters."""
    main, *siblings = units
    _units.update(units)
    borrowed = []
    for unit, unit_parameters in zip(siblings, parameters_of_units[1:], strict=True):
        unit.main = weakref.ref(main)
        own_parameters(unit, unit_parameters, exchanged)
        borrow_parameters(unit, unit_parameters)
        borrowed += [(p.sharded, slot) for p in unit.parameters for slot in p.slots]
    main.siblings = siblings
    if parameters_of_units[0].owned:
        own_parameters(main, parameters_of_units[0], exchanged)
    borrow_parameters(
        main, UnitParameters(parameters_of_units[0].owned, [*parameters_of_units[0].borrowed, *borrowed])
    )


# -- parameters replaced by the user ---------------------------------------------------------------------------------


def settle(unit: Unit) -> None:
    """Adopt parameters that users replaced, unless the unit is in use."""
    if at_rest(unit):
        if unit.site.reads is not None:
            complete(unit)
            unit.weights.host_may_write()
        settle_now(unit)


def settle_now(unit: Unit) -> None:
    """Adopt parameters that users put in place of the unit's parameters. This makes the unit's memory again.

    The old parameters keep their values, because users may still have them and put them back. A tensor that is no
    parameter stays: ``torch.func.functional_call`` lends it to the module for one call.

    Other units may have got the same parameters, or have lost them. They adopt theirs at once, and the unit of the
    first ``fully_shard`` call owns a parameter of several. So the owner does not depend on which unit is used first.
    """
    if not (_changed(unit) or any(at_rest(lender) and _changed(lender) for lender in unit.watch.lenders)):
        return
    group = _changed_together(unit)
    for _ in range(len(group) + 1):  # a unit that gives up a parameter may change another one
        changed = [each for each in group if _changed(each)]
        if not changed:
            return
        for each in changed:
            remake(each)


def at_rest(unit: Unit) -> bool:
    """Whether modules show sharded parameters and no forward or backward of the unit runs."""
    return not unit.weights.forms.full_shown and not unit.activity.busy


def _changed(unit: Unit) -> bool:
    """Whether users have replaced parameters of the unit, or those that it borrows, or have changed its modules."""
    watch, forms = unit.watch, unit.weights.forms
    if watch.paused or watch.unsharded:
        return False
    if not forms.lends_over and forms.untouched() and not watch.changed(shows_full):
        return False
    parameters = unit.weights.parameters
    replaced = [p for p in parameters if p.replaced]
    for p in parameters:
        p.lent_over = False
    lent = [p for p in replaced if p.stand_in() is not None]
    for p in lent:
        p.lent_over = True
    forms.lends_over = bool(lent)
    return len(lent) < len(replaced) or watch.changed(shows_full)


def _changed_together(unit: Unit) -> list[Unit]:
    """``unit`` and other units that must adopt parameters together with it, in the order of ``fully_shard``."""
    waiting = {
        each: _parameters_in(each) for each in _units if each is not unit and at_rest(each) and _changed(each)
    }
    group, concerned = [unit, *unit.watch.lenders], set()
    for each in group:
        concerned |= waiting.pop(each, set()) or _parameters_in(each)
        group += [
            other for other, parameters in waiting.items() if other not in group and parameters & concerned
        ]
    return sorted((e for e in group if e is unit or at_rest(e)), key=lambda e: e.serial)


def _parameters_in(unit: Unit) -> set[int]:
    """Identities of all parameters that the unit's modules hold, and of those that they held before."""
    now = [p for top in unit.watch.modules() for _, m in own_modules(top) for p in m._parameters.values()]
    before = [*unit.weights.forms.shardeds, *(sharded for sharded, _ in unit.watch.borrowed)]
    return {id(p) for p in (*now, *before) if p is not None}


def shows_full(unit: Unit) -> bool:
    """Whether modules show full parameters for some of the unit's parameters."""
    return unit.weights.forms.full_shown or bool(unit.watch.unsharded)


def refuse_sharded_stand_ins(unit: Unit) -> None:
    """Raise if a module is about to compute with a sharded tensor that replaces a parameter."""
    for p in unit.parameters:
        stand_in = p.stand_in() if p.lent_over else None
        if stand_in is not None and is_cut(plain := untransformed(stand_in), p.cut.parallel):
            raise RuntimeError(
                f"Parameter {p.name!r} of unit {unit.name!r} was replaced for this call (torch.func.functional_call) "
                f"by a sharded {type(plain).__name__} of shape {tuple(plain.shape)}, but modules compute with full "
                "tensors. Pass its .full_tensor(), called on every rank, or the parameter itself."
            )


@torch.inference_mode(False)  # the next step writes to these tensors
def remake(unit: Unit) -> None:
    """Make the unit's memory again from the parameters that its modules hold now."""
    unit.release()
    modules = unit.watch.modules()
    own = {id(m) for top in modules for _, m in own_modules(top)}
    lent = [
        (p.sharded, slot)
        for p in unit.parameters
        for slot in p.slots
        if id(slot.module()) not in own and slot.holds(p.sharded)
    ]
    unit_parameters = find_parameters(
        modules,
        unit.watch.ignored(),
        unit.ranks,
        unit.arguments.placement_fn,
        unit,
        sibling=unit.main is not None,
    )
    for owned in unit_parameters.owned:
        owned.slots.extend(slot for sharded, slot in lent if sharded is owned.parameter)
    before = unit.parameters
    reductions = unit.gradients.held_reductions()
    sharded_ids = {id(p.sharded) for p in before}
    if not any(id(owned.parameter) in sharded_ids for owned in unit_parameters.owned):
        reductions = []  # it belongs to replaced parameters, like a plain parameter's .grad
    if reductions and not _same_parameters(before, unit_parameters):
        raise RuntimeError(
            f"Parameters of unit {unit.name!r} were replaced while gradients of earlier micro-batches are held. "
            "Replace them between optimizer steps."
        )
    for name, parameter, *_ in unit_parameters.owned:
        if not isinstance(parameter, (DTensor, RaggedTensor)) and parameter.grad is not None:
            raise RuntimeError(
                f"Parameter {name!r} of unit {unit.name!r} was put in the place of another parameter and has a "
                "gradient of this rank alone. Set its .grad to None, and replace parameters outside of forward."
            )
    try:
        _retire(unit)
        own_parameters(unit, unit_parameters)
        borrow_parameters(unit, unit_parameters)
        unit.rejoin()
        if reductions:
            unit.gradients.take_held(reductions, unit.settings.transport)
    except BaseException:
        unit.remake_later(reductions)
        raise
    finally:
        current_ids = {id(p.sharded) for p in unit.parameters}
        for p in before:
            # No unit owns it now, and a module that was tied to it may still have it.
            if id(p.sharded) not in current_ids and unit_of(p.sharded) is unit:
                p.sharded.__dict__.pop(UNIT_OF, None)


def _retire(unit: Unit) -> None:
    """Release the old memory before the unit's memory is made again."""
    unit.release()
    unit.gradients.finish(unit.settings)
    complete(unit)
    unit.weights.host_may_write()
    unit.activity.visits.clear()
    unit.watch.lenders = []


def _same_parameters(before: list[ManagedParameter], unit_parameters: UnitParameters) -> bool:
    """Whether these are the same parameter objects, with any values."""
    return len(before) == len(unit_parameters.owned) and all(
        p.sharded is owned.parameter
        and owned.parameter.shape == p.cut.shape
        and owned.parameter.dtype == p.spec.storage_dtype
        for p, owned in zip(before, unit_parameters.owned, strict=True)
    )
