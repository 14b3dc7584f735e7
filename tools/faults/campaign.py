"""The runs of a campaign: their configurations, and the fault of each attempt, drawn from the seed.

A fault is drawn when the attempt before has ended, at a step that the next attempt will reach.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.format.index import parse_index
from shardwright.checkpoint.format.names import INDEX
from shardwright.common.errors import Damaged
from tools.faults.history import History, Place, read
from tools.faults.jobs import LONGEST_REFERENCE, Job, run_attempt
from tools.faults.points import Fault

FAULTS = 5  #: of a run, at most
BLOCKS = 2
STALL_SECONDS = 6.0
"""Seconds of `[fault]`: after them the ranks that wait for a stopped one end."""
PATIENT_STEPS = 3
"""Steps of a session after which the watch no longer waits ten times as long."""

CONFIG = """
[run]
name = "faults"
device = "cpu"
sample_tokens = 0
[model]
dim = 32
n_layers = {blocks}
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
max_seq_len = 64
[train]
steps = {steps}
seq_len = 32
global_batch = 12
micro_batch = 1
[optimizer]
lr = 1e-2
warmup_steps = 2
schedule = "constant"
[parallel]
engine = "shardwright"
{parallel}
[validation]
every = 4
batches = 2
[checkpoint]
every = {every}
keep = {keep}
asynchronous = {asynchronous}
[fault]
stall_seconds = {stall}
[log]
sinks = []
"""


@dataclass(frozen=True)
class Setting:
    """A configuration of jobs, and the number of their ranks."""

    ranks: int
    asynchronous: bool
    parallel: str
    keep: int = 2
    steps: int = 12
    every: int = 2  #: steps between two checkpoints

    @property
    def name(self) -> str:
        how = "asynchronous" if self.asynchronous else "synchronous"
        return (
            f"{self.ranks} ranks, {how}, keep {self.keep}, {self.steps} steps, {self.parallel or 'defaults'}"
        )

    def text(self) -> str:
        return CONFIG.format(
            blocks=BLOCKS, steps=self.steps, every=self.every, keep=self.keep, stall=STALL_SECONDS,
            parallel=self.parallel.replace(", ", "\n"), asynchronous=str(self.asynchronous).lower(),
        )  # fmt: skip


PARALLEL = ("", 'strategy = "zero1"', 'strategy = "zero2", layout = "ragged"', 'memory = "arena"')
SETTINGS = tuple(
    Setting(ranks, asynchronous, PARALLEL[(number + ranks) % len(PARALLEL)], keep=1 + number % 2)
    for ranks in (1, 2, 3, 4)
    for number, asynchronous in enumerate((False, True, False, True))
)


class Campaign:
    """The forked runs of a campaign. ``folder`` gets the runs and the history."""

    def __init__(self, folder: Path, history: Path, seed: int, port: int) -> None:
        self.folder, self.history, self.seed, self.port = folder, history, seed, port
        #: The system calls of a save, by setting, then by step and rank.
        self._calls: dict[Setting, dict[tuple[int, int], int]] = {}

    def reference(self, setting: Setting) -> None:
        """Run a job that nobody disturbs, once."""
        if setting not in self._calls:
            name = f"reference: {setting.name}"
            job, history = self._job(setting, name, is_reference=True)
            if not run_attempt(job, setting.ranks, None, history, self.port, LONGEST_REFERENCE):
                raise RuntimeError(f"{name}: failed, see {job.log}")
            self._final(setting, job, history)
            self._calls[setting] = {
                (line["step"], line["rank"]): line["calls"]
                for line in self._lines(name)
                if line["event"] == "calls"
            }

    def run(self, number: int, faults: int) -> int:
        """Run a job with at most so many faults; returns how many it met."""
        setting = SETTINGS[number % len(SETTINGS)]
        self.reference(setting)
        name = f"run {number}"
        generator = random.Random(f"{self.seed} {number}")
        job, history = self._job(setting, name)
        changes_ranks = generator.random() < 0.15
        ranks, met = setting.ranks, 0
        for attempt in range(1, 3 * FAULTS):
            history = History(self.history, Place(name, attempt))
            fault = None
            if met < min(faults, FAULTS):
                fault = self._draw(generator, setting, ranks, self._reached(name), attempt)
            done = run_attempt(job, ranks, fault, history, self.port)
            met = self._met(name)
            if done or fault is None:
                break
            if changes_ranks:
                ranks = generator.choice([each for each in (1, 2, 3, 4) if each != ranks])
        self._final(setting, job, history)
        return met

    def _job(self, setting: Setting, name: str, is_reference: bool = False) -> tuple[Job, History]:
        folder = self.folder / hashlib.sha256(name.encode()).hexdigest()[:12]
        folder.mkdir()
        config = folder / "job.toml"
        config.write_text(setting.text())
        history = History(self.history, Place(name, 1))
        history.add(
            "run", config=setting.name, ranks=setting.ranks, steps=setting.steps, is_reference=is_reference
        )
        return Job(config, folder / "run", folder / "log"), history

    def _draw(
        self, generator: random.Random, setting: Setting, ranks: int, reached: int, attempt: int
    ) -> Fault | None:
        """The fault of the next attempt, None if no step is left for one."""
        if reached >= setting.steps:
            return None
        rank = generator.randrange(ranks)
        kind = generator.choices(("kill", "stop", "gil", "error"), (80, 6, 6, 8))[0]
        victims = {"rank": 70, "host": 10, "writer": 20 if setting.asynchronous else 0}
        victim = generator.choices(list(victims), list(victims.values()))[0] if kind == "kill" else "rank"
        step = generator.randint(reached + 1, min(reached + 4, setting.steps))
        if kind in ("stop", "gil"):
            # Where the watch is not patient: after the first steps of a session, and before the end of the job.
            if reached + PATIENT_STEPS >= setting.steps:
                kind = "kill"
            else:
                step = generator.randint(reached + PATIENT_STEPS, setting.steps - 1)
        elif attempt > 1 and reached >= setting.every and generator.random() < 0.1 and victim != "writer":
            return Fault(kind, victim, rank, 0, generator.choice(("load", "loaded")))
        if victim == "writer" and generator.random() < 0.5:
            return Fault(kind, victim, rank, step, "write", generator.randint(1, 200))
        phase, number = generator.choice(_points(step, setting)), 0
        if phase in ("forward", "backward"):
            number = generator.randrange(BLOCKS)
        if phase == "call":
            calls = self._calls[setting]
            number = generator.randint(1, calls.get((step, rank), calls[step, 0]))
        if victim == "writer" and phase == "call":
            phase, number = "after", 0
        return Fault(kind, victim, rank, step, phase, number)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        return (line for line in read(self.history) if line["run"] == name)

    def _reached(self, name: str) -> int:
        return max((line["step"] for line in self._lines(name) if line["event"] == "step"), default=0)

    def _met(self, name: str) -> int:
        return sum(line["event"] == "fault" for line in self._lines(name))

    def _final(self, setting: Setting, job: Job, history: History) -> None:
        history.add("final", digest=digest_of(job.folder / "checkpoints" / f"step-{setting.steps}"))


def _points(step: int, setting: Setting) -> list[str]:
    """The phases at which a rank may fail in this step. Half of the faults of a step with a save are in the save."""
    phases = ["data", "forward", "backward", "clip", "reduce", "optimizer", "after"]
    if step % 4 == 0:
        phases.append("validate")
    if step == setting.steps:
        phases += ["conclude"] * 2
    if step % setting.every == 0:
        phases += ["call"] * len(phases) + ["saved"]
    return phases


def digest_of(checkpoint: Path) -> str:
    """The digest of all tensors of a checkpoint; empty if there is no whole one."""
    try:
        index = parse_index((checkpoint / INDEX).read_bytes())
    except (OSError, Damaged):
        return ""
    result = hashlib.sha256()
    for name, tensor in sorted(index.tensors.items()):
        for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
            result.update(f"{name} {tensor.shape} {chunk.offsets} {chunk.sizes} {chunk.sha256}\n".encode())
    return result.hexdigest()
