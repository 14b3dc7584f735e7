"""Finds corrupt values: copies on several ranks that differ, and gradients that differ when they are computed again.

Everything is compared by a hash of its bytes. Hashes of copies meet in reductions; only if some differ are they
gathered, to name the rank. Nothing here mends what it finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine.assembly.states import digest, hash_of, plain_tensors
from shardwright.engine.base.names import FSDP1, plain_name
from shardwright.engine.collective import RankGroup
from shardwright.engine.comm.notes import noted
from shardwright.engine.gradients.stepping import SteppedGradient
from shardwright.engine.heartbeat import ranks_in_words
from shardwright.engine.tensors.gathering import full_of
from shardwright.engine.tensors.parameter import ManagedParameter, unit_of
from shardwright.engine.tensors.ragged.tensor import RaggedTensor
from shardwright.engine.tensors.tensor_parallel import cut_dim
from shardwright.engine.unit.owning import units_of

GATHERED = "gathered weights"
OWN = "own gradient"


@dataclass(frozen=True)
class Difference:
    """Values that should be equal, and are not. ``str()`` of it is a sentence.

    Attributes:
        kind: "parameter", "gradient", "own gradient" (of a rank, before it is reduced), "buffer", "gathered weights"
            (the full weights that ZeRO-1 and 2 keep), or "optimizer state 'KEY'".
        name: of the parameter or the buffer.
        unit: of the parameter; None if it is not sharded.
        ranks: whose values are wrong; of copies without a majority all ranks that have one.
        others: of copies, the ranks whose values are right; empty if there is no majority.
        is_copy: several ranks have it; else one rank has computed or read it twice.
    """

    kind: str
    name: str
    unit: str | None
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()
    is_copy: bool = False

    def __str__(self) -> str:
        unit = "" if self.unit is None else f" (unit {self.unit})"
        of = "" if self.kind in ("parameter", "buffer") else "of "
        what, ranks = f"{self.kind} {of}{self.name}{unit}", ranks_in_words(self.ranks)
        several = len(self.ranks) > 1
        if not self.is_copy:
            return f"{what}: {ranks} {'have' if several else 'has'} other bits the second time"
        if self.others:
            return f"{what}: {ranks} {'differ' if several else 'differs'} from {ranks_in_words(self.others)}"
        return f"{what}: {ranks} differ from one another, and no majority says which is right"


class HashKey(NamedTuple):
    """The name of a hash: its kind, its tensor and the tensor's unit."""

    kind: str
    name: str
    unit: str | None


class _Replicas(NamedTuple):
    """A tensor of which several ranks have copies: those along these axes of a mesh."""

    key: HashKey
    tensors: list[torch.Tensor]
    mesh: DeviceMesh | None  #: None: all ranks of the default process group
    axes: tuple[int, ...]


# -- copies on several ranks -----------------------------------------------------------------------------------------


@torch.no_grad()
def compare_copies(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    gradients: bool = True,
    buffers: bool = True,
    without: Iterable[torch.Tensor] = (),
) -> list[Difference]:
    """Compare the bits of everything that several ranks hold copies of. All ranks get the same list; empty is good.

        if differences := sw.compare_copies(model, optimizer):
            raise RuntimeError(str(differences[0]))

    Copies are: shards of HSDP's replicas; parameters, gradients and buffers that are not sharded; the full weights that
    ZeRO-1 and 2 keep until the optimizer's step; tensor-parallel parameters that are replicated; the optimizer's state
    of all these, and its counters of steps. With three copies or more the rank in the minority is named. Kept full
    weights are compared with the shards, so the rank is named for any number. A sharded value of which there is one
    copy cannot be compared.

    Call it between backward and the optimizer's step, on every rank of the default process group. It reads each tensor
    once, and sends 16 bytes for each in a reduction over each mesh axis with copies.

    Args:
        model: sharded by this library, by torch's FSDP2, or not sharded (DDP). Parameters of FSDP1 are left out.
        optimizers: one or several, whose state is compared.
        gradients: compare ``.grad``, too. Not before the last micro-batch of a step, when ranks hold parts of sums.
        buffers: compare buffers, too. Not if ranks may have different ones, such as running statistics.
        without: parameters and buffers that differ between ranks on purpose.

    Raises:
        RuntimeError: the ranks have different tensors.
        TypeError: ``model`` is no module, or ``optimizers`` are none.
    """
    _check_model("sw.compare_copies", model)
    optimizers = _listed(optimizers)
    left_out = set(map(id, without))
    copies = list(_copies(model, optimizers, gradients, buffers, left_out))
    hashes = _numbers([[digest(tensor) for tensor in each.tensors] for each in copies])
    differing = _differing(copies, hashes)
    anywhere = torch.tensor([len(differing)], device=_device_of(None))
    if dist.is_initialized():
        with noted("all-reduce of a flag"):
            dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if not anywhere.item():
        return []
    reports = [(copies[i].key, _ranks_of(copies[i]), hashes[i]) for i in sorted(differing)]
    everyones = RankGroup().all_gather(reports, "hashes")
    truths = _truths(model, everyones)
    return _judged(everyones, truths)


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} expects a model (torch.nn.Module), got {type(model).__name__}.")


