"""The base of the sinks of all services: when they start, what they send, and how a resumed run continues.

The run in the service starts with the first step that this run has done. A run that fails before sends nothing. No
package of a service is imported here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwright.train.config.catalog.records import RunEnd, StepRecord, scalars
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.config.schema import flat
from shardwright.train.errors import UserError
from shardwright.train.run.writing import write_json


@dataclass(frozen=True)
class KnownRun:
    """A run in a service, as a file in the run's folder names it.

    Attributes:
        id: its name in the service; unique in the project.
        project: the project, or the experiment, that has it.
        url: where the service shows it; empty if not known.
        step: the last step that the service got.
    """

    id: str
    project: str
    url: str
    step: int


class ServiceRun(Protocol):
    """A run in a service. Its methods may raise any error and may block."""

    id: str
    url: str

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        """Log results on the checkpoint of a step, which may be before the last one of `log`."""

    def finish(self, end: RunEnd) -> None: ...


class ServiceSink:
    """The sink of one service.

    Args:
        name: the sink's name; its file in the run's folder is NAME.json.
        site: the run.
        project: the project in the service.
        start: makes the run in the service, or continues the stored one.

    Raises:
        UserError: the file in the run's folder is damaged.
    """

    def __init__(
        self,
        name: str,
        site: RunSite,
        project: str,
        start: Callable[[RunSite, str, KnownRun | None], ServiceRun],
    ) -> None:
        self._site, self._project, self._start = site, project, start
        self._file = site.folder / f"{name}.json"
        stored = stored_run(site.folder, name) if site.steps_done or site.attempt > 1 else None
        self._stored = stored if stored is not None and stored.project == project else None
        self._last_step = self._stored.step if self._stored else 0
        self._run: ServiceRun | None = None
        self._has_records = False

    def step(self, record: StepRecord) -> None:
        self._has_records = True
        values = scalars(record, self._site.config.log.every)
        if not values or record.step <= self._last_step:  # The service has this step from before the resume.
            return
        run = self._opened()
        run.log(record.step, values)
        self._last_step = record.step
        self._note(run)

    def tasks(self, step: int, values: Mapping[str, float]) -> None:
        run = self._opened()
        run.log_tasks(step, values)
        self._note(run)  # no step may have been sent before

    def say(self, text: str) -> None:
        """Nothing: the lines are for a terminal and name folders of this machine."""

    def close(self, end: RunEnd) -> None:
        if self._run is not None or (self._stored is not None and self._has_records):
            self._opened().finish(end)

    def _opened(self) -> ServiceRun:
        if self._run is None:
            self._run = self._start(self._site, self._project, self._stored)
        return self._run

    def _note(self, run: ServiceRun) -> None:
        write_json(self._file, asdict(KnownRun(run.id, self._project, run.url, self._last_step)))


def stored_run(folder: Path, name: str) -> KnownRun | None:
    """Return the run of a folder in the service of that sink; None if nothing was sent there. Raises UserError for a
    damaged file."""
    file = folder / f"{name}.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return KnownRun(str(values["id"]), str(values["project"]), str(values["url"]), int(values["step"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file}: expected the id, project, url and step of a run in a service, found something else "
            f"({type(error).__name__}); delete the file to begin a new run there"
        ) from None


def project_of(site: RunSite, variable: str) -> str:
    """`[log] project`, else the service's own environment variable, else "shardwright"."""
    return site.config.log.project or os.environ.get(variable) or "shardwright"


def settings_of(site: RunSite) -> dict[str, Any]:
    """Configuration and facts of a run, by dotted keys, as values of JSON. Keys without a value are left out.

    The configuration is the one that the user wrote, with the model's sizes. The stored configuration of a resumed run
    has absolute paths, which the user may not have written; they are left out.
    """
    tables = site.config.model_dump(mode="json", exclude_none=True)
    tables["model"] = site.config.model.resolved().model_dump(mode="json", exclude_none=True)
    values = dict(flat(tables))
    if site.steps_done or site.attempt > 1:
        values = {key: value for key, value in values.items() if not _has_path(value)}
    return {**values, **dict(flat(site.facts, "facts."))}


def _has_path(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_path, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    return isinstance(value, str) and os.path.isabs(value)


def numbers_in(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the results of a run that are numbers, by the names that a service shows."""
    return {
        f"result/{name}": value
        for name, value in results.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
