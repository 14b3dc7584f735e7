"""Whether the ranks start from one model: values broadcast from the first rank, or compared by hash.

Used by ``fully_shard`` before it cuts, when every rank still has the whole of each tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.construct import Found, is_cut, own_modules
from shardwright.engine.parameter import has_no_values, plain_of

_CHUNK = 1 << 23  #: bytes that are hashed at a time


class State(NamedTuple):
    """A parameter or buffer that a ``fully_shard`` call takes over."""

    name: str
    tensor: torch.Tensor

    @property
    def form(self) -> tuple[str, tuple[int, ...], str]:
        return self.name, tuple(self.tensor.shape), str(self.tensor.dtype)


def states_of(modules: list[nn.Module], found: Found) -> list[State]:
    """What is to be the same on every rank: parameters not cut over the ranks as yet, and buffers. Ties once."""
    states = [
        State(each.name, each.parameter) for each in found.owned if not is_cut(each.parameter, each.parallel)
    ]
    seen: set[int] = set()
    for position, top in enumerate(modules):
        first = f"{position}." if len(modules) > 1 else ""
        for prefix, module in own_modules(top):
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    states.append(State(f"{first}{prefix}.{name}" if prefix else f"{first}{name}", buffer))
    return states


def everywhere(mesh: DeviceMesh, value: object) -> list[Any]:
    """The value of every rank of the mesh, in its order. Every rank must come."""
    values: list[Any] = [value]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, values, group)
        values = [each for part in gathered for each in part]
    return values


@torch.no_grad()
def sync_states(mesh: DeviceMesh, device: torch.device, states: list[State], owner: str) -> None:
    """Give every rank the values of the mesh's first one. Each tensor is broadcast whole, over one axis at a time.

    Raises:
        ValueError: a tensor has no values, or the ranks have different tensors.
    """
    empty = [state.name for state in states if has_no_values(state.tensor)]
    forms = everywhere(mesh, ([state.form for state in states], empty))
    for rank, (_, without) in zip(mesh.mesh.flatten().tolist(), forms, strict=True):
        if without:
            raise ValueError(
                f"sync_module_states broadcasts values, and on rank {rank} {without[0]!r} of {owner} holds none. "
                "Build the model for real on every rank, or load or materialise it after sharding."
            )
    _refuse_different_forms(mesh, [form for form, _ in forms], owner)
    for state in states:
        for tensor in (t for t in _plain(state) if t.numel()):
            flat = tensor.to(device).contiguous().reshape(-1).view(torch.uint8)
            for axis in range(mesh.ndim):
                dist.broadcast(flat, group=mesh.get_group(axis), group_src=0)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def check_states(mesh: DeviceMesh, states: list[State], owner: str) -> None:
    """Compare hashes of all bytes over the ranks, of deferred tensors those of what they are drawn from.

    Tensors on the meta device are passed over.

    Raises:
        ValueError: tensors are not the same on every rank, all of them named, with the ranks that differ from the
            first.
    """
    states = [state for state in states if not state.tensor.is_meta]
    deferred = [state for state in states if has_no_values(state.tensor)]
    states = [state for state in states if not has_no_values(state.tensor)]
    sums = [digest(tensor) for state in states for tensor in _plain(state)]
    numbers = torch.stack(sums).tolist() if sums else []
    numbers += [plain_of(state.tensor).origin for state in deferred]  # type: ignore[attr-defined]
    forms = [state.form for state in (*states, *deferred)]
    if len(set(everywhere(mesh, hash_of((forms, numbers))))) == 1:
        return
    found = everywhere(mesh, (forms, numbers))
    _refuse_different_forms(mesh, [form for form, _ in found], owner)
    names = [state.name for state in states for _ in _plain(state)] + [state.name for state in deferred]
    first = found[0][1]
    different: dict[str, list[int]] = {}
    for rank, (_, theirs) in zip(mesh.mesh.flatten().tolist(), found, strict=True):
        for name, one, other in zip(names, first, theirs, strict=True):
            if one != other and rank not in different.setdefault(name, []):
                different[name].append(rank)
    told = [
        f"{name!r} on rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for name, r in different.items() if r
    ]
    more = f" and {len(told) - 10} more" if len(told) > 10 else ""
    raise ValueError(
        f"The ranks do not start from the same {owner}; other values than on rank {mesh.mesh.flatten()[0].item()} "
        f"have: {'; '.join(told[:10])}{more}. Build the model with the same seed on every rank, or give "
        "sync_module_states=True."
    )


def _refuse_different_forms(mesh: DeviceMesh, forms: list[list[tuple[Any, ...]]], owner: str) -> None:
    ranks = mesh.mesh.flatten().tolist()
    for rank, form in zip(ranks, forms, strict=True):
        if form != forms[0]:
            mine, theirs = ([f for f in a if f not in b] for a, b in ((forms[0], form), (form, forms[0])))
            raise ValueError(
                f"The ranks have different tensors in {owner}, or in another order: rank {ranks[0]} has "
                f"{mine[:3] or 'no other'}, rank {rank} {theirs[:3] or 'no other'}. Build the same model on every rank."
            )


def _plain(state: State) -> list[torch.Tensor]:
    """The tensors that hold the values: of a wrapper, those inside."""
    tensor = plain_of(state.tensor).detach()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in _plain(State(state.name, getattr(tensor, name)))]
    return [tensor.as_subclass(torch.Tensor)]


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bytes and their places: int64, 0-d, on its device."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        piece = data[start : start + _CHUNK]
        if piece.numel() % 8 or piece.data_ptr() % 8:
            piece = nn.functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        first = start // 8
        # Each word by itself as in splitmix64 (Steele, Lea and Flood, 2014), seeded with its place; sums wrap around.
        x = torch.arange(first + 1, first + 1 + words.numel(), device=data.device).mul_(-7046029254386353131)
        x.add_(words)
        x.bitwise_xor_(x >> 30).mul_(-4658895280553007687)
        x.bitwise_xor_(x >> 27).mul_(-7723592293110705685)
        total += x.bitwise_xor_(x >> 31).sum()
    return total


def hash_of(value: object) -> int:
    """The same number on every rank, which Python's own hash of strings is not."""
    text = repr(value).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return int(digest(data))
