"""Settings that plans cover. Nothing here imports torch."""

from __future__ import annotations

import importlib.util

from shardwright.train.config.schema import Config
from shardwright.train.errors import UserError


def check_planned(config: Config) -> None:
    """Refuse settings that no plan covers.

    Raises:
        UserError: names the key.
    """
    if config.train.float8 != "none" and importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"train.float8: a plan with {config.train.float8!r} needs torchao, found none; install the extra float8"
        )
    if config.parallel.engine in ("ddp", "fsdp1"):
        raise UserError(
            f"parallel.engine: a plan covers 'shardwright', 'fsdp2' and 'none', found {config.parallel.engine!r}"
        )
