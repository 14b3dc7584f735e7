"""The tests that `make test` runs: those that a change must pass. `make test-all` runs every test.

A test is in both tiers unless one of these leaves it to `make test-all`, each with its reason:

- ``@pytest.mark.extensive("reason")`` on a test, a parameter or a file (``pytestmark``). With ``but=("zero3-*",)`` the
  cases or tests whose names are like one of these stay in `make test`.
- `FILES`, for whole files.
- A case on 3 or 4 ranks of a test that also runs on 1 or 2.
- A row of a matrix that only shows a new pair of values, and no new value (tests/support/matrix.py).

``@pytest.mark.central("reason")`` keeps a test that a rule leaves out; with ``ranks=3`` its cases on three ranks. It
does not keep what a mark `extensive` leaves out.
A run that names files or tests runs all of them, and so does ``--tier all``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
#: Files without marks, by their paths below ``tests``: why they are extensive, and the tests that stay in `make test`.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "engine/test_sim.py": (
        "on the simulated device every pair, event and wait takes minutes",
        ("test_training_on_two_ranks_*", "test_hooks_*", "test_deferred_*",
         "test_on_one_rank_*", "plain-2ranks", "none-2ranks", "none-False-2ranks",
         "weights are read too soon-2ranks", "gradients are read too soon-2ranks"),
    ),
    "engine/test_sim_graphs.py": (
        "on the simulated device every event and wait takes minutes",
        ("test_a_graph_on_one_*", "test_a_capture_*", "test_a_replay_*", "none-2ranks", "loaded-2ranks",
         "weights are read too soon, in a graph-2ranks"),
    ),
    "test_gpu_failures.py": (
        "a tool: each fault is a process",
        ("test_a_failure_before_*", "test_endings", "test_long_*", "test_the_first_*", "plain torch-exit-2"),
    ),
    "test_gpu_contact.py": (
        "a tool: each part is a process",
        ("test_each_gpu_test_*", "test_an_unknown_*", "test_the_parts_*"),
    ),
    "test_gpu_benchmark.py": (
        "a benchmark",
        ("test_[!ir]*", "test_rows_are_chosen_*"),
    ),
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=("change", "all"),
        help="change: what a change must pass, as `make test`; all: every test, as `make test-all`. "
        "Default: all where the arguments name files, else change",
    )


def pytest_configure(config: pytest.Config) -> None:
    for mark in (
        "extensive(reason, but=()): `make test` leaves it out",
        "central(reason, ranks=None): it does not",
    ):
        config.addinivalue_line("markers", mark)
    os.environ.setdefault("SHARDWRIGHT_MATRIX", "values" if tier(config) == "change" else "pairs")


def tier(config: pytest.Config) -> str:
    """The tier of this run. A run that names files has all of their tests."""
    named = all(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return config.option.tier or ("all" if named else "change")


def pytest_report_header(config: pytest.Config) -> str:
    less = (
        "" if tier(config) == "all" else ", which leaves tests out: `make test-all` or --tier all runs them"
    )
    return f"tier: {tier(config)}{less} (matrices: {os.environ['SHARDWRIGHT_MATRIX']})"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if tier(config) == "all":
        return
    small = {function_of(item) for item in items if ranks_of(item) in (1, 2)}
    left = {item for item in items if next(reasons(item, small), None) is not None}
    if stale := sorted(nothing_stays(items)):
        raise pytest.UsageError(
            f"no case is like what the mark `extensive` says in `but`: {', '.join(stale)}"
        )
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def reasons(item: pytest.Item, small: set[Any]) -> Iterator[str]:
    """Why `make test` leaves a test out; none: it runs it. ``small`` are the functions with cases on 1 or 2 ranks."""
    ranks, marks = ranks_of(item), [*item.iter_markers("extensive")]
    yield from (mark.args[0] for mark in marks if not is_like(item, mark.kwargs.get("but", ())))
    if any(mark.kwargs.get("ranks") in (None, ranks) for mark in item.iter_markers("central")):
        return
    if ranks in (3, 4) and function_of(item) in small:
        yield "the test also runs on fewer ranks"
    reason, but = FILES.get(Path(os.path.relpath(item.path, TESTS)).as_posix(), ("", ()))
    if reason and not is_like(item, but):
        yield reason


def nothing_stays(items: list[pytest.Item]) -> set[str]:
    """Tests whose mark names cases that stay, and has none of them: their names have changed."""
    named, found = set(), set()
    for item in items:
        for mark in item.iter_markers("extensive"):
            if but := mark.kwargs.get("but"):
                test = item.nodeid.partition("[")[0]
                named.add(test)
                found.update([test] if is_like(item, but) else [])
    return named - found


def is_like(item: pytest.Item, names: tuple[str, ...]) -> bool:
    """Whether one of these patterns matches the name of the test, or the name of its case in brackets."""
    test, _, case = item.name.partition("[")
    return any(fnmatchcase(test, name) or fnmatchcase(case[:-1], name) for name in names)


def ranks_of(item: pytest.Item) -> int | None:
    """The number of ranks that `multirank` gives a case."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("world_size") if callspec is not None else None


def function_of(item: pytest.Item) -> Any:
    return getattr(item, "function", item)
