"""Notes that the writer processes of an asynchronous save leave for the first rank's: what was written, or what failed.

They are beside the files of the checkpoint until it is committed. Each has its own digest and gets its name when it is
complete, so half a note is none.
"""

from __future__ import annotations

from typing import cast

from shardwright.checkpoint.asynchronous.messages import Note
from shardwright.checkpoint.format.index import decoded_chunk, encoded_chunk
from shardwright.checkpoint.save.writing import WrittenFile
from shardwright.checkpoint.storage.save_names import note_of_rank
from shardwright.checkpoint.storage.stores import UnfinishedSave
from shardwright.common.errors import Damaged
from shardwright.common.sealed_json import sealed, unsealed


def leave(save: UnfinishedSave, rank: int, attempt: str, written: WrittenFile) -> None:
    """Say that a rank's file is on disk. Raises OSError if that cannot be said."""
    chunks = [[name, encoded_chunk(chunk, {written.file: 0})] for name, chunk in written.chunks]
    _leave(save, rank, {"attempt": attempt, "file": written.file, "chunks": chunks})


def leave_failure(save: UnfinishedSave, rank: int, attempt: str, kind: int, text: str) -> None:
    """Say that a rank's file could not be written. Raises OSError if that cannot be said."""
    _leave(save, rank, {"attempt": attempt, "kind": kind, "text": text})


def _leave(save: UnfinishedSave, rank: int, note: Note) -> None:
    save.write(save.stored_name(note_of_rank(rank)), sealed(dict(note)).encode())


def read(save: UnfinishedSave, rank: int, attempt: str) -> WrittenFile | tuple[int, str]:
    """The file and chunks that a rank has written, or the kind and text of its failure.

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


def remove(save: UnfinishedSave, ranks: int) -> None:
    """Remove the notes, before the files become a checkpoint."""
    for rank in range(ranks):
        save.remove(save.stored_name(note_of_rank(rank)))
