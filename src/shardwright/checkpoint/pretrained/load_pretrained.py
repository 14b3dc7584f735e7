"""``load_pretrained``: weights from files straight into this rank's part of a model.

First every rank checks names, shapes and dtypes from the headers of all files. One error counts the tensors that do not
fit and names the first ones. Then each rank copies its boxes out of the mapped files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwright.checkpoint.format.boxes import Box, overlap
from shardwright.checkpoint.pretrained.conversions import names_not_stored, transformers_key_map
from shardwright.checkpoint.pretrained.files import FileTensor, abbreviated, in_memory, same_bits
from shardwright.checkpoint.pretrained.folder import open_model
from shardwright.checkpoint.pretrained.key_maps import KeyMap, TensorSource, keys_of, source_of, views_of
from shardwright.checkpoint.pretrained.model import (
    ModelTensor,
    aliases_of,
    allocate,
    at_rest,
    mark_loaded,
    ranks_of,
    tensors_of,
)
from shardwright.engine import (
    OtherRankFailed,
    RankGroup,
    hash_of,
    heartbeat,
    ranks_in_words,
    refuse_while_deferring,
    units_of,
)
from shardwright.init import refuse_graphs

NAMED = 4
"""Number of missing tensors that an error names; also of unexpected tensors, and of tensors that do not fit. The error
stays readable in one line."""


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`load_pretrained`.

    Attributes:
        missing: names of the model's tensors that are not stored; these are unchanged.
        unexpected: keys of stored tensors that the model does not have.
        bytes_read: bytes that this rank has read from files.
    """

    missing: list[str]
    unexpected: list[str]
    bytes_read: int


@torch.inference_mode(False)
@torch.no_grad()
@heartbeat.during(heartbeat.LOAD)
def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    key_map: KeyMap | None = None,
    allow_missing: bool | Iterable[str] = False,
    allow_unexpected: bool | Iterable[str] = False,
    device: torch.device | str | None = None,
) -> Loaded:
    """Read stored weights into a model, sharded or not, deferred or not; each rank reads no more than its part.

        sw.load_pretrained(model, "checkpoint/")

    For a sharded model every rank must call it, with the same files. For a plain model each process calls it
    independently. Floating-point values are converted to the dtype of the parameter or buffer; other dtypes must be
    equal. Before anything is written, every rank compares names, shapes and dtypes. One error counts the tensors that
    do not fit and names the first ones. Call it between steps; gradients and optimizer state stay unchanged.

    **Models without values.** In a deferred model (``sw.deferred_init``), or a model on the meta device, the loaded
    tensors have values afterwards and the others still have none. ``sw.materialize`` initialises only the tensors
    without values. So load first and then materialise: this never overwrites loaded values, and it initialises the rest
    (say tables that are not stored). Parameters stay the same objects, so optimizers that were made before still have
    them.

    Args:
        model: plain, or sharded by ``fully_shard`` in any layout and strategy. Tied weights must be stored at least
            once; if they are stored under several names, the values must be equal.
        path: a file (.safetensors; .pt, .pth or .bin of ``torch.save``, opened with ``weights_only=True``), an index
            (.index.json), or a folder with an index or a single file. Or a dict from keys to tensors, such as a
            bucket of :func:`stream_weights`.
        key_map: where the model's tensors are stored: a dict from names in the model to keys (a name that is not in it
            is its own key), or a callable. Values are keys, or :class:`Transposed`, :class:`Slice`, :class:`Stacked`,
            :class:`Joined` of keys, or None for a tensor that is not stored and stays unchanged. Default: for a model
            of transformers 5 its list of conversions (renamed weights, experts stored one by one), for other models the
            same names.
        allow_missing: True, or names in the model, with ``*`` as in file names, that need not be stored. Tensors that
            transformers does not save (``_keys_to_ignore_on_save``) need not be stored either: they keep the values
            from the model's constructor. On the meta device the constructor computes no values, so there they must be
            stored.
        allow_unexpected: True, or keys that may be stored without a place in the model, with ``*``.
        device: device of tensors that have no memory yet. Default: the mesh's device; for plain models the CPU.

    Returns:
        The missing and unexpected names that were allowed, and the number of bytes that this rank has read.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: a file is damaged, or names, shapes or dtypes do not fit. One error counts the tensors that are
            missing, unexpected or of another shape, and names the first of each. The model is unchanged.
        RuntimeError: another rank failed, or the model is in use.
    """
    refuse_while_deferring("load_pretrained")
    units = units_of(model)
    ranks = ranks_of(model)
    at_rest(units, "load_pretrained was called")
    patterns = _patterns(allow_missing), _patterns(allow_unexpected)
    plan: _LoadPlan = ranks.run_own(
        lambda: _plan(model, path, key_map, *patterns), others_raise=OtherRankFailed
    )
    _refuse_different_files(ranks, plan)
    on_meta = (
        torch.device(device)
        if device is not None
        else units[0].ranks.device
        if units
        else torch.device("cpu")
    )
    bytes_read = ranks.run_own(
        lambda: sum(_fill(load, on_meta) for load in plan.in_order()), others_raise=OtherRankFailed
    )
    return Loaded(plan.missing, plan.unexpected, bytes_read + plan.bytes_compared)


