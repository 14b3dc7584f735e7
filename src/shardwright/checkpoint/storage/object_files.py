"""Objects below a URL that fsspec knows: listed, read in ranges, and written in parts, with errors in one line.

No object is ever renamed. fsspec is imported at the first use. Nothing here knows checkpoints or saves: `object_store`
does.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shardwright.common.errors import Damaged
from shardwright.engine.extend import stores

PATIENCE = 30.0  #: seconds for the first answer of a store; what follows is retried as its file system does
_CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or log in with gcloud",
}
T = TypeVar("T")


class StoreError(OSError):
    """Raised if a store did not do what was asked for. The message is one line."""


class ObjectsBelow:
    """The file system of fsspec behind a URL, and its errors in one line."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL names no place for a checkpoint."""
        found = re.fullmatch(r"([A-Za-z][\w+.-]*(?::\w+)?)://([^?#]*)", url)
        if found is None or "::" in url:
            raise ValueError(f"expected a URL such as s3://bucket/run-7/step-100, found {url}")
        if not found[2].strip("/") or ".." in found[2].split("/"):
            raise ValueError(f"{url} names no place for a checkpoint; add the name of a folder")
        self.url, self.protocol = url.rstrip("/"), found[1]

    def at(self, name: str) -> tuple[Any, str]:
        """Return the file system, which fsspec keeps for each process, and the path of an object in it."""
        try:
            from fsspec.core import url_to_fs

            if ":" in self.protocol:  # the import path of its class
                system = stores.get(self.protocol).make()
                path = system._strip_protocol(self.url.partition("://")[2])
            else:
                system, path = url_to_fs(self.url)
        except ImportError as error:
            raise StoreError(
                f"{self.url}: a package for {self.protocol}:// is missing ({in_one_line(error)})"
            ) from None
        except ValueError as error:
            raise StoreError(
                f"{self.url}: no file system for {self.protocol}:// ({in_one_line(error)})"
            ) from None
        return system, f"{path}/{name}" if name else str(path)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object below the URL, without the objects in folders. A folder counts as 0 bytes."""
        with self.reported("", "read"):
            system, path = self.at("")
            system.invalidate_cache()
            try:
                entries = system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        own = path.strip("/")
        sizes = {}
        for entry in entries:
            name = str(entry["name"]).strip("/")
            if name != own:
                nbytes = 0 if entry.get("type") == "directory" else int(entry.get("size") or 0)
                sizes[name.removeprefix(f"{own}/")] = nbytes
            elif entry.get("size"):
                raise FileExistsError(f"{self.url} is an object, not a place for several. Choose another URL")
        return sizes

    @contextlib.contextmanager
    def reported(self, name: str, doing: str) -> Iterator[None]:
        """Turn what a file system raises into one line that names the object, the reason and what to check.

        An object that is missing when it is read raises Damaged, caused by what the file system has raised.
        """
        try:
            yield
        except (Damaged, FileExistsError, StoreError):
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and doing == "read":
                raise Damaged(f"no {name} file") from error
            url = f"{self.url}/{name}" if name else self.url
            raise StoreError(f"{url} cannot be {doing}: {in_one_line(error)}{self._advice(error)}") from None

    def _advice(self, error: Exception) -> str:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, PermissionError) or any(
            word in text for word in ("credential", "forbidden", "denied")
        ):
            kind = {"s3a": "s3", "gcs": "gs"}.get(self.protocol, self.protocol)
            return f". {_CREDENTIALS.get(kind, 'Check the credentials')}"
        if isinstance(error, (ConnectionError, TimeoutError)) or any(
            word in text for word in ("connect", "timeout")
        ):
            return ". Check the network and the address of the store"
        if isinstance(error, FileNotFoundError):
            return ". Check the URL"
        return ""


def write_new(system: Any, path: str, content: bytes) -> None:
    """Write an object where none is. Stores that cannot compare and write in one step do it in two.

    Raises:
        FileExistsError: an object is there.
    """
    system.invalidate_cache()
    if system.exists(path):  # first, since some stores ignore the condition
        raise FileExistsError(path)
    try:
        system.pipe_file(path, content, mode="create")
        return
    except (TypeError, NotImplementedError):
        pass
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    system.pipe_file(path, content)


def promptly(action: Callable[[], T], url: str) -> T:
    """Run ``action`` and return its result. Raises StoreError if it takes longer than :data:`PATIENCE`.

    File systems try for minutes to reach a store that does not answer.
    """
    outcomes: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcomes.append((action(), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="shardwright: first answer of a store")
    thread.start()
    thread.join(PATIENCE)
    if not outcomes:
        raise StoreError(
            f"{url}: no answer within {PATIENCE:.0f} s. Check the network and the address of the store"
        )
    value, error = outcomes[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__) is not None:
        yield cause
        error = cause


def in_one_line(error: BaseException) -> str:
    """Return an error in one line. Without a text, the name of its type."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__


BLOCK = 32 << 20  #: bytes of a request that uploads a part of an object; stores take 10,000 of them
SLICE = 8 << 20  #: bytes of a request that reads, and of a write into the buffer of an upload
READ_AT_ONCE = 4 * SLICE  #: read by several requests at the same time


class ObjectFiles:
    """The objects below a URL, to read and to remove."""

    path = None  #: no folder of this machine
    is_local = False

    def __init__(self, objects: ObjectsBelow) -> None:
        self.objects = objects

    def __str__(self) -> str:
        return self.objects.url

    def has(self, name: str) -> bool:
        try:
            self.size(name)
        except Damaged:
            return False
        return True

    def size(self, name: str) -> int:
        with self.objects.reported(name, "read"):
            system, path = self.objects.at(name)
            system.invalidate_cache()
            return int(system.info(path)["size"])

    def read(self, name: str) -> bytes:
        with self.objects.reported(name, "read"):
            system, path = self.objects.at(name)
            return bytes(system.cat_file(path))

    def open(self, name: str) -> ObjectReader:
        return ObjectReader(self.objects, name)

    def identity(self, name: str) -> None:
        """Return None, because two saves write no objects of the same name, except ones that digests tell apart."""

    def drop_from_cache(self, name: str) -> None:
        """Nothing: objects have no such cache."""

    def remove(self, name: str) -> None:
        with self.objects.reported(name, "removed"):
            system, path = self.objects.at(name)
            with contextlib.suppress(FileNotFoundError):  # another save that clears this place was faster
                system.rm_file(path)

    def sizes(self) -> dict[str, int]:
        return self.objects.sizes()


class ObjectWriter:
    """An object that appears when it is finished. It is uploaded in parts, so that no more than two are in memory."""

    in_order = True

    def __init__(self, files: ObjectFiles, name: str) -> None:
        self._files, self._objects, self._name = files, files.objects, name
        with self._objects.reported(name, "written"):
            system, path = self._objects.at(name)
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
            self._files.remove(self._name)  # of file systems where a file appears when it is opened


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
