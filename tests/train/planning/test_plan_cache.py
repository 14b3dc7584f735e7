"""Plans from the cache: without PyTorch, and only while everything that they follow from is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.planner import Alloc, Owner, Phase, Program, cache
from shardwright.train.commands.plans import plan
from shardwright.train.config import Config, load_config
from shardwright.train.config.plans import cache_key as keys
from shardwright.train.config.plans.cache_key import cache_key

EXAMPLES = Path(__file__).parents[3] / "examples"
CODE = """
import sys
from shardwright.cli.program import main
status = main(["plan", *sys.argv[1:], "--on", "2xh100"])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


def config_of(*overrides: tuple[str, str], example: str = "llama_debug") -> Config:
    return load_config(EXAMPLES / f"{example}.toml", [*overrides], ranks=2)


def run(*arguments: str) -> tuple[str, str]:
    """The output of a plan in a process of its own, and whether it imported torch."""
    command = [sys.executable, "-c", CODE, str(EXAMPLES / "llama_debug.toml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.strip()


def test_a_plan_from_the_cache_is_the_same_and_imports_no_torch(cache_home: Path) -> None:
    assert not cache_home.exists()
    first, with_torch = run()
    assert with_torch == "True" and cache_home.exists()
    assert run() == (first, "False")


PROGRAM = Program([Phase("forward"), Alloc(1, 8, "compute", 0)], [Owner("other", "", "", "")])


@pytest.mark.parametrize("number", range(3))
def test_a_program_is_traced_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.train.planning import programs

    traced: list[Any] = []
    monkeypatch.setattr(programs, "program_of", lambda *of: traced.append(of) or PROGRAM)
    config = config_of()
    for _ in range(2):
        assert plan.program_of(config, 2, caches=number > 0) == PROGRAM
    assert len(traced) == (1 if number else 2)


def test_the_key_has_everything_that_a_program_follows_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    texts = [
        cache_key(config, 2, "cuda"),
        cache_key(config, 4, "cuda"),
        cache_key(config, 2, "cpu"),
        cache_key(config_of(("train.seq_len", "128")), 2, "cuda"),
        cache_key(config_of(("model.n_layers", "5")), 2, "cuda"),
    ]
    assert cache_key(config_of(), 2, "cuda") == texts[0]
    monkeypatch.setattr(keys, "version", lambda package: "9")
    texts.append(cache_key(config, 2, "cuda"))
    (tmp_path / "one.py").write_text("")
    monkeypatch.setattr(keys.shardwright, "__file__", str(tmp_path / "__init__.py"))
    texts.append(cache_key(config, 2, "cuda"))
    os.utime(tmp_path / "one.py", (7, 7))
    texts.append(cache_key(config, 2, "cuda"))
    assert None not in texts and len(set(texts)) == len(texts)


def test_a_configuration_of_transformers_counts_by_its_content(tmp_path: Path) -> None:
    texts = []
    for layers in (2, 3, 2):
        folder = tmp_path / str(len(texts)) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(
            f'{{"model_type": "llama", "vocab_size": 300, "num_hidden_layers": {layers}}}'
        )
        config = config_of(("model.kind", "hf"), ("model.path", str(folder)))
        texts.append(cache_key(config, 2, "cuda"))
    assert texts[0] != texts[1] and None not in texts


@pytest.mark.parametrize(
    "overrides",
    [
        (("model.kind", "python"), ("model.target", "my_models:build")),
        (("parallel.memory", "tests.train.planning.test_plan_cache:MINE"),),
    ],
)
def test_plans_with_code_of_the_user_are_not_kept(overrides: tuple[tuple[str, str], ...]) -> None:
    config = config_of().model_copy()
    for key, value in overrides:
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    assert cache_key(config, 2, "cuda") is None


def test_the_folder_of_tests_is_their_own(cache_home: Path) -> None:
    assert cache.folder().is_relative_to(cache_home)
