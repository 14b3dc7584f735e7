"""Finished runs that several tests of the trainer look at. They are shared: copy a run before changing it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.kit.jobs import config_file, run, train_here


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` has filled, for all processes of this session."""
    base = factory.getbasetemp()
    base = (
        base if base.name.startswith("pytest-") else base.parent
    )  # each worker of xdist has one in the session's
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job on one rank without an engine."""

    def make(folder: Path) -> None:
        assert (
            train_here(config_file(folder), "--run.dir", folder / "run", "--log.sinks", '["tensorboard"]')
            == 0
        )

    return made_once(tmp_path_factory, "plain", make) / "run"


@pytest.fixture(scope="session")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on two ranks, started as a user starts it. Its output is kept in output.txt."""

    def make(folder: Path) -> None:
        arguments = ("--nproc", "2", "--parallel.engine", "shardwright", "--run.dir", folder / "run")
        status, out, err = run("train", config_file(folder), *arguments)
        assert (status, err) == (0, "")
        (folder / "output.txt").write_text(out)

    return made_once(tmp_path_factory, "sharded", make) / "run"
