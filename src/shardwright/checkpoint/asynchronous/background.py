"""The work of the writer process of an asynchronous save. ``writer_program.py`` starts the process.

It gets jobs through a pipe, writes the rank's file from shared memory, and leaves a note beside it. The first rank's
writer waits for the notes of all ranks, describes and commits the checkpoint. Writers share only the file system or
store. A writer ends when its trainer ends, however that happens, so nothing is committed for a dead trainer.
"""

from __future__ import annotations

import contextlib
import time

from shardwright.checkpoint.asynchronous.messages import (
    Command,
    JsonLines,
    Report,
    leave_failure,
    leave_note,
    read_note,
    remove_notes,
    send,
)
from shardwright.checkpoint.asynchronous.staging import SaveJob, SharedMemory, staged_job
from shardwright.checkpoint.save.collective_save import describe, write_own_file
from shardwright.checkpoint.save.writing import WrittenFile
from shardwright.checkpoint.storage.save_names import note_of_rank
from shardwright.checkpoint.storage.stores import unless_removed
from shardwright.engine import described, raise_for

#: Seconds without a sign of the other ranks, after which the first rank's writer gives up. Only while its trainer ends:
#: before that, the trainers themselves find out that one of them is gone.
PATIENCE = 60.0
PATIENCE_BEHIND_URLS = 600.0  #: an upload shows no sign before it ends
#: Seconds between looks. Those at a store are paid for.
_LONGEST_PAUSE, _LONGEST_PAUSE_BEHIND_URLS = 0.25, 2.0


class BackgroundWriter:
    """The saves of one trainer, in its writer process.

    Args:
        commands: what the trainer sends.
        results: the descriptor of the pipe for reports to the trainer.
        memory: the descriptor of the shared memory that has the jobs.
    """

    def __init__(self, commands: JsonLines[Command], results: int, memory: int) -> None:
        self._commands = commands
        self._results = results
        self._memory = memory
        self._is_leaving = False

    def run(self) -> None:
        """Do the trainer's saves one after another, and return when it leaves or ends."""
        while not self._is_leaving:
            command = self._commands.next()  # without a limit: the pipe ends with the trainer
            if command is None or command["do"] == "leave":
                return
            if command["do"] == "save":
                memory = SharedMemory(self._memory)
                self._save(staged_job(memory, command["at"], command["bytes"]))

    def _save(self, job: SaveJob) -> None:
        start, attempt = time.monotonic(), job.contents.attempt
        try:
            save = job.unfinished
            with unless_removed(save):
                written = write_own_file(save, job.rank, job.boxes, job.verified)
                leave_note(save, job.rank, attempt, written)
            seconds = time.monotonic() - start
            self._report({"attempt": attempt, "is": "written", "nbytes": written.nbytes, "seconds": seconds})
            if job.is_first:
                self._commit(job)
                seconds = time.monotonic() - start
                self._report(
                    {"attempt": attempt, "is": "committed", "nbytes": written.nbytes, "seconds": seconds}
                )
        except Exception as error:
            kind, text = described(error)
            with contextlib.suppress(OSError):  # the disk may be full; then the trainer says it
                leave_failure(job.unfinished, job.rank, attempt, kind, text)
            self._report({"attempt": attempt, "is": "failed", "kind": kind, "text": text})

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone, and so is this process soon
            send(self._results, report)

    def _commit(self, job: SaveJob) -> None:
        writes = self._all_written(job)
        remove_notes(job.unfinished, job.contents.ranks)
        describe(job.unfinished, job.contents, writes, verified=job.verified)
        job.unfinished.commit(job.overwrite)

    def _all_written(self, job: SaveJob) -> list[WrittenFile]:
        """Wait until each rank has left a note, and return what they have written, in the order of the ranks.

        While the trainer lives there is no limit: it finds that another rank is gone, and sends "abandon".

        Raises:
            OSError and others: a rank has failed, or the trainer wants the save to end.
        """
        ranks, attempt, save = job.contents.ranks, job.contents.attempt, job.unfinished
        patience = PATIENCE if save.is_local else PATIENCE_BEHIND_URLS
        longest_pause = _LONGEST_PAUSE if save.is_local else _LONGEST_PAUSE_BEHIND_URLS
        names = {rank: save.stored_name(note_of_rank(rank)) for rank in range(ranks)}
        writes: dict[int, WrittenFile] = {}
        seen: dict[str, int] = {}
        change, pause = time.monotonic(), 0.002
        while True:
            sizes = save.sizes()
            failures = []
            for rank in [rank for rank, name in names.items() if rank not in writes and name in sizes]:
                note = read_note(save, rank, attempt)
                if isinstance(note, WrittenFile):
                    writes[rank] = note
                else:
                    failures.append((rank, *note))
            if failures:
                raise_for(failures, ranks, None)
            if len(writes) == ranks:
                return [writes[rank] for rank in range(ranks)]
            if sizes != seen:
                seen, change = sizes, time.monotonic()
            missing = min(set(range(ranks)) - writes.keys())
            if self._is_leaving and time.monotonic() - change > patience:
                raise RuntimeError(
                    f"rank {missing} has not written its part of {job.store}: nothing in {save} has changed for "
                    f"{patience:.0f} seconds"
                )
            command = self._commands.next(pause)
            self._is_leaving |= self._commands.ended or (command is not None and command["do"] == "leave")
            if command is not None and command["do"] == "abandon" and command["attempt"] == attempt:
                raise RuntimeError(f"rank {missing} has not written its part of {job.store}")
            if self._commands.ended:
                time.sleep(pause)
            pause = min(pause * 1.5, longest_pause)
