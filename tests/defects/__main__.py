"""Run the tests of each defect that `make test` has, with the defect in place: ``python -m tests.defects [WORD ...]``.

With words, those whose seam or description has one of them. Prints one line for each; the status is 1 if one was not
found. Wrong orders of streams (tests/engine/kit/wrong_streams.py, seam "streams") are put into both
simulators. The simulator with clocks names a race. The simulated device shows other numbers.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.defects.table import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
LIMIT = 600  #: seconds for the tests of one defect


def found_by(defect: Defect, folder: Path) -> str | None:
    """The first test that fails with the defect in a copy of the package below ``folder``, or None."""
    package = folder / "src" / "shardwright"
    shutil.copytree(ROOT / "src" / "shardwright", package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / defect.path
    file.write_text(file.read_text().replace(defect.source, defect.wrong))
    tests = [part if part[:1] == "-" or " " in part or (i and defect.tests[i - 1] == "-k") else f"tests/{part}"
             for i, part in enumerate(defect.tests)]  # fmt: skip
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package.parent)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--show-capture=no",
        "--tier",
        "change",
        *tests,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT} s"
    if done.returncode == 0:
        return None
    if failed := re.search(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE):
        return failed[1].partition(" - ")[0].removeprefix("tests/")
    raise SystemExit(
        f"pytest has ended with {done.returncode} and no failed test:\n{done.stdout}{done.stderr}"
    )


def put_into_simulators(names: list[str]) -> int:
    """Print what both simulators show of wrong orders. Returns how many one of them has missed.

    Only the device has graphs.
    """
    from tests.engine.kit.on_sim import shown
    from tests.engine.kit.wrong_streams import WRONG, WRONG_GRAPHS, race_of
    from tests.support import WorkerPools
    from tests.support.sim.building import library, reason_to_skip

    pools, missed = WorkerPools(), 0
    if (reason := reason_to_skip()) is None:
        library()
    for name in names:
        wrong = (WRONG | WRONG_GRAPHS)[name]
        race, difference = "not tried: no graphs" if name in WRONG_GRAPHS else race_of(wrong), None
        if reason is None:
            ranks = math.prod(wrong.case.on.shape)
            difference = pools.run(shown, ranks, timeout=LIMIT, pool_name="sim", name=name)[0]
        missed += race is None or (difference is None and reason is None)
        seen = "seed {}: {}".format(*difference) if difference else reason or "NOT FOUND"
        print(f"{'streams':24} {name}\n    clocks: {race or 'NOT FOUND'}\n    device: {seen}", flush=True)
    pools.close()
    return missed


def chosen_orders(words: list[str]) -> list[str]:
    from tests.engine.kit.wrong_streams import WRONG, WRONG_GRAPHS

    return [
        name
        for name in (*WRONG, *WRONG_GRAPHS)
        if not words or any(word in f"streams {name}" for word in words)
    ]


def main(words: list[str]) -> int:
    chosen = [d for d in DEFECTS if not words or any(w in f"{d.seam} {d.what}" for w in words)]
    orders = chosen_orders(words)
    missed = 0
    for defect in chosen:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            test = found_by(defect, Path(folder))
        missed += test is None
        seconds = time.monotonic() - begin
        print(
            f"{defect.seam:24} {defect.what}\n    {'NOT FOUND' if test is None else test} ({seconds:.0f} s)",
            flush=True,
        )
    missed += put_into_simulators(orders)
    number = len(chosen) + len(orders)
    print(f"{number - missed} of {number} defects found")
    return 1 if missed or not number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
