"""Settings that plans cover. Nothing here imports torch."""

from __future__ import annotations

from shardwright.train.config.schema import Config
from shardwright.train.errors import UserError


def check_planned(config: Config) -> None:
    """Refuse settings that no plan covers.

    Raises:
        UserError: names the key.
    """
    for section, key, value in (
        ("parallel", "offload", config.parallel.offload),
        ("train", "float8", config.train.float8),
    ):
        if value != "none":
            raise UserError(f"{section}.{key}: a plan covers 'none', found {value!r}")
    if config.train.cuda_graph:
        raise UserError(
            "train.cuda_graph: a plan covers false, found true; plan with --train.cuda_graph false"
        )
    if config.parallel.engine in ("ddp", "fsdp1"):
        raise UserError(
            f"parallel.engine: a plan covers 'shardwright', 'fsdp2' and 'none', found {config.parallel.engine!r}"
        )
