"""Explains torch's errors about weights that are not gathered: which unit they are of, and what to do.

Two things make torch refuse such weights. Autograd compares the version counters of saved tensors (``ledger.py``), and
most operations refuse storages without memory. Neither message names a unit, so :func:`explain` adds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from shardwright._torch import is_made_of_tensors, is_transformed
from shardwright.engine.weights.ledger import unit_of_version
from shardwright.memory import slab_of

_VERSION = re.compile(r"\[[\w.]+ \[([\d, ]*)\]\].* is at version (\d+); expected version \d+")
_WITHOUT_MEMORY = re.compile(
    "out of bounds for storage of size 0|its data is not allocated yet|resize storage that is not resizable"
)
_MARK = "its weights are not gathered"
_IN_BACKWARD = (
    "Backward reached the unit through a tensor that is not one of its outputs, such as one that a forward hook or a "
    "list kept, or after it had left the unit. Return every tensor from which backward starts as an output of the "
    "unit (outputs may be in tuples, lists, dicts or dataclasses), or keep it in an attribute of one of the unit's "
    "modules. Or keep the unit's weights for all of backward: set_reshard_after_forward(False) and "
    "set_reshard_after_backward(False)."
)
_IN_FORWARD = (
    "Full weights exist only while the unit computes, so a view of them must not be kept for later. Read the "
    "parameter from its module again, keep a clone, or keep the weights: set_reshard_after_forward(False)."
)


def explain(error: BaseException | None) -> None:
    """Put the unit and the way out before torch's message, if ``error`` is about weights that are not gathered."""
    if type(error) is not RuntimeError or len(error.args) != 1 or _MARK in (text := str(error)):
        return
    if found := _VERSION.search(text):
        unit = unit_of_version(int(found[2]))
        if unit is not None:
            what = (
                f"a weight of unit {unit!r}, of shape ({found[1]}), but {_MARK} at that time. {_IN_BACKWARD}"
            )
            error.args = (f"Backward read {what} (torch: {text})",)
    elif _WITHOUT_MEMORY.search(text):
        units = dict.fromkeys(_released_units(error.__traceback__))
        if units:
            names = ", ".join(map(repr, units))
            error.args = (
                f"An operation read weights of unit {names}, but {_MARK} now. {_IN_FORWARD} (torch: {text})",
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


def _units_in(value: Any, depth: int = 3) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not is_made_of_tensors(value) and not is_transformed(value)
        if plain and (slab := slab_of(value)) is not None and not (slab.leased and slab.revealed):
            yield slab.unit
    elif depth and isinstance(value, (list, tuple, dict)):
        for each in list(value.values() if isinstance(value, dict) else value)[:100]:
            yield from _units_in(each, depth - 1)
    elif depth and isinstance(value, torch.nn.Module):
        for each in list(value.__dict__.values()):
            if not isinstance(each, torch.nn.Module):
                yield from _units_in(each, depth - 1)
