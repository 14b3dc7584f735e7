"""The registry of places for metrics, for `[log] sinks`.

Every run also writes metrics.jsonl, and lines or a progress bar on the terminal. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.extend.registry import ExtensionError, Registry, call, check_signature
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from shardwright.train.config import Config
    from shardwright.train.metrics import Sink


@dataclass(frozen=True)
class RunSite:
    """The run for which a sink is opened.

    Attributes:
        folder: the run's folder, an absolute path. It exists.
        config: the run's configuration.
        steps_done: optimizer steps in the checkpoint that the run continues; 0 for a new run. If a sink already has
            records of later steps, it gets these steps again.
    """

    folder: Path
    config: Config
    steps_done: int


@dataclass(frozen=True)
class NamedSink:
    """A place for metrics.

    Attributes:
        name: its name in `[log] sinks`.
        summary: one sentence on what it does.
        open: makes the sink of one run. Only the first rank calls it.
    """

    name: str
    summary: str
    open: Callable[[RunSite], Sink]

    def __post_init__(self) -> None:
        check_signature(f"NamedSink {self.name!r}: open", self.open, "site")

    def make(self, site: RunSite) -> Sink:
        """The sink of one run.

        Raises:
            ExtensionError: ``open`` raised an error, or returned an object without the methods of ``Sink``.
        """
        owner = f"The function open of sink {self.name!r}"
        try:
            sink = call(owner, self.open, site)
        except ExtensionError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise
        missing = [name for name in ("step", "say", "close") if not callable(getattr(sink, name, None))]
        if missing or isinstance(sink, type):
            raise ExtensionError(
                f"{owner} returned {sink!r} ({type(sink).__name__}); expected an object with the methods "
                "step(record), say(text) and close()"
            )
        return sink  # type: ignore[no-any-return]


def _tensorboard(site: RunSite) -> Sink:
    from shardwright.train.metrics import TensorBoard

    return TensorBoard(site.folder / "tensorboard", site.steps_done, site.config.log.every)


sinks: Registry[NamedSink] = Registry(
    "sink",
    "sinks",
    NamedSink,
    (
        NamedSink(
            "tensorboard", "Event files for TensorBoard, in the run's folder tensorboard.", _tensorboard
        ),
    ),
)
