"""Tied weights while a state dict is loaded with ``assign=True``.

torch then assigns to each name separately, so tied parameters would become different ones. This file gives one
parameter to all of its names, in this unit and in others. ``tensors/cut.py`` cuts whole tensors.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.comm.notes import noted
from shardwright.engine.tensors.cut import Cut
from shardwright.engine.tensors.parameter import ManagedParameter


class _Tie(NamedTuple):
    """The value that was assigned to the first name of a tied parameter."""

    key: str
    parameter: weakref.ref[nn.Parameter]
    cut: Cut
    mesh: DeviceMesh


class AssigningLoad:
    """One call of ``load_state_dict(assign=True)``. torch's hooks run for it module by module."""

    def __init__(self, missing: list[str]) -> None:
        self.missing = missing  #: torch's list of missing keys, one object during the whole call
        self._ties: dict[tuple[int, str], _Tie] = {}

    def begin(self, p: ManagedParameter, mesh: DeviceMesh, key: str, value: torch.Tensor) -> nn.Parameter:
        """Put the first value of a parameter with several names under all of them."""
        if isinstance(value, nn.Parameter):
            new = value
        else:
            new = nn.Parameter(value, requires_grad=p.sharded.requires_grad)
        tie = _Tie(key, weakref.ref(new), p.cut, mesh)
        for slot in p.slots:
            module = slot.module()
            if module is not None and slot.holds(p.sharded):
                self._ties[id(module), slot.name] = tie
                slot.show(new)
        return new

    def again(self, module: nn.Module, name: str, key: str, value: Any, errors: list[str]) -> Any:
        """The parameter that an earlier name of the tie got, or None. If the values differ, adds to ``errors``."""
        tie = self._ties.get((id(module), name))
        new = tie.parameter() if tie is not None else None
        if tie is None or new is None or not isinstance(value, torch.Tensor) or value.shape != new.shape:
            return None
        if _differs_anywhere(tie, new, value):
            errors.append(
                f"{tie.key!r} and {key!r} are names of one tied parameter of shape {tuple(new.shape)}, and the state "
                "dict has different values for them. Give both names the same value, remove one of them "
                "(strict=False), or untie the modules before fully_shard."
            )
        return new


_load: AssigningLoad | None = None


def load_of(missing: list[str]) -> AssigningLoad:
    """The running call of ``load_state_dict`` with this list of missing keys."""
    global _load
    if _load is None or _load.missing is not missing:
        _load = AssigningLoad(missing)
    return _load


@torch.no_grad()
def _differs_anywhere(tie: _Tie, new: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` differs from ``new`` on any rank. Every rank of the mesh must call it."""
    differs = new.dtype != value.dtype or new.is_meta != value.is_meta
    if not differs and not value.is_meta and value is not new:
        one, other = tie.cut.part_of(new), tie.cut.part_of(value)
        other = other.to(one.device)
        same = one.eq(other) | (one.ne(one) & other.ne(other))
        differs = not bool(same.all())
    flag = torch.tensor(differs, dtype=torch.int32, device=tie.mesh.device_type)
    for axis in range(tie.mesh.ndim):
        if tie.mesh.size(axis) > 1:
            with noted("all-reduce of a flag", tie.mesh.get_group(axis)):
                dist.all_reduce(flag, dist.ReduceOp.MAX, tie.mesh.get_group(axis))
    return bool(flag.item())
