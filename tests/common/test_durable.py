"""Small files that are replaced whole: whatever call fails, a reader finds the old content or the new."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.common.durable import make_folder, new_file, replace_file, sync_files


def fail_at(patch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """Let the call of this number fail, of those that put a file on disk. Returns the names of the calls."""
    calls: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            if len(calls) > moment:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        return call

    for name in ("fsync", "replace"):
        patch.setattr(os, name, failing(name))
    return calls


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, exists: bool) -> None:
    for moment, done in enumerate((False, False, True, True)):
        path = tmp_path / str(moment) / "file"
        make_folder(path.parent)
        if exists:
            path.write_bytes(b"old")
        before = [path] if exists else []
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, moment)
            if moment == 3:
                replace_file(path, b"new")
            else:
                with pytest.raises(OSError, match=f"No space left.*{path if moment < 2 else path.parent}"):
                    replace_file(path, b"new")
        assert calls == ["fsync", "replace", "fsync"][: moment + 1]  # content, name, folder
        assert list(path.parent.iterdir()) == ([path] if done else before)
        assert not path.exists() or path.read_bytes() == (b"new" if done else b"old")


def test_several_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([number]) * (1 << 16) for number in range(8)]
    threads = [threading.Thread(target=replace_file, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert path.read_bytes() in contents and list(tmp_path.iterdir()) == [path]


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError), new_file(tmp_path / "file") as stream:
        stream.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_files_of_a_folder_are_synced_before_their_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"new")
    for moment in range(4):
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, moment)
            if moment == 3:
                sync_files(tmp_path)
            else:
                with pytest.raises(OSError, match=f"No space left.*{tmp_path}{'/.' if moment < 2 else ''}"):
                    sync_files(tmp_path)
        assert calls == ["fsync"] * min(moment + 1, 3)
