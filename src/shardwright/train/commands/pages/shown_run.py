"""One run as plain values for a page: all of it that can be read, and a notice for each file that cannot.

Nothing here compares runs or writes files.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from shardwright.common.json_text import strict_json
from shardwright.train.errors import UserError, counted
from shardwright.train.launch.forecast import plan_file
from shardwright.train.report import jsonl, plots
from shardwright.train.report.page.notes import LARGEST, notes_picture
from shardwright.train.report.unit_norms import heat_map, read_unit_norms
from shardwright.train.run.evaluations import Evaluation, evaluated_steps, evaluation_at, scalars_of
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.metrics import INCIDENT, SAVE_FAILURE

CURVES = (
    "loss", "validation_loss", "tokens_per_second", "seconds", "data_seconds", "grad_norm", "lr", "memory_active",
    "memory_reserved", "mfu",
)  # fmt: skip
PARTS = "parts"  #: an object with the seconds of the parts of a step, in runs that record it
ABSENT = {"validation_loss": None, "data_seconds": 0.0}  #: keys that lines of older runs lack
TABLE = ("step", "loss", "validation_loss", "grad_norm", "tokens_per_second", "seconds", "memory_reserved")
ROWS = 50  #: of the table of steps
SHOWN = 5  #: damaged lines that are named
NOTICES = 20  #: that are shown
LONGEST = 1_000  #: characters of a text in a table
# Kinds of the values that are shown.
RECORD = {"name": str, "status": str, "parameters": int}
RESULTS = {"peak_memory": int, "held_memory": int, "leased_memory": int}
SESSION = {
    "start": str, "end": str, "from_step": int, "to_step": int, "status": str, "ended_by": str, "attempt": int,
    "ranks": int, "threads": int, "device": str, "device_name": str, "engine": str, "strategy": str, "layout": str,
    "memory": str, "param_dtype": str, "reduce_dtype": str, "versions": dict,
}  # fmt: skip
END = {"status": int, "reason": str, "step": int, "rank": int, "time": str}
PLANNED = {
    "fits": str, "device": str, "ranks": int, "reserved_bytes": int, "live_bytes": int, "exact": dict, "speed": dict,
    "peak": dict,
}  # fmt: skip
MAY_BE_NULL = {"parameters", *RESULTS, "end", "to_step", "ended_by", "step", "rank", "speed", "peak"}
KINDS = {int: "a whole number", str: "a text", dict: "an object"}

Curve = list[tuple[int, float]]


@dataclass
class ShownRun:
    """A run.

    Attributes:
        path: its folder.
        record: run.json; empty if it cannot be read.
        steps: records of steps.
        settings: values of the configuration as text, by SECTION.KEY.
        plan: the plan that was made beside the run; None: there is none.
        incidents: faults, restarts and samples that were left out, in the order of steps.
        end: exit.json; empty if there is none.
        memory: memory.txt.
        evaluations: results of tasks on its checkpoints.
        noted: the picture of a step that was noted; None: there is none.
        norms: the picture of gradient norms by unit; None: there is none.
        notices: of files that are damaged or missing.
    """

    path: Path
    record: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    incidents: Sequence[Mapping[str, Any]] = ()
    end: Mapping[str, Any] = field(default_factory=dict)
    memory: str = ""
    evaluations: Sequence[Evaluation] = ()
    noted: Mapping[str, Any] | None = None
    norms: Mapping[str, Any] | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        name, folder = str(self.record.get("name", "")), self.path.resolve().name
        return folder if folder.startswith(name) else f"{shortened(name)} ({folder})"

    @property
    def sessions(self) -> Sequence[Mapping[str, Any]]:
        """The sessions of its record, without those whose first step is damaged."""
        return [each for each in self.record.get("sessions", []) if "from_step" in each]

    @property
    def facts(self) -> dict[str, str]:
        """Settings, and facts of the last session, by which runs may differ."""
        last = dict(self.sessions[-1]) if self.sessions else {}
        versions = last.get("versions")
        names = ("engine", "ranks", "device_name", "threads", "param_dtype", "reduce_dtype")
        facts = {name: str(last[name]) for name in names if name in last}
        if isinstance(versions, dict):
            facts |= {f"version of {name}": str(version) for name, version in versions.items()}
        corpus = self.record.get("corpus", {})
        if "sha256" in corpus:
            facts["SHA-256 of the data"] = corpus["sha256"][:12]
        return {**facts, **self.settings}

    def curves(self) -> dict[str, Curve]:
        """Return values over steps, by the keys of metrics.jsonl; those of objects as KEY/NAME, metrics of tasks as
        tasks/TASK/METRIC."""
        curves: dict[str, Curve] = {}
        for record in self.steps:
            for key, value in _numbers(record):
                curves.setdefault(key, []).append((record["step"], value))
        for evaluation in self.evaluations:
            for key, value in scalars_of(evaluation.tasks).items():
                curves.setdefault(key, []).append((evaluation.step, value))
        return {key: sorted(curve) for key, curve in curves.items()}

    def results(self) -> dict[str, Any]:
        """Return the figures of a comparison, and the memory in run.json."""
        recorded = self.record.get("results") or {}
        memory = {key: recorded.get(key) for key in ("peak_memory", "held_memory", "leased_memory")}
        if not self.steps:
            return memory
        if memory["peak_memory"] is None:  # a run that did not end has no figure of all ranks
            memory["peak_memory"] = max(record["memory_reserved"] for record in self.steps)
        return {**plots.results(self.steps, self._timed_sessions), **memory}

    @property
    def _timed_sessions(self) -> Sequence[Mapping[str, Any]]:
        return self.sessions or [{"from_step": 0}]

    def split(self) -> dict[str, float]:
        """Mean seconds of the parts of a timed step; without recorded parts the wait for data, and the rest."""
        if not self.steps:
            return {}
        timed = plots.timed_steps(self.steps, self._timed_sessions)
        recorded = [record[PARTS] for record in timed if record.get(PARTS)]
        if recorded:
            names = [name for name, value in recorded[-1].items() if _is_number(value)]
            return {name: _mean([each.get(name) or 0.0 for each in recorded]) for name in names}
        whole, data = (_mean([record[name] for record in timed]) for name in ("seconds", "data_seconds"))
        return {"data": data, "forward, backward, collectives and optimizer": max(0.0, whole - data)}

    def values(self, most: int, characters: int) -> dict[str, Any]:
        """Return all but its curves.

        Args:
            most: incidents, and sessions. If there are more, the first and the last ones are shown.
            characters: of memory.txt.
        """
        results, last = self.results(), self.sessions[-1] if self.sessions else {}
        split = self.split()
        every = max(1, math.ceil(len(self.steps) / ROWS))
        rows = [*self.steps[:-1:every], *self.steps[-1:]]
        notices = [shortened(each) for each in self.notices[:NOTICES]]
        if more := self.notices[NOTICES:]:
            notices.append(f"left out of this page: {counted(len(more), 'more notice')} of this run")
        if more_text := self.memory[characters:]:
            notices.append(
                f"memory.txt: the last {len(more_text):,} of {len(self.memory):,} characters are left out of this page"
            )
        if self.record.get("status") == "failed" and (
            reason := last.get("ended_by") or self.end.get("reason")
        ):
            notices.insert(0, shortened(f"the run failed: {reason}"))
        return {
            "name": self.name,
            "folder": str(self.path),
            "status": self.record.get("status", ""),
            "end": last.get("end"),
            "on_gpu": last.get("device") == "cuda",
            "out_of_memory": "out of memory" in str(self.end.get("reason", "")).lower(),
            "parameters": self.record.get("parameters"),
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "results": results,
            "split": split,
            "step_seconds": sum(split.values()) or None,
            "sessions": [
                {key: _shortened_texts(value) for key, value in session.items() if key in SESSION}
                for session in _ends(self.sessions, most, "sessions", notices)
            ],
            "incidents": [
                _shortened_texts(each) for each in _ends(self.incidents, most, "incidents", notices)
            ],
            "settings": _shortened_texts(self.settings),
            "plan": None if self.plan is None else {key: self.plan.get(key) for key in PLANNED},
            "memory_text": self.memory[:characters],
            "noted": self.noted,
            "norms": self.norms,
            "notices": notices,
            "table": [[record.get(key) for key in TABLE] for record in rows],
        }


def _ends(values: Sequence[Any], most: int, name: str, notices: list[str]) -> list[Any]:
    """Return at most `most` of the values, the first and the last ones. A notice says how many are left out."""
    count = len(values)
    if count <= most:
        return list(values)
    first = most // 2
    notices.append(
        f"{count - most:,} of {count:,} {name} are left out of this page: it has the first {first:,} and the last "
        f"{most - first:,}"
    )
    return [*values[:first], *values[count - most + first :]]


def shortened(text: str) -> str:
    """Return the text, or its begin and how many characters follow."""
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} ... ({counted(more, 'more character')})"


def _shortened_texts(value: Any) -> Any:
    """Return the value with short texts, also inside an object."""
    if isinstance(value, Mapping):
        return {key: _shortened_texts(each) for key, each in value.items()}
    return shortened(value) if isinstance(value, str) else value


def _mean(values: Sequence[float]) -> float:
    """Not finite if a value or the sum is not: it raises no error."""
    return sum(map(float, values)) / len(values)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if key in CURVES and _is_number(value):
            yield key, value
        elif isinstance(value, dict):
            yield from ((f"{key}/{name}", each) for name, each in value.items() if _is_number(each))


def read_shown_run(path: Path) -> ShownRun:
    """Return all of a run that can be read.

    Raises:
        UserError: the folder has neither a record nor metrics of a run.
    """
    folder = RunFolder(path)
    run = ShownRun(path)
    try:
        run.record = _sound_record(folder.record(), folder.record_file, run.notices)
    except UserError as error:
        if not folder.metrics_file.is_file():
            raise
        run.notices.append(str(error))
    events: list[dict[str, Any]] = []
    try:
        steps, events, errors = jsonl.read_what_is_whole(folder.metrics_file)
        run.steps = [{**ABSENT, **record} for record in steps]
        run.notices += errors[:SHOWN]
        if more := len(errors) - SHOWN:
            run.notices += (
                [f"{counted(more, 'more line', 'more lines')} of it are damaged"] if more > 0 else []
            )
    except UserError as error:
        run.notices.append(str(error))
    run.settings = _settings(folder.config_file, run.notices)
    run.end = _sound(_json(folder.exit_file, run.notices), END, str(folder.exit_file), run.notices)
    if plan := _json(plan_file(folder), run.notices):
        plan = _sound(plan, PLANNED, str(plan_file(folder)), run.notices)
        run.plan = plan if plan.keys() >= PLANNED.keys() else None
        if run.plan is None:
            missing = ", ".join(key for key in PLANNED if key not in plan)
            run.notices.append(f"{plan_file(folder)}: the plan is not shown, since it has no valid {missing}")
    run.evaluations = list(_evaluations(folder, run.notices))
    run.incidents = sorted(_incidents(run, events, folder), key=lambda each: each["step"] or 0)
    if notes := _json(folder.notes_file, run.notices):
        try:
            run.noted = notes_picture(notes)
        except ValueError as error:
            run.notices.append(f"{folder.notes_file}: {error}")
    run.norms = _norms(folder.unit_norms_file, run.notices)
    try:
        run.memory = folder.memory_file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it is written after the first steps
        pass
    return run


def _norms(file: Path, notices: list[str]) -> dict[str, Any] | None:
    """Return the picture of gradient norms by unit, with a notice about lines that are damaged."""
    try:
        read = read_unit_norms(file)
    except OSError as error:
        notices.append(f"{file}: cannot read it: {error.strerror}")
        return None
    if read.damaged:
        count, first = counted(len(read.damaged), "line"), read.damaged[0]
        notices.append(f"{file}: expected norms by unit, found {count} damaged, the first is line {first}")
    return heat_map(read)


def _evaluations(folder: RunFolder, notices: list[str]) -> Iterator[Evaluation]:
    for step in evaluated_steps(folder):
        try:
            yield evaluation_at(folder, step)
        except UserError as error:
            notices.append(str(error))


def _sound(
    values: Mapping[str, Any], kinds: Mapping[str, type], where: str, notices: list[str]
) -> dict[str, Any]:
    """Return the values without those of another kind, and a notice about each of these."""
    sound = {}
    for key, value in values.items():
        kind = kinds.get(key)
        is_sound = type(value) is kind and (type(value) is not int or abs(value) <= LARGEST)
        if kind is None or is_sound or (value is None and key in MAY_BE_NULL):
            sound[key] = value
        else:
            is_list = isinstance(value, list)
            found = "a list" if is_list else "an object" if isinstance(value, dict) else f"{value!r:.100}"
            notices.append(f"{where}: expected {KINDS[kind]} for {key}, found {found}")
    return sound


def _sound_record(record: Mapping[str, Any], file: Path, notices: list[str]) -> dict[str, Any]:
    """Return the values of run.json of which each has its kind. A session without its first step is not shown."""
    sound = _sound(record, RECORD, str(file), notices)
    sound["results"] = _sound(record.get("results", {}), RESULTS, f"{file}, results", notices)
    sessions = []
    for number, session in enumerate(record["sessions"], start=1):
        where = f"{file}, session {number}"
        sessions.append(_sound(session, SESSION, where, notices))
        if "versions" in sessions[-1]:
            versions = session["versions"]
            sessions[-1]["versions"] = _sound(versions, dict.fromkeys(versions, str), where, notices)
    return {**sound, "sessions": sessions}


def _settings(file: Path, notices: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    try:
        for section, keys in tomllib.loads(file.read_text(encoding="utf-8")).items():
            values = keys.items() if isinstance(keys, dict) else [("", keys)]
            settings |= {f"{section}.{key}".rstrip("."): _in_words(value) for key, value in values}
    except (OSError, ValueError, RecursionError) as error:  # also of a number with too many digits for a text
        reason = error.strerror if isinstance(error, OSError) else error
        notices.append(f"{file}: cannot read the settings: {reason}")
    return settings


def _in_words(value: object) -> str:
    """Texts without quotes, and true and false as TOML writes them."""
    if isinstance(value, str):
        return value or '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(file: Path, notices: list[str]) -> dict[str, Any]:
    """Empty without the file, and with a notice if it is damaged. A killed job may leave a file without content."""
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text) if text.strip() else {}
        strict_json(value)  # which a page needs: it is not nested too deeply
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notices.append(f"{file}: cannot read it: {error}")
        return {}
    if not isinstance(value, dict):
        notices.append(f"{file}: expected a JSON object, found {type(value).__name__}")
        return {}
    return value


def _incidents(
    run: ShownRun, events: Sequence[Mapping[str, Any]], folder: RunFolder
) -> Iterator[dict[str, Any]]:
    def incident(step: object, what: str, text: object, time: object = None) -> dict[str, Any]:
        return {"step": step if type(step) is int else None, "what": what, "text": str(text), "time": time}

    for event in events:
        if SAVE_FAILURE in event:
            yield incident(event["step"], "checkpoint not written", event[SAVE_FAILURE])
        elif not isinstance(content := event[INCIDENT], dict):
            yield incident(event["step"], "incident", "its line of metrics.jsonl is damaged")
        else:
            words = {
                "skip": "step skipped",
                "rewind": "back to a checkpoint",
                "untrained": "no trained token",
                "repeat": "step done twice",
            }
            action, samples = str(content.get("action")), content.get("samples")
            left_out = (
                f"; samples {samples[0]} to {samples[1] - 1} are left out"
                if _is_range(samples) and action != "repeat"
                else ""
            )
            text = f"{content.get('reason', 'no reason is recorded')}{left_out}"
            yield incident(event["step"], words.get(action, action), text)
    for number, session in enumerate(run.sessions):
        begin, start = session["from_step"], session.get("start")
        text = f"on {session.get('ranks', '?')} ranks, goes on after step {begin}"
        if (attempt := session.get("attempt", 1)) > 1:
            yield incident(begin, "restart", f"attempt {attempt}, {text}", start)
        elif number:
            yield incident(begin, "resume", text, start)
        if (status := session.get("status")) not in ("finished", "running", None):
            text = session.get("ended_by") or "no reason is recorded"
            yield incident(session.get("to_step"), f"session {status}", text, session.get("end"))
    for record in run.steps:
        if wrong := _not_finite(record):
            yield incident(record["step"], "not finite", ", ".join(wrong))
    if run.end.get("status"):
        rank = f", rank {run.end['rank']}" if run.end.get("rank") is not None else ""
        text = f"exit status {run.end['status']}{rank}: {run.end.get('reason', 'no reason is recorded')}"
        yield incident(run.end.get("step"), "end of the job", text, run.end.get("time"))
    try:
        dropped = len(folder.dropped_metrics_file.read_bytes().splitlines())
    except OSError:
        dropped = 0
    if dropped:
        yield incident(
            None, "repeated steps", f"{counted(dropped, 'line', 'lines')} of metrics.jsonl were moved away"
        )
    for report in sorted((folder.path / "hangs").glob("*.txt")):
        yield incident(None, "hang", f"the report is {report}")


def _is_range(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and [type(each) for each in value] == [int, int]


def _not_finite(record: Mapping[str, Any]) -> list[str]:
    return [key for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
