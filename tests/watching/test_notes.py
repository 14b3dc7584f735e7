"""Every collective that may wait is on heartbeats, so that a verdict says who waits and who has not come."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C import _distributed_c10d

import shardwright
from shardwright.engine import heartbeat
from shardwright.engine.compat import flight_entries
from shardwright.watching import HeartbeatReader, evidence

PACKAGE = Path(shardwright.__file__).parent
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
}  # fmt: skip
#: Where no note is needed, with the reason and the number of calls.
EXCEPTIONS = {
    "cli/doctor/links.py": ("no job runs: processes of a measurement, which have a limit", 4),
    "engine/comm/gradient_hooks.py": ("the caller notes them", 3),
    "engine/comm/memory.py": ("once, on a GPU, where the engine is built", 1),
    "planner/tracing/timing.py": ("measurements, which no run waits for", 1),
    "train/planning/measuring.py": ("measurements, which no run waits for", 1),
    "context/rows.py": ("noted outside of compiled graphs, which cannot write", 1),
}


def without_a_note(node: ast.AST, noted: bool = False) -> Iterator[int]:
    """The lines of collectives outside of any ``with noted(...)``."""
    if isinstance(node, ast.With):
        contexts = [each.context_expr for each in node.items]
        noted = noted or any(ast.unparse(each).startswith("noted(") for each in contexts)
    if isinstance(node, ast.Call) and not noted:
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if owner in ("dist", "torch.distributed") and name in COLLECTIVES:
            yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from without_a_note(child, noted)


def test_collectives_have_notes() -> None:
    counts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if lines := [*without_a_note(ast.parse(path.read_text(encoding="utf-8")))]:
            counts[str(path.relative_to(PACKAGE))] = len(lines)
    assert counts == {name: count for name, (_, count) in EXCEPTIONS.items()}


def test_a_record_of_another_form_does_not_end_the_thread_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = heartbeat.open_heartbeat(0, 1, tmp_path)
    monkeypatch.setattr("shardwright.engine.compat.flight_entries", lambda: [{"process_group": []}])
    evidence.note_flights(beat)
    assert HeartbeatReader(beat).look().flights == ()
    heartbeat.close_heartbeat()


@pytest.mark.parametrize("builds", [("fr",), ("nccl",), ("fr", "nccl"), ()])
def test_the_recorders_of_every_build_are_read(
    builds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's collectives have a recorder of their own, in builds that have NCCL."""
    for name in ("fr", "nccl"):
        monkeypatch.delattr(_distributed_c10d, f"_dump_{name}_trace_json", raising=False)
    for name in builds:
        text = json.dumps({"entries": [{"profiling_name": f"{name}:all_reduce"}]})
        monkeypatch.setattr(
            _distributed_c10d, f"_dump_{name}_trace_json", lambda *_, t=text: t.encode(), raising=False
        )
    entries = flight_entries()
    if not builds:
        assert entries is None
    else:
        assert entries is not None
        assert [each["profiling_name"] for each in entries] == [f"{name}:all_reduce" for name in builds]
