"""The content of a checkpoint, and whether it is whole, in words: for ``shardwright inspect``.

It reads checkpoints of runs, of ``sw.save_checkpoint`` and of torch's distributed checkpoint, and folders of runs. No
file is executed, and nothing is written. Text from a checkpoint is printed without control characters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from shardwright.checkpoint.format.digests import Damaged
from shardwright.checkpoint.format.index import INDEX, METADATA, VERSION, UnknownVersion
from shardwright.checkpoint.load.loading import open_checkpoint
from shardwright.checkpoint.storage.places import LocalStore, Location, store_of
from shardwright.checkpoint.storage.stores import Store
from shardwright.train.errors import UserError, counted
from shardwright.train.launch.progress import patience
from shardwright.train.run.earlier import POSITION_FILE, is_earlier, open_earlier
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import Place, Position, saved_steps, step_folder
from shardwright.train.run.stored_checkpoint import Stored, check_files, compare_lengths, position_in

Say = Callable[[str], None]
LARGEST_SHOWN = 8
"""Tensors in the list of the largest ones."""
LONGEST_VALUE = 100
"""Characters of a value."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, for a line of a list."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: int
    nbytes: int


def inspect(location: Location, *, quick: bool, tensors: bool, show: Say, say: Say) -> str | None:
    """Show what a place holds. Returns what is damaged, in a line, or None.

    Args:
        location: a checkpoint, here or behind a URL, or the folder of a run.
        quick: compare the lengths of files alone.
        tensors: list all tensors, not the largest.
        show, say: print what was asked for, and notices of progress.

    Raises:
        UserError: there is no checkpoint, or a later version has saved it.
    """
    try:
        store = store_of(location)
    except ValueError as error:
        raise UserError(f"inspect: {error}") from error
    if not isinstance(store, LocalStore):
        try:
            if saved_steps(str(store)):
                return _inspect_run(str(store), str(store), quick, tensors, show, say)
            return _inspect_one(store, quick, tensors, show, say)
        except OSError as error:  # the store does not answer
            raise UserError(f"inspect: {error}") from error
    path = store.path
    if not os.path.lexists(path):
        raise UserError(f"inspect: expected a checkpoint or the folder of a run, found nothing at {path}")
    if not path.is_dir():
        raise UserError(
            f"inspect: expected the folder of a checkpoint or of a run, found a file at {path}; give the folder that "
            "it is in"
        )
    run, checkpoints = RunFolder(path), path / "checkpoints"
    if run.exists() and not checkpoints.is_dir():
        return _inspect_run(path, checkpoints_of(run, run.config()), quick, tensors, show, say)
    steps = saved_steps(checkpoints) or saved_steps(path)
    if _is_checkpoint(path) or not (checkpoints.is_dir() or steps):
        return _inspect_one(store, quick, tensors, show, say)
    return _inspect_run(path, checkpoints if checkpoints.is_dir() else path, quick, tensors, show, say)


def _is_checkpoint(path: Path) -> bool:
    return any(os.path.lexists(path / name) for name in (INDEX, METADATA, POSITION_FILE))


def _inspect_run(
    path: Place, checkpoints: Place, quick: bool, tensors: bool, show: Say, say: Say
) -> str | None:
    """A line for each checkpoint of a run, and the content of the newest whole one."""
    try:
        steps = saved_steps(checkpoints)
    except OSError as error:  # the store does not answer
        raise UserError(f"inspect: {error}") from error
    if not steps:
        raise UserError(
            f"inspect: expected a checkpoint in {checkpoints}, found none; the run has saved nothing"
        )
    show(f"{printable(str(path))}: {counted(len(steps), 'checkpoint')}")
    damaged: list[str] = []
    newest: Stored | None = None
    for step in steps:
        try:
            stored = _opened(store_of(step_folder(checkpoints, step)))
            _compare(stored, quick, say)
        except Damaged as problem:
            damaged.append(f"step-{step} is damaged: {printable(str(problem))}")
            show(f"  {damaged[-1]}")
            continue
        newest = newest or stored
        outcome = "whole" if stored.has_digests and not quick else _outcome(stored, quick)
        show(f"  {f'step-{step}':<12}  {in_bytes(sum(stored.files().values())):>9}  {outcome}")
    if newest is not None:
        show("")
        for line in _lines(newest, tensors):
            show(line)
    if not damaged:
        return None
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return f"{path}: {damaged[0]}{more}"


def _inspect_one(place: Store, quick: bool, tensors: bool, show: Say, say: Say) -> str | None:
    try:
        stored = _opened(place)
        for line in _lines(stored, tensors):
            show(line)
        _compare(stored, quick, say)
    except Damaged as problem:
        return f"{place} is damaged: {printable(str(problem))}"
    show(f"  {'check':<12} {_outcome(stored, quick)}")
    return None


def _opened(place: Store) -> Stored:
    """A checkpoint by any of the writers. Its position is -1 if no run has saved it."""
    try:
        if isinstance(place, LocalStore) and is_earlier(place.path):
            return Stored(*open_earlier(place.path))
        checkpoint = open_checkpoint(place)
    except UnknownVersion as error:
        raise UserError(f"{place}: {error}") from error
    except OSError as error:
        if error.errno is None:  # of our own, which names the place
            raise UserError(f"inspect: {error}") from error
        raise UserError(f"{place}: cannot read: {error.strerror or error}") from error
    position = _NO_RUN
    if checkpoint.index is not None:
        try:
            position = position_in(checkpoint.index)
        except Damaged:
            pass
    return Stored(position, checkpoint)


