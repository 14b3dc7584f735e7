"""The registry of places for metrics, for `[log] sinks`.

Every run also writes metrics.jsonl, and lines or a progress bar on the terminal. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.engine.extend import Registry, check_signature
from shardwright.train.errors import UserError

if TYPE_CHECKING:
    from shardwright.train.config.catalog.records import Sink


@dataclass(frozen=True)
class RunSite:
    """The run for which a sink is opened.

    Attributes:
        folder: the run's folder, an absolute path. It exists.
        config: the run's configuration, a ``RunConfiguration`` of ``shardwright.train.extend``.
        steps_done: optimizer steps in the checkpoint that the run continues; 0 for a new run. If a sink already has
            records of later steps, it gets these steps again.
        facts: facts about the run that its configuration does not have: parameters, ranks, device, dtypes, versions.
        attempt: 1 for a start or a resume, one more after each restart. A restart may begin with step 1 again.
    """

    folder: Path
    config: Any
    steps_done: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1


#: Sinks that ``report/sinks/opening.py`` opens.
BUILT_IN = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class NamedSink:
    """A place for metrics.

    Attributes:
        name: its name in `[log] sinks`.
        summary: one sentence on what it does.
        open: makes the sink of one run. Only the first rank calls it, before the first step. None: a sink of this
            package, which ``report/sinks/opening.py`` knows.
        needs: a package that the sink imports, as in `import PACKAGE`. If it is missing, no rank starts. Empty: none.
        install: the argument of `pip install` for that package. Empty: the package's name.
        patience: seconds that a step waits at most for the sink. 0: a step does not wait.
        reopens: whether `open` goes on with the run in a service after its end, and notes it in NAME.json of the run's
            folder. Results of `shardwright evaluate` are then sent there.
    """

    name: str
    summary: str
    open: Callable[[RunSite], Sink] | None
    needs: str = ""
    install: str = ""
    patience: float = 2.0
    reopens: bool = False

    def __post_init__(self) -> None:
        if self.open is None and self.name not in BUILT_IN:
            raise ValueError(f"NamedSink {self.name!r}: expected a function for open, found None")
        if self.open is not None:
            check_signature(f"NamedSink {self.name!r}: open", self.open, "site")


def check_packages(names: Iterable[str]) -> None:
    """Raise a UserError for the first of these sinks whose package is not installed. Imports no package."""
    for name in names:
        sink = sinks.get(name)
        if sink.needs and not _is_installed(sink.needs):
            raise UserError(
                f"log.sinks: sink {name!r} needs the package {sink.needs}, which is not installed; install it: "
                f"pip install '{sink.install or sink.needs}'"
            )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder without __init__.py has no origin: W&B makes such a folder "wandb" where it runs.
    return spec is not None and spec.origin is not None


sinks: Registry[NamedSink] = Registry(
    "sink",
    "sinks",
    NamedSink,
    (
        NamedSink(
            "tensorboard", "Event files for TensorBoard, in the run's folder tensorboard.", None
        ),
        NamedSink(
            "wandb", "Weights & Biases; WANDB_MODE=offline writes to the run's folder.",
            None, needs="wandb", install="wandb>=0.31", patience=0, reopens=True,
        ),
        NamedSink(
            "mlflow", "MLflow, at MLFLOW_TRACKING_URI.",
            None, needs="mlflow", install="mlflow-skinny>=3.17", patience=0, reopens=True,
        ),
        NamedSink(
            "trackio", "trackio, on this machine or at TRACKIO_SPACE_ID.",
            None, needs="trackio", install="trackio>=0.43", patience=0, reopens=True,
        ),
    ),
)  # fmt: skip