def _listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    several = isinstance(optimizers, Iterable)
    listed = list(optimizers) if several else [optimizers]
    for each in listed:
        if not hasattr(each, "state"):
            kind = f"{type(each).__name__} among them" if several else type(each).__name__
            raise TypeError(f"sw.compare_copies expects an optimizer or several, got {kind}.")
    return listed


def names_in(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the plain model, by its id."""
    return {id(parameter): plain_name(name, model) for name, parameter in model.named_parameters()}


def unit_name(parameter: torch.Tensor) -> str | None:
    unit = unit_of(parameter)
    return None if unit is None else unit.name


def _copies(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    gradients: bool,
    buffers: bool,
    left_out: set[int],
) -> Iterator[_Replicas]:
    names: dict[torch.Tensor, str] = {}
    for long_name, weight in model.named_parameters():
        if id(weight) in left_out or FSDP1 in long_name:
            continue
        names[weight] = name = plain_name(long_name, model)
        unit = unit_name(weight)
        yield from _copies_of(HashKey("parameter", name, unit), weight)
        gradient = weight.grad
        if gradients and gradient is not None and not isinstance(gradient, SteppedGradient):
            yield from _copies_of(HashKey("gradient", name, unit), gradient)
    for name, buffer in model.named_buffers() if buffers else ():
        if id(buffer) not in left_out:
            yield from _copies_of(HashKey("buffer", plain_name(name, model), None), buffer)
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            if parameter in names:
                yield from _copies_of_state(names[parameter], parameter, values)
    yield from (copies for copies, _ in _kept(model))


def _copies_of(key: HashKey, tensor: torch.Tensor) -> Iterator[_Replicas]:
    mesh, axes = _placed(tensor)
    if mesh is None or axes:
        yield _Replicas(key, plain_tensors(tensor.detach()), mesh, axes)


def _placed(tensor: torch.Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh and its axes along which ranks have copies."""
    if isinstance(tensor, RaggedTensor):
        mesh, cut = tensor.spec.mesh, {axis % tensor.spec.mesh.ndim for axis in tensor.spec.axes}
        return mesh, tuple(a for a in range(mesh.ndim) if a not in cut and mesh.shape[a] > 1)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        whole = [
            axis for axis, p in enumerate(tensor.placements) if cut_dim(p) is None and not p.is_partial()
        ]
        return mesh, tuple(axis for axis in whole if mesh.shape[axis] > 1)
    return None, ()


def _copies_of_state(name: str, parameter: torch.Tensor, values: dict[str, Any]) -> Iterator[_Replicas]:
    mesh, axes = _placed(parameter)
    for key, value in values.items():
        where = HashKey(f"optimizer state {key!r}", name, unit_name(parameter))
        if isinstance(value, (DTensor, RaggedTensor)):
            yield from _copies_of(where, value)
        elif isinstance(value, torch.Tensor) and value.ndim:
            if mesh is None or axes:  # this rank's part, in no wrapper
                yield _Replicas(where, plain_tensors(value.detach()), mesh, axes)
        elif isinstance(
            value, torch.Tensor | int | float
        ):  # a counter of steps is equal on all ranks of a parameter
            tensor = torch.as_tensor(value)
            everywhere = () if mesh is None else tuple(a for a in range(mesh.ndim) if mesh.shape[a] > 1)
            if mesh is None or everywhere:
                yield _Replicas(where, [tensor], mesh, everywhere)


def _kept(model: nn.Module) -> Iterator[tuple[_Replicas, ManagedParameter]]:
    """The full weights that units keep gathered now."""
    names = names_in(model)
    for unit in units_of(model):
        weights = unit.weights
        if not (unit.parameters and weights.ready and weights.is_current):
            continue
        axes = tuple(axis for axis in range(unit.mesh.ndim) if unit.mesh.shape[axis] > 1)
        for p in unit.parameters:
            if axes and not p.in_place and p.extension is None:
                key = HashKey(GATHERED, names.get(id(p.sharded), p.name), unit.name)
                yield _Replicas(key, plain_tensors(p.view.detach()), unit.mesh, axes), p


def _numbers(digests: list[list[torch.Tensor]]) -> list[int]:
    """One number for each list of hashes, read from each device at once."""
    flat = [each for group in digests for each in group]
    by_device: dict[torch.device, list[int]] = {}
    for place, each in enumerate(flat):
        by_device.setdefault(each.device, []).append(place)
    values = [0] * len(flat)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([flat[i] for i in places]).tolist(), strict=True):
            values[place] = value
    rest = iter(values)
    return [next(rest) if len(group) == 1 else hash_of([next(rest) for _ in group]) for group in digests]


