"""The content of a checkpoint, and whether it is whole, in words: for ``shardwright inspect``.

It reads checkpoints of runs, of ``sw.save_checkpoint`` and of torch's distributed checkpoint, and folders of runs. No
file is executed, and nothing is written. Text from a checkpoint is printed without control characters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from shardwright.checkpoint import (
    Damaged,
    StoredForm,
    UnknownVersion,
    folder_or_url,
    has_description,
    open_checkpoint,
)
from shardwright.train.errors import UserError, as_user_errors, counted, printable
from shardwright.train.report.progress import patience_about_bytes
from shardwright.train.run.folder import RunFolder, checkpoints_near, checkpoints_of, to_begin_again
from shardwright.train.run.position import FolderOrUrl, Position, saved_steps, step_folder
from shardwright.train.run.stored_checkpoint import RunCheckpoint, position_in

Say = Callable[[str], None]
LARGEST_SHOWN = 8
"""Tensors in the list of the largest ones."""
LONGEST_VALUE = 100
"""Characters of a value."""


def inspect(
    location: str | os.PathLike[str], *, quick: bool, tensors: bool, show: Say, say: Say
) -> str | None:
    """Show what a place holds. Returns what is damaged, in a line, or None.

    Args:
        location: a checkpoint, here or behind a URL, or the folder of a run.
        quick: compare the lengths of files alone.
        tensors: list all tensors, not the largest.
        show, say: print what was asked for, and notices of progress.

    Raises:
        UserError: there is no checkpoint, or a later version has saved it.
    """
    with as_user_errors(ValueError, prefix="inspect: "):
        path = folder_or_url(location)
    if isinstance(path, str):
        with as_user_errors(OSError, prefix="inspect: "):
            if saved_steps(path):
                return _inspect_run(path, path, quick, tensors, show, say)
            return _inspect_one(path, quick, tensors, show, say)
    if not os.path.lexists(path):
        raise UserError(
            f"inspect: expected a checkpoint or the folder of a run, found nothing at {path}"
            f"{checkpoints_near(path)}"
        )
    if not path.is_dir():
        raise UserError(
            f"inspect: expected the folder of a checkpoint or of a run, found a file at {path}; give the folder that "
            "it is in"
        )
    run = RunFolder(path)
    checkpoints = run.checkpoints
    if run.exists() and not checkpoints.is_dir():
        return _inspect_run(path, checkpoints_of(run, run.config().checkpoint), quick, tensors, show, say)
    steps = saved_steps(checkpoints) or saved_steps(path)
    if has_description(path) or not (checkpoints.is_dir() or steps):
        return _inspect_one(path, quick, tensors, show, say)
    return _inspect_run(path, checkpoints if checkpoints.is_dir() else path, quick, tensors, show, say)


def _inspect_run(
    path: FolderOrUrl, checkpoints: FolderOrUrl, quick: bool, tensors: bool, show: Say, say: Say
) -> str | None:
    """Return a line for each checkpoint of a run, and the content of the newest whole one, else of the newest readable
    one.

    A checkpoint that this process cannot examine, as one of a later version, hides no other. Its UserError is raised at
    the end, unless one is damaged.
    """
    with as_user_errors(OSError, prefix="inspect: "):
        steps = saved_steps(checkpoints)
    if not steps:
        raise UserError(
            f"inspect: expected a checkpoint in {checkpoints}, found none; the run has saved nothing; "
            f"{to_begin_again(checkpoints)}"
        )
    show(f"{printable(str(path))}: {counted(len(steps), 'checkpoint')}")
    damaged: list[str] = []
    whole: list[RunCheckpoint] = []
    opened: list[RunCheckpoint] = []
    unread: list[UserError] = []
    for step in steps:
        try:
            stored = _opened(step_folder(checkpoints, step), Damaged)
            opened.append(stored)
            _compare(stored, quick, say)
        except Damaged as problem:
            damaged.append(f"step-{step} is damaged: {printable(str(problem))}")
            show(f"  {damaged[-1]}")
            continue
        except UserError as problem:
            unread.append(problem)
            show(f"  step-{step} cannot be examined: {printable(str(problem))}")
            continue
        whole.append(stored)
        outcome = "whole" if stored.checkpoint.has_digests and not quick else _outcome(stored, quick)
        show(f"  {f'step-{step}':<12}  {in_bytes(sum(stored.checkpoint.files.values())):>9}  {outcome}")
    for stored in (whole or opened)[:1]:
        show("")
        for line in _lines(stored, tensors):
            show(line)
    if not damaged and unread:
        raise unread[0]
    if not damaged:
        return None
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return f"{path}: {damaged[0]}{more}"


def _inspect_one(place: FolderOrUrl, quick: bool, tensors: bool, show: Say, say: Say) -> str | None:
    damage = None
    try:
        stored = _opened(place)
    except Damaged as problem:
        return f"{place} is damaged: {printable(str(problem))}"
    try:
        _compare(stored, quick, say)
    except Damaged as problem:  # said before the list, which may be long
        damage = f"{place} is damaged: {printable(str(problem))}"
        show(damage)
    for line in _lines(stored, tensors):
        show(line)
    if damage is None:
        show(f"  {'check':<12} {_outcome(stored, quick)}")
    return damage


def _opened(place: FolderOrUrl, missing: type[Exception] = UserError) -> RunCheckpoint:
    """Return a checkpoint by any of the writers. Its position is -1 if no run has saved it. `missing`: the error if the
    place has none."""
    try:
        checkpoint = open_checkpoint(place)
    except UnknownVersion as error:
        raise UserError(f"{place}: {error}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and missing is Damaged:
            raise Damaged(str(error).removeprefix(f"{place}: ")) from error
        if error.errno is None:  # of our own, which names the place
            raise UserError(f"inspect: {error}") from error
        raise UserError(f"{place}: cannot read: {error.strerror or error}") from error
    position = _NO_RUN
    try:
        position = position_in(checkpoint)
    except Damaged:
        pass
    return RunCheckpoint(position, checkpoint)


_NO_RUN = Position(-1, -1)


def _compare(stored: RunCheckpoint, quick: bool, say: Say) -> None:
    whole, folder = in_bytes(sum(stored.checkpoint.files.values())), printable(stored.folder)
    with as_user_errors(OSError, prefix="inspect: "):
        stored.checkpoint.check_lengths()
        if quick or not stored.checkpoint.has_digests:
            return
        with patience_about_bytes(
            say, lambda done: f"reading {folder}: {in_bytes(done)} of {whole}"
        ) as progress:
            stored.checkpoint.verify(progress)


def _outcome(stored: RunCheckpoint, quick: bool) -> str:
    files = stored.checkpoint.files
    if not stored.checkpoint.has_digests:
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


def _lines(stored: RunCheckpoint, all_tensors: bool) -> Iterator[str]:
    checkpoint = stored.checkpoint
    tensors = list(checkpoint.tensors.items())
    yield printable(stored.folder)
    facts = {"format": "a folder of torch's distributed checkpoint"}
    if checkpoint.ranks is not None:
        form = f"shardwright, version {checkpoint.version}"
        facts = {"format": f"{form}; torch's distributed checkpoint reads it, too"}
        versions = ", ".join(f"{name} {version}" for name, version in checkpoint.about.items())
        facts |= {"written by": f"{counted(checkpoint.ranks, 'rank')}, {versions or 'versions not known'}"}
    if stored.position != _NO_RUN:
        facts["step"] = f"{stored.position.step:,}, after {counted(stored.position.samples, 'sample')}"
    facts["tensors"] = f"{len(tensors):,}, {in_bytes(sum(each.nbytes for _, each in tensors))}"
    for name, text in facts.items():
        yield f"  {name:<12} {printable(text)}"
    kinds: dict[str, list[StoredForm]] = {}
    for name, each in tensors:
        kinds.setdefault(name.partition(".")[0], []).append(each)
    for kind, own in sorted(kinds.items(), key=lambda item: -sum(each.nbytes for each in item[1])):
        nbytes = in_bytes(sum(each.nbytes for each in own))
        yield f"    {printable(kind)[:24]:<24} {nbytes:>9} in {counted(len(own), 'tensor')}"
    yield from _lines_of_values(stored)
    shown = tensors if all_tensors else sorted(tensors, key=lambda each: -each[1].nbytes)[:LARGEST_SHOWN]
    if shown:
        title = (
            "all tensors"
            if all_tensors or len(shown) == len(tensors)
            else f"the {len(shown)} largest tensors"
        )
        yield f"  {title}"
    width = max((len(printable(name)) for name, _ in shown), default=0)
    for name, each in shown:
        parts = f"  in {each.parts} parts" if each.parts > 1 else ""
        shape = " x ".join(map(str, each.shape)) or "a number"
        dtype = str(each.dtype).removeprefix("torch.")
        yield f"    {printable(name):<{width}}  {in_bytes(each.nbytes):>9}  {dtype} {shape}{parts}"


def _lines_of_values(stored: RunCheckpoint) -> Iterator[str]:
    """Yield values that are no tensors, and whose random generators there are."""
    values = stored.checkpoint.values
    if stored.checkpoint.ranks is None:
        if values:
            yield f"  {'values':<12} {len(values):,}, pickled, so they are not read"
        return
    if values:
        yield f"  {'values':<12} {len(values):,}"
    for name, value in values.items():
        yield f"    {printable(name)}: {_shortened(printable(repr(value)))}"
    generators = [name.split(".")[1:] for name in stored.checkpoint.tensors if name.startswith("generators.")]
    if generators:
        kinds = ", ".join(dict.fromkeys(".".join(name[1:]) for name in generators))
        ranks = len({name[0] for name in generators})
        yield f"  {'generators':<12} {printable(kinds)} of {counted(ranks, 'rank')}"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def in_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
