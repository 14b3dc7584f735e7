"""The commands of docs/tutorial.md and of the README, typed one after another in a folder of their own.

A block whose first line names a file is written to that file. Blocks of the language ``sh`` run in bash.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def programs(page: str) -> Iterator[tuple[str, str]]:
    """The name and text of each file, and the empty name and text of each block of commands, in their order."""
    for language, text in BLOCK.findall(page):
        name = re.match(r"# (\w+\.\w+)\n", text)
        if name is not None:
            yield name[1], text
        elif language == "sh":
            yield "", text


def typed(folder: Path, commands: str) -> str:
    """The output of commands in a shell that finds ``python``, ``torchrun`` and ``shardwright`` of this environment."""
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    for name, start in (
        ("python", ""),
        ("shardwright", "-m shardwright"),
        ("torchrun", "-m torch.distributed.run"),
    ):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_jobs_of_pages_have_keys_of_the_configuration() -> None:
    pytest.importorskip("pydantic")
    from shardwright.train.config.keys import keys

    pages = TUTORIAL + (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    jobs = [tomllib.loads(text) for language, text in BLOCK.findall(pages) if language == "toml"]
    used = {f"{section}.{key}" for job in jobs for section, table in job.items() for key in table}
    assert [job["run"]["name"] for job in jobs] == ["pretrain", "tune", "tune"]
    assert used - {key.path for key in keys()} == set()


@pytest.mark.extensive("each step of the tutorial is a job, in three to eight minutes")
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    losses: list[str] = []
    for name, text in programs(TUTORIAL):
        if name:
            (tmp_path / name).write_text(text)
        else:
            losses += re.findall(r"^step \d+: loss [\d.]+$", typed(tmp_path, text), re.MULTILINE)
    assert len(losses) == 40
    assert losses[:20] == losses[20:]  # the plain loop, then the sharded one in two parts
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
    assert (tmp_path / "tuned" / "config.json").is_file()


@pytest.mark.extensive("jobs of two ranks, in one to three minutes")
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (commands,) = [text for _, text in programs(README) if "shardwright train" in text]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = typed(tmp_path, commands)
    assert "step 60/60" in printed and "fits?    YES" in printed
    assert (tmp_path / "first" / "model.safetensors").is_file()