def _device_of(mesh: DeviceMesh | None) -> torch.device:
    """The device on which a mesh communicates; None: the default process group."""
    if mesh is not None:
        kind = mesh.device_type
    else:
        kind = "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _differing(copies: list[_Replicas], hashes: list[int]) -> set[int]:
    """The numbers of those that are not equal along an axis: one reduction for each axis of a mesh."""
    lines: dict[tuple[DeviceMesh | None, int], list[int]] = {}
    for i, each in enumerate(copies):
        for axis in each.axes if each.mesh is not None else (0,):
            lines.setdefault((each.mesh, axis), []).append(i)
    differing: set[int] = set()
    for (mesh, axis), numbers in lines.items():
        if mesh is None and not dist.is_initialized():
            continue
        group = None if mesh is None else mesh.get_group(axis)
        device = _device_of(mesh)
        if _ends(torch.tensor([hash_of([copies[i].key for i in numbers])], device=device), group).any():
            raise RuntimeError(
                "compare_copies: the ranks have different tensors, or in another order. Call it on every rank at the "
                "same point of a step, with the same arguments."
            )
        unequal = _ends(torch.tensor([hashes[i] for i in numbers], device=device), group)
        differing |= {i for i, flag in zip(numbers, unequal.tolist(), strict=True) if flag}
    return differing


