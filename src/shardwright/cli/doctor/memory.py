"""The memory of the host: its size, the limit of its container, and shared memory.

Facts are read from the system's files. Verdicts are pure functions. Nothing here is about the memory of GPUs.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from shardwright.cli.doctor.findings import GIB, Finding, size, unmeasured

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = {False: 2**26, True: GIB}
"""Free bytes of shared memory that one GPU or none, and several GPUs, need: NCCL puts its buffers there."""
LEAST_AVAILABLE = 0.1
"""Share of the memory below which a host is short of it."""
CGROUPS = Path("/sys/fs/cgroup")


# ------------------------------------------------------------------------------
# Facts


def host_memory() -> dict[str, int | None]:
    """Return the bytes of the host's memory, and of its control group where that has a smaller limit.

    `available` is what new programs can get; `limit` and `limit_used` are those of the control group. None: not known,
    or no limit.
    """
    memory: dict[str, int | None] = {"total": None, "available": None, "limit": None, "limit_used": None}
    with suppress(OSError, ValueError):  # on another system than Linux
        total = memory["total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        table = Path("/proc/meminfo").read_text()
        if available := re.search(r"^MemAvailable:\s+(\d+) kB$", table, re.MULTILINE):
            memory["available"] = int(available[1]) * 1024
        limited = group_limit(Path("/proc/self/cgroup").read_text())
        if limited and limited[0] < total:
            memory["limit"], memory["limit_used"] = limited
    return memory


def group_limit(groups: str, root: Path = CGROUPS) -> tuple[int, int] | None:
    """Return the bytes that the control groups of a process allow, and those that they use. None without a limit.

    Groups above the process limit it, too: the one with the least room counts. In a container the group's own folder
    can be the root.

    Args:
        groups: the text of /proc/self/cgroup.
        root: the folder of all groups.
    """
    found: list[tuple[int, int]] = []
    for folder, limit_file, used_file in _group_folders(groups, root):
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
        except (OSError, ValueError):
            continue  # no such file, or "max"
        if limit < 2**60:  # version 1 writes a huge number for no limit
            found.append((limit, used))
    return min(found, key=lambda each: each[0] - each[1]) if found else None


def _group_folders(groups: str, root: Path) -> Iterator[tuple[Path, str, str]]:
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers == "":
            top, files = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))
        for part in (path, *path.parents):
            if ".." not in part.parts:
                yield top / part, *files


def shared_memory() -> dict[str, Any]:
    """Return the bytes of /dev/shm, and as `error` why this user may not write there, or None."""
    facts: dict[str, Any] = {"path": str(SHARED_MEMORY), "total": None, "free": None, "error": None}
    try:
        size = os.statvfs(SHARED_MEMORY)
        facts |= {"total": size.f_blocks * size.f_frsize, "free": size.f_bavail * size.f_frsize}
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            file.write(b"1")
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


# ------------------------------------------------------------------------------
# Verdicts, and their words


def memory_text(memory: Mapping[str, int | None]) -> str:
    """Return the facts of `host_memory` as a line."""
    text = f"{size(memory['available'])} available of {size(memory['total'])}"
    if memory["limit"] is None:
        return text
    return f"{text}; this container may use {size(memory['limit'])} and uses {size(memory['limit_used'])}"


def shared_text(shared: Mapping[str, Any]) -> str:
    """Return the facts of `shared_memory` as a line."""
    if shared["error"]:
        return f"{shared['path']}: {shared['error']}"
    return f"{shared['path']}, {size(shared['free'])} free of {size(shared['total'])}"


def judge_host(memory: Mapping[str, int | None]) -> Finding:
    """Return the finding for the facts of `host_memory`."""
    total, available, limit, used = (memory[name] for name in ("total", "available", "limit", "limit_used"))
    if total is None or available is None:
        return unmeasured("memory", "this system has no /proc/meminfo")
    advice = []
    if available < LEAST_AVAILABLE * total:
        advice.append("other programs hold this host's memory: end them, or the system kills ranks")
    if limit is not None and limit < total // 4:
        advice.append(
            "ranks above the container's limit are killed: give the container more (docker --memory, Kubernetes "
            "resources.limits.memory, srun --mem)"
        )
    elif limit is not None and limit - (used or 0) < LEAST_AVAILABLE * limit:
        advice.append("the container's memory is nearly used up: end its other programs, or give it more")
    return Finding("memory", memory_text(memory), "; ".join(advice), dict(memory))


def judge_shared(shared: Mapping[str, Any], several_gpus: bool) -> Finding:
    """Return the finding for the facts of `shared_memory`."""
    least, advice = LEAST_SHARED[several_gpus], ""
    if shared["error"]:
        advice = "NCCL and data loaders need it: mount a tmpfs there that this user may write"
    elif shared["free"] < least:
        advice = (
            f"NCCL and data loaders can fail with less than {size(least)}: give the container more (docker --shm-size, "
            "Kubernetes emptyDir of medium Memory), or delete old files there"
        )
    return Finding("shared memory", shared_text(shared), advice, dict(shared))
