"""The folder of a run: the names of its files, how a run is found again, and how its record is checked.

This file writes small files, completely or not at all. The modules that make checkpoints, metrics and pictures write
them. If a write fails, `writing` raises a UserError.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import shardwright
from shardwright.checkpoint import check_writable, folder_or_url
from shardwright.train.config import Config, stored_config, with_special_tokens
from shardwright.train.config.catalog.kinds import kind_named
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.run.lock import FolderLock, claim
from shardwright.train.run.position import FolderOrUrl, saved_steps
from shardwright.train.run.writing import unwritable, writing

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
    plan_picture = _Inside("memory_plan.png")
    checkpoints = _Inside("checkpoints")
    logs = _Inside("logs")

    def memory_history(self, step: int, rank: int) -> Path:
        """The allocations and releases of a rank's GPU memory in a step."""
        return self.path / "memory_history" / f"step_{step}_rank_{rank}.pickle"

    def exists(self) -> bool:
        """Return whether a run was ever started here."""
        # Path.is_file would raise for a folder without permissions.
        return os.path.isfile(self.record_file)

    def record(self) -> dict[str, Any]:
        """The content of run.json. Raises UserError if it is missing, cannot be read, or lacks a key."""
        try:
            record = json.loads(self.record_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = "no run.json in it" if os.path.isdir(self.path) else "no such folder"
            raise UserError(f"{self.path}: expected the folder of a run, found {found}") from None
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
        """The configuration of the run's last start.

        Raises UserError where it cannot be read, or names values whose files are not there.
        """
        return stored_config(self.path)


def checkpoints_of(folder: RunFolder, config: Config) -> FolderOrUrl:
    """The folder or URL of a run's checkpoints. Raises UserError if `checkpoint.folder` is no such place."""
    parent = config.checkpoint.folder
    if not parent:
        return folder.checkpoints
    with as_user_errors(ValueError, prefix="checkpoint.folder: "):
        folder_or_url(parent)
        return folder_or_url(f"{parent.rstrip('/')}/{folder.path.resolve().name}")


def newest_saved(folder: RunFolder) -> int | None:
    """The newest step that a run has saved, whole or not; None without one. Raises OSError if a store is silent."""
    try:
        place = checkpoints_of(folder, folder.config())
    except UserError:  # nothing has begun here
        place = folder.checkpoints
    return next(iter(saved_steps(place)), None)


def _damaged_key(record: Mapping[str, Any]) -> str | None:
    """The first key of a run.json that is missing or has a value of the wrong kind."""
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


CONTINUE = "--continue"
"""A value in place of a run to resume: `run.dir`, from the newest checkpoint if it has one; else a new run there."""


def create_run(config: Config) -> RunFolder:
    """Make the folder of a new run: `run.dir`, or runs/NAME-TIME. Raises UserError if `run.dir` holds a run."""
    if config.run.dir:
        _check_name(config.run.dir)
        folder = RunFolder(Path(config.run.dir))
        if folder.exists():
            raise UserError(holds_a_run(folder))
    else:
        folder = RunFolder(_unique_folder(f"{config.run.name}-{datetime.now():%Y%m%d-%H%M%S}"))
    open_for_writing(folder.path, "run.dir")
    return folder


def _check_name(path: str) -> None:
    """Raise if run.json and config.toml, which are UTF-8, cannot store the name."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"run.dir: expected a folder whose name is UTF-8 text, found {path!a}; choose another name, or set "
            "PYTHONUTF8=1 where the locale is not UTF-8"
        ) from None


def holds_a_run(folder: RunFolder) -> str:
    return (
        f"run.dir: expected a folder without a run, found one in {folder.path}; continue it with --resume "
        f"{shlex.quote(str(folder.path))}, or set another folder"
    )


def _unique_folder(name: str) -> Path:
    attempt = 1
    while True:
        path = RUNS / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise UserError(f"{RUNS}: expected a folder to keep runs in, found something else") from None
            attempt += 1
        except OSError as error:
            raise UserError(unwritable(path, error)) from error


def find_run(config: Config, resume: str) -> RunFolder:
    """The run to continue: the folder `resume`. For "" it is `run.dir`, else the newest run with that name."""
    if resume or config.run.dir:
        folder = RunFolder(Path(resume or config.run.dir))
        if not folder.exists():
            raise UserError(f"--resume: expected the folder of a run, found none in {folder.path}")
        return folder
    pattern = re.compile(re.escape(config.run.name) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    runs = []
    for path in RUNS.iterdir() if RUNS.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and RunFolder(path).exists():
            runs.append((match[1], int(match[2] or 1), path))
    if not runs:
        raise UserError(
            f"--resume: expected a run named {config.run.name} in {RUNS}, found none; pass its folder"
        )
    return RunFolder(max(runs)[2])


def as_saved(config: Config, resume: str) -> Config:
    """The configuration for going on with a run, with the run's own `data.special_tokens` and `model.vocab_size` unless
    it has them.

    `resume`: as for :func:`find_run`, or CONTINUE, whose run need not exist yet.
    """
    if resume == CONTINUE and not RunFolder(Path(config.run.dir)).exists():
        return config
    try:
        saved = find_run(config, "" if resume == CONTINUE else resume).config()
    except UserError:
        return config  # the job says so when it opens the folder
    config = with_special_tokens(config, saved.data.special_tokens)
    same_kind = config.model.kind == saved.model.kind and config.model.vocab_size is None
    if not same_kind or saved.model.vocab_size is None:
        return config
    model = config.model.model_copy(update={"vocab_size": saved.model.vocab_size})
    return config.model_copy(update={"model": model})


def check_same_job(folder: RunFolder, config: Config, what: str) -> None:
    """Raise if the configuration makes the run another job. The error names the first key.

    Steps, learning rate, engine, ranks and precisions may change. The model and the sequence of samples may not.
    """
    there, here = folder.config().checkpoint.folder, config.checkpoint.folder
    if there != here:
        raise UserError(
            f"{what}: expected checkpoint.folder = {value_in_words(there)} as in {folder.path}, where its checkpoints "
            f"are, found {value_in_words(here)}"
        )
    for key, before, after in differences(_where_content_decides(folder.config(), config), config):
        old, new = value_in_words(before), value_in_words(after)
        raise UserError(
            f"{what}: expected {key} = {old} as in {folder.path}, found {new}; start a new run for that"
        )


def value_in_words(value: object) -> str:
    """A value of a configuration in a message; "none" for an empty one."""
    return "none" if value in ("", None, (), {}) else str(value)


def _where_content_decides(stored: Config, config: Config) -> Config:
    """The stored configuration with the current paths and keys of data whose content is compared, or may change."""
    before, after = stored.data, config.data
    changes: dict[str, Any] = {}
    if after.appended:  # a list may have new files
        changes["source"] = after.source
        if len(before.sources) == len(after.sources):
            pairs = zip(before.sources, after.sources, strict=True)
            changes["sources"] = tuple(old.model_copy(update={"path": new.path}) for old, new in pairs)
    if before.split_fraction == after.split_fraction:  # other text for validation alone changes no step
        changes.update({key: getattr(after, key) for key in ("validation_source", "validation_sources")})
    return stored.model_copy(update={"data": before.model_copy(update=changes)})


def differences(first: Config, second: Config) -> Iterator[tuple[str, object, object]]:
    """Keys of the model, the data and the order of samples that differ between two configurations, with both values.

    The resolved values are compared, so two spellings of one value are equal.
    """
    first, second = first.resolved(), second.resolved()
    pairs: list[tuple[str, object, object]] = [("model.kind", first.model.kind, second.model.kind)]
    if kind_named(first.model.kind) is kind_named(second.model.kind):  # by a short name or an import path
        shapes = vars(first.model.shape()), vars(second.model.shape())
        pairs = [(f"model.{key}", value, shapes[1][key]) for key, value in shapes[0].items()]
    free = {"workers", "cache", "appended", "validation_fraction"}  # which no sample depends on
    if first.data.separates == second.data.separates:
        free.add("document_mask")
    data = [(key, value, getattr(second.data, key)) for key, value in first.data if key not in free]
    pairs += [(f"data.{key}", before, after) for key, before, after in data]
    pairs.append(("data.validation_fraction", first.data.split_fraction, second.data.split_fraction))
    pairs += [
        *(
            (f"finetune.{key}", value, getattr(second.finetune, key))
            for key, value in first.finetune
            if key not in ("dropout", "adapters")
        ),
        ("run.seed", first.run.seed, second.run.seed),
        ("train.seq_len", first.train.seq_len, second.train.seq_len),
        ("train.global_batch", first.train.global_batch, second.train.global_batch),
    ]
    for key, before, after in pairs:
        if before != after:
            yield key, before, after


def check_same_data(folder: RunFolder, sha256: str, train_tokens: int) -> None:
    """Raise if the text of the run has changed but its `data.source` has not."""
    data = folder.record()["corpus"]
    stored, stored_tokens = data["sha256"], data["train_tokens"]
    if stored != sha256:
        raise UserError(
            f"--resume: expected the data of {folder.path} (sha256 {stored[:12]}), found other tokens "
            f"(sha256 {sha256[:12]}): the text behind data.source, the tokenizer or the template has changed; "
            "restore it or start a new run"
        )
    if stored_tokens != train_tokens:
        raise UserError(
            f"--resume: expected the {stored_tokens:,} training tokens of {folder.path}, found {train_tokens:,} in the "
            "same data: its documents begin elsewhere; start a new run"
        )


def recorded_tokenizer(record: Mapping[str, Any], config: Config) -> str:
    """The setting `data.tokenizer` of a run. A hub name gets the commit that the run has used."""
    name = config.data.tokenizer
    used = str(record["tokenizer"]["name"])
    return used if used.partition("@")[0] == name.partition("@")[0] else name


def check_same_tokenizer(folder: RunFolder, name: str, fingerprint: str) -> None:
    """Raise if a tokenizer is not the one of the run.

    Args:
        folder: of the run.
        name: the setting with which the tokenizer was opened.
        fingerprint: of the tokenizer.

    Raises:
        UserError: the fingerprints differ.
    """
    recorded = folder.record()["tokenizer"]
    if fingerprint != recorded["fingerprint"]:
        raise UserError(
            f"data.tokenizer: expected the tokenizer of {folder.path}, {recorded['name']} with the fingerprint "
            f"{recorded['fingerprint'][:12]}, found the fingerprint {fingerprint[:12]} at {name}; restore the files "
            f"that the run was trained with, or set data.tokenizer in {folder.config_file} to a copy of them"
        )


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


def open_folder(config: Config, resume: str | None) -> tuple[RunFolder, FolderLock]:
    """The folder of the run, and its lock. No other run may use the folder until the lock is released."""
    if resume is None:
        folder = create_run(config)
        with writing(folder.path):
            lock = claim(folder.path)
        if folder.exists():  # another run began and ended here after our check and before the lock
            lock.release()
            raise UserError(holds_a_run(folder))
        try:
            _check_unused(checkpoints_of(folder, config))
        except BaseException:
            discard_if_unused(folder, lock)
            raise
        return folder, lock
    folder = find_run(config, resume)
    check_same_job(folder, config, "--resume")
    with writing(folder.path):
        return folder, claim(folder.path)


def _check_unused(checkpoints: FolderOrUrl) -> None:
    """Raise UserError if a new run must not write its checkpoints there. Finds a store that cannot be used, too."""
    with as_user_errors(OSError, prefix="checkpoint.folder: "):
        steps = saved_steps(checkpoints)
        if not steps:
            check_writable(checkpoints)
    if steps:
        raise UserError(
            f"checkpoint.folder: expected no checkpoint of another run in {checkpoints}, found step-{steps[0]}; choose "
            "another checkpoint.folder or run.dir"
        )


def discard_if_unused(folder: RunFolder, lock: FolderLock) -> None:
    """Remove a folder in which no run began, so that the next try does not find its files."""
    if folder.exists():
        return
    try:
        lock.remove()
        for log in sorted(folder.logs.rglob("*"), reverse=True):
            log.rmdir() if log.is_dir() else log.unlink()
        if folder.logs.exists():
            folder.logs.rmdir()
        folder.path.rmdir()
    except OSError:
        pass  # The folder has other files, or no longer exists.
