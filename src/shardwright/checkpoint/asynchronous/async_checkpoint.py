"""Asynchronous checkpoints: training goes on while a process of each rank writes.

    with sw.AsyncCheckpoint() as checkpoints:
        for step in range(steps):
            ...
            if step % 100 == 0:
                checkpoints.save(f"step-{step}", model, optimizer, extra={"step": step})

A save waits only until this rank's part is copied into memory that the trainer and its writer process share.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwright.checkpoint.asynchronous.messages import Report
from shardwright.checkpoint.asynchronous.staging import SaveJob, SharedMemory, stage
from shardwright.checkpoint.asynchronous.writer_process import WriterProcess
from shardwright.checkpoint.load.checkpoints import check_whole, checkpoint_at
from shardwright.checkpoint.save.plan import SavePlan
from shardwright.checkpoint.storage.locations import folder_or_url
from shardwright.checkpoint.storage.publishing import begun
from shardwright.checkpoint.storage.save_names import files_of_save, note_of_rank
from shardwright.checkpoint.storage.stores import Store
from shardwright.checkpoint.training.arguments import place_of
from shardwright.checkpoint.training.save_checkpoint import SHARED, state_to_save
from shardwright.common.errors import Damaged
from shardwright.engine import RankGroup, described, heartbeat, raise_for

Failure = tuple[int, str]  #: number of the error's kind, and its text


@dataclass(frozen=True)
class Outcome:
    """The result of a save, as this rank knows it."""

    path: Path | str  #: the folder, or the URL
    committed: (
        bool  #: the checkpoint is whole and has its name. Before ``wait`` only the first rank can know it
    )
    error: str | None  #: why the save failed
    nbytes: int  #: that this rank's writer has written
    seconds: float  #: that this rank's writer took; on the first rank with the commit


class _State(Enum):
    """The state of a save, as this rank's writer process has reported it."""

    WRITING = auto()
    WRITTEN = auto()  #: this rank's file is on disk; on the first rank the commit follows
    COMMITTED = auto()  #: only the first rank knows
    NOT_WRITTEN = auto()
    NOT_COMMITTED = auto()


#: The states that may follow; none follows the others. A writer that dies after its work has reported nothing of it.
_MOVES: dict[_State, set[_State]] = {
    _State.WRITING: {_State.WRITTEN, _State.COMMITTED, _State.NOT_WRITTEN},
    _State.WRITTEN: {_State.COMMITTED, _State.NOT_COMMITTED},
}


@dataclass
class _Save:
    """A save under way."""

    store: Store
    attempt: str
    ranks: RankGroup
    state: _State = _State.WRITING
    failure: Failure | None = None  #: of the states NOT_WRITTEN and NOT_COMMITTED
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.ranks.is_first

    @property
    def path(self) -> Path | str:
        return folder_or_url(self.store)

    @property
    def is_committed(self) -> bool:
        return self.state is _State.COMMITTED

    @property
    def is_over(self) -> bool:
        return self.state not in _MOVES or (self.state is _State.WRITTEN and not self.is_first)

    def move(self, state: _State) -> None:
        assert state in _MOVES.get(self.state, ()), (self.state, state)
        self.state = state

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.move(_State.NOT_WRITTEN if self.state is _State.WRITING else _State.NOT_COMMITTED)

    def note(self, message: Report) -> None:
        """Take a message of the writer."""
        if message["attempt"] != self.attempt:
            return
        if message["is"] == "failed":
            self.fail((message["kind"], message["text"]))
            return
        self.move(_State.COMMITTED if message["is"] == "committed" else _State.WRITTEN)
        self.nbytes, self.seconds = message["nbytes"], message["seconds"]

    def abandon(self) -> None:
        """Remove what was written, as far as that is possible."""
        names = [*files_of_save(self.ranks.size), *map(note_of_rank, range(self.ranks.size))]
        self.store.unfinished(self.attempt).abandon(names)

    def outcome(self) -> Outcome:
        error = None if self.failure is None else self.failure[1]
        return Outcome(self.path, self.is_committed, error, self.nbytes, self.seconds)


