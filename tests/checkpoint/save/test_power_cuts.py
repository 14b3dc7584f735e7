"""Cuts of power while checkpoints are saved: at every call, with what no fsync covers lost, torn or kept.

What a save does to the file system is recorded, and each state that a cut can leave is made and loaded. It has the
newest checkpoint, or the one before. ``tools/power_cuts.py`` cuts a real file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardwright as sw
from shardwright.checkpoint import save_state
from shardwright.checkpoint.storage import local_store
from tests.checkpoint.kit.calls import recorded, renames_alone
from tests.checkpoint.kit.disk import Disk, Script, check_every_cut, materialise, record
from tests.checkpoint.kit.states import saves, small_tensors_spread, state, step_of
from tests.support.pool import multirank


def newest_or_the_one_before(place: Path, done: int) -> None:
    step = step_of(place / "run" / "c")
    assert step in ((done,) if done == 3 else (done or None, done + 1)), (step, done)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "renames"])
def test_every_cut_leaves_the_newest_or_the_one_before(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "saved" / "run" / "c"
    with nullcontext() if exchange else renames_alone():
        script = record(tmp_path / "saved", saves(path, 3))
    assert any(call.kind == "exchange" for call in script.calls) == exchange
    states, different = check_every_cut(script, tmp_path, newest_or_the_one_before)
    assert states > 1000 and different > 5, (states, different)


def test_a_save_after_a_cut_removes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "run" / "c"
    script = record(tmp_path / "saved", saves(path, 2))
    disk = Disk(script.calls)
    for length in range(len(script.calls) + 1):
        place = tmp_path / f"{length}"
        place.mkdir()
        materialise(disk.tree(length, []), place)
        save_state(place / "run" / "c", state(3), overwrite=True)
        assert [each.name for each in (place / "run").iterdir()] == ["c"]
        assert step_of(place / "run" / "c") == 3


def test_cuts_while_an_older_checkpoint_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def next_one(step: int) -> None:
        save_state(folder / f"step-{step}", state(step))
        if step > 1:
            local_store.LocalStore(folder / f"step-{step - 1}").clear()

    script = record(folder, [lambda step=step: next_one(step) for step in (1, 2, 3)])

    def check(place: Path, done: int) -> None:
        steps = [step_of(each) for each in sorted(place.glob("step-*"))]
        assert max([step or 0 for step in steps], default=0) in (done, done + 1)

    check_every_cut(script, tmp_path, check)


@multirank(2)
def test_every_cut_of_a_save_of_two_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "saved" / "c"
    (tmp_path / "saved").mkdir(exist_ok=True)
    ends = []
    with small_tensors_spread(), recorded(tmp_path / "saved") as calls:
        for step in (1, 2):
            save_state(path, state(step), overwrite=True)
            dist.barrier()
            ends.append(len(calls))
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, (calls, ends))
    if rank == 0:
        assert all(any(call.kind == "write" for call in each) for each, _ in everyones)
        merged = sorted((call for each, _ in everyones for call in each), key=lambda call: call.when)
        done = [sum(ends[save] for _, ends in everyones) for save in range(2)]
        script = Script(merged, done)

        def check(place: Path, done: int) -> None:
            assert step_of(place / "c") in ((2,) if done == 2 else (done or None, done + 1))

        states, _ = check_every_cut(script, tmp_path, check)
        assert states > 1000
    dist.barrier()


TRACED = (
    "open,openat,openat2,creat,mkdir,mkdirat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,fsync,"
    "fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,truncate,ftruncate,fallocate"
)
KINDS = {
    "openat": "create", "mkdir": "mkdir", "pwrite64": "write", "fsync": "fsync", "rename": "rename",
    "renameat2": "exchange", "unlinkat": "unlink", "unlink": "unlink", "rmdir": "rmdir",
}  # fmt: skip
SAVES = """
import json, sys
from pathlib import Path
from tests.checkpoint.kit.calls import recorded
from tests.checkpoint.kit.states import saves
root = Path(sys.argv[1])
with recorded(root) as calls:
    for save in saves(root / "run" / "c", 2):
        save()
print(json.dumps([[call.kind, call.path, call.other] for call in calls]))
"""


@pytest.mark.extensive("programs under a tracer")
def test_the_system_sees_the_same_calls(tmp_path: Path) -> None:
    """The record is made in Python; strace sees what a save really asks the system for."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    root, log = tmp_path / "saved", tmp_path / "strace"
    root.mkdir()
    (tmp_path / "saves.py").write_text(SAVES)
    paths = [str(Path(__file__).parents[3]), str(Path(sw.__file__).parents[1])]
    result = subprocess.run(
        ["strace", "-f", "-y", "-qq", "--seccomp-bpf", "-s", "0", "-o", str(log), "-e", f"trace={TRACED}"]
        + [sys.executable, str(tmp_path / "saves.py"), str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode and "ptrace" in result.stderr:
        pytest.skip(f"strace may not trace here: {result.stderr.splitlines()[0]}")
    assert result.returncode == 0, result.stderr
    expected = Counter((kind, place_of(root / path, root)) for kind, path, _ in json.loads(result.stdout))
    seen: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        match = re.match(r"\d+ +(\w+)\((.*)\) += +(\d+)", line)
        if match is None or str(root) not in line:
            continue
        name, arguments, _ = match.groups()
        if name == "openat" and "O_CREAT" not in arguments:
            continue
        assert name in KINDS, line
        kind = "rmdir" if "AT_REMOVEDIR" in arguments else KINDS[name]
        seen[kind, place_of(_first_path(arguments), root)] += 1
    assert seen == expected


def _first_path(arguments: str) -> Path:
    """``"/a"``, ``3</a>`` or ``3</a>, "b"``."""
    folder = re.match(r"(?:AT_FDCWD|\d+)<([^>]*)>", arguments)
    name = re.search(r'"([^"]*)"', arguments)
    return Path(folder[1] if folder else "/", name[1] if name else "")


def place_of(path: Path, root: Path) -> str:
    return re.sub(r"\.[0-9a-f]{16}\.", ".*.", str(path.relative_to(root)))
