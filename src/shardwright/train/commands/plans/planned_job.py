"""A job of the command line that is planned and not started, and what it is planned for.

It is a value that other processes can read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.planner import Device, Rules
from shardwright.train.config import Config, load_config
from shardwright.train.config.plans.job_of_model import MODEL_PREFIX, assumed_job
from shardwright.train.models.vocabulary import with_vocabulary

Keys = Sequence[tuple[str, str]]
"""Keys of the configuration, as SECTION.KEY, and the texts of their values."""


@dataclass(frozen=True)
class PlannedJob:
    """A job, and the devices for which it is planned.

    Attributes:
        name: the file of a configuration, or `hf:` with a model.
        keys: of the command line.
        ranks: of the job.
        device: of each rank.
        rules: of PyTorch's allocator.
        caches: take programs that were traced before, and keep new ones.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    ranks: int
    device: Device
    rules: Rules
    caches: bool = True

    @property
    def assumes(self) -> bool:
        """Whether it is a model, and the rest of the configuration is assumed."""
        return self.name.startswith(MODEL_PREFIX)

    def __call__(self, keys: Keys = ()) -> Config:
        """Return the configuration, with further keys.

        Raises:
            UserError: there is none, or it is wrong.
        """
        if self.assumes:
            return assumed_job(self.name, self.keys, self.ranks)(keys)
        return with_vocabulary(load_config(Path(self.name), [*self.keys, *keys], ranks=self.ranks))
