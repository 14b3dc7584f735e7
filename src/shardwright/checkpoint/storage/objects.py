"""A checkpoint behind a URL that fsspec knows, such as ``s3://bucket/run-7/step-100``. No object is ever renamed.

Files of a save have its attempt in their names, so two saves never write the same object. ``index.json`` is written
last, in one request: with it the checkpoint is there, without it there is none. fsspec is imported at the first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Self

from shardwright.checkpoint.format.index import UnknownVersion, parse_index
from shardwright.checkpoint.format.names import (
    INDEX,
    MARK,
    METADATA,
    is_mark,
    is_of_checkpoint,
    is_of_save_at_url,
    with_attempt,
)
from shardwright.checkpoint.storage.file_systems import (
    ObjectsBelow,
    causes_of,
    in_one_line,
    promptly,
    write_new,
)
from shardwright.checkpoint.storage.stores import Store, new_attempt, unless_removed
from shardwright.errors import Damaged

BLOCK = 32 << 20  #: bytes of a request that uploads a part of an object; stores take 10,000 of them
SLICE = 8 << 20  #: bytes of a request that reads, and of a write into the buffer of an upload
READ_AT_ONCE = 4 * SLICE  #: read by several requests at the same time
#: File systems whose folders must be made before files are in them. Others would make a bucket of a misspelt name.
_WITH_FOLDERS = {"sftp", "ssh", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "smb", "dask", "dbfs"}


class ObjectStore:
    """The objects below a URL; with ``attempt`` those of a save that is not committed."""

    path = None  #: no folder of this machine

    def __init__(self, url: str, attempt: str | None = None) -> None:
        """Raises ValueError if the URL names no place for a checkpoint."""
        self._objects, self._attempt = ObjectsBelow(url), attempt
        self._url = self._objects.url

    def __str__(self) -> str:
        return self._url

    # -- files --

    def stored_name(self, name: str) -> str:
        return with_attempt(name, self._attempt)

    def create(self, name: str) -> ObjectWriter:
        with self._objects.reported(name, "written"):
            return ObjectWriter(self, self._objects, name)

    def write(self, name: str, content: bytes) -> None:
        """Names without an attempt are written only where no object is: another save may have written it."""
        with self._objects.reported(name, "written"):
            system, path = self._objects.at(name)
            if name not in (METADATA, INDEX):
                system.pipe_file(path, content)
                return
            try:
                write_new(system, path, content)
            except FileExistsError:
                raise FileExistsError(
                    f"{self._url}/{name} was written by another save. Let one save at a time write to a URL"
                ) from None

    def remove(self, name: str) -> None:
        with self._objects.reported(name, "removed"):
            system, path = self._objects.at(name)
            with contextlib.suppress(FileNotFoundError):  # another save that clears this place was faster
                system.rm_file(path)

    def has(self, name: str) -> bool:
        try:
            self.size(name)
        except Damaged:
            return False
        return True

    def size(self, name: str) -> int:
        with self._objects.reported(name, "read"):
            system, path = self._objects.at(name)
            system.invalidate_cache()
            return int(system.info(path)["size"])

    def read(self, name: str) -> bytes:
        with self._objects.reported(name, "read"):
            system, path = self._objects.at(name)
            return bytes(system.cat_file(path))

    def open(self, name: str) -> ObjectReader:
        return ObjectReader(self._objects, name)

    # -- the place of one checkpoint --

    def description(self) -> str:
        name = INDEX if self._attempt is None else self.stored_name(INDEX)
        try:
            promptly(lambda: self.size(name), self._url)
        except Damaged as problem:
            reasons = [in_one_line(error) for error in causes_of(problem)]
            known = [f" ({each})" for each in reasons if " bucket " in each or "onnect" in each][:1]
            raise FileNotFoundError(
                f"{self._url} holds no whole checkpoint{''.join(known)}: a save was interrupted, or the path is wrong"
            ) from None
        return name

    def begin(self, attempt: str, nbytes: int, overwrite: bool) -> None:
        unfinished = self.unfinished(attempt)
        if names := promptly(self.sizes, self._url):
            self._clear(list(names), overwrite)
        if self._objects.protocol in _WITH_FOLDERS:
            with self._objects.reported("", "made"):
                system, path = self._objects.at("")
                system.makedirs(path, exist_ok=True)
        mark = unfinished.stored_name(MARK)
        promptly(lambda: unfinished.write(mark, b"a save has begun\n"), self._url)
        # Two saves that begin at once each have a mark there before they look for others, so one of them sees both.
        if any(is_mark(name) and name != mark for name in self.sizes()):
            raise self._busy()

    def _busy(self) -> FileExistsError:
        return FileExistsError(
            f"{self._url}: another save to this URL is under way. Let one save at a time write to a URL"
        )

    def unfinished(self, attempt: str) -> Self:
        return type(self)(self._url, attempt)

    def check_seen(self) -> None:
        mark = self.stored_name(MARK)
        if not promptly(lambda: self.has(mark), self._url):
            raise OSError(
                f"{self._url}/{mark} is not there, though the first rank has written it: all ranks must save to a "
                "store that they share, and one save at a time"
            )

    def commit(self, unfinished: Store, overwrite: bool) -> None:
        """Write ``index.json``. Only where none is: nothing is overwritten, and a save begins only where nothing is."""
        assert isinstance(unfinished, ObjectStore)
        with unless_removed(self, unfinished):
            self._write_index(unfinished)

    def _write_index(self, unfinished: ObjectStore) -> None:
        unfinished.check_seen()  # a save that begins later with overwrite=True removes it, and our files
        try:
            text = unfinished.read(unfinished.stored_name(INDEX))
        except Damaged:
            raise self._busy() from None
        try:
            self.write(INDEX, text)
        except OSError:
            if not self._holds(text):  # the store may have done it, and only its answer was lost
                raise
        # Once more: such a save removes the mark first, and then looks for an index. So either it finds ours and keeps
        # our files, or the mark is missing here.
        if unfinished.is_removed():
            if self._holds(text):
                self.remove(INDEX)
            raise self._busy()
        for name in (MARK, INDEX):
            with contextlib.suppress(OSError):
                unfinished.remove(unfinished.stored_name(name))

    def is_removed(self) -> bool:
        try:
            return not promptly(lambda: self.has(self.stored_name(MARK)), self._url)
        except OSError:  # no answer; the save is complete
            return False

    def _holds(self, text: bytes) -> bool:
        try:
            return self.read(INDEX) == text
        except (OSError, Damaged):
            return False

    def abandon(self, names: Iterable[str]) -> None:
        """Objects stay if they may be of a committed checkpoint: if ``index.json`` names them, or cannot be read."""
        own = {self.stored_name(name) for name in (*names, MARK)}
        try:
            # First, and promptly: a store that does not answer would keep each of the requests below waiting.
            if promptly(lambda: self._names_attempt(INDEX), self._url):
                return
            own |= {name for name in self.sizes() if f".{self._attempt}." in name}
            own |= {METADATA} if self._names_attempt(METADATA) else set()
        except OSError:
            return
        for name in sorted(own):
            with contextlib.suppress(OSError):
                self.remove(name)
        self._remove_folder()

    def _names_attempt(self, name: str) -> bool:
        try:
            return f"{self._attempt}".encode() in self.read(name)
        except Damaged:  # it is not there
            return False

    def sizes(self) -> dict[str, int]:
        return self._objects.sizes()

    def children(self, recovers: bool) -> list[str]:
        sizes = promptly(self.sizes, self._url)
        return [name for name, nbytes in sizes.items() if not nbytes]  # an object with content is no place

    def check_writable(self) -> None:
        unfinished = self.unfinished(new_attempt())
        mark = unfinished.stored_name(MARK)
        promptly(lambda: unfinished.write(mark, b"a check\n"), self._url)
        unfinished.remove(mark)

    def clear(self) -> None:
        """Other objects than those of saves stay. Files of a folder that was copied here are removed."""
        self._remove(name for name in self.sizes() if is_of_checkpoint(name))
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder if it is empty: it would count as a checkpoint."""
        # Of a user's file system nobody knows whether it has folders.
        if self._objects.protocol in _WITH_FOLDERS or ":" in self._objects.protocol:
            with (
                contextlib.suppress(OSError),
                self._objects.reported("", "removed"),
            ):  # it may hold other files
                system, path = self._objects.at("")
                system.invalidate_cache()
                if system.isdir(path):
                    system.rmdir(path)

    def _clear(self, names: list[str], overwrite: bool) -> None:
        """Remove what an interrupted save has left, or a damaged checkpoint. Raises FileExistsError for all else."""
        foreign = min((name for name in names if not is_of_save_at_url(name)), default=None)
        if foreign is not None:
            raise FileExistsError(
                f"{self._url} holds {foreign}, which no save has written. Choose another URL"
            )
        if INDEX in names:
            problem = self._damage()
            if problem is None:
                raise FileExistsError(
                    f"{self._url} holds a whole checkpoint. It is not replaced, since objects cannot be renamed: "
                    "choose another URL, or delete it first"
                )
            left = f"a damaged checkpoint ({problem})"
        else:
            count = len(names)
            left = f"what an interrupted save has left ({count} object{'s' * (count > 1)})"
        if not overwrite:
            raise FileExistsError(
                f"{self._url} holds {left}. Pass overwrite=True to delete it, or choose another URL"
            )
        self._remove(names)

    def _remove(self, names: Iterable[str]) -> None:
        # First what would let a load or another save take the rest for theirs.
        ordered = sorted(names, key=lambda name: (name != INDEX, not is_mark(name), name))
        is_checked = False
        for name in ordered:
            if not is_checked and name != INDEX and not is_mark(name):
                is_checked = True
                if self.has(INDEX):  # another save has written it meanwhile: see commit
                    raise self._busy()
            self.remove(name)

    def _damage(self) -> str | None:
        """The damage of a committed checkpoint, in words, from its index and sizes alone; None without damage."""
        try:
            index = parse_index(self.read(INDEX))
            for name, file in index.files.items():
                if (nbytes := self.size(name)) != file.nbytes:
                    return f"{name} holds {nbytes:,} bytes, {file.nbytes:,} expected"
        except UnknownVersion:
            return None
        except Damaged as problem:
            return str(problem)
        return None


