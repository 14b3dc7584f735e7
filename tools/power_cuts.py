"""Cuts the power of a real file system while checkpoints are saved: ext4 in a file, mounted by a loop device.

At random instants the process that saves is stopped and the backing file is copied: a disk without what the system had
only in memory. The copy is mounted, and must hold the newest checkpoint or the one before. Needs root:
``sudo python tools/power_cuts.py --cuts 30 --seed 0``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from shardwright.checkpoint import open_checkpoint
from shardwright.checkpoint.save.collective_save import write_state
from shardwright.common.errors import Damaged
from shardwright.engine.collective import RankGroup

ALONE = RankGroup(alone=True)


def values(step: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


@contextlib.contextmanager
def mounted(image: Path, folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def save_for_ever(path: Path, log: Path, size: int) -> None:
    """Replace the checkpoint again and again. The log, elsewhere, gets each step when its save has returned."""
    step = 0
    while True:
        step += 1
        write_state(path, {"model": {"w": values(step, size)}, "step": step}, ALONE, overwrite=True)
        with open(log, "a") as stream:
            stream.write(f"{step}\n")


def snapshot(child: int, image: Path, copy: Path) -> None:
    """Copy the disk of a process between two of its calls. A copy during which the disk changes is no disk's state."""
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    while True:
        before = image.stat().st_mtime_ns
        shutil.copyfile(image, copy)
        if image.stat().st_mtime_ns == before:
            return


def last_saved(log: Path) -> int:
    return int(log.read_text().split()[-1]) if log.exists() and log.read_text() else 0


def step_found(path: Path, size: int) -> int:
    """The step of the checkpoint, whose values are right; 0 if there is none."""
    try:
        checkpoint = open_checkpoint(path)
    except FileNotFoundError:
        return 0
    checkpoint.verify()
    read = torch.zeros(size)
    checkpoint.read({"model.w": read})
    step = int(checkpoint.values["step"])
    if not torch.equal(read, values(step, size)):
        raise Damaged(f"step {step} has other values than were saved")
    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=100_000, help="elements of the saved tensor")
    parser.add_argument("--mebibytes", type=int, default=24, help="of the file system")
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        print("needs root and mkfs.ext4")
        return 2
    generator = random.Random(options.seed)
    failures, steps = 0, []
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        image, copy, log = top / "disk", top / "copy", top / "log"
        with open(image, "wb") as stream:
            stream.truncate(options.mebibytes << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        with mounted(image, top / "live"):
            child = os.fork()
            if not child:
                save_for_ever(top / "live" / "c", log, options.size)
            try:
                for cut in range(options.cuts):
                    time.sleep(generator.uniform(0.01, 0.4))
                    snapshot(child, image, copy)
                    saved = last_saved(log)
                    os.kill(child, signal.SIGCONT)
                    with mounted(copy, top / "cut"):
                        try:
                            step = step_found(top / "cut" / "c", options.size)
                        except Damaged as problem:
                            failures += 1
                            print(f"cut {cut}: {problem}")
                            continue
                    steps.append(step)
                    if step not in (saved, saved + 1):
                        failures += 1
                        print(f"cut {cut}: step {step}, expected {saved} or {saved + 1}")
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    print(f"{options.cuts} cuts of {max(steps, default=0)} saves, {failures} failures; steps found: {steps}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
