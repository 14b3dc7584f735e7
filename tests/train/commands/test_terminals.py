"""Every command on terminals that lack characters or columns: what those cannot show is escaped, nothing fails."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright import cli
from tests.train.kit.jobs import TINY, config_file

TEXT = "wie schön, 5 € für ein ☕ — naïve\n" * 300
JOB = ("--train.steps", "2", "--validation.every", "0", "--parallel.engine", "shardwright")


@pytest.mark.extensive("each terminal")
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


SCRIPT = """
import itertools, sys
from shardwright import cli
for is_end, arguments in itertools.groupby(sys.argv[1:], ";".__eq__):
    if not is_end:
        print("status", cli.main(list(arguments)), flush=True)
"""


@pytest.mark.extensive("a process of its own")
def test_a_locale_without_utf8(tmp_path: Path) -> None:
    """In a process that starts with it: Python decides then how it names files."""
    config = config_file(tmp_path, TINY)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    job = ("train", config, "--data.source", tmp_path / "text.txt", *JOB, "--nproc", "1", "--run.dir")
    commands = [
        *(*job, tmp_path / "run", ";"),
        *("generate", tmp_path / "run", "--prompt", "schön", "--tokens", "5", ";"),
        *(*job, tmp_path / "schön"),
    ]
    variables = {
        **os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(cli.__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *commands], env=variables, capture_output=True, text=True, timeout=240
    )
    trained, generated, refused, _ = re.split(r"status \d\n", done.stdout)
    assert re.findall(r"^status (\d)$", done.stdout, re.MULTILINE) == ["0", "0", "2"], done.stderr
    assert "done: 2 steps" in trained and "sch\\xf6n" in trained
    assert generated.startswith("sch\\xf6n")
    assert refused == "" and done.stderr.count("\n") == 1
    assert "run.dir: expected a folder whose name is UTF-8 text" in done.stderr