def _ends(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A mask of the values that differ over the group's ranks: their maximum is not their minimum."""
    both = torch.stack([values, ~values])  # ~x falls where x rises, and has no overflow
    with noted("all-reduce of hashes", group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0] != ~both[1]


def _ranks_of(copies: _Replicas) -> tuple[int, ...]:
    """The ranks that have a copy."""
    if copies.mesh is None:
        return tuple(range(dist.get_world_size()))
    here = copies.mesh.get_coordinate()
    assert here is not None
    place: tuple[Any, ...] = tuple(slice(None) if axis in copies.axes else at for axis, at in enumerate(here))
    return tuple(copies.mesh.mesh[place].flatten().tolist())


def _truths(model: nn.Module, everyones: list[list[Any]]) -> list[dict[HashKey, int]]:
    """For each rank, the hashes that kept full weights should have: those of the shards, gathered again."""
    wanted = {key for reports in everyones for key, *_ in reports if key.kind == GATHERED}
    if not wanted:
        return [{} for _ in everyones]
    mine: dict[HashKey, int] = {}
    names = names_in(model)
    for unit in units_of(model):
        coded = unit.settings.transport.codec is not None
        for p in unit.parameters:
            key = HashKey(GATHERED, names.get(id(p.sharded), p.name), unit.name)
            if key in wanted and not coded:
                whole = full_of(p.sharded) if p.cut.parallel is None else None
                if whole is not None:
                    mine[key] = int(digest(whole.to(p.view.dtype)))
    return RankGroup().all_gather(mine, "hashes")


def _judged(everyones: list[list[Any]], truths: list[dict[HashKey, int]]) -> list[Difference]:
    sets: dict[tuple[HashKey, tuple[int, ...]], dict[int, int]] = {}
    for rank, reports in enumerate(everyones):
        for key, ranks, number in reports:
            sets.setdefault((key, ranks), {})[rank] = number
    differences = []
    for (key, ranks), numbers in sets.items():
        truth = next((truths[rank][key] for rank in numbers if key in truths[rank]), None)
        wrong = tuple(sorted(rank for rank, number in numbers.items() if number != truth))
        if truth is None or not wrong:
            (common, count), *rest = Counter(numbers.values()).most_common()
            majority = count > 1 and (not rest or rest[0][1] < count)
            wrong = tuple(
                sorted(rank for rank, number in numbers.items() if not majority or number != common)
            )
        others = tuple(rank for rank in ranks if rank not in wrong)
        differences.append(Difference(*key, wrong, others, is_copy=True))
    return differences


# -- gradients, computed again ---------------------------------------------------------------------------------------


@dataclass
class GradientHashes:
    """The hashes of a step's gradients on this rank. Two of them can be compared.

    Attributes:
        own: of this rank's gradients before they are reduced, by parameter, one for each use in backward. Only of
            parameters that this library shards.
        reduced: of ``.grad`` after backward, by parameter.
    """

    own: dict[HashKey, int] = field(default_factory=dict)
    reduced: dict[HashKey, int] = field(default_factory=dict)

    def differing(self, other: GradientHashes) -> list[HashKey]:
        """Keys whose hashes differ, in the order of the model. Only this rank's; it does not communicate."""
        return [
            key
            for mine, theirs in ((self.own, other.own), (self.reduced, other.reduced))
            for key in dict.fromkeys([*mine, *theirs])
            if mine.get(key) != theirs.get(key)
        ]


@contextmanager
def hash_gradients(model: nn.Module, own: bool = True) -> Iterator[GradientHashes]:
    """Hash the gradients of the backwards inside the context, on this rank.

        with sw.hash_gradients(model) as first:
            loss_of(model, batch).backward()
        optimizer.zero_grad()
        with sw.hash_gradients(model) as again:
            loss_of(model, batch).backward()
        differences = sw.compare_gradients(first, again)

    The second time everything must be the same: weights, batch, random generators, buffers. Then all bits are equal,
    unless an operation is not deterministic, such as additions in no fixed order on a GPU
    (``torch.use_deterministic_algorithms``).

    Args:
        model: a model, sharded or not.
        own: hash each rank's gradients before they are reduced, too. They show which rank computes wrongly. False for a
            step in a CUDA graph, whose replays call no hooks.

    Raises:
        TypeError: ``model`` is no module.
    """
    _check_model("sw.hash_gradients", model)
    hashes, handles = GradientHashes(), []
    parts: dict[HashKey, list[torch.Tensor]] = {}
    names = names_in(model)
    if own:
        for unit in units_of(model):
            for p in unit.parameters:
                if p.full.requires_grad:
                    digests: list[torch.Tensor] = []
                    parts[HashKey(OWN, names.get(id(p.sharded), p.name), unit.name)] = digests
                    handles.append(p.full.register_hook(_keeps_digest(digests)))
    try:
        yield hashes
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        hashes.own.update(zip(parts, _numbers(list(parts.values())), strict=True))
        reduced = {
            HashKey("gradient", plain_name(name, model), unit_name(p)): [
                digest(t) for t in plain_tensors(p.grad.detach())
            ]
            for name, p in model.named_parameters()
            if p.grad is not None and not isinstance(p.grad, SteppedGradient)
        }
        hashes.reduced.update(zip(reduced, _numbers(list(reduced.values())), strict=True))


def _keeps_digest(digests: list[torch.Tensor]) -> Any:
    def keep(gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        with torch.no_grad():
            digests.extend(digest(tensor) for tensor in plain_tensors(gradient.detach()))

    return keep


def compare_gradients(first: GradientHashes, second: GradientHashes) -> list[Difference]:
    """The gradients that differ on any rank. All ranks must call it, and get the same list; empty is good.

    If a rank computes wrongly, its own gradients differ. After the reduction the gradients of other ranks differ, too,
    so these are listed only where no rank's own gradients differ.

    Raises:
        TypeError: one of the two is not what :func:`hash_gradients` gives.
    """
    for each in (first, second):
        if not isinstance(each, GradientHashes):
            raise TypeError(
                "sw.compare_gradients expects two results of sw.hash_gradients (the value after `as`), got "
                f"{type(each).__name__}."
            )
    everyones = RankGroup().all_gather(first.differing(second), "differences")
    found: dict[HashKey, list[int]] = {}
    for rank, keys in enumerate(everyones):
        for key in keys:
            found.setdefault(HashKey(*key), []).append(rank)
    differences = [Difference(*key, tuple(ranks)) for key, ranks in found.items()]
    return [each for each in differences if each.kind == OWN] or differences


def state_hashes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[HashKey, int]:
    """The hashes of this rank's weights and optimizer state, which change in the optimizer's step alone."""
    groups: dict[HashKey, list[torch.Tensor]] = {}
    names: dict[torch.Tensor, str] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            names[weight] = plain_name(name, model)
            key = HashKey("parameter", names[weight], unit_name(weight))
            groups[key] = list(map(digest, plain_tensors(weight.detach())))
        for optimizer in optimizers:
            for p, values in optimizer.state.items():
                for entry, value in values.items():
                    if isinstance(value, torch.Tensor):
                        where = HashKey(f"optimizer state {entry!r}", names.get(p, "?"), unit_name(p))
                        groups[where] = list(map(digest, plain_tensors(value.detach())))
    return dict(zip(groups, _numbers(list(groups.values())), strict=True))
