"""The names of the files in a run's folder, and what its record must have.

Nothing here writes a file but a probe; checkpoints, metrics and pictures are written by their own modules.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import shardwright
from shardwright.checkpoint import folder_or_url
from shardwright.train.config import CheckpointConfig, Config, stored_config
from shardwright.train.errors import UserError, as_user_errors, listed
from shardwright.train.run.position import FolderOrUrl, saved_steps
from shardwright.train.run.writing import writing

RUNS = Path("runs")
"""The parent folder of runs without `run.dir`."""


class _Inside:
    """The path of a file or a folder inside a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The names inside a run's folder."""

    path: Path

    config_file = _Inside("config.toml")
    record_file = _Inside("run.json")
    data_file = _Inside("data.json")  #: the documents of each source that the run has
    metrics_file = _Inside("metrics.jsonl")
    dropped_metrics_file = _Inside(
        "metrics.dropped.jsonl"
    )  #: lines of metrics.jsonl whose steps were repeated
    summary_file = _Inside("summary.txt")
    exit_file = _Inside("exit.json")  #: the end of the job, for wrappers
    launch_file = _Inside(
        "launch.json"
    )  #: the launch by torchrun that uses the folder, and how its attempts ended
    picture = _Inside("loss.png")
    memory_file = _Inside("memory.txt")  #: the memory of the first rank, by use
    base_file = _Inside("base.json")  #: the reference to the frozen base of adapters
    plan_file = _Inside("memory_plan.json")
    notes_file = _Inside("step_notes.json")  #: leases and collectives of an early step of the first rank
    unit_norms_file = _Inside("unit_norms.jsonl")  #: gradient norms by unit, of some steps
    plan_picture = _Inside("memory_plan.png")
    checkpoints = _Inside("checkpoints")
    evaluations = _Inside("evaluations")  #: results of tasks, by step
    logs = _Inside("logs")

    def evaluation_file(self, step: int) -> Path:
        """Return the results of tasks on the checkpoint of a step."""
        return self.evaluations / f"{step}.json"

    def evaluation_log(self, step: int) -> Path:
        """Return all that was printed by evaluations of tasks on that checkpoint."""
        return self.evaluations / f"{step}.log"

    def memory_history(self, step: int, rank: int) -> Path:
        """Return the allocations and releases of a rank's GPU memory in a step."""
        return self.path / "memory_history" / f"step_{step}_rank_{rank}.pickle"

    def memory_segments(self, step: int, rank: int) -> Path:
        """Return the segments and blocks of a rank's GPU memory at the error of a step, without stacks."""
        return self.path / "memory_history" / f"step_{step}_rank_{rank}_segments.pickle"

    def profile(self, first: int, last: int, rank: int) -> Path:
        """Return the trace of torch's profiler of a rank in these steps."""
        return self.path / "profile" / f"steps_{first}_to_{last}_rank_{rank}.json.gz"

    def exists(self) -> bool:
        """Return whether a run was ever started here."""
        # Path.is_file would raise for a folder without permissions.
        return os.path.isfile(self.record_file)

    def record(self) -> dict[str, Any]:
        """Return the content of run.json. Raises UserError if it is missing, cannot be read, or lacks a key."""
        try:
            record = json.loads(self.record_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = "no run.json in it" if os.path.isdir(self.path) else "no such folder"
            raise UserError(
                f"{self.path}: expected the folder of a run, found {found}{runs_near(self.path)}"
            ) from None
        except NotADirectoryError:
            raise UserError(
                f"{self.path}: expected the folder of a run, found a file; give the folder, such as {RUNS}/NAME-TIME"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.record_file}: cannot read the record of the run: {error.strerror}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{self.record_file}: cannot read the record of the run: {error}; the file is damaged: restore it"
            ) from None
        if not isinstance(record, dict):
            raise UserError(f"{self.record_file}: expected a JSON object, found {type(record).__name__}")
        damaged = _damaged_key(record)
        if damaged is not None:
            raise UserError(
                f"{self.record_file}: expected a valid {damaged}, found none or another kind of value; the file is "
                "damaged"
            )
        return record

    def config(self) -> Config:
        """Return the configuration of the run's last start.

        Raises UserError where it cannot be read, or names values whose files are not there.
        """
        return stored_config(self.path)


