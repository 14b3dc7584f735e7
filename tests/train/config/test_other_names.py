"""Values by the names of other projects, sizes of other presets, and numbers that do not divide: what is advised."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.train.config import ParallelConfig, load_config
from shardwright.train.config.catalog.kinds import near_name
from shardwright.train.config.load import checked_config
from shardwright.train.errors import UserError

PRESETS = ("debug", "150M", "1B", "3B", "8B", "70B", "405B")


@pytest.mark.parametrize(
    ("name", "near"),
    [("7B", "8B"), ("7b", "8B"), ("1.5B", "1B"), ("llama-65b", "70B"), ("125M", "150M"), ("debgu", "debug")],
)
def test_a_preset_of_another_size_is_near_by_its_size(name: str, near: str) -> None:
    assert near_name(name, PRESETS) == near


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("parallel.strategy", "fsdp", "did you mean 'zero3'?"),
        ("parallel.strategy", "FULL_SHARD", "did you mean 'zero3'?"),
        ("parallel.strategy", "SHARD_GRAD_OP", "did you mean 'zero2'?"),
        ("parallel.strategy", "ShardingStrategy.HYBRID_SHARD", "did you mean 'hsdp'?"),
        ("parallel.strategy", "zero4", "did you mean 'zero3'?"),
        ("parallel.engine", "FULL_SHARD", 'leave it out, and set parallel.strategy = "zero3"'),
        ("parallel.engine", "hsdp", 'leave it out, and set parallel.strategy = "hsdp"'),
        ("parallel.engine", "deepspeed", 'use parallel.strategy = "zero3"; see docs/migration/deepspeed.md'),
        ("data.kind", "chat", "did you mean conversations?"),
    ],
)
def test_names_of_other_projects(key: str, value: str, advice: str) -> None:
    with pytest.raises(UserError) as raised:
        checked_config({}, "job.toml", [(key, value)])
    assert str(raised.value).startswith(f"command line: {key}: ") and advice in str(raised.value)


def test_a_table_without_a_weight() -> None:
    tables = {"data": {"validation_sources": [{"path": "a.txt"}]}}
    with pytest.raises(UserError, match="found none; write weight = 1 in each table for equal shares"):
        checked_config(tables, "job.toml")


def test_the_divisors_are_named() -> None:
    for size, use in ((2, "1 or 2"), (8, "1, 2, 4 or 8"), (1, "1")):
        with pytest.raises(UserError, match=f"{size}, found 3; use {use}$"):
            ParallelConfig(tensor=3).dims(size)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "other.toml").touch()
    for name, words in (("othr.toml", "did you mean"), ("x.toml", "that folder has")):
        with pytest.raises(UserError) as raised:
            load_config(tmp_path / name)
        path = tmp_path / name
        assert f"found nothing there ({path}); {words} {tmp_path / 'other.toml'}" in str(raised.value)
    with pytest.raises(UserError, match=f"there is no folder {tmp_path / 'none'}$"):
        load_config(tmp_path / "none" / "x.toml")
