"""Losses of jobs on the CPU beside those that are committed, bit by bit, for each version of torch."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.train.kit.jobs import config_file, losses, ranks, train_here
from tests.train.step.committed.jobs import CAPABILITIES, JOBS, VERSION, committed, found


def _skip_other_processors() -> None:
    if platform.machine() != "x86_64" or "AVX2" not in torch.__config__.show().upper():
        pytest.skip("the losses are those of x86-64 processors with AVX2")


Losses = Callable[[str], dict[str, list[str]]]


@pytest.fixture(scope="module")
def of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """A function that returns the losses of a capability, by job. It computes them once."""
    _skip_other_processors()
    folder = tmp_path_factory.mktemp("losses")
    return functools.cache(lambda capability: found(capability, folder / capability))


@pytest.mark.extensive("two processes for each capability", but=("default",))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_losses_have_the_committed_bits(capability: str, of_this_machine: Losses) -> None:
    of_version = committed().get(VERSION)
    if of_version is None:
        pytest.skip(f"no losses of torch {VERSION}: python -m tests.train.step.committed.jobs adds them")
    assert of_this_machine(capability) == of_version[capability]


@pytest.mark.extensive("two processes for each capability")
def test_the_capabilities_have_other_bits(of_this_machine: Losses) -> None:
    """So the setting is really in use."""
    default, avx2 = (of_this_machine(capability) for capability in CAPABILITIES)
    assert default != avx2
    for name in JOBS:
        pairs = zip(default[name], avx2[name], strict=True)
        assert all(abs(float.fromhex(a) - float.fromhex(b)) < 1e-2 for a, b in pairs)


HOOK = """
import os
import torch
from shardwright.train.extend import TrainerHook
class Asking(TrainerHook):
    def after_step(self, step):
        print("deterministic", torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""


@pytest.mark.parametrize("asked", ["true", "false"])
def test_torch_is_deterministic_while_the_run_asks_for_it(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    (tmp_path / "asking.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--run.hooks", '["asking:Asking"]', "--train.steps", "1", "--train.deterministic", asked]
    assert train_here(config_file(tmp_path), *options, "--run.dir", tmp_path / "run") == 0
    workspace = ":4096:8" if asked == "true" else None
    assert f"deterministic {asked == 'true'} {workspace}\n" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


#: By name, settings of a job of two ranks.
BESIDE: dict[str, tuple[str, ...]] = {
    "compiled": ("--train.compile", "inductor"),
    "offload": ("--activations.checkpoint", "full", "--activations.offload", "inputs"),
    "context": ("--parallel.context", "2", "--activations.checkpoint", "ops"),
}


@pytest.mark.extensive("jobs of two ranks for each")
@pytest.mark.parametrize("case", BESIDE)
def test_deterministic_runs_have_the_bits_of_others_on_the_cpu(case: str, tmp_path: Path) -> None:
    """Also a run that was ended after two of its steps, and resumed."""
    config, length = config_file(tmp_path), ["--train.steps", "4"]
    options = ["--parallel.engine", "shardwright", "--run.sample_tokens", "0", *BESIDE[case]]

    def train(name: str, *arguments: str | Path) -> list[str]:
        ended = ranks(2, "train", *arguments)
        assert not any(status for status, _ in ended), ended
        return [loss.hex() for loss in losses(tmp_path / name)]

    def new(name: str, *more: str) -> list[str]:
        return train(name, config, *options, "--run.dir", tmp_path / name, *more)

    asked = ("--train.deterministic", "true")
    expected = new("other", *length)
    assert new("one", *length, *asked) == expected
    assert new("ended", "--train.steps", "2", *asked) == expected[:2]
    assert train("ended", "--resume", tmp_path / "ended", *length) == expected
