"""The speed of a folder, for checkpoints: write, sync, read and rename, as a save does them.

`measure_folder` runs in a process of its own, since a file system can hang. Its files are in a folder that is deleted
afterwards. No name of a folder is reported.
"""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.cli.doctor.children import Unmeasured, measure_in_children, within
from shardwright.cli.doctor.finding import Finding, joined, unmeasured
from shardwright.cli.doctor.words import GIB, duration, rate, size

SECONDS = 15.0
"""Limit of the measurement. It takes about 3 s, also in a slow folder."""
FIRST_BYTES, MOST_BYTES = 2**22, 2**27
"""Bytes of the first file, from whose time the size of the large one follows, and of the largest."""
BUDGET = 2.0
"""Seconds for the large file, and for each of the other parts."""
SYNCS, RENAMES = 20, 50

SLOW_WRITE = SLOW_READ = 100e6
"""Bytes per second. A checkpoint of a model with 1e9 parameters in AdamW has 12 GB: two minutes at this speed."""
SLOW_SYNC = 0.1
"""Seconds of a sync of a small file. A disk with a cache takes 1 ms, one without 20 ms."""
LEAST_FREE = 5 * GIB
IN_MEMORY = ("ramfs", "tmpfs")
ANOTHER = "put the run on another disk (--run.dir, or [checkpoint] folder)"
SLOW_ADVICE = (
    "let training go on during a save with [checkpoint] asynchronous = true, save less often (every), or "
    f"{ANOTHER}"
)


def find_folder(folder: Path) -> Finding:
    """Measure a folder, and judge it."""
    subject = "folder"
    if not folder.is_dir():
        return unmeasured(subject, "there is no such folder", "give an existing folder with --folder")
    place = folder / f"shardwright-doctor-{secrets.token_hex(4)}"
    kind = file_system(folder)
    try:
        (figures,) = measure_in_children([("folder", str(place))], SECONDS)
    except Unmeasured as error:
        on = f" ({kind})" if kind else ""
        return unmeasured(
            subject,
            f"{error}{on}",
            f"see whether this user can write there and the server answers, or {ANOTHER}",
        )
    finally:
        with suppress(Exception):  # the process deletes it, unless it was killed
            within(2.0, lambda: shutil.rmtree(place, ignore_errors=True))
    return judge_folder({**figures, "file_system": kind})


def judge_folder(figures: Mapping[str, Any]) -> Finding:
    """The verdict on the speed of a folder."""
    write, read, sync = (figures[name] for name in ("write", "read", "sync_seconds"))
    free, kind = figures["free"], figures["file_system"]
    advice = []
    if kind in IN_MEMORY:
        advice.append(f"files of {kind} are in the host's memory and lost when it restarts: {ANOTHER}")
    slow = [
        f"{name} is slow"
        for name, there in (("write", write < SLOW_WRITE), ("fsync", sync > SLOW_SYNC))
        if there
    ]
    if slow:
        advice.append(f"{' and '.join(slow)}: {SLOW_ADVICE}")
    if read is not None and read < SLOW_READ:
        advice.append(
            "read is slow: starts and resumes wait for it; copy data and weights to a disk of the host before the job"
        )
    if not figures["atomic_rename"]:
        advice.append(
            f"a rename was seen half done: a checkpoint can be read before it is whole, so do not save here; {ANOTHER}"
        )
    if free < LEAST_FREE:
        advice.append(
            f"little room: delete old runs, keep fewer checkpoints ([checkpoint] keep), or {ANOTHER}"
        )
    if figures["free_files"] == 0:
        advice.append("no room for further files (inodes): delete small files")
    facts = [
        f"{kind or 'unknown file system'}: writes {rate(write)} with fsync",
        f"reads {rate(read)}" if read is not None else "reading was not measured",
        f"an fsync takes {duration(sync)}",
        "rename is atomic" if figures["atomic_rename"] else "rename is NOT atomic",
        f"{size(free)} free",
    ]
    return Finding("folder", ", ".join(facts), joined(advice), dict(figures))


def file_system(folder: Path, mounts: str | None = None) -> str:
    """The kind of file system of a folder, from the text of /proc/self/mounts. Empty if unknown."""
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
    """Bytes per second of write with fsync and of read, seconds of a small fsync, and whether rename is atomic."""
    folder = Path(place)
    folder.mkdir()
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        first = _write(folder / "first", min(FIRST_BYTES, max(free // 8, 4096)))
        nbytes = int(min(MOST_BYTES, max(BUDGET * first, FIRST_BYTES), max(free // 8, 4096)))
        write = _write(folder / "large", nbytes)
        return {
            "write": write,
            "read": _read(folder / "large", nbytes),
            "sync_seconds": _sync_seconds(folder / "small"),
            "atomic_rename": _rename_is_atomic(folder),
            "free": free,
            "free_files": room.f_favail if room.f_files else None,
            "bytes": nbytes,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, nbytes: int) -> float:
    """Write and sync a file of random bytes, which no file system compresses. Return the bytes per second."""
    block = os.urandom(min(nbytes, 2**22))
    begin = time.perf_counter()
    with open(path, "xb", buffering=0) as stream:
        for at in range(0, nbytes, len(block)):
            stream.write(block[: nbytes - at])
        os.fsync(stream.fileno())
    return nbytes / max(time.perf_counter() - begin, 1e-6)


def _read(path: Path, nbytes: int) -> float | None:
    """Bytes per second of a read for which the system forgets what it has of the file; None if it cannot forget."""
    if not hasattr(os, "posix_fadvise"):
        return None
    buffer, done = bytearray(2**22), 0
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while (count := stream.readinto(buffer)) and time.perf_counter() - begin < BUDGET:
            done += count
    return max(done, 1) / max(time.perf_counter() - begin, 1e-6)


def _sync_seconds(path: Path) -> float:
    seconds: list[float] = []
    with open(path, "xb", buffering=0) as stream:
        while len(seconds) < SYNCS and sum(seconds) < BUDGET:
            stream.write(b"x" * 4096)
            begin = time.perf_counter()
            os.fsync(stream.fileno())
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _rename_is_atomic(folder: Path) -> bool:
    """Replace a file several times, while a thread reads it. Return whether it always saw one of the contents whole."""
    contents = [letter * 4096 for letter in (b"a", b"b")]
    target, seen, finished = folder / "name", [], threading.Event()
    target.write_bytes(contents[0])

    def read() -> None:
        while not finished.is_set():
            try:
                seen.append(target.read_bytes() in contents)
            except OSError as error:
                seen.append(isinstance(error, InterruptedError))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begin = time.perf_counter()
    for number in range(RENAMES):
        new = folder / f"name.{number}.new"
        new.write_bytes(contents[number % 2])
        os.replace(new, target)
        if time.perf_counter() - begin > BUDGET:
            break
    finished.set()
    reader.join(BUDGET)
    return all(seen)
