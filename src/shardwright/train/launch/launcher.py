"""Our launcher starts the ranks of one machine under torch elastic's process layer, and waits for their end.

It starts the ranks with torchrun's environment, passes signals on to them, and starts them again if the settings allow
it. It speaks for the job: one message, one exit status. It never trains itself.

Why not torchrun as a whole: its agent gives ranks 30 s from a signal to their end, which a large checkpoint exceeds,
and the same 30 s to ranks that wait in a collective for one that died. The environment is the same, so
`torchrun -m shardwright train ...` and SLURM work too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import rich.progress  # noqa: F401  # every rank needs it: where it is missing, the launcher says so, once
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

from shardwright.train.config import FaultConfig
from shardwright.train.launch.environment import (
    ATTEMPT_VARIABLE,
    FOLDER_VARIABLE,
    LAUNCHER_VARIABLE,
    SPEAKING,
    path_to_ourselves,
)
from shardwright.train.launch.job_end import JobEnd
from shardwright.train.launch.judgement import (
    EndOfRanks,
    Evidence,
    announce,
    complaints_in,
    judge,
    log_of,
    say_in_logs,
)
from shardwright.train.launch.restarts import Attempt, Restarts, place_in_words
from shardwright.train.launch.signals import StopRequest, noted_signals
from shardwright.train.report.progress import START
from shardwright.train.run.deadlines import GRACE_SECONDS
from shardwright.train.run.exits import DONE, STOPPED
from shardwright.train.run.folder import RunFolder, now
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.record import session_after, sessions_of
from shardwright.train.run.writing import writing
from shardwright.watching import Eyes, Hang


class RankLogs(LogsSpecs):
    """Ranks write into the run's folder; rank 0's stdout goes to ours."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = range(len(envs))
        return LogsDest(
            stdouts={rank: str(self.folder / f"rank-{rank}.stdout") if rank else "" for rank in ranks},
            stderrs={rank: str(log_of(self.folder, rank)) for rank in ranks},
            error_files=dict.fromkeys(ranks, os.devnull),
        )


def launch_until_done(
    fault: FaultConfig, folder: RunFolder, attempt: Attempt, can_run: Callable[[int], bool]
) -> int:
    """Start the ranks, and again while the settings allow it. Returns the status of the job.

    `can_run`: says whether a number of ranks can run the job.
    """
    # torch's handlers would unwind the launcher; ours store the signals over all attempts.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    restarts = Restarts(fault, can_run)
    sessions_before = sessions_of(folder)
    request = StopRequest(fault.save_seconds)
    with noted_signals(request):
        while True:
            sessions = sessions_of(folder)
            evidence = _launch(fault.stall_seconds, folder, attempt, request, sessions)
            end = judge(evidence)
            next_ranks, note = 0, ""
            if request.signal_number is None:
                step = recorded_step(folder.metrics_file) if end.done is None else end.done
                next_ranks, note = restarts.after(end, step, attempt.ranks)
            speaks = not next_ranks
            JobEnd(folder, attempt.number, speaks, sessions).write(end, note)
            if speaks:
                return announce(evidence, end, "--debug" in attempt.arguments, note)
            attempt = attempt.after(end, next_ranks, folder, sessions_of(folder) > sessions_before)
            print(
                f"restart {restarts.count} of {fault.max_restarts}: {end.reason}, after step {step}; "
                f"{place_in_words(folder, next_ranks)} (log: {evidence.logs})",
                flush=True,
            )


def _launch(
    stall_seconds: float, folder: RunFolder, attempt: Attempt, request: StopRequest, sessions_before: int
) -> Evidence:
    """Start the ranks and wait for their end. `sessions_before`: in run.json."""
    ranks = attempt.ranks
    START.doing(f"starting {ranks} ranks")
    logs = folder.logs / now().replace(":", "")
    if attempt.number > 1:
        logs = logs.with_name(f"{logs.name}-attempt-{attempt.number}")
    with writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    # The store lives here, so it outlives every rank, and its port is the system's choice: no two jobs collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # -P: a random.py in the folder where the user works must not take the place of Python's own.
    command = ("-P", "-m", "shardwright", *attempt.arguments)
    with writing(logs):
        processes = start_processes(
            name="shardwright",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), command),
            envs={rank: environment(rank, attempt, store.port, folder) for rank in range(ranks)},
            logs_specs=RankLogs(logs),
        )
    assert isinstance(processes, SubprocessContext)
    with _eyes(stall_seconds, processes, folder) as eyes:
        end = RankWatch(processes, eyes, lambda: store.check([SPEAKING]), request).until_all_ended()
    processes.close()  # the files of its logs
    if end.hang is not None:
        say_in_logs(end.hang, logs, ranks)
    return Evidence(
        folder,
        logs,
        end,
        complaints=complaints_in(store, ranks),
        first_signal=request.signal_number,
        session=session_after(folder, sessions_before),
    )


