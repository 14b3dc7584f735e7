"""Every way of hanging ends soon, and some rank of each host says which rank is behind and where it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.watching.scenarios import LIMIT, SCENARIOS, STALL, Scenario

ROOT = Path(__file__).parents[2]
#: Scenarios in which the culprit can still speak and end by itself.
SPEAKS = ("endless", "sleep", "stalled", "left", "mismatched", "barrier", "stuck", "all joined")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The scenarios of this run's tests, several at the same time, forked from one process."""
    folder = tmp_path_factory.mktemp("hangs") / "jobs"
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    own = [item for item in tests if item.path == request.path and "results" in item.fixturenames]
    names = [item.callspec.params["name"] for item in own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.watching.scenarios", str(folder), *names],
        cwd=ROOT, env=environment, check=True, timeout=500,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def hosts(scenario: Scenario) -> list[list[int]]:
    """The ranks of each host, without a culprit that is alone on its host and cannot speak."""
    each = scenario.ranks // scenario.hosts
    groups = [[*range(first, first + each)] for first in range(0, scenario.ranks, each)]
    return [ranks for ranks in groups if ranks != [scenario.culprit]]


@pytest.mark.extensive(
    "each way of hanging waits for a timeout",
    but=("stopped in backward", "interpreter held", "left the loop", "sleep on another host"),
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_hang_names_the_rank_and_its_place(results: dict[str, Any], name: str) -> None:
    scenario, result = SCENARIOS[name], results[name]
    expected = re.escape(scenario.text).replace(r"\*", r"\d+").replace(r"\ ", " ")
    speaks = name.startswith(SPEAKS)
    if scenario.ends_well:
        assert {*result["statuses"].values()} == {0}
        assert not result["evidence"]
        return
    for rank in map(str, range(scenario.ranks)):
        assert result["seconds"][rank] < STALL + 10 < LIMIT
        if rank != str(scenario.culprit) or speaks:
            assert result["statuses"][rank] == 75, result["texts"]
            assert f"rank {rank}: the job hangs in " in result["texts"][rank]
    for ranks in hosts(scenario):
        # At least one rank of each host prints all of it. On a busy machine two may do so.
        assert any(re.search(expected, result["texts"][str(rank)]) for rank in ranks), result["texts"]
    assert len(list(result["folders"])) == 1
    gone = {scenario.culprit} if "gone" in name else set()
    ranks = {*range(scenario.ranks)} - gone
    files = {f"rank-{rank}.{kind}.txt" for rank in ranks for kind in ("ring", "stacks")}
    assert {*result["evidence"]} == files | {"diagnosis.txt"}
    assert gone or not result["left"]
    if speaks or "held" in name:
        assert f"in {scenario.what.__name__}" in result["stacks"]
