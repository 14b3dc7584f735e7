"""The sink of MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables apply."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.config.catalog.sinks import RunSite
from shardwright.train.errors import UserError
from shardwright.train.report.sinks.service import KnownRun, ServiceSink, numbers_in, project_of, settings_of

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MOST_PARAMS, LONGEST_PARAM = 100, 6000
"""Parameters of one request, and characters of one value: limits of MLflow."""


def open_sink(site: RunSite) -> ServiceSink:
    """Raises UserError if MLflow cannot use its tracking URI. A server is not contacted."""
    try:
        client = MlflowClient()
    except (MlflowException, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            "log.sinks: sink 'mlflow' cannot open MLflow's tracking URI; set MLFLOW_TRACKING_URI to a server, as in "
            f"http://localhost:5000. MLflow's error: {reason}"
        ) from None

    def start(site: RunSite, project: str, stored: KnownRun | None) -> _Run:
        return _Run(client, site, project, stored)

    return ServiceSink("mlflow", site, project_of(site, "MLFLOW_EXPERIMENT_NAME"), start)


class _Run:
    """A run in MLflow."""

    url = ""

    def __init__(self, client: MlflowClient, site: RunSite, project: str, stored: KnownRun | None) -> None:
        self._client = client
        if stored is not None:
            self.id = stored.id
            client.update_run(self.id, status="RUNNING")
            return
        experiment = client.get_experiment_by_name(project)
        experiment_id = client.create_experiment(project) if experiment is None else experiment.experiment_id
        name = os.environ.get("MLFLOW_RUN_NAME") or site.config.run.name
        self.id = client.create_run(experiment_id, run_name=name).info.run_id
        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in settings_of(site).items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(self.id, params=params[first : first + MOST_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self.id, [Metric(name, value, now, step) for name, value in values.items()])

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def finish(self, end: RunEnd) -> None:
        results = numbers_in(end.results)
        if results:
            self.log(end.step, results)
        if end.picture is not None:
            self._client.log_artifact(self.id, str(end.picture))
        self._client.set_terminated(self.id, STATUS[end.status])
