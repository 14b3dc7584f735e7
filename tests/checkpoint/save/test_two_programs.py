"""Two programs that use one place at once: two saves, or a save that replaces what another program reads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import load_checkpoint, save_checkpoint
from shardwright.checkpoint.load import collective_load
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint, checkpoint_at
from shardwright.checkpoint.storage import local_store
from shardwright.checkpoint.storage.local_store import LocalSave, LocalStore
from shardwright.checkpoint.storage.stores import new_attempt


def model(value: float) -> torch.nn.Module:
    made = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def save(path: Path, value: float, overwrite: bool = True) -> None:
    save_checkpoint(path, model(value), extra={"value": value}, generators=False, overwrite=overwrite)


def values(module: torch.nn.Module) -> set[float]:
    return {each for parameter in module.parameters() for each in parameter.flatten().tolist()}


def check_holds(path: Path, value: float) -> None:
    read = model(-1)
    assert load_checkpoint(path, read, generators=False)["value"] == value
    assert values(read) == {value}


@pytest.mark.parametrize("when", ["after the description", "after the comparison"])
def test_a_checkpoint_is_replaced_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path, read = tmp_path / "c", model(-1)
    save(path, 1)
    real = OwnCheckpoint.verify

    def verify(*args: Any) -> None:
        if when == "after the description":
            save(path, 2)
        real(*args)
        if when == "after the comparison":
            save(path, 2)

    monkeypatch.setattr(OwnCheckpoint, "verify", verify)
    with pytest.raises(
        OSError,
        match=r"c: another program has replaced or removed the checkpoint while it was read\. Load it again",
    ):
        load_checkpoint(path, read, generators=False)
    assert values(read) == {-1}
    monkeypatch.setattr(OwnCheckpoint, "verify", real)
    check_holds(path, 2)


@pytest.mark.parametrize("removed", [False, True])
def test_a_checkpoint_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """A load reads the checkpoint that it has compared to the end."""
    path, read = tmp_path / "c", model(-1)
    save(path, 1)
    real = collective_load.read_boxes

    def read_tensors(*args: Any) -> None:
        if removed:
            LocalStore(path).clear()
        else:
            save(path, 2)
        real(*args)

    monkeypatch.setattr(collective_load, "read_boxes", read_tensors)
    assert load_checkpoint(path, read, generators=False)["value"] == 1
    assert values(read) == {1}


def test_a_copy_in_the_place_of_a_checkpoint_is_the_same(tmp_path: Path) -> None:
    """As on file systems that number files when they are looked up."""
    path = tmp_path / "c"
    save(path, 1)
    checkpoint = checkpoint_at(path)
    (tmp_path / "copy").write_bytes((path / "index.json").read_bytes())
    os.replace(tmp_path / "copy", path / "index.json")
    assert checkpoint.description_file._replace(fingerprint=None).is_replaced()
    assert not checkpoint.description_file.is_replaced()
    check_holds(path, 1)


def test_more_files_than_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are opened when they are read are compared again."""
    monkeypatch.setattr("shardwright.checkpoint.load.replacement.HELD", 0)
    path, read = tmp_path / "c", model(-1)
    save(path, 1)
    check_holds(path, 1)
    real = collective_load.read_boxes

    def read_tensors(*args: Any) -> None:
        save(path, 2)
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(collective_load, "read_boxes", read_tensors)
        with pytest.raises(
            OSError, match=r"Some values were read before that, and others were not\. Load it again"
        ):
            load_checkpoint(path, read, generators=False)
    assert values(read) == {-1}
    check_holds(path, 2)


def test_a_save_cleans_up_what_another_save_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal goes on in a folder that gets another name meanwhile. So it never begins in one that may get it."""
    path, attempt = tmp_path / "c", new_attempt()
    save(path, 1)
    save(tmp_path / "other", 2)
    other = local_store.partial_folder(path, attempt)
    os.rename(tmp_path / "other", other)

    def rmtree(folder: Path, **_: Any) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(FileNotFoundError):  # what its own save does at this moment
            local_store._exchange(other, path)
        for name in os.listdir(descriptor):
            os.unlink(name, dir_fd=descriptor)
        os.close(descriptor)

    monkeypatch.setattr("shutil.rmtree", rmtree)
    LocalStore(path).remove_leftovers()
    check_holds(path, 1)


def test_two_first_saves_end_together(tmp_path: Path) -> None:
    """Both have found nothing at the place when they began."""
    path = tmp_path / "c"
    saves = [LocalStore(path).unfinished() for _ in range(2)]
    for value, each in enumerate(saves, 1):
        save(each.path, value)
    saves[0]._give_name(overwrite=False)
    with pytest.raises(FileExistsError, match="another save has just written it"):
        saves[1]._give_name(overwrite=False)
    check_holds(path, 1)
    saves[1].commit(overwrite=True)
    check_holds(path, 2)


def test_something_appears_at_the_place_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "c", LocalSave.begin

    def begin(*args: Any) -> None:
        real(*args)
        path.mkdir()
        (path / "mine.txt").write_text("kept")

    monkeypatch.setattr(LocalSave, "begin", begin)
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        save(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["c"] and (path / "mine.txt").read_text() == "kept"