class ObjectWriter:
    """An object that appears when it is finished. It is uploaded in parts, so that no more than two are in memory."""

    in_order = True

    def __init__(self, store: ObjectStore, objects: ObjectsBelow, name: str) -> None:
        self._store, self._objects, self._name = store, objects, name
        system, path = objects.at(name)
        self._stream = system.open(path, "wb", block_size=BLOCK)

    def write(self, piece: bytes | memoryview, position: int) -> None:
        whole = memoryview(piece)
        with self._objects.reported(self._name, "written"):
            for start in range(0, len(whole), SLICE):
                self._stream.write(whole[start : start + SLICE])

    def finish(self) -> None:
        with self._objects.reported(self._name, "written"):
            self._stream.close()

    def discard(self) -> None:
        """End the upload. The uploaded part does not appear."""
        with contextlib.suppress(Exception):
            self._stream.discard()
        with contextlib.suppress(Exception):
            if not self._stream.closed:
                self._stream.closed = True  # or its end as an object of Python would finish the upload
        with contextlib.suppress(Exception):
            self._store.remove(self._name)  # of file systems where a file appears when it is opened


class ObjectReader:
    """An object, read in ranges. Only the ranges that are asked for are fetched, some at the same time."""

    at_once = READ_AT_ONCE

    def __init__(self, objects: ObjectsBelow, name: str) -> None:
        self._objects, self._name = objects, name

    def read_into(self, target: memoryview, position: int) -> int:
        end = position + min(len(target), READ_AT_ONCE)
        starts = list(range(position, end, SLICE))
        ends = [min(start + SLICE, end) for start in starts]
        with self._objects.reported(self._name, "read"):
            system, path = self._objects.at(self._name)
            pieces = system.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
        for start, stop, piece in zip(starts, ends, pieces, strict=True):
            if isinstance(piece, BaseException) or len(piece) != stop - start:
                raise Damaged(f"{self._name} ends before byte {stop:,}")
            target[start - position : stop - position] = piece
        return end - position

    def close(self) -> None:
        pass
