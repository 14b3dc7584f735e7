"""Programs in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.planner import Alloc, Free, Kernel, Owner, Phase, Program, cache
from shardwright.planner.program import HostWait, Mark, Wait

PROGRAM = Program(
    [
        Phase("build"),
        Alloc(1, 512, "compute", 1),
        Kernel("mm", "gather", 64, ((4, 4), (), (0,)), "float32"),
        Alloc(3, 4, "gather", 0),
        Mark(1, "gather"),
        Wait("compute", 1),
        HostWait(1),
        Free(1),
        Kernel("mm", "gather", 64, ((4, 4), (), (0,)), "float32"),
    ],
    [Owner("slabs", "layers.0", "parameters", ""), Owner("other", "", "mm float32 [4, 4]", "model.py:3")],
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache.folder()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_stored_program_is_found_by_its_key_alone(folder: Path) -> None:
    assert cache.load("one") is None
    cache.store("one", PROGRAM)
    assert cache.load("one") == PROGRAM
    assert cache.load("two") is None
    assert len(files(folder)) == 1


@pytest.mark.parametrize("at", [0, 70, -1])
def test_a_damaged_file_is_as_none_and_is_replaced(folder: Path, at: int) -> None:
    cache.store("one", PROGRAM)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert cache.load("one") is None
    for cut in (b"", bytes(content[:90]), b"\xff\n{}"):
        path.write_bytes(cut)
        assert cache.load("one") is None
    cache.store("one", PROGRAM)
    assert cache.load("one") == PROGRAM


def test_the_newest_programs_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 3)
    for number in range(3):
        cache.store(str(number), PROGRAM)
        os.utime(cache._path(str(number)), (number, number))
    cache.load("0")  # it is among the newest now
    cache.store("3", PROGRAM)
    assert len(files(folder)) == 3
    assert [cache.load(str(number)) is None for number in range(4)] == [False, True, False, False]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    cache.store("one", PROGRAM)
    assert cache.load("one") is None
    assert blocked.read_text() == ""


def test_the_folder_is_below_the_home_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "relative"):  # a relative path is as none, says the XDG specification
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache.folder() == Path.home() / ".cache" / "shardwright" / "plans"