def _refuse_different_files(ranks: RankGroup, plan: _LoadPlan) -> None:
    """Raise if ranks read copies of a checkpoint that have different tensors."""
    stored = plan.loads[0].stored.values() if plan.loads else ()
    forms = sorted((s.key, tuple(s.shape), str(s.dtype)) for s in stored)
    ranks.check_equal(
        ranks.all_gather(hash_of((forms, plan.missing)), "states"),
        lambda others, *_: ValueError(
            f"{ranks_in_words(others).capitalize()} found other tensors in its files than rank {ranks.numbers[0]}: "
            "names, shapes or dtypes differ. Nothing was changed. Give every rank the same files."
        ),
    )


def _patterns(allowed: bool | Iterable[str]) -> tuple[str, ...]:
    if isinstance(allowed, bool):
        return ("*",) if allowed else ()
    if isinstance(allowed, str):
        raise TypeError(f"expected True, False or a list of names, got the string {allowed!r}")
    return tuple(allowed)


class _Load(NamedTuple):
    entry: ModelTensor
    source: TensorSource
    stored: dict[str, FileTensor]

    @property
    def place(self) -> tuple[Path, int]:
        first = self.stored[keys_of(self.source)[0]]
        return first.file, first.position


@dataclass
class _LoadPlan:
    loads: list[_Load] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_compared: int = 0

    def in_order(self) -> list[_Load]:
        """Return the tensors in the order of the files, which is fast on disks."""
        return sorted(self.loads, key=lambda load: load.place)


def _plan(
    model: nn.Module,
    path: str | os.PathLike[str] | Mapping[str, Tensor],
    key_map: KeyMap | None,
    may_miss: tuple[str, ...],
    may_be_unexpected: tuple[str, ...],
) -> _LoadPlan:
    """Return the tensors to read. Raises a ValueError for everything that does not fit."""
    stored = in_memory(path) if isinstance(path, Mapping) else open_model(path)
    plan = _LoadPlan()
    used: set[str] = set()
    missing: list[str] = []
    unfit: list[str] = []
    copies: list[tuple[_Load, _Load]] = []
    refuse_graphs(model)
    tensors = tensors_of(model)
    if key_map is None:
        key_map = transformers_key_map(model, [name for entry in tensors for name in entry.names], stored)
    aliases = aliases_of(model, tensors)
    not_stored = names_not_stored(model)
    for entry in tensors:
        sources = {s: name for name in entry.names if (s := source_of(key_map, name)) is not None}
        used.update(key for source in sources for key in keys_of(source))
        there = [s for s in sources if all(key in stored for key in keys_of(s))]
        if not there:
            if sources and not entry.optional:
                plan.missing.append(entry.name)
                computed = not_stored.issuperset(entry.names)
                if not (computed and entry.is_constructed) and not _allowed(entry.names, may_miss):
                    problem = _missing_in_words(entry, next(iter(sources)), stored)
                    missing.append(problem + " (its constructor computes it: use deferred_init)" * computed)
            continue
        loads = [_Load(entry, source, stored) for source in there]
        problems = [p for load in loads if (p := _misfit(load, sources[load.source])) is not None]
        if entry.name in aliases:
            problems.append(
                f"{entry.name!r}: it holds no values yet and shares its memory with {aliases[entry.name]!r}, which "
                "would not get the loaded values; call materialize first"
            )
        unfit += problems
        if not problems:
            plan.loads.append(loads[0])
            copies += [(loads[0], other) for other in loads[1:]]
    plan.unexpected = [key for key in stored if key not in used]
    unexpected = [repr(key) for key in plan.unexpected if not _allowed([key], may_be_unexpected)]
    if not (missing or unexpected or unfit):
        for one, other in copies:
            nbytes, equal = _compare(one, other)
            plan.bytes_compared += nbytes
            if not equal:
                unfit.append(
                    f"{one.entry.name!r} is tied to {one.entry.names[1]!r}, and {keys_of(one.source)[0]!r} and "
                    f"{keys_of(other.source)[0]!r} have different values"
                )
    if missing or unexpected or unfit:
        raise ValueError(
            _problems_in_words("The dict" if isinstance(path, Mapping) else path, missing, unexpected, unfit)
        )
    return plan


