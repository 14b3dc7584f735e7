"""The settings that plans cover. Nothing here imports torch."""

from __future__ import annotations

from shardwright.train.config.conflicts.jobs import PLANNED
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.config.schema import Config


def check_planned(config: Config) -> None:
    """Refuse settings that no plan covers.

    Raises:
        UserError: names the key.
    """
    refuse(PLANNED, config)
