"""The opening of a sink by its name in `[log] sinks`, and checks of what a user's function returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shardwright.engine.extend import ExtensionError, call
from shardwright.train.config.catalog.records import Sink
from shardwright.train.config.catalog.sinks import NamedSink, RunSite
from shardwright.train.errors import UserError


def _tensorboard(site: RunSite) -> Sink:
    from shardwright.train.report.sinks import tensorboard

    return tensorboard.open_sink(site)


def _wandb(site: RunSite) -> Sink:
    from shardwright.train.report.sinks import weights_and_biases

    return weights_and_biases.open_sink(site)


def _mlflow(site: RunSite) -> Sink:
    from shardwright.train.report.sinks import mlflow_tracking

    return mlflow_tracking.open_sink(site)


def _trackio(site: RunSite) -> Sink:
    from shardwright.train.report.sinks import trackio_projects

    return trackio_projects.open_sink(site)


_BUILT_IN: dict[str, Callable[[RunSite], Sink]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio
}  # fmt: skip


def open_sink(named: NamedSink, site: RunSite) -> Sink:
    """Open a sink for one run and return it.

    Raises:
        ExtensionError: ``open`` raised an error, or returned an object without the methods of ``Sink``.
    """
    owner = f"The function open of sink {named.name!r}"
    try:
        sink = call(owner, named.open or _BUILT_IN[named.name], site)
    except ExtensionError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    missing = [name for name in ("step", "say", "close") if not callable(getattr(sink, name, None))]
    if missing or isinstance(sink, type):
        raise ExtensionError(
            f"{owner} returned {sink!r} ({type(sink).__name__}); expected an object with the methods "
            "step(record), say(text) and close(end)"
        )
    if not _accepts(sink.close, 1):
        raise ExtensionError(
            f"{owner} returned a {type(sink).__name__} with close{inspect.signature(sink.close)}; expected "
            "close(end)"
        )
    return sink


def _accepts(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:
        return True  # a function written in C, without a readable signature
    return True
