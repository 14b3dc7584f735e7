"""A graph for the CPU: what a function dispatches, repeated without its Python, on the memory that it used.

It stands in for a CUDA graph where there is no GPU. Like one it knows addresses and no objects; unlike one it runs
while it is captured. Nothing that the function allocated is freed before the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.engine.comm import HostStreams
from shardwright.engine.memory import DYNAMIC, Slab

HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")


@dataclass(frozen=True)
class Place:
    """A tensor by its address."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        hull = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.dtype)
        block = (ctypes.c_byte * (hull * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(block, dtype=self.dtype).as_strided(self.size, self.stride)


class Capture(TorchDispatchMode):
    """Records each operation with the places of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.alive: list[Any] = []
        self.is_invalid = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(
            t not in (torch.Tensor, torch.nn.Parameter) and not issubclass(t, torch.nn.Parameter)
            for t in types
        ):
            return NotImplemented  # subclasses first: what they do inside comes here
        if func._schema.name in HOST_READS:
            self.is_invalid = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        places = tree_map_only(torch.Tensor, self.place, (args, kwargs))
        result = func(*args, **kwargs)
        fresh = None
        if not any(r.alias_info is not None for r in func._schema.returns):
            fresh = tree_map_only(torch.Tensor, self.place, result)
        self.calls.append((func, *places, fresh))
        return result

    def place(self, tensor: torch.Tensor) -> Place:
        self.alive.append(tensor.untyped_storage())
        return Place(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            args, kwargs = tree_map_only(Place, Place.tensor, (args, kwargs))
            result = func(*args, **kwargs)
            for each in tree_leaves(result):
                if isinstance(each, torch.ScriptObject):
                    each = each.boxed() if hasattr(each, "boxed") else each
                if hasattr(each, "wait"):
                    each.wait()
            if fresh is not None and not func._schema.name.startswith("aten::empty"):
                for place, value in zip(tree_leaves(fresh), tree_leaves(result), strict=True):
                    if isinstance(place, Place):
                        place.tensor().copy_(value)


class CpuGraphs(HostStreams):
    """The CPU's streams with a graph; otherwise as on an accelerator: the host looks at nothing within a step."""

    asynchronous = False
    captures = True

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        given, original = Capture(), Slab.lease

        def lease(slab: Slab) -> None:
            """As the slab's own, but what would be freed is kept, as a CUDA graph keeps its pool."""
            if not slab.leased:
                allocator = slab.owner.allocator
                memory = allocator.lease(slab)
                slab._lender = allocator if memory is not None else DYNAMIC
                if memory is None:
                    memory = torch.empty(max(1, slab.nbytes), dtype=torch.uint8)
                    given.alive.append(memory)
                slab._attach(memory)
                slab.leased = True
            slab._hide()

        self.capturing, Slab.lease = True, lease  # type: ignore[method-assign]
        try:
            with given:
                result = function()
        finally:
            self.capturing, Slab.lease = False, original  # type: ignore[method-assign]
            if given.is_invalid:  # as the end of a capture on CUDA, which hides the reason
                raise RuntimeError("operation failed due to a previous error during capture")
        return given.replay, result
