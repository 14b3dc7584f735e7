"""A file system for fsspec like a store of objects, in a folder, so that all ranks see it: ``fake:///folder/...``.

An object appears when its upload ends, in one step. Nothing can be renamed. Calls are counted, a chosen change fails,
and lists can be late. What it must never contain: anything of checkpoints.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

FAILS_AT = "FAKE_STORE_FAILS_AT"  #: in the environment: uploads of objects fail whose paths contain it
HIDDEN = ".uploads"  #: where parts of unfinished uploads are


class FakeStore(AbstractFileSystem):
    """Objects are files; a list shows those that :attr:`late` does not hold back."""

    protocol = "fake"
    cachable = False

    calls: ClassVar[Counter[str]] = Counter()
    bytes_read: ClassVar[int] = 0
    largest_request: ClassVar[int] = 0
    changes: ClassVar[int] = 0  #: requests that change the store
    fail_at: ClassVar[int | None] = None  #: the number of the change that fails
    failure: ClassVar[str] = (
        "once"  #: "down": later requests, too; "lost": it is done; "answer": of all requests
    )
    late: ClassVar[bool] = False  #: lists are empty
    reason: ClassVar[OSError] = OSError(errno.EIO, "the store has failed")

    @classmethod
    def restart(cls, fail_at: int | None = None, failure: str = "once", late: bool = False) -> None:
        cls.calls.clear()
        cls.bytes_read = cls.largest_request = cls.changes = 0
        cls.fail_at, cls.failure, cls.late = fail_at, failure, late

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("fake://").strip("/")

    def _asked(self, call: str) -> None:
        cls = type(self)
        cls.calls[call] += 1
        if cls.failure == "answer" and sum(cls.calls.values()) == cls.fail_at:
            raise cls.reason
        if cls.fail_at is not None and cls.failure == "down" and cls.changes >= cls.fail_at:
            raise cls.reason

    def _changed(self, call: str, change: Any) -> None:
        self._asked(call)
        cls = type(self)
        cls.changes += 1
        fails = cls.changes == cls.fail_at and cls.failure != "answer"
        if not fails or cls.failure == "lost":
            change()
        if fails:
            raise cls.reason

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self._asked("ls")
        folder = Path(self._strip_protocol(path))
        if not folder.is_dir() or type(self).late:
            raise FileNotFoundError(path)
        entries = [
            self._entry(each) for each in folder.iterdir() if each.name != HIDDEN and _has_objects(each)
        ]
        return entries if detail else [each["name"] for each in entries]

    def _entry(self, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        return {"name": str(path), "size": path.stat().st_size if kind == "file" else 0, "type": kind}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._asked("info")
        return self._entry(Path(self._strip_protocol(path)))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._asked("cat_file")
        content = Path(self._strip_protocol(path)).read_bytes()[start:end]
        type(self).bytes_read += len(content)
        type(self).largest_request = max(type(self).largest_request, len(content))
        return content

    def rm_file(self, path: str) -> None:
        self._changed("rm_file", lambda: Path(self._strip_protocol(path)).unlink(missing_ok=True))

    def mv(self, *paths: str, **options: Any) -> None:
        raise NotImplementedError("a store of objects cannot rename")

    rename = move = cp_file = copy = mv

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        target = Path(self._strip_protocol(path))

        def appear() -> None:
            if mode == "create" and target.exists():
                raise FileExistsError(path)
            place(target, [value])

        self._changed("pipe_file", appear)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Upload:
        assert mode == "wb", "a load reads ranges"
        return Upload(self, self._strip_protocol(path), mode, block_size=block_size or 1 << 20)


def _has_objects(path: Path) -> bool:
    """Whether it is an object, or a folder: what objects have in their names, so that an empty one is none."""
    return not path.is_dir() or any(each.is_file() for each in path.rglob("*"))


class Upload(AbstractBufferedFile):
    """An upload in parts."""

    def _initiate_upload(self) -> None:
        if os.environ.get(FAILS_AT, "\0") in self.path:
            raise FakeStore.reason
        self.parts: list[bytes] = []
        self.hidden = Path(self.path).parent / HIDDEN / uuid.uuid4().hex
        self.fs._changed("upload", lambda: self.hidden.mkdir(parents=True))

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        FakeStore.largest_request = max(FakeStore.largest_request, len(part))
        self.fs._changed("part", lambda: self.parts.append(part))
        if final:
            self.fs._changed("complete", self._complete)
        return True

    def _complete(self) -> None:
        place(Path(self.path), self.parts)
        shutil.rmtree(self.hidden, ignore_errors=True)

    def discard(self) -> None:
        self.fs._changed("abort", lambda: shutil.rmtree(self.hidden, ignore_errors=True))


def place(target: Path, parts: list[bytes]) -> None:
    """Let an object appear in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.parent / f"{HIDDEN}-{uuid.uuid4().hex}"
    hidden.write_bytes(b"".join(parts))
    os.replace(hidden, target)


def known_to_children(folder: Path) -> None:
    """Let processes that this one starts with its search path know the file system, as an installed package would."""
    package = folder / "fake_store-1.dist-info"
    package.mkdir(exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-store\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[fsspec.specs]\nfake = {__name__}:FakeStore\n")


fsspec.register_implementation("fake", FakeStore, clobber=True)
