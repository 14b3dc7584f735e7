"""Results of tasks for the sinks of a run that has ended: a service's run goes on with them, if it can.

While a run uses its folder, its own process has its runs in the services. Nothing here evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from shardwright.engine.extend import in_words
from shardwright.train.config.catalog.records import RunEnd
from shardwright.train.config.catalog.sinks import RunSite, check_packages, sinks as named_sinks
from shardwright.train.errors import UserError
from shardwright.train.launch.evaluation_process import is_beside_run
from shardwright.train.report import sink_thread
from shardwright.train.report.sink_thread import SinkThread
from shardwright.train.report.sinks.opening import open_sink
from shardwright.train.report.sinks.service import stored_run
from shardwright.train.report.sinks.tensorboard import write_scalars
from shardwright.train.run.evaluations import scalars_of
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.lock import is_in_use
from shardwright.train.run.metrics import recorded_step


def send(folder: RunFolder, step: int, tasks: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Send the results of tasks on the checkpoint of `step` to the sinks of the run.

    TensorBoard always gets them. A service gets them in its run, if the run has ended. A line says why a sink does not
    get them; the results are in the run's folder all the same.
    """
    values = scalars_of(tasks)
    uses_folder = is_beside_run() or is_in_use(folder.path)
    for name in folder.config().log.sinks:
        try:
            if name == "tensorboard":
                write_scalars(folder.path / "tensorboard" / "tasks", values, step)
                continue
            reason = _problem(folder, name, uses_folder)
            if not reason:
                _send_to(folder, name, step, values)
        except Exception as error:  # of the service: the evaluation is done
            reason = str(error) if isinstance(error, UserError) else f"it raised {in_words(error)}"
        if reason:
            say(f"sink {name!r} gets no results of tasks: {reason}")


def _problem(folder: RunFolder, name: str, uses_folder: bool) -> str:
    """Return the reason why a sink cannot go on with the run. Empty: it can."""
    if not named_sinks.get(name).reopens:
        return "it cannot go on with a run that has ended"
    if uses_folder:
        return "the run trains, and alone writes there; [validation] tasks are sent by the run"
    if stored_run(folder.path, name) is None:
        return "it has no run of this folder"
    check_packages([name])
    return ""


def _send_to(folder: RunFolder, name: str, step: int, values: Mapping[str, float]) -> None:
    """Open the sink as for a resume, in the project that it had, and close it as the run has ended."""
    stored = stored_run(folder.path, name)
    assert stored is not None
    config = folder.config()
    log = config.log.model_copy(update={"project": stored.project})
    last = max(1, recorded_step(folder.metrics_file))
    site = RunSite(folder.path.absolute(), config.model_copy(update={"log": log}), last)
    named = named_sinks.get(name)
    sink = SinkThread(name, partial(open_sink, named, site), named.patience)
    sink.tasks(step, values)
    status: Literal["finished", "interrupted", "failed"] = "failed"
    if (recorded := folder.record()["status"]) in ("finished", "interrupted"):
        status = recorded
    sink.close(RunEnd(status, max(last, stored.step)), sink_thread.CLOSE_SECONDS)
