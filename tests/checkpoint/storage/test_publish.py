"""A process that is killed between any two steps: what was at the place is there, or what was written, and all of it.

Checkpoints, folders of models, and single files become whole in the same way. The next save removes what is left.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import convert_checkpoint as convert, save_state
from shardwright.checkpoint.pretrained.folder import open_model
from shardwright.checkpoint.storage import local_store, publishing
from tests.checkpoint.kit.calls import Call, recorded
from tests.checkpoint.kit.states import state, step_of
from tests.support.pool import forkserver


def save_model(path: Path, step: int) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, step)
    nn.init.constant_(model.bias, step)
    sw.save_pretrained(model, path, max_shard_size=16, overwrite=True)


def step_of_model(path: Path) -> int | None:
    try:
        stored = open_model(path)
    except FileNotFoundError:
        return None
    (step,) = {value for each in stored.values() for value in each.view().flatten().tolist()}
    assert len(stored) == 2
    return int(step)


def save_file(path: Path, step: int) -> None:
    sw.checkpoint.write_file(path, lambda stream: torch.save({"step": step}, stream))


def step_of_file(path: Path) -> int | None:
    sw.checkpoint.is_checkpoint(path)  # a load begins with it
    return int(torch.load(path)["step"]) if path.exists() else None


def convert_to(form: str) -> Callable[[Path, int], None]:
    def save(path: Path, step: int) -> None:
        source = path.parent.parent / f"source-{step}.pt"
        torch.save({"weight": torch.full((2, 2), float(step))}, source)
        path.unlink(missing_ok=True)  # a conversion replaces nothing
        convert(source, path, form)

    return save


def step_of_weights(path: Path) -> int | None:
    return int(open_model(path)["weight"].view()[0, 0]) if path.exists() else None


class Kind(NamedTuple):
    name: str
    save: Callable[[Path, int], object]
    step_of: Callable[[Path], int | None]


KINDS = {
    "checkpoint": Kind("c", lambda path, step: save_state(path, state(step), overwrite=True), step_of),
    "model": Kind("c", save_model, step_of_model),
    "file": Kind("c", save_file, step_of_file),
    "torch": Kind("c.pt", convert_to("torch"), step_of_weights),
    "safetensors": Kind("c.safetensors", convert_to("safetensors"), step_of_weights),
}


def save_and_die(kind: str, path: Path, number: int, exchange: bool) -> None:
    """Save step 2, and be killed before a call that changes the file system. Exits with 0 if there are fewer calls."""

    def die(at: int, call: Call) -> None:
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if not exchange:
        local_store._exchange = lambda one, other: False
    with recorded(path.parent, before=die):
        KINDS[kind].save(path, 2)
    os._exit(0)


CASES = [
    *(
        (kind, older)
        for kind in ("checkpoint", "model", "file")
        for older in ("first", "exchange", "renames")
    ),
    *((kind, "first") for kind in ("torch", "safetensors")),
]


@pytest.mark.extensive("a process for each call", but=("model-renames", "file-renames", "safetensors-first"))
@pytest.mark.parametrize(("kind", "older"), CASES, ids=["-".join(case) for case in CASES])
def test_a_kill_between_any_two_steps(tmp_path: Path, kind: str, older: str) -> None:
    name, save, step_of = KINDS[kind]
    number, outcomes, exit_code = 0, set(), -9
    while exit_code == -9:
        path = tmp_path / f"{number}" / name
        path.parent.mkdir()
        if older != "first":
            save(path, 1)
        child = forkserver().Process(target=save_and_die, args=(kind, path, number, older == "exchange"))
        child.start()
        child.join()
        exit_code = child.exitcode
        step = step_of(path)
        assert step in (None if older == "first" else 1, 2), number
        outcomes.add(step)
        save(path, 3)
        assert os.listdir(path.parent) == [name], number
        assert step_of(path) == 3
        number += 1
    assert exit_code == 0 and step == 2
    assert len(outcomes) == 2 and number > 4, (outcomes, number)


@pytest.mark.parametrize("kind", KINDS)
def test_another_program_removes_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name, save, step_of = KINDS[kind]
    path = tmp_path / "place" / name
    path.parent.mkdir()
    replaces = kind in ("checkpoint", "model", "file")
    if replaces:
        save(path, 1)

    def removed(unfinished: local_store.LocalPartial, overwrite: bool) -> None:
        unfinished.abandon(())
        commit(unfinished, overwrite)

    commit = local_store.LocalPartial.commit
    monkeypatch.setattr(local_store.LocalPartial, "commit", removed)
    with pytest.raises(OSError, match=f"{name}: what this save had written was removed, by another program"):
        save(path, 2)
    assert step_of(path) == (1 if replaces else None)
    assert os.listdir(path.parent) == ([name] if replaces else [])


@pytest.mark.parametrize("kind", ["checkpoint", "model", "file"])
def test_a_disk_that_fails_is_not_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """If the names cannot be written to disk, what was written gets another name, and the error is the disk's."""
    name, save, step_of = KINDS[kind]
    path = tmp_path / name
    save(path, 1)

    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(local_store, "sync_folder", failing)
        with pytest.raises(OSError, match="Input/output error"):
            save(path, 2)
    assert step_of(path) == 1
    save(path, 3)
    assert step_of(path) == 3 and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_cannot_look_for_leftovers_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A failure after the rename is none of the save: the next one removes what is left."""
    name, save, step_of = KINDS[kind]
    path = tmp_path / "c" / name
    path.parent.mkdir()
    refused: list[str] = []
    iterdir, unlink = Path.iterdir, Path.unlink

    def refuse(real: Callable[..., Any], is_refused: Callable[[Path], bool]) -> Callable[..., Any]:
        def act(each: Path, **options: Any) -> Any:
            if is_refused(each):
                refused.append(each.name)
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(each))
            return real(each, **options)

        return act

    for step in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", refuse(iterdir, lambda each: each == path.parent))
            patch.setattr(Path, "unlink", refuse(unlink, lambda each: each.name.endswith(".partial")))
            save(path, step)
        assert step_of(path) == step and refused
    save(path, 3)
    assert step_of(path) == 3 and os.listdir(path.parent) == [name]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_came_in_the_meantime_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Where the file system has links. Elsewhere the file is replaced, since nothing else is whole in one step."""
    if not links:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "one.safetensors"

    def write(stays: bool) -> None:
        with publishing.publish(local_store.SingleFile(path).unfinished()) as unfinished:
            unfinished.path.write_text("mine")
            if stays:
                path.write_text("another's")

    write(stays=False)
    assert path.read_text() == "mine" and [each.name for each in tmp_path.iterdir()] == [path.name]
    path.unlink()
    if links:
        monkeypatch.setattr(
            local_store.SingleFile, "check_free", lambda *_: None
        )  # the last look was before it came
        with pytest.raises(FileExistsError, match="has just written it"):
            write(stays=True)
        assert path.read_text() == "another's" and [each.name for each in tmp_path.iterdir()] == [path.name]
