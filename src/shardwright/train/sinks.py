"""Places for metrics that have a name, for `[log] sinks`.

Every run writes metrics.jsonl and lines or a bar on the terminal besides. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.extend import Registry

if TYPE_CHECKING:
    from shardwright.train.config import Config
    from shardwright.train.metrics import Sink


@dataclass(frozen=True)
class RunSite:
    """What a sink learns of the run for which it is opened.

    Attributes:
        folder: of the run, an absolute path. It exists.
        config: the run's.
        steps_done: optimizer steps of the checkpoint from which the run goes on; 0 for a new one. Records of later
            steps that a sink has already are written once more.
    """

    folder: Path
    config: Config
    steps_done: int


@dataclass(frozen=True)
class NamedSink:
    """A place for metrics.

    Attributes:
        name: by which `[log] sinks` knows it.
        summary: what it does, in a sentence.
        open: makes the sink of one run, on its first rank only.
    """

    name: str
    summary: str
    open: Callable[[RunSite], Sink]


def _tensorboard(site: RunSite) -> Sink:
    from shardwright.train.metrics import TensorBoard

    return TensorBoard(site.folder / "tensorboard", site.steps_done, site.config.log.every)


sinks: Registry[NamedSink] = Registry(
    "sink",
    "sinks",
    NamedSink,
    (
        NamedSink(
            "tensorboard", "Event files for TensorBoard, in the folder tensorboard of the run.", _tensorboard
        ),
    ),
)
