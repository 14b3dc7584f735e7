"""Wrong numbers as a user sees them: the command's status, its messages and the files of the run."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from tests.support import multirank
from tests.train.kit.jobs import TINY, config_file, train_here
from tests.train.step.numerics.bad_data import BAD
from tests.train.step.numerics.kit import job

WITHOUT_LLAMA = re.sub(r"\[model\].*(?=\[train\])", "", TINY, flags=re.DOTALL)
PAGE = Path(__file__).parents[4] / "docs" / "numbers.md"


@pytest.fixture
def bad_text(tmp_path: Path) -> Path:
    """Bytes of which one is bad."""
    draw = random.Random(0)
    text = bytearray(draw.choice(b"abcdefgh \n") for _ in range(20_000))
    text[10_000] = BAD
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    return path


def train(folder: Path, text: Path, run: str, *arguments: str) -> int:
    return train_here(
        config_file(folder, WITHOUT_LLAMA), "--run.dir", folder / run, "--data.source", text, "--model.kind", "python",
        "--model.target", "tests.train.step.numerics.bad_data:Model", "--train.steps", "50",
        "--train.global_batch", "16", "--train.micro_batch", "8", "--validation.every", "0",
        "--checkpoint.every", "20", "--run.sample_tokens", "0", *arguments,
    )  # fmt: skip


def test_a_bad_sample_stops_a_run_or_is_left_out(
    tmp_path: Path, bad_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, bad_text, "stops") == 1
    shown = capsys.readouterr()
    (error,) = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in shown.err
    found = re.search(
        r"step (\d+): .*found loss nan.* rank 0 .*gradient of .* after step (\d+) is saved", error
    )
    assert found and int(found[1]) == int(found[2]) + 1, error
    ended: Any = json.loads((tmp_path / "stops" / "exit.json").read_text())
    assert (ended["status"], ended["saved"]) == (1, int(found[2])) and ended["reason"] in error

    assert train(tmp_path, bad_text, "skips", "--fault.on_non_finite", "skip") == 0
    shown = capsys.readouterr()
    (warning,) = [line for line in shown.out.splitlines() if line.startswith("warning: ")]
    assert f"step {found[1]}: " in warning and warning.endswith("are left out")
    assert "16 samples left out: 1 step skipped, 0 rewinds" in shown.out
    record = json.loads((tmp_path / "skips" / "run.json").read_text())
    counts = [record["results"][key] for key in ("skipped_steps", "rewinds", "samples_left_out")]
    assert counts == [1, 0, 16]
    lines = [json.loads(line) for line in (tmp_path / "skips" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if "incident" in line]
    first = (int(found[1]) - 1) * 16
    assert event["step"] == int(found[1]) and event["incident"]["samples"] == [first, first + 16]


def test_settings_that_cannot_work_are_refused() -> None:
    for sections, words in (
        ({"fault": {"on_spike": "rewind"}, "checkpoint": {"every": 0}}, "no checkpoint to go back to"),
        ({"fault": {"on_non_finite": "skip"}, "optimizer": {"in_backward": True}, "train": {"max_norm": 0.0}},
         "already updated"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            job(**sections)


@multirank(2)
def test_the_example_of_the_page_runs(rank: int, world_size: int) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    torch.manual_seed(rank)
    exec(compile(example, str(PAGE), "exec"), {"sw": sw, "torch": torch})