class AsyncCheckpoint:
    """Saves checkpoints while training goes on: the same folders as :func:`save_checkpoint` writes.

    Every rank has a writer process, which starts here and lives until :meth:`close`. It needs Linux, and memory on the
    host for one copy of what this rank writes; that is allocated at the first save, kept, and used again.

    At most one save is under way. Where a method is collective, every rank of ``process_group`` must call it.

    If a trainer or a writer process is killed, the save under way is not committed, then or later; what was at its
    path before is unchanged. Unfinished files of a killed save are removed by the next save to the same path, behind a
    URL by the next one with ``overwrite=True``. If the interpreter ends without :meth:`close`, it waits until the save
    under way is on disk. It gives the save up, with a warning, when other ranks have not written anything for 60
    seconds, behind a URL for 10 minutes.

    Args:
        process_group: of the ranks that have the model. Default: all ranks; without a process group this process.
        verified: a save reads back what it has written, and compares it with its digests before the folder gets its
            name.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, verified: bool = False) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotImplementedError("asynchronous checkpoints need Linux; use save_checkpoint here")
        self._ranks = RankGroup(process_group)
        self._verified = verified
        self._memory = SharedMemory()
        self._writer: WriterProcess | None = None
        self._save: _Save | None = None
        self._last: Outcome | None = None
        self._trainer = os.getpid()
        self._is_closed = False
        try:
            self._start_writer()  # it imports torch while the model is made
        except OSError:
            pass  # the first save tries again, where all ranks can raise the error

    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        generators: bool = True,
        frozen: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Copy what :func:`save_checkpoint` would write, and let the writers begin. Collective; between steps.

        Waits for the save before. If that failed, its error is raised here, and nothing is saved. On return model,
        optimizer and ``extra`` may change. Arguments as for :func:`save_checkpoint`.

        Raises:
            ValueError, FileExistsError: as :func:`save_checkpoint`.
            OSError: on every rank: as :func:`save_checkpoint`, or a rank has no memory for the copy, or the save
                before has failed.
            RuntimeError: the save before has failed because a writer process has died.
        """
        self._check_open()
        self.wait()
        state = state_to_save(model, optimizer, extra, generators, frozen, self._ranks)
        self.save_state(path, state, overwrite=overwrite)

    @heartbeat.during(heartbeat.SAVE)
    def save_state(
        self, path: str | os.PathLike[str], state: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """:meth:`save` of a nested state: dicts and lists of tensors and plain values."""
        self._check_open()
        ranks = self._ranks
        store = place_of(path, ranks)
        self.wait()
        plan = SavePlan.of(state, ranks, shared=SHARED)
        job = SaveJob(store, ranks.rank, overwrite, plan.own, plan.contents, self._verified)
        with begun(
            job.unfinished, plan.contents.nbytes, overwrite, files_of_save(ranks.size), ranks, check_whole
        ):
            ranges = ranks.run_on_all(lambda: self._stage(job))
            at, nbytes = ranges[ranks.rank]
            # From here on nothing fails before every rank has a save under way, so that every rank waits for it.
            self._save = _Save(store, plan.contents.attempt, ranks)
            _under_way.add(self)
            assert self._writer is not None
            self._writer.send({"do": "save", "at": at, "bytes": nbytes})

    def _stage(self, job: SaveJob) -> tuple[int, int]:
        self._start_writer()
        return stage(job, self._memory)

    @heartbeat.during(heartbeat.SAVE)
    def wait(self) -> None:
        """Wait until the save under way is committed: on disk, whole, and under its name. Collective.

        The wait has no limit of its own, since a large save takes long: a writer reports its end or dies, and a rank
        that is gone ends the wait by the timeout of the process group.

        Raises:
            OSError: on every rank. The message names rank, file and reason. Anything at the path is unchanged.
            RuntimeError: on every rank: a writer process has died.
        """
        self._check_owner()
        save, ranks = self._save, self._ranks
        if save is None:
            return
        while save.state is _State.WRITING:
            self._receive(save, wait=True)
        # A rank that is gone ends this exchange with an error of the process group. After it the first rank's writer
        # needs nobody any more.
        own_failure = save.failure if save.state is _State.NOT_WRITTEN else None
        failures = [
            (rank, *each) for rank, each in enumerate(ranks.all_gather(own_failure)) if each is not None
        ]
        if save.is_first and failures and self._writer is not None:
            self._writer.send({"do": "abandon", "attempt": save.attempt})
        if save.is_first:
            while not save.is_over:
                self._receive(save, wait=True)
            if not save.is_committed:
                save.abandon()
        committed, failure = ranks.broadcast((save.is_committed, save.failure))
        self._save = None
        _under_way.discard(self)
        if committed:  # also if a writer has died after its work
            self._last = Outcome(save.path, True, None, save.nbytes, save.seconds)
            return
        if not failures:
            assert failure is not None
            failures = [(0, *failure)]
        try:
            raise_for(failures, ranks.size, None)
        except Exception as error:
            self._last = Outcome(save.path, False, described(error)[1], save.nbytes, save.seconds)
            raise

    def poll(self) -> Outcome | None:
        """Return the result of the last save; None while it is under way, and before the first one. Not collective.

        On the first rank it is over when the checkpoint is committed. Another rank knows only its own part; the errors
        of others are raised by :meth:`wait` and the next :meth:`save`.
        """
        self._check_owner()
        save = self._save
        if save is None:
            return self._last
        while not save.is_over and self._receive(save, wait=False):
            pass
        return save.outcome() if save.is_over else None

    def close(self) -> None:
        """Wait for the save under way, end the writer process, and free the memory. Collective.

        Raises:
            OSError, RuntimeError: as :meth:`wait`. It is closed all the same.
        """
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may be elsewhere
            self._leave()

    def _receive(self, save: _Save, wait: bool) -> bool:
        """Note the writer's next message, or that it is dead. Whether there was one."""
        writer = self._writer
        assert writer is not None
        message = writer.receive(wait)
        if message is not None:
            save.note(message)
            return True
        death = writer.death()
        if death is None:
            return False
        if (message := writer.receive(wait=False)) is not None:  # its last words, of a moment ago
            save.note(message)
        elif save.is_first and _is_committed(save):
            save.move(_State.COMMITTED)
        else:
            text = f"{death}, so {save.path} was not saved. The next save starts another one"
            save.fail(described(RuntimeError(text)))
            writer.end()
            self._writer = None
        return True

    def _start_writer(self) -> None:
        if self._writer is not None and not self._writer.lives:
            warnings.warn(
                f"{self._writer.death()}. It had nothing to write. Another one is started.", stacklevel=2
            )
            self._writer.end()
            self._writer = None
        if self._writer is None:
            self._writer = WriterProcess(self._memory.descriptor)

    def _leave(self) -> None:
        """Finish the save under way without the other ranks, as far as that is possible, and close."""
        save, writer = self._save, self._writer
        self._save = None
        try:
            if save is None or writer is None or self._is_closed:
                return
            writer.send({"do": "leave"})
            while not save.is_over:
                self._receive(save, wait=True)
            if save.failure is not None:
                if save.is_first:
                    save.abandon()
                warnings.warn(f"{save.path} was not saved: {save.failure[1]}", stacklevel=3)
        finally:
            self._free()

    def _free(self) -> None:
        self._is_closed = True
        _under_way.discard(self)
        if self._writer is not None:
            self._writer.end()
        self._memory.close()

    def _check_owner(self) -> None:
        if os.getpid() != self._trainer:
            raise RuntimeError(
                "this AsyncCheckpoint belongs to the process that has made it; make one in each process"
            )

    def _check_open(self) -> None:
        self._check_owner()
        if self._is_closed:
            raise RuntimeError("this AsyncCheckpoint is closed; make another one")


def _is_committed(save: _Save) -> bool:
    """Return whether a save is at its place, although its writer did not live to say so."""
    try:
        return checkpoint_at(save.store).attempt == save.attempt
    except (OSError, Damaged):
        return False


#: Those with a save under way, which the end of the interpreter finishes.
_under_way: set[AsyncCheckpoint] = set()


@atexit.register
def _finish_saves() -> None:
    for each in list(_under_way):
        if each._trainer == os.getpid():
            each._leave()
