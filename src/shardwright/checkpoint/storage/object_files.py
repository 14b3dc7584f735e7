"""Objects below a URL that fsspec knows: read in ranges, and written in parts.

No object is ever renamed. Nothing here knows checkpoints or saves: `object_store` does.
"""

from __future__ import annotations

import contextlib

from shardwright.checkpoint.storage.file_systems import ObjectsBelow
from shardwright.common.errors import Damaged

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
        """None: no save writes an object of another one, except for what the digests in index.json tell apart."""

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
