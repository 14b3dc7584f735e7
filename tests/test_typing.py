"""The annotations that the package ships (``py.typed``), as type checkers of its users read them.

mypy is one of the tools of this project. pyright is run where it is installed, and no test needs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "typing" / "user_script.py"
#: What the checkers must object to, each beside what it replaces: annotations that say nothing would pass the script.
MISTAKES = (
    ('prefetch="512 MiB"', "prefetch=1.5"),
    ("assert_type(optimizer, sw.Muon)", "assert_type(optimizer, str)"),
    ("assert_type(report.shards, int)", "assert_type(report.shards, str)"),
    ("assert_type(sharded, Model)", "assert_type(sharded, nn.Linear)"),
    ("handle.wait()", "handle.await_it()"),
)


def with_mistakes(folder: Path) -> tuple[Path, list[int]]:
    """A copy of the script in which each mistake was made, and the numbers of their lines."""
    lines = SCRIPT.read_text().splitlines()
    numbers = []
    for right, wrong in MISTAKES:
        (index,) = (index for index, line in enumerate(lines) if right in line)
        lines[index] = lines[index].replace(right, wrong)
        numbers.append(index + 1)
    copy = folder / "mistaken_script.py"
    copy.write_text("\n".join(lines) + "\n")
    return copy, sorted(numbers)


@pytest.mark.extensive("mypy, which `make types` runs")
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_mypy_accepts_a_users_script_and_finds_its_mistakes(tmp_path: Path) -> None:
    mistaken, expected = with_mistakes(tmp_path)
    # torch takes mypy 20 s, the first time. Modules other than the scripts are followed, and not reported, as installed
    # ones are.
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--follow-imports=silent"]
    command += [
        f"--cache-dir={ROOT / '.mypy_cache' / 'user_script'}",
        "--no-error-summary",
        "--hide-error-context",
    ]
    done = subprocess.run(
        [*command, "--no-pretty", str(SCRIPT), str(mistaken)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        cwd=tmp_path,
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line for line in errors if mistaken.name not in line] == [], done.stderr
    assert sorted({int(line.split(":")[1]) for line in errors}) == expected, done.stdout


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_accepts_a_users_script_and_finds_its_mistakes(tmp_path: Path) -> None:
    mistaken, expected = with_mistakes(tmp_path)
    shutil.copy(SCRIPT, tmp_path)
    settings = {"include": ["."], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        ["pyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    diagnostics = json.loads(done.stdout)["generalDiagnostics"]
    errors = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in diagnostics
        if each["severity"] == "error"
    ]
    assert [error for error in errors if error[0] != mistaken.name] == []
    assert sorted({line for _, line, _ in errors}) == expected, errors
