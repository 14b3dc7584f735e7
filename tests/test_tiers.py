"""The tiers of the suite: which tests `make test` leaves to `make test-all`, and that Ctrl-C reaches tests anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.matrix import generate, select, together

TESTS = '''
import pytest

def test_plain(): pass

@pytest.mark.extensive("slow")
def test_slow(): pass

@pytest.mark.extensive("each letter", but=("a", "*-3"))
@pytest.mark.parametrize("case", ["a", "b", "b-3"])
def test_letters(case): pass

@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.extensive("as 1"))])
def test_values(value): pass

@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks(world_size): pass

@pytest.mark.central("uneven shards", ranks=3)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_uneven(world_size): pass

@pytest.mark.parametrize("world_size", [3, 4])
def test_many(world_size): pass

@pytest.mark.central("a rule leaves it out", ranks=3)
@pytest.mark.extensive("each letter", but=("*-a",))
@pytest.mark.parametrize("case", ["a", "b"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_marked(world_size, case): pass
'''  # fmt: skip
IN_BOTH = [
    "test_plain",
    "test_letters[a]",
    "test_letters[b-3]",
    "test_values[1]",
    "test_ranks[1]",
    "test_uneven[2]",
    "test_uneven[3]",
    "test_many[3]",
    "test_many[4]",
    "test_marked[2-a]",
    "test_marked[3-a]",
]
EXTENSIVE = [
    "test_slow",
    "test_letters[b]",
    "test_values[2]",
    "test_ranks[3]",
    "test_ranks[4]",
    "test_uneven[4]",
    "test_marked[2-b]",
    "test_marked[3-b]",
]


class Collected:
    """The names of the tests that a run would run, by a plugin of it."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def collected(*arguments: str | Path) -> list[str]:
    found = Collected()
    quiet = ("-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull, "--collect-only")
    assert pytest.main([*quiet, *map(str, arguments)], plugins=[tiers, found]) == 0
    return found.names


def test_what_each_tier_runs(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    assert collected(tmp_path) == collected("--tier", "change", file) == IN_BOTH
    for everything in (collected("--tier", "all", tmp_path), collected(file)):
        assert sorted(everything) == sorted(IN_BOTH + EXTENSIVE)
    assert collected(f"{file}::test_slow") == ["test_slow"]


def test_a_file_is_extensive_but_for_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    monkeypatch.setattr(tiers, "FILES", {"test_tool.py": ("a tool", ("test_plain", "a"))})
    (tmp_path / "test_tool.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")
    names = ["test_letters[a]", "test_marked[3-a]", "test_other", "test_plain", "test_uneven[3]"]
    assert sorted(collected(tmp_path)) == names


def test_rows_that_show_values_are_few_of_those_that_show_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"letter": "abcd", "number": range(3), "flag": (None, True)}
    product = [(a, b, c) for a in axes["letter"] for b in axes["number"] for c in axes["flag"]]
    rows = {}
    for level in ("values", "pairs"):
        monkeypatch.setenv("SHARDWRIGHT_MATRIX", level)
        selected = select(product, lambda row, strength: together(strength, *row))
        generated = [tuple(row.values()) for row in generate(axes, lambda *_: False, 2)]
        rows[level] = selected, generated
    for few, many in zip(rows["values"], rows["pairs"], strict=True):
        assert set(few) < set(many) and len(few) == 4
        assert [set(column) for column in zip(*few, strict=True)] == [set(axis) for axis in axes.values()]


def test_a_run_in_the_background_interrupts_its_tests() -> None:
    """``nohup make test &``: a shell without job control lets the command ignore Ctrl-C."""
    code = "import signal, tests.conftest; print(signal.getsignal(signal.SIGINT).__name__)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout.split() == ["default_int_handler"], done.stderr