def _allowed(names: list[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _missing_in_words(entry: ModelTensor, source: TensorSource, stored: dict[str, FileTensor]) -> str:
    absent = [key for key in dict.fromkeys(keys_of(source)) if key not in stored]
    return (
        repr(entry.name) if absent == [entry.name] else f"{entry.name!r} (stored as {abbreviated(absent, 3)})"
    )


def _misfit(load: _Load, name: str) -> str | None:
    """Return the reason why the stored tensor does not fit the model's tensor."""
    tensor = load.entry.tensor
    keys = keys_of(load.source)
    label = repr(name) if keys == [name] else f"{name!r} (stored as {abbreviated(keys, 3)})"
    try:
        shape, _ = views_of(load.source, lambda key: load.stored[key].on_meta())
    except ValueError as error:
        return f"{label}: {error}"
    if shape != tensor.shape:
        return f"{label}: expected shape {tuple(tensor.shape)}, found {tuple(shape)}"
    for key in keys:
        stored_dtype = load.stored[key].dtype
        if stored_dtype != tensor.dtype and not (
            stored_dtype.is_floating_point and tensor.dtype.is_floating_point
        ):
            return f"{label}: expected {tensor.dtype}, found {stored_dtype}; this dtype cannot be converted"
    return None


def _problems_in_words(path: object, missing: list[str], unexpected: list[str], unfit: list[str]) -> str:
    lines = [f"{path} does not fit the model. Nothing was changed."]
    for what, entries in (
        ("Missing in the files", missing),
        ("Unexpected, not in the model", unexpected),
        ("With another shape, dtype or value", unfit),
    ):
        if entries:
            lines.append(f"{what} ({len(entries)}): {abbreviated(entries, NAMED)}.")
    if missing or unexpected:
        lines.append(
            "If names differ, pass a key_map. If you intend this, pass allow_missing or allow_unexpected."
        )
    return "\n".join(lines)


# -- reading -----------------------------------------------------------------------------------------------------------


def _fill(load: _Load, device: torch.device) -> int:
    """Copy this rank's part from the files. Returns the number of bytes read."""
    entry = load.entry
    if entry.unit is None and not entry.has_values:
        entry = allocate(entry, device)
    count = _read(load, entry.boxes())
    mark_loaded(entry)
    return count


def _read(load: _Load, boxes: list[Box]) -> int:
    """Copy the content of these boxes. Returns the number of bytes read."""
    _, views = views_of(load.source, lambda key: load.stored[key].view())
    count = 0
    for box in boxes:
        for offsets, stored in views:
            shared = overlap((box.offsets, box.sizes), (offsets, stored.shape))
            if shared is not None:
                part = shared.of(stored, offsets)
                shared.of(box.local, box.offsets).copy_(part)
                count += part.nbytes
    return count


def _compare(one: _Load, other: _Load) -> tuple[int, bool]:
    """Return the number of bytes read, and whether both sources have equal values for this rank's part."""
    entry = one.entry
    parts = [
        [Box(offsets, torch.empty(local.shape, dtype=local.dtype)) for offsets, local in entry.boxes()]
        for _ in range(2)
    ]
    count = _read(one, parts[0]) + _read(other, parts[1])
    return count, all(same_bits(a.local, b.local) for a, b in zip(*parts, strict=True))
