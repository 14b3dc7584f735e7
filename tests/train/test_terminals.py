"""Every command on terminals that lack characters or columns: what those cannot show is escaped, nothing fails."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from shardwright import cli
from tests.train.jobs import TINY, config_file, run

TEXT = "wie schön, 5 € für ein ☕ — naïve\n" * 300
JOB = ("--train.steps", "2", "--validation.every", "0", "--parallel.engine", "shardwright")


@pytest.mark.parametrize(("encoding", "columns"), [("ascii", 20), ("latin-1", 200)])
def test_commands_print_on_any_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, columns: int
) -> None:
    config = config_file(tmp_path, TINY)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    first, other = tmp_path / "first", tmp_path / "schön☕"
    job = ("train", config, "--data.source", tmp_path / "text.txt", *JOB)
    commands: list[tuple[tuple[str | Path, ...], int, str]] = [
        ((), 0, "commands"),
        (("--help",), 0, "commands"),
        (("train", "--help"), 0, "--optimizer.lr"),
        ((*job, "--run.dir", first), 0, "done: 2 steps"),
        ((*job, "--run.dir", other), 0, "sch"),
        (("train", "--resume", other, "--train.steps", "3"), 0, "done: 3 steps"),
        (("compare", first, other), 0, "wrote"),
        (("generate", first, "--prompt", "schön ☕", "--tokens", "9"), 0, "sch"),
        (("layout", config, "--world-size", "2,64"), 0, "padding"),
        (("train", tmp_path / "fehlt-ö.toml"), 2, "expected a configuration file"),
        (("trän",), 2, "did you mean train"),
    ]
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments, expected, part in commands:
        raw = io.BytesIO()
        terminal = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        status = cli.main([str(argument) for argument in arguments])
        shown = raw.getvalue().decode(encoding)
        assert status == expected and part in " ".join(shown.split()), (arguments, shown)
        assert "Traceback" not in shown and "UnicodeEncodeError" not in shown


def test_a_locale_without_utf8(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    config = config_file(tmp_path, TINY)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    job = ("train", config, "--data.source", tmp_path / "text.txt", *JOB, "--nproc", "1")
    status, out, err = run(*job, "--run.dir", tmp_path / "run", environment=locale)
    assert (status, err) == (0, "") and "done: 2 steps" in out and "sch\\xf6n" in out
    status, out, err = run(
        "generate", tmp_path / "run", "--prompt", "schön", "--tokens", "5", environment=locale
    )
    assert (status, err) == (0, "") and out.startswith("sch\\xf6n")
    status, _, err = run(*job, "--run.dir", tmp_path / "schön", environment=locale)
    assert (
        status == 2 and err.count("\n") == 1 and "run.dir: expected a folder whose name is UTF-8 text" in err
    )
