"""Explains torch's errors about weights that are not gathered: which unit they are of, and what to do.

Two things make torch refuse such weights. Autograd compares the version counters of saved tensors (``ledger.py``), and
most operations refuse storages without memory. Neither message names a unit, so :func:`explain` adds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

from shardwright.engine.compat.modes import is_transformed
from shardwright.engine.compat.tensors import is_made_of_tensors
from shardwright.engine.memory import released_slabs, slab_of
from shardwright.engine.weights.ledger import unit_of_version

_VERSION = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\].* is at version (\d+); expected version \d+")
_WITHOUT_MEMORY = re.compile(
    "out of bounds for storage of size 0|its data is not allocated yet|resize storage that is not resizable"
)
_CHANGED = "modified by an inplace operation"
_MARK = "they are not gathered"
_NAMED = 6  #: as many units a message names
#: Why a backward reads weights that are not gathered, and what to do.
NOT_THROUGH_OUTPUTS = (
    "Backward reached the unit in a way that the engine did not see, such as through a view of a weight that the "
    "program kept after the unit's forward. Return every tensor from which backward starts as an output of the "
    "unit (outputs may be in tuples, lists, dicts or dataclasses). Or keep the unit's weights for all of backward: "
    "set_reshard_after_forward(False) and set_reshard_after_backward(False)."
)
_IN_FORWARD = (
    "Full weights exist only while the unit computes, so a view of them must not be kept for later. Read the "
    "parameter from its module again, keep a clone, or keep the weights: set_reshard_after_forward(False)."
)


def explain(error: BaseException | None, backward: bool) -> None:
    """Put the unit and the way out before torch's message, if ``error`` is about weights that are not gathered.

    ``backward``: whether a backward raised it. Its operations have no lines of Python, so every unit without weights is
    named if none is found otherwise.
    """
    if type(error) is not RuntimeError or len(error.args) != 1 or _MARK in (text := str(error)):
        return
    why = NOT_THROUGH_OUTPUTS if backward else _IN_FORWARD
    if found := _VERSION.search(text):
        unit = unit_of_version(int(found[2]))
        if unit is not None:
            error.args = (
                f"Backward read weights of unit {unit!r}, of shape ({found[1]}), but they are not gathered now. "
                f"{NOT_THROUGH_OUTPUTS} (torch: {text})",
            )
    elif _WITHOUT_MEMORY.search(text):
        units = list(dict.fromkeys(_released_units(error.__traceback__)))
        one_of = ""
        if not units and backward:
            units = list(dict.fromkeys(slab.unit for slab in released_slabs("parameters")))
            one_of = "one of " if len(units) > 1 else ""
        if units:
            names = ", ".join(map(repr, units[:_NAMED])) + (", ..." if len(units) > _NAMED else "")
            what = f"weights of {one_of}unit{'s' if len(units) > 1 else ''} {names}"
            error.args = (f"An operation read {what}, but {_MARK} now. {why} (torch: {text})",)


def explain_stepped(error: RuntimeError, units: Iterable[str]) -> None:
    """Put the reason before torch's message if a backward read weights that ``sw.optim.in_backward`` has changed since
    the forward. ``units``: those that it has stepped since then."""
    if type(error) is not RuntimeError or _CHANGED not in (text := str(error)) or _MARK in text:
        return
    if names := list(units):
        shown = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
        error.args = (
            f"Backward read weights that an earlier backward has changed: its optimizer steps in backward, and has "
            f"stepped unit{'s' if len(names) > 1 else ''} {shown} since the forward. If several backwards make one "
            f"step, call set_is_last_backward(False) before all except the last, or add up the losses. (torch: {text})",
        )


def _released_units(traceback: TracebackType | None) -> Iterator[str]:
    """Yield the units of released weights among the local variables of the innermost frame that has any."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        found = [unit for value in list(frame.f_locals.values()) for unit in _units_in(value)]
        if found:
            yield from found
            return


def _units_in(value: Any, depth: int = 2) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not is_made_of_tensors(value) and not is_transformed(value)
        if plain and (slab := slab_of(value)) is not None and not (slab.leased and slab.revealed):
            yield slab.unit
    elif depth and isinstance(value, (list, tuple, dict)):
        for each in list(value.values() if isinstance(value, dict) else value)[:100]:
            yield from _units_in(each, depth - 1)
    elif (
        depth
        and not isinstance(value, type)
        and isinstance(attributes := getattr(value, "__dict__", None), dict)
    ):
        for each in list(attributes.values())[:100]:
            yield from _units_in(each, depth - 1)
