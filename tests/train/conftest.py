"""Finished runs that several tests of the trainer look at. They are shared: copy a run before changing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.jobs import config_file, run, train_here


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny job on one rank without an engine."""
    folder = tmp_path_factory.mktemp("plain")
    assert train_here(config_file(folder), "--run.dir", folder / "run", "--log.sinks", '["tensorboard"]') == 0
    return folder / "run"


@pytest.fixture(scope="session")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on two ranks, started as a user starts it. Its output is kept in output.txt."""
    folder = tmp_path_factory.mktemp("sharded")
    arguments = ("--nproc", "2", "--parallel.engine", "shardwright", "--run.dir", folder / "run")
    status, out, err = run("train", config_file(folder), *arguments)
    assert (status, err) == (0, "")
    (folder / "output.txt").write_text(out)
    return folder / "run"
