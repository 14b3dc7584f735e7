"""Reads and writes of torch's operations and of collectives, for the simulated accelerator (races.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

#: Of these operations the arguments that are not written are looked at for their shapes alone.
_SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
        *("full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "_unsafe_view", "is_same_size"),
    )
)
#: These move no bytes at all.
_NO_ACCESS = frozenset(("aten::set_", "aten::resize_", "c10d::barrier"))
#: After these the host knows what the device has computed.
HOST_WAITS = frozenset(("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"))
#: Collectives: which arguments are written and which are read. Their schemas do not tell.
_COLLECTIVES = {
    "_allgather_base_": ((0,), (1,)),
    "_reduce_scatter_base_": ((0,), (1,)),
    "allgather_": ((0,), (1,)),
    "allgather_into_tensor_coalesced_": ((0,), (1,)),
    "allreduce_": ((0,), ()),
    "alltoall_base_": ((0,), (1,)),
    "broadcast_": ((0,), ()),
    "reduce_scatter_tensor_coalesced_": ((0,), (1,)),
}


PLAIN_DISPATCH: Any = torch.Tensor.__torch_dispatch__


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        plain = type(value).__torch_dispatch__ is PLAIN_DISPATCH
        if plain and value.layout is torch.strided and value.device.type == "cpu":
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


class Plan(NamedTuple):
    """The effects of an operation on its arguments, by position and name."""

    writes: tuple[tuple[int, str], ...]
    reads: tuple[tuple[int, str], ...]


def plan_of(operation: Any) -> Plan:
    schema = operation._schema
    arguments = list(enumerate(schema.arguments))
    if schema.name in _NO_ACCESS:
        return Plan((), ())
    if schema.name.startswith("c10d::"):
        found = _COLLECTIVES.get(schema.name.removeprefix("c10d::"))
        if found is None:
            raise NotImplementedError(f"what {schema.name} reads and writes is not in the simulator's table")
        return Plan(*(tuple((i, arguments[i][1].name) for i in group) for group in found))
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if operation.is_view or schema.name in _SHAPES_ONLY:
        return Plan(tuple(written), ())
    # An argument that results are views of is not read by that.
    read = [(i, a.name) for i, a in arguments if a.alias_info is None and "Tensor" in str(a.type)]
    return Plan(tuple(written), tuple(read))