_NO_RUN = Position(-1, -1)


def _compare(stored: Stored, quick: bool, say: Say) -> None:
    compare_lengths(stored)
    if quick or not stored.has_digests:
        return
    done, whole = 0, sum(stored.files().values())

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    text = f"reading {printable(str(stored.checkpoint.place))}"
    with patience(say, lambda: f"{text}: {in_bytes(done)} of {in_bytes(whole)}"):
        check_files(stored, 0, 1, progress)


def _outcome(stored: Stored, quick: bool) -> str:
    files = stored.files()
    if not stored.has_digests:
        return (
            f"sizes of {counted(len(files), 'file')} fit; the folder has no digests, so nothing shows whether their "
            "bytes changed"
        )
    if quick:
        return f"sizes of {counted(len(files), 'file')} fit; their digests were not compared (--quick)"
    return (
        f"whole: {counted(len(files), 'file')}, {in_bytes(sum(files.values()))} compared with their SHA-256"
    )


# -- in words ----------------------------------------------------------------------------------------------------------


def _lines(stored: Stored, all_tensors: bool) -> Iterator[str]:
    index, tensors = stored.index, _tensors(stored)
    yield printable(str(stored.checkpoint.place))
    facts = {"format": "a folder of torch's distributed checkpoint"}
    if index is not None:
        facts = {"format": f"shardwright, version {VERSION}; torch's distributed checkpoint reads it, too"}
    elif stored.position != _NO_RUN:
        facts = {
            "format": f"of shardwright 0.2 and before: torch's distributed checkpoint with {POSITION_FILE}"
        }
    if index is not None:
        versions = ", ".join(f"{name} {version}" for name, version in index.about.items())
        facts |= {"written by": f"{counted(index.ranks, 'rank')}, {versions or 'versions not known'}"}
    if stored.position != _NO_RUN:
        facts["step"] = f"{stored.position.step:,}, after {counted(stored.position.samples, 'sample')}"
    facts["tensors"] = f"{len(tensors):,}, {in_bytes(sum(each.nbytes for each in tensors))}"
    for name, text in facts.items():
        yield f"  {name:<12} {printable(text)}"
    kinds: dict[str, list[Tensor]] = {}
    for each in tensors:
        kinds.setdefault(each.name.partition(".")[0], []).append(each)
    for kind, own in sorted(kinds.items(), key=lambda item: -sum(each.nbytes for each in item[1])):
        nbytes = in_bytes(sum(each.nbytes for each in own))
        yield f"    {printable(kind)[:24]:<24} {nbytes:>9} in {counted(len(own), 'tensor')}"
    yield from _lines_of_values(stored)
    shown = tensors if all_tensors else sorted(tensors, key=lambda each: -each.nbytes)[:LARGEST_SHOWN]
    if shown:
        title = (
            "all tensors"
            if all_tensors or len(shown) == len(tensors)
            else f"the {len(shown)} largest tensors"
        )
        yield f"  {title}"
    width = max((len(printable(each.name)) for each in shown), default=0)
    for each in shown:
        parts = f"  in {each.parts} parts" if each.parts > 1 else ""
        shape = " x ".join(map(str, each.shape)) or "a number"
        yield f"    {printable(each.name):<{width}}  {in_bytes(each.nbytes):>9}  {each.dtype} {shape}{parts}"


def _tensors(stored: Stored) -> list[Tensor]:
    if stored.index is not None:
        return [
            Tensor(name, _name_of(each.dtype), each.shape, len(each.parts), each.nbytes)
            for name, each in stored.index.tensors.items()
        ]
    assert stored.checkpoint.metadata is not None
    return [
        Tensor(
            name,
            _name_of(entry.properties.dtype),
            tuple(entry.size),
            len(entry.chunks),
            prod(entry.size) * entry.properties.dtype.itemsize,
        )
        for name, entry in stored.checkpoint.metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    ]


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _lines_of_values(stored: Stored) -> Iterator[str]:
    """Values that are no tensors, and whose random generators there are."""
    if stored.index is None:
        assert stored.checkpoint.metadata is not None
        entries = stored.checkpoint.metadata.state_dict_metadata.values()
        if count := sum(isinstance(entry, BytesStorageMetadata) for entry in entries):
            yield f"  {'values':<12} {count:,}, pickled, so they are not read"
        return
    values = {name: each.value for name, each in stored.index.values.items()}
    if values:
        yield f"  {'values':<12} {len(values):,}"
    for name, value in values.items():
        yield f"    {printable(name)}: {_shortened(printable(repr(value)))}"
    of_ranks = stored.contents().get("generators")
    if isinstance(of_ranks, Mapping):
        names: dict[str, None] = {}
        for own in of_ranks.values():
            names.update(dict.fromkeys(map(str, own if isinstance(own, Mapping) else ())))
        yield f"  {'generators':<12} {printable(', '.join(names))} of {counted(len(of_ranks), 'rank')}"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def in_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def printable(text: str) -> str:
    """The text without control characters, which would change the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
