"""Every collective of a piece of training as bytes on the wire, counted where torch dispatches it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The kind by torch's name.
_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class Collective(NamedTuple):
    """One collective: its kind, its ranks, and the bytes of its full side."""

    kind: str
    ranks: tuple[int, ...]
    nbytes: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends if the backend is optimal in bandwidth, as rings are."""
        n = len(self.ranks)
        return (2 if self.kind == "all_reduce" else 1) * self.nbytes * (n - 1) / n


class Wire(TorchDispatchMode):
    """Collects the collectives that run inside. One of an unknown kind raises KeyError."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = _KINDS[function._schema.name.split("::")[1]]
            group = next(
                g for a in args if isinstance(a, torch.ScriptObject) and (g := _group(a)) is not None
            )
            sides = [sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args]
            self.collectives.append(Collective(kind, tuple(dist.get_process_group_ranks(group)), max(sides)))
        return function(*args, **(kwargs or {}))


def _group(boxed: torch.ScriptObject) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(boxed)
    except RuntimeError:  # a reduce op
        return None
