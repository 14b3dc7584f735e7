"""`shardwright plan`: whether a configured job fits into the memory of its devices. Nothing is started."""

from __future__ import annotations

import os

from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device
from shardwright.planner.text import as_json, lines_of
from shardwright.planner.verdict import judge
from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import model_in_words, sizes_of
from shardwright.train.planning import program_of


def plan(config: Config, ranks: int, device: Device, json: bool) -> int:
    """Print the verdict on the job; returns 0, or 3 if it does not fit.

    Raises:
        UserError: the configuration does not fit so many ranks, or no plan covers it.
    """
    verdict = judge(program_of(config, ranks), device, ranks, rules_of(os.environ.get(CONF, "")))
    if json:
        print(as_json(verdict))
        return verdict.status
    train, parallel = config.train, config.parallel
    parameters = sizes_of(config.model.shape()).parameters
    model = model_in_words(config.model.shape(), config.model.kind)
    print(
        f"{model} ({parameters:,} parameters), {ranks} x {device.name}, "
        f"{parallel.strategy}, micro-batch {train.micro_batch} x {train.seq_len:,} tokens, {parallel.param_dtype}, "
        f"{config.optimizer.name}, activations.checkpoint {config.activations.checkpoint!r}"
    )
    for line in lines_of(verdict):
        print(line)
    return verdict.status


CONF = "PYTORCH_ALLOC_CONF"


def rules_of(conf: str) -> Rules:
    """The allocator's settings in a value of ``PYTORCH_ALLOC_CONF``. Others than these are ignored."""
    pairs = dict(part.split(":", 1) for part in conf.replace(" ", "").split(",") if ":" in part)
    split = pairs.get("max_split_size_mb", "")
    divisions = pairs.get("roundup_power2_divisions", "")
    return Rules(
        expandable=pairs.get("expandable_segments", "").lower() == "true",
        max_split=int(split) << 20 if split.isdecimal() else None,
        divisions=int(divisions) if divisions.isdecimal() else 0,
    )
