"""The sink of trackio. TRACKIO_DIR, TRACKIO_PROJECT, TRACKIO_SPACE_ID and its other variables apply."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import trackio

from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.report.sinks.service import KnownRun, ServiceSink, numbers_in, project_of, settings_of


def open_sink(site: RunSite) -> ServiceSink:
    return ServiceSink("trackio", site, project_of(site, "TRACKIO_PROJECT"), _Run)


class _Run:
    """A run in trackio. Runs there are found by their names, so the name has random digits."""

    url = ""

    def __init__(self, site: RunSite, project: str, stored: KnownRun | None) -> None:
        self.id = stored.id if stored else f"{site.config.run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=project,
            name=self.id,
            config=settings_of(site),  # of a resumed run, too: trackio replaces the settings it has
            resume="allow" if stored else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def finish(self, end: RunEnd) -> None:
        values: dict[str, object] = {**numbers_in(end.results), "status": end.status}
        if end.picture is not None:
            values["loss/curve"] = trackio.Image(str(end.picture))
        self._run.log(values, step=end.step)
        self._run.finish()
