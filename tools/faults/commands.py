"""Runs of the real command, ``shardwright train``, whose processes are killed from outside.

Before each kill the newest checkpoint in the run's folder is written down. Then a rank, all ranks, a writer or the
launcher is killed. The command starts the ranks again; if the launcher was killed, ``--resume`` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from shardwright.checkpoint.format.names import INDEX
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.position import saved_steps
from tools.faults.campaign import Setting, digest_of
from tools.faults.history import History, Place
from tools.faults.points import Fault, is_writer, writers_of

LONGEST_SECONDS = 120.0
KILLS = 4  #: of a run
SETTINGS = tuple(Setting(ranks, ranks % 2 == 0, "", steps=120, every=5) for ranks in (2, 3, 4))


class Command:
    """A run of the command, over all its attempts."""

    def __init__(self, setting: Setting, folder: Path, history: Path, name: str) -> None:
        self.setting, self.name = setting, name
        self.folder, self.log, self.config = folder / "run", folder / "log", folder / "job.toml"
        self._history_file, self._attempt, self._began = history, 0, 0.0
        folder.mkdir()
        self.config.write_text(setting.text())
        facts = {"config": setting.name, "ranks": setting.ranks, "steps": setting.steps}
        self._history.add("run", **facts, is_reference=False)

    @property
    def _history(self) -> History:
        return History(self._history_file, Place(self.name, max(self._attempt, 1)))

    def with_kills(self, generator: random.Random, kills: int) -> int:
        """Run the job to its end with at most so many kills; returns their number."""
        try:
            return self._run(generator, kills)
        finally:
            self._process.kill()  # and its ranks notice that

    def _run(self, generator: random.Random, kills: int) -> int:
        restarts = ("--max-restarts", str(2 * KILLS))
        count = ("--nproc", str(self.setting.ranks))
        process = self._start("train", str(self.config), "--run.dir", str(self.folder), *count, *restarts)
        met = 0
        self._begin()
        for number in range(kills):
            if not self._has_begun(process):
                break
            pause = generator.uniform(0.0, 0.4)
            target = self._step() + generator.randint(3, 3 + self.setting.steps // (2 * kills))
            victim = (
                "launcher" if number % KILLS == KILLS - 1 else generator.choice(("rank", "host", "writer"))
            )
            self._until_step(target, process)
            time.sleep(pause)
            victim = self._kill(process, victim, generator.randrange(self.setting.ranks))
            if not victim:
                break
            met += 1
            if victim == "writer" and not self._restarts(process):
                continue  # it wrote nothing then, or the run goes on without that checkpoint
            if victim == "launcher":
                process.wait()
                self._until(lambda: not self._ranks())
                process = self._start("train", "--resume", str(self.folder), *count, *restarts)
            self._end([-9])
            self._begin()
        self._has_begun(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST_SECONDS)
        waits = process.poll() is None
        process.kill()
        self._end([process.wait()], [0] if waits else [])
        self._history.add(
            "final", digest=digest_of(self.folder / "checkpoints" / f"step-{self.setting.steps}")
        )
        return met

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardwright", *arguments],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "FAULTS_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return self._process

    def _begin(self) -> None:
        self._attempt, self._began = self._attempt + 1, time.monotonic()
        self._history.add("attempt", ranks=self.setting.ranks)

    def _has_begun(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the attempt has opened its session, and write down from which step it goes on."""
        self._until(lambda: len(self._sessions()) >= self._attempt or process.poll() is not None)
        sessions = self._sessions()
        if len(sessions) < self._attempt:
            return False
        if self._attempt > 1:
            self._history.add("resumed", rank=0, step=sessions[self._attempt - 1]["from_step"])
        return True

    def _end(self, statuses: list[int], killed: list[int] | None = None) -> None:
        seconds = time.monotonic() - self._began
        self._history.add("ended", statuses=statuses, killed=killed or [], seconds=seconds, orphans=0)

    def _kill(self, launcher: subprocess.Popen[bytes], victim: str, rank: int) -> str:
        """Kill, unless the job is done; returns who was killed. Before it, the checkpoints there are written down.

        A rank takes the place of a writer that is not there, and of the launcher if the run cannot be resumed yet.
        """
        ranks = self._ranks()
        if launcher.poll() is not None or len(ranks) != self.setting.ranks:
            return ""
        found = {"rank": [ranks[rank]], "host": ranks, "launcher": [psutil.Process(launcher.pid)]}
        found["writer"] = writers_of(ranks[rank].pid)
        steps = [step for step in saved_steps(self.folder / "checkpoints") if self._is_committed(step)]
        if not found[victim] or (victim == "launcher" and not steps):
            victim = "rank"
        for step in steps:
            self._history.add("saved", step=step)
        step = self._step()
        for process in found[victim]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._history.add("fault", **Fault("kill", victim, rank, step, "command").facts())
        return victim

    def _is_committed(self, step: int) -> bool:
        return (self.folder / "checkpoints" / f"step-{step}" / INDEX).is_file()

    def _ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in their order."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ValueError):
                variables = process.environ()
                is_ours = variables.get("FAULTS_FOLDER") == str(self.folder) and "RANK" in variables
                if is_ours and not is_writer(process.cmdline()):
                    found[int(variables["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def _sessions(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads((self.folder / "run.json").read_text())["sessions"])
        except (OSError, ValueError, LookupError):
            return []

    def _step(self) -> int:
        return recorded_step(self.folder / "metrics.jsonl")

    def _restarts(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether a new session begins, before the present one does ten more steps."""
        end = self._step() + 10
        self._until(
            lambda: len(self._sessions()) > self._attempt or self._step() > end or process.poll() is not None
        )
        return len(self._sessions()) > self._attempt

    def _until_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        self._until(lambda: self._step() >= step or process.poll() is not None)

    @staticmethod
    def _until(what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not what() and time.monotonic() < deadline:
            time.sleep(0.02)
