"""Makes the ranks start from one model: broadcasts values from the first rank, or compares hashes.

Used by ``fully_shard`` before it cuts, when every rank still has the whole of each tensor.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.engine.assembly.find import UnitParameters, is_cut, own_modules
from shardwright.engine.collective import RankGroup
from shardwright.engine.comm.notes import noted
from shardwright.engine.extend import ExtensionError
from shardwright.engine.heartbeat import ranks_in_words
from shardwright.engine.layout import Ragged
from shardwright.engine.tensors.parameter import has_no_values, plain_of

_CHUNK = 1 << 23  #: bytes that are hashed at a time


class TakenTensor(NamedTuple):
    """A parameter or buffer that a ``fully_shard`` call takes over."""

    name: str
    tensor: torch.Tensor

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that must be equal on every rank before values can be compared."""
        description = self.name, tuple(self.tensor.shape), str(self.tensor.dtype)
        return (*description, "deferred") if has_no_values(self.tensor) else description


def states_of(
    modules: list[nn.Module], unit_parameters: UnitParameters, ignored: list[nn.Module]
) -> list[TakenTensor]:
    """Parameters that are not cut yet, and buffers. They must be equal on every rank. Tied ones appear once."""
    states = [
        TakenTensor(each.name, each.parameter)
        for each in unit_parameters.owned
        if not is_cut(each.parameter, each.parallel)
    ]
    seen = {id(b) for top in ignored for b in top.buffers()}
    for position, top in enumerate(modules):
        first = f"{position}." if len(modules) > 1 else ""
        for prefix, module in own_modules(top):
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    states.append(
                        TakenTensor(f"{first}{prefix}.{name}" if prefix else f"{first}{name}", buffer)
                    )
    return states


@torch.no_grad()
def sync_states(mesh: DeviceMesh, device: torch.device, states: list[TakenTensor], owner: str) -> None:
    """Give every rank the values of the mesh's first one. Each tensor is broadcast whole, over one axis at a time.

    Raises:
        ValueError: a tensor has no values, or the ranks have different tensors.
    """
    empty = [state.name for state in states if has_no_values(state.tensor)]
    ranks = RankGroup.of_mesh(mesh)
    forms = ranks.all_gather(([state.form for state in states], empty), "states")
    for rank, (_, without) in zip(ranks.numbers, forms, strict=True):
        if without:
            raise ValueError(
                f"sync_module_states broadcasts values, but on rank {rank} {without[0]!r} of {owner} has no values. "
                "Build the model with values on every rank, or omit sync_module_states and load or materialise the "
                "model after sharding."
            )
    _refuse_different_forms(ranks, [form for form, _ in forms], owner)
    for state in states:
        for tensor in (t for t in plain_tensors(state.tensor.detach()) if t.numel()):
            flat = tensor.to(device).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for axis in range(mesh.ndim):
                with noted("broadcast of states", mesh.get_group(axis)):
                    dist.broadcast(flat, group=mesh.get_group(axis), group_src=0)
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def check_states(
    mesh: DeviceMesh,
    states: list[TakenTensor],
    owner: str,
    remedy: str = "Build the model with the same seed on every rank, or pass sync_module_states=True.",
) -> None:
    """Compare hashes over the ranks: hashes of all bytes, and for deferred tensors of their recorded operations.

    Tensors on the meta device are skipped. ``remedy``: for tensors with values, in the error.

    Raises:
        ValueError: names all tensors that are not equal on every rank, and the ranks that differ from the first.
    """
    states = [state for state in states if not state.tensor.is_meta]
    forms = [state.form for state in states]
    hashes = _hashes(states)
    ranks = RankGroup.of_mesh(mesh)
    if not ranks.different(ranks.all_gather(hash_of((forms, hashes)), "states")):
        return
    of_all_ranks = ranks.all_gather((forms, hashes), "states")
    _refuse_different_forms(ranks, [form for form, _ in of_all_ranks], owner)
    differences: list[str] = []
    only_real = True
    for number, state in enumerate(states):
        if others := ranks.different([theirs[number] for _, theirs in of_all_ranks]):
            differences.append(f"{state.name!r} on {ranks_in_words(others)}")
            only_real = only_real and not has_no_values(state.tensor)
    more = f" and {len(differences) - 10} more" if len(differences) > 10 else ""
    way_out = (
        remedy
        if only_real
        else (
            "Build it with the same seed, code and data on every rank. For deferred tensors, the recorded "
            "operations, their constants and their random numbers are compared."
        )
    )
    raise ValueError(
        f"The ranks start with different values of {owner}; these tensors differ from rank {ranks.numbers[0]}: "
        f"{'; '.join(differences[:10])}{more}. {way_out}"
    )


