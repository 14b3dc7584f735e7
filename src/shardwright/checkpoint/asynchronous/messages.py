"""Messages between a trainer, its writer process, and the writers of other ranks.

Commands and reports are JSON objects that go through pipes. A note says to the first rank's writer what another rank
has written, or what failed: it is a small file beside those of the checkpoint until the commit. Each note has its own
digest and gets its name when it is complete, so half a note is none.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast, final

from shardwright.checkpoint.format.index import decoded_chunk, encoded_chunk
from shardwright.checkpoint.save.writing import WrittenFile
from shardwright.checkpoint.storage.save_names import note_of_rank
from shardwright.checkpoint.storage.stores import UnfinishedSave
from shardwright.common.errors import Damaged
from shardwright.common.sealed_json import sealed, unsealed


class SaveCommand(TypedDict):
    """Write the job whose description begins at byte ``at`` of the shared memory and has so many ``bytes``."""

    do: Literal["save"]
    at: int
    bytes: int


class AbandonCommand(TypedDict):
    """Give the save up: another rank has failed."""

    do: Literal["abandon"]
    attempt: str


class LeaveCommand(TypedDict):
    """End after the save, without the trainers of other ranks."""

    do: Literal["leave"]


Command = SaveCommand | AbandonCommand | LeaveCommand

WrittenReport = TypedDict(
    "WrittenReport",
    {"attempt": str, "is": Literal["written", "committed"], "nbytes": int, "seconds": float},
)
"""This rank's file is on disk; on the first rank the commit follows, which it reports, too."""
FailedReport = TypedDict("FailedReport", {"attempt": str, "is": Literal["failed"], "kind": int, "text": str})
"""The save has failed here: the number of the error's kind, and its text."""
Report = WrittenReport | FailedReport


@final
class WrittenNote(TypedDict):
    """A rank's file is on disk. `chunks` are pairs: the tensor's name, and the chunk as in the index."""

    attempt: str
    file: str
    chunks: list[list[Any]]


@final
class FailedNote(TypedDict):
    """A rank's file could not be written."""

    attempt: str
    kind: int
    text: str


Note = WrittenNote | FailedNote


# -- pipes -------------------------------------------------------------------------------------------------------------


M = TypeVar("M", Command, Report)


class JsonLines(Generic[M]):
    """JSON objects of one kind, one a line, through a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._rest = b""
        self.ended = False

    def next(self, seconds: float | None = None) -> M | None:
        """Return the next object, or None if none came within ``seconds`` or the other end is closed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            poller = select.poll()
            poller.register(self.descriptor, select.POLLIN)
            if self.ended or not poller.poll(None if left is None else left * 1000):
                return None
            data = os.read(self.descriptor, 1 << 16)
            self.ended = not data
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        content: M = json.loads(line)
        return content


def send(descriptor: int, message: Command | Report) -> None:
    """Write an object for :class:`JsonLines` at the other end. Raises OSError if that is closed."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


# -- notes of writer processes, beside the files of a save -------------------------------------------------------------


def leave_note(save: UnfinishedSave, rank: int, attempt: str, written: WrittenFile) -> None:
    """Write the note that a rank's file is on disk. Raises OSError."""
    chunks = [[name, encoded_chunk(chunk, {written.file: 0})] for name, chunk in written.chunks]
    _leave(save, rank, {"attempt": attempt, "file": written.file, "chunks": chunks})


def leave_failure(save: UnfinishedSave, rank: int, attempt: str, kind: int, text: str) -> None:
    """Write the note that a rank's file could not be written. Raises OSError."""
    _leave(save, rank, {"attempt": attempt, "kind": kind, "text": text})


def _leave(save: UnfinishedSave, rank: int, note: Note) -> None:
    save.write(save.stored_name(note_of_rank(rank)), sealed(dict(note)).encode())


def read_note(save: UnfinishedSave, rank: int, attempt: str) -> WrittenFile | tuple[int, str]:
    """Return the file and chunks that a rank has written, or the kind and text of its failure.

    Raises:
        RuntimeError: the note is damaged or of another save.
    """
    name = note_of_rank(rank)
    try:
        note = cast(Note, unsealed(save.read(save.stored_name(name)), name))
        if note["attempt"] != attempt:
            raise Damaged(f"{name} is of another save")
        if "text" in note:
            return note["kind"], note["text"]
        file = note["file"]
        return WrittenFile(file, [(name, decoded_chunk(entry, [file])) for name, entry in note["chunks"]])
    except (Damaged, LookupError, TypeError, ValueError) as error:
        raise RuntimeError(f"{save}: the note of rank {rank} cannot be read: {error}") from None


def remove_notes(save: UnfinishedSave, ranks: int) -> None:
    """Remove the notes, before the files become a checkpoint."""
    for rank in range(ranks):
        save.remove(save.stored_name(note_of_rank(rank)))
