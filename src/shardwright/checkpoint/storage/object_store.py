"""Checkpoints behind a URL that fsspec knows, such as ``s3://bucket/run-7/step-100``. No object is ever renamed.

Files of a save have its attempt in their names, so two saves never write the same object. ``index.json`` is written
last, in one request: with it the checkpoint is there, without it there is none. fsspec is imported at the first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from shardwright.checkpoint.format.names import INDEX, METADATA
from shardwright.checkpoint.storage.object_files import (
    ObjectFiles,
    ObjectsBelow,
    ObjectWriter,
    causes_of,
    in_one_line,
    promptly,
    write_new,
)
from shardwright.checkpoint.storage.save_names import (
    MARK,
    is_mark,
    is_of_checkpoint,
    is_of_save_at_url,
    with_attempt,
)
from shardwright.checkpoint.storage.stores import Check, new_attempt, trust, unless_removed
from shardwright.common.errors import Damaged

#: File systems whose folders must be made before files are in them. Others would make a bucket of a misspelt name.
_WITH_FOLDERS = {"sftp", "ssh", "ftp", "hdfs", "arrow_hdfs", "webhdfs", "smb", "dask", "dbfs"}


class ObjectStore(ObjectFiles):
    """The place of a checkpoint behind a URL."""

    replaces = False  #: objects cannot be renamed

    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL names no place for a checkpoint."""
        super().__init__(ObjectsBelow(url))

    # -- the checkpoint at this place ----------------------------------------------------------------------------------

    def description_name(self) -> str:
        try:
            promptly(lambda: self.size(INDEX), str(self))
        except Damaged as problem:
            reasons = [in_one_line(error) for error in causes_of(problem)]
            known = [f" ({each})" for each in reasons if " bucket " in each or "onnect" in each][:1]
            raise FileNotFoundError(
                f"{self} holds no whole checkpoint{''.join(known)}: a save was interrupted, or the path is wrong"
            ) from None
        return INDEX

    def check_removable(self) -> None:
        """Nothing: other objects stay."""

    def clear(self) -> None:
        """Other objects than those of saves stay. Files of a folder that was copied here are removed."""
        self._remove_all(name for name in self.sizes() if is_of_checkpoint(name))
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder if it is empty: it would count as a checkpoint."""
        # Of a user's file system nobody knows whether it has folders.
        if self.objects.protocol in _WITH_FOLDERS or ":" in self.objects.protocol:
            with (
                contextlib.suppress(OSError),
                self.objects.reported("", "removed"),
            ):  # it may hold other files
                system, path = self.objects.at("")
                system.invalidate_cache()
                if system.isdir(path):
                    system.rmdir(path)

    def _remove_all(self, names: Iterable[str]) -> None:
        # First what would let a load or another save take the rest for theirs.
        ordered = sorted(names, key=lambda name: (name != INDEX, not is_mark(name), name))
        is_checked = False
        for name in ordered:
            if not is_checked and name != INDEX and not is_mark(name):
                is_checked = True
                if self.has(INDEX):  # another save has written it meanwhile: see its commit
                    raise _busy(self)
            self.remove(name)

    def files(self, links: bool) -> ObjectFiles:
        return self

    # -- a save to this place ------------------------------------------------------------------------------------------

    def unfinished(self, attempt: str | None = None) -> ObjectSave:
        return ObjectSave(self, attempt or new_attempt())

    def make_free(self, overwrite: bool, check: Check) -> None:
        """Remove what an interrupted save has left, or a damaged checkpoint. Raises FileExistsError for all else."""
        names = promptly(self.sizes, str(self))
        if not names:
            return
        foreign = min((name for name in names if not is_of_save_at_url(name)), default=None)
        if foreign is not None:
            raise FileExistsError(f"{self} holds {foreign}, which no save has written. Choose another URL")
        if INDEX in names:
            try:
                check(self)
            except (Damaged, FileNotFoundError) as problem:
                left = f"a damaged checkpoint ({problem})"
            else:
                raise FileExistsError(
                    f"{self} holds a whole checkpoint. It is not replaced, since objects cannot be renamed: choose "
                    "another URL, or delete it first"
                )
        else:
            count = len(names)
            left = f"what an interrupted save has left ({count} object{'s' * (count > 1)})"
        if not overwrite:
            raise FileExistsError(
                f"{self} holds {left}. Pass overwrite=True to delete it, or choose another URL"
            )
        self._remove_all(names)

    # -- the parent of such places -------------------------------------------------------------------------------------

    def children(self, recovers: bool) -> list[str]:
        sizes = promptly(self.sizes, str(self))
        return [name for name, nbytes in sizes.items() if not nbytes]  # an object with content is no place

    def check_writable(self) -> None:
        save = self.unfinished()
        promptly(lambda: save.write(save.mark, b"a check\n"), str(self))
        save.remove(save.mark)

    def remove_unfinished(self) -> None:
        """Nothing: the next save to the same place does so."""


class ObjectSave(ObjectFiles):
    """The objects of a save that is not committed. Its ``mark`` says that the save has begun."""

    def __init__(self, store: ObjectStore, attempt: str) -> None:
        super().__init__(store.objects)
        self.store, self._attempt = store, attempt
        self.mark = self.stored_name(MARK)

    def begin(self, nbytes: int, overwrite: bool, check: Check = trust) -> None:
        self.store.make_free(overwrite, check)
        if self.objects.protocol in _WITH_FOLDERS:
            with self.objects.reported("", "made"):
                system, path = self.objects.at("")
                system.makedirs(path, exist_ok=True)
        promptly(lambda: self.write(self.mark, b"a save has begun\n"), str(self))
        # Two saves that begin at once each have a mark there before they look for others, so one of them sees both.
        if any(is_mark(name) and name != self.mark for name in self.sizes()):
            raise _busy(self)

    def check_seen(self) -> None:
        if not promptly(lambda: self.has(self.mark), str(self)):
            raise OSError(
                f"{self}/{self.mark} is not there, though the first rank has written it: all ranks must save to a "
                "store that they share, and one save at a time"
            )

    # -- files ---------------------------------------------------------------------------------------------------------

    def stored_name(self, name: str) -> str:
        return with_attempt(name, self._attempt)

    def create(self, name: str) -> ObjectWriter:
        return ObjectWriter(self, name)

    def write(self, name: str, content: bytes) -> None:
        """Names without an attempt are written only where no object is: another save may have written it."""
        with self.objects.reported(name, "written"):
            system, path = self.objects.at(name)
            if name not in (METADATA, INDEX):
                system.pipe_file(path, content)
                return
            try:
                write_new(system, path, content)
            except FileExistsError:
                raise FileExistsError(
                    f"{self}/{name} was written by another save. Let one save at a time write to a URL"
                ) from None

    # -- the end of the save -------------------------------------------------------------------------------------------

    def commit(self, overwrite: bool) -> None:
        """Write ``index.json``. Only where none is: nothing is overwritten, and a save begins only where nothing is."""
        with unless_removed(self):
            self._write_index()

    def _write_index(self) -> None:
        self.check_seen()  # a save that begins later with overwrite=True removes it, and our files
        try:
            text = self.read(self.stored_name(INDEX))
        except Damaged:
            raise _busy(self) from None
        try:
            self.write(INDEX, text)
        except OSError:
            if not self._is_index(text):  # the store may have done it, and only its answer was lost
                raise
        # Once more: such a save removes the mark first, and then looks for an index. So either it finds ours and keeps
        # our files, or the mark is missing here.
        if self.is_removed():
            if self._is_index(text):
                self.remove(INDEX)
            raise _busy(self)
        for name in (self.mark, self.stored_name(INDEX)):
            with contextlib.suppress(OSError):
                self.remove(name)

    def _is_index(self, text: bytes) -> bool:
        try:
            return self.read(INDEX) == text
        except (OSError, Damaged):
            return False

    def abandon(self, names: Iterable[str]) -> None:
        """Objects stay if they may be of a committed checkpoint: if ``index.json`` names them, or cannot be read."""
        own = {self.mark, *map(self.stored_name, names)}
        try:
            # First, and promptly: a store that does not answer would keep each of the requests below waiting.
            if promptly(lambda: self._names_attempt(INDEX), str(self)):
                return
            own |= {name for name in self.sizes() if f".{self._attempt}." in name}
            own |= {METADATA} if self._names_attempt(METADATA) else set()
        except OSError:
            return
        for name in sorted(own):
            with contextlib.suppress(OSError):
                self.remove(name)
        self.store.remove_folder()

    def _names_attempt(self, name: str) -> bool:
        try:
            return self._attempt.encode() in self.read(name)
        except Damaged:  # it is not there
            return False

    def is_removed(self) -> bool:
        try:
            return not promptly(lambda: self.has(self.mark), str(self))
        except OSError:  # no answer; the save is complete
            return False


def _busy(files: ObjectFiles) -> FileExistsError:
    return FileExistsError(
        f"{files}: another save to this URL is under way. Let one save at a time write to a URL"
    )