def check_layout(
    mesh: DeviceMesh, layout: Ragged, name: str, unit_parameters: UnitParameters, owner: str
) -> None:
    """Compare over the ranks what the function of a layout returns for each parameter.

    Raises:
        ExtensionError: it raised an error, or does not return the same on every rank. The error names the layout and
            the parameters.
    """
    forms = [
        (each.name, each.parallel.local_shape if each.parallel is not None else tuple(each.parameter.shape))
        for each in unit_parameters.owned
    ]
    of_all_ranks = RankGroup.of_mesh(mesh).all_gather(
        [_elements(layout, shape) for _, shape in forms], "states"
    )
    ranks = mesh.mesh.flatten().tolist()
    differences = []
    for (parameter, shape), *of_ranks in zip(forms, *of_all_ranks, strict=True):
        problem = next((each for each in of_ranks if isinstance(each, str)), None)
        if problem is not None:
            raise ExtensionError(f"Layout {name}, for parameter {parameter!r} of {owner}: {problem}")
        if len(set(of_ranks)) > 1:
            values = ", ".join(
                f"{n} on rank {rank}" for rank, n in list(zip(ranks, of_ranks, strict=True))[:4]
            )
            more = ", ..." if len(ranks) > 4 else ""
            differences.append(f"{parameter!r} of shape {shape}: {values}{more}")
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ExtensionError(
            f"The ranks have different results of layout {name} in {owner}. Elements that stay together: "
            f"{'; '.join(differences[:3])}{more}. Each rank would cut these parameters at other places. Let the "
            "function of the layout depend on the shape alone"
        )


def _elements(layout: Ragged, shape: tuple[int, ...]) -> int | str:
    """The elements that stay together, or why the layout has no such number."""
    try:
        return layout.elements(shape)
    except ValueError as error:
        return str(error)


def _hashes(states: list[TakenTensor]) -> list[list[int]]:
    """The hashes of each state's tensors, copied from the device together."""
    real = [[] if has_no_values(state.tensor) else plain_tensors(state.tensor.detach()) for state in states]
    sums = [digest(tensor) for tensors in real for tensor in tensors]
    numbers = iter(torch.stack(sums).tolist() if sums else ())
    return [
        [plain_of(state.tensor).origin] if has_no_values(state.tensor) else [next(numbers) for _ in tensors]  # type: ignore[attr-defined]
        for state, tensors in zip(states, real, strict=True)
    ]


def _refuse_different_forms(ranks: RankGroup, forms: list[list[tuple[Any, ...]]], owner: str) -> None:
    def error(others: list[int], theirs: list[tuple[Any, ...]], first: list[tuple[Any, ...]]) -> Exception:
        mine, other = [f for f in first if f not in theirs], [f for f in theirs if f not in first]
        return ValueError(
            f"The ranks have different tensors in {owner}, or in another order: rank {ranks.numbers[0]} has "
            f"{mine[:3] or 'no other'}, rank {others[0]} {other[:3] or 'no other'}. Build the same model on every rank."
        )

    ranks.check_equal(forms, error)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values: for a wrapper, the tensors inside."""
    tensor = plain_of(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in plain_tensors(getattr(tensor, name))]
    return [tensor.as_subclass(torch.Tensor)]


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of a tensor's bytes and their places: int64, 0-d, on its device."""
    data = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        piece = data[start : start + _CHUNK]
        if piece.numel() % 8 or piece.data_ptr() % 8:
            piece = nn.functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        first = start // 8
        # Hash each word as in splitmix64 (Steele, Lea and Flood, 2014), with its place as seed. Sums wrap around.
        x = torch.arange(first + 1, first + 1 + words.numel(), device=data.device).mul_(-7046029254386353131)
        x.add_(words)
        x.bitwise_xor_(x >> 30).mul_(-4658895280553007687)
        x.bitwise_xor_(x >> 27).mul_(-7723592293110705685)
        total += x.bitwise_xor_(x >> 31).sum()
    return total


def hash_of(value: object) -> int:
    """A hash that is equal on every rank, unlike Python's own hash of strings."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)