@contextmanager
def _eyes(seconds: float, processes: SubprocessContext, folder: RunFolder) -> Iterator[Eyes | None]:
    """Watch the ranks inside the context. None with 0 `seconds` until a stall: there is no watch."""
    eyes = Eyes(processes.pids(), seconds, folder.path / "hangs", "fault.stall_seconds") if seconds else None
    try:
        yield eyes
    finally:
        if eyes is not None:
            eyes.close()


def environment(rank: int, attempt: Attempt, port: int, folder: RunFolder) -> dict[str, str]:
    """Return the environment that torchrun would set for this rank, and the folder of the run."""
    ranks = attempt.ranks
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is the launcher's: rank 0 must not open its own
        FOLDER_VARIABLE: folder.path, LAUNCHER_VARIABLE: os.getpid(), ATTEMPT_VARIABLE: attempt.number,
    }  # fmt: skip
    if attempt.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(attempt.devices)
    variables |= START.variables
    variables |= path_to_ourselves()
    if "OMP_NUM_THREADS" not in os.environ:
        # Each rank would claim all cores, also for the work of the host beside a GPU.
        variables["OMP_NUM_THREADS"] = max(1, (os.cpu_count() or 1) // ranks)
    return {name: str(value) for name, value in variables.items()}


class RankWatch:
    """Waits for the ranks, passes signals on, and kills ranks that shall not go on: those that do not end soon after
    one has failed, that hang, or that a signal has asked to end and that have no more time to save."""

    def __init__(
        self,
        processes: SubprocessContext,
        eyes: Eyes | None,
        first_rank_speaks: Callable[[], bool],
        request: StopRequest,
    ) -> None:
        self.processes, self.eyes = processes, eyes
        self.first_rank_speaks, self.request = first_rank_speaks, request
        self._killed: set[int] = set()
        self._hurried, self._late = "", False
        self._passed_on = 0  #: signals
        self._hang: Hang | None = None

    def until_all_ended(self) -> EndOfRanks:
        deadline = None
        while running := [rank for rank, status in self._poll().items() if status is None]:
            self._pass_on(running)
            if deadline is None and any(
                status not in (None, DONE, *STOPPED) for status in self._poll().values()
            ):
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self._kill(running)
                deadline = None
            if START.is_speaking and self.first_rank_speaks():
                START.end()
            if self.eyes is not None and self._hang is None and (hang := self.eyes.look()):
                self._hang = hang
                self._kill(running)
            time.sleep(0.05)
        START.end()
        statuses = {rank: status for rank, status in self._poll().items() if status is not None}
        for handler in self.processes.subprocess_handlers.values():
            handler.proc.wait()
        return EndOfRanks(
            statuses,
            frozenset(self._killed),
            self._hurried,
            self._late,
            self._hang,
            steps={} if self.eyes is None else self.eyes.steps_done(),
        )

    def _poll(self) -> Mapping[int, int | None]:
        return {rank: handler.proc.poll() for rank, handler in self.processes.subprocess_handlers.items()}

    def _kill(self, ranks: list[int]) -> None:
        self._killed.update(ranks)
        for rank in ranks:
            self.processes.subprocess_handlers[rank].proc.kill()

    def _pass_on(self, running: list[int]) -> None:
        """Pass signals on. If there is no more time to save, kill the ranks before that."""
        if not self._hurried and (hurry := self.request.hurry):
            self._hurried, self._late = hurry, self.request.is_late
            self._kill(running)
        while self._passed_on < len(self.request.received):
            number, _ = self.request.received[self._passed_on]
            self._passed_on += 1
            for rank in running:
                self.processes.subprocess_handlers[rank].proc.send_signal(number)
