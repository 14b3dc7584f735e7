"""The speed of a folder, for checkpoints: it is written and read as a save and a resume do it.

`measure_folder` runs in a process of its own, since a file system can hang. Its files are in a folder that is deleted
afterwards. No name of a folder is reported.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.cli.doctor.children import Unmeasured, measure_in_children
from shardwright.cli.doctor.findings import GIB, Finding, rate, size, unmeasured

SECONDS = 15.0
"""Limit of the measurement. It takes about 3 s, also in a slow folder."""
FIRST_BYTES, MOST_BYTES = 2**22, 2**27
"""Bytes of the first file, from whose time the size of the large one follows, and of the largest."""
BUDGET = 2.0
"""Seconds for writing the large file, and for reading it."""

SLOW = 100e6
"""Bytes per second. A checkpoint of a model with 1e9 parameters in AdamW has 12 GB: two minutes at this speed."""
LEAST_FREE = 5 * GIB
IN_MEMORY = ("ramfs", "tmpfs")
ANOTHER = "put the run on another disk (--run.dir, or [checkpoint] folder)"


def find_folder(folder: Path) -> Finding:
    """Measure a folder, and judge it."""
    subject = "folder"
    if not folder.is_dir():
        return unmeasured(subject, "there is no such folder", "give an existing folder with --folder")
    place = folder / f"shardwright-doctor-{secrets.token_hex(4)}"
    kind = file_system(folder)
    try:
        (figures,) = measure_in_children(measure_folder, [(str(place),)], SECONDS)
    except Unmeasured as error:
        with suppress(Unmeasured):  # the process deletes its files, unless it was killed
            measure_in_children(_delete, [(str(place),)], 2.0)
        advice = f"see whether this user can write there and the server answers, or {ANOTHER}"
        return unmeasured(subject, f"{error}{f' ({kind})' if kind else ''}", advice)
    return judge_folder({**figures, "file_system": kind})


def judge_folder(figures: Mapping[str, Any]) -> Finding:
    """Return the finding for a folder, from the figures of `measure_folder` and the kind of its file system."""
    write, read, free, kind = (figures[name] for name in ("write", "read", "free", "file_system"))
    advice = []
    if kind in IN_MEMORY:
        advice.append(f"files of {kind} are in the host's memory and lost when it restarts: {ANOTHER}")
    if write < SLOW:
        advice.append(
            "write is slow: let training go on during a save with [checkpoint] asynchronous = true, save less often "
            f"(every), or {ANOTHER}"
        )
    if read is not None and read < SLOW:
        advice.append(
            "read is slow: starts and resumes wait for it; copy data and weights to a disk of the host before the job"
        )
    if free < LEAST_FREE:
        advice.append(
            f"little room: delete old runs, keep fewer checkpoints ([checkpoint] keep), or {ANOTHER}"
        )
    reads = "reading was not measured" if read is None else f"reads {rate(read)}"
    text = f"{kind or 'unknown file system'}: writes {rate(write)} with fsync, {reads}, {size(free)} free"
    return Finding("folder", text, "; ".join(advice), dict(figures))


def file_system(folder: Path, mounts: str | None = None) -> str:
    """Return the kind of file system of a folder, from the text of /proc/self/mounts. Empty if it is not known."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text()
        except OSError:
            return ""
    path, best, kind = folder.absolute(), -1, ""
    with suppress(OSError):
        path = folder.resolve()
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        # A later mount over the same folder hides the one before.
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


# ------------------------------------------------------------------------------
# In the process that measures


def measure_folder(place: str) -> dict[str, Any]:
    """Return the bytes per second of write with fsync and of read, and the free bytes.

    Args:
        place: a folder that does not exist yet, and does not afterwards.
    """
    folder = Path(place)
    folder.mkdir()
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        first = _write(folder / "first", min(FIRST_BYTES, max(free // 8, 4096)))
        nbytes = int(min(MOST_BYTES, max(BUDGET * first, FIRST_BYTES), max(free // 8, 4096)))
        write = _write(folder / "large", nbytes)
        return {"write": write, "read": _read(folder / "large"), "free": free, "bytes": nbytes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _delete(place: str) -> dict[str, Any]:
    shutil.rmtree(place, ignore_errors=True)
    return {}


def _write(path: Path, nbytes: int) -> float:
    """Write and sync a file of random bytes, which no file system compresses. Return the bytes per second."""
    block = os.urandom(min(nbytes, 2**22))
    begin = time.perf_counter()
    with open(path, "xb", buffering=0) as stream:
        for at in range(0, nbytes, len(block)):
            stream.write(block[: nbytes - at])
        os.fsync(stream.fileno())
    return nbytes / max(time.perf_counter() - begin, 1e-6)


def _read(path: Path) -> float | None:
    """Return the bytes per second of a read from the disk, or None on systems that cannot empty their cache."""
    if not hasattr(os, "posix_fadvise"):
        return None
    buffer, done = bytearray(2**22), 0
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while (count := stream.readinto(buffer)) and time.perf_counter() - begin < BUDGET:
            done += count
    return max(done, 1) / max(time.perf_counter() - begin, 1e-6)
