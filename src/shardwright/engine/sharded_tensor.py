"""The sharded tensor of layouts that cut rows: a DTensor of which every edit is noticed.

Units and modules are not known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwright._torch import dtensor_of, increment_version, local_of
from shardwright.engine.unset import begin_edit, unmark

#: Set on a view of a sharded parameter: the local tensor whose counter moves with edits of it.
EDITED = "_edited"
_detach = torch.ops.aten.detach.default
_RANDOM = torch.Tag.nondeterministic_seeded


class ShardedTensor(DTensor):
    """A sharded parameter, or a view of one or its ``.data``, of which every edit moves the local tensor's counter.

    Below autograd, where a DTensor's operations run on local tensors, no counter moves by itself. Other operations on
    it give plain DTensors, and so do copies and pickles of it.
    """

    __slots__ = ()
    _edited: torch.Tensor  #: the parameter's local tensor, where this is a view of it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        given = begin_edit(func, args, kwargs) if func._schema.is_mutable else []
        if _RANDOM in func.tags and func._schema.is_mutable and isinstance(args[0], DTensor):
            result = _draw_whole(func, args, kwargs)
        else:
            result = cls._operate(func, types, args, kwargs)
        for local in given:
            unmark(local)
        return result

    @classmethod
    def _operate(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = DTensor.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[arg-type]
        if func.is_view:
            if type(result) is DTensor and isinstance(args[0], ShardedTensor):
                result.__class__ = ShardedTensor
                viewed = local_of(args[0])
                if (
                    func is _detach
                ):  # its local tensor is the very same: below autograd counters are not shared
                    result._local_tensor = viewed
                result._edited = args[0].__dict__.get(EDITED, viewed)  # type: ignore[attr-defined]
        elif func._schema.is_mutable:
            many = isinstance(args[0], (list, tuple))
            edits = [t for t in (args[0] if many else args[:1]) if isinstance(t, ShardedTensor)]
            counters = [t.__dict__.get(EDITED, local_of(t)) for t in edits]
            # Operations on one tensor move the counter of its wrapper, those on many do not.
            counters += edits if many else []
            increment_version([t for t in counters if not t.is_inference()])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._as_dtensor(clone=True)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_dtensor().__reduce_ex__(protocol)

    def _as_dtensor(self, clone: bool = False) -> DTensor:
        local = local_of(self).detach()
        local = local.clone() if clone else local
        return dtensor_of(local, self.device_mesh, self.placements, self.shape, self.stride())


def _draw_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill this rank's part with what a whole tensor would have been filled with, there.

    Ranks that are seeded alike agree. DTensor's own would give every rank the same numbers on the CPU.
    """
    target = args[0]
    whole = torch.empty(target.shape, dtype=target.dtype, device=local_of(target).device)
    func(whole, *args[1:], **kwargs)
    part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    local_of(target).copy_(local_of(part))
    return target