def runs_near(path: Path) -> str:
    """ "; runs in runs: runs/a, runs/b": the runs in a path without one, else beside it, else in `RUNS`. The one
    that was started last is the first. Empty: there are none."""
    for parent in (path, path.parent, RUNS):
        try:
            runs = [folder for folder in map(RunFolder, parent.iterdir()) if folder.exists()]
            runs.sort(key=lambda folder: folder.record_file.stat().st_mtime, reverse=True)
        except OSError:
            continue
        if runs:
            return f"; runs in {parent}: {listed(folder.path for folder in runs)}"
    return ""


def checkpoints_near(path: Path) -> str:
    """ "; checkpoints in runs/a/checkpoints: step-20, step-10": those beside a path without one, else the runs near it.
    Empty: there are none."""
    steps = saved_steps(path.parent)
    names = listed(f"step-{step}" for step in steps)
    return f"; checkpoints in {path.parent}: {names}" if steps else runs_near(path)


def checkpoints_of(folder: RunFolder, settings: CheckpointConfig) -> FolderOrUrl:
    """Return the folder or URL of a run's checkpoints. Raises UserError if `checkpoint.folder` is no such place."""
    parent = settings.folder
    if not parent:
        return folder.checkpoints
    with as_user_errors(ValueError, prefix="checkpoint.folder: "):
        folder_or_url(parent)
        return folder_or_url(f"{parent.rstrip('/')}/{folder.path.resolve().name}")


def newest_saved(folder: RunFolder) -> int | None:
    """Return the newest step that a run has saved, whole or not; None without one. Raises OSError if a store is
    silent."""
    try:
        place = checkpoints_of(folder, folder.config().checkpoint)
    except UserError:  # nothing has begun here
        place = folder.checkpoints
    return next(iter(saved_steps(place)), None)


def to_begin_again(checkpoints: FolderOrUrl) -> str:
    """Return the advice of a message about a run that has saved nothing. `checkpoints`: their place."""
    own = isinstance(checkpoints, Path) and checkpoints.name == "checkpoints"
    run = shlex.quote(str(checkpoints.parent)) if own and isinstance(checkpoints, Path) else "RUN"
    return f"start it again with: shardwright train CONFIG.toml --run.dir {run} --continue"


def _damaged_key(record: Mapping[str, Any]) -> str | None:
    """Return the first key of a run.json that is missing or has a value of the wrong kind."""
    corpus, sessions, results = record.get("corpus"), record.get("sessions"), record.get("results", {})
    tokenizer = record.get("tokenizer")
    facts = {field.name for field in fields(Session) if field.default is MISSING}
    sound = {
        "vocab_size": type(record.get("vocab_size")) is int,
        "tokenizer": isinstance(tokenizer, dict)
        and all(isinstance(tokenizer.get(key), str) for key in ("name", "fingerprint")),
        "corpus.sha256": isinstance(corpus, dict) and isinstance(corpus.get("sha256"), str),
        "corpus.train_tokens": isinstance(corpus, dict) and type(corpus.get("train_tokens")) is int,
        "sessions": isinstance(sessions, list)
        and sessions != []
        and all(isinstance(session, dict) and facts <= session.keys() for session in sessions),
        "results": isinstance(results, dict) and type(results.get("peak_memory", 0)) is int,
    }
    return next((key for key, is_sound in sound.items() if not is_sound), None)


def open_for_writing(folder: Path, what: str) -> None:
    """Make `folder` if it does not exist. Raises a UserError that names `what` if it cannot be written to."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{what}: expected a folder, found a file at {folder}")
    probe = folder / ".writable"
    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@dataclass(frozen=True)
class Session:
    """One part of a run without interruption, from a start or a --resume to its end."""

    start: str
    from_step: int
    engine: str
    ranks: int
    device: str
    device_name: str
    threads: int
    param_dtype: str
    reduce_dtype: str
    versions: dict[str, str]
    # These three are empty with an engine that does not have them.
    strategy: str = ""
    layout: str = ""
    memory: str = ""
    attempt: int = 1
    """1 for a start or a --resume, 2 for the first restart after it."""


def versions() -> dict[str, str]:
    return {
        "shardwright": shardwright.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
