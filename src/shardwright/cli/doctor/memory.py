"""The memory of the host: its size and limits, shared memory, swap, and the limits of a process.

Facts are read from the system's files. Verdicts are pure functions. Nothing here is about the memory of GPUs.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from shardwright.cli.doctor.finding import Finding, joined, unmeasured
from shardwright.cli.doctor.words import GIB, size

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = {False: 2**26, True: GIB}
"""Free bytes of shared memory that one GPU or none, and several GPUs, need: NCCL puts its buffers there."""
LEAST_AVAILABLE = 0.1
"""Share of the memory below which a host is short of it."""
MUCH_SWAP = GIB // 4
"""Used bytes of swap that show a lack of memory. A few idle pages are normal."""
LEAST_FILES = 1024
"""Open files. Each rank has a connection to each other rank, and data loaders pass tensors as open files."""
CGROUPS = Path("/sys/fs/cgroup")
INFINIBAND = Path("/sys/class/infiniband")


# ------------------------------------------------------------------------------
# Facts


def host_memory() -> dict[str, int | None]:
    """Bytes of the machine's memory, and of its control group's limit where one is set."""
    memory: dict[str, int | None] = {"total": None, "available": None, "limit": None}
    try:
        memory["total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        table = Path("/proc/meminfo").read_text()
        if available := re.search(r"^MemAvailable:\s+(\d+) kB$", table, re.MULTILINE):
            memory["available"] = int(available[1]) * 1024
    except (OSError, ValueError):
        pass  # another system than Linux
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue  # no such file, or "max"
        if memory["total"] is None or limit < memory["total"]:
            memory["limit"] = limit
    return memory


def shared_memory() -> dict[str, Any]:
    """Bytes of /dev/shm, and whether this user may write there."""
    facts: dict[str, Any] = {"path": str(SHARED_MEMORY), "total": None, "free": None, "error": None}
    try:
        size = os.statvfs(SHARED_MEMORY)
        facts |= {"total": size.f_blocks * size.f_frsize, "free": size.f_bavail * size.f_frsize}
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            file.write(b"1")
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def meminfo(table: str) -> dict[str, int]:
    """Bytes by name, from the text of /proc/meminfo."""
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", table, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in rows}


def group_limit(groups: str, root: Path = CGROUPS) -> tuple[int, int] | None:
    """Bytes that the control groups of a process allow, and that they use. None without a limit.

    `groups` is the text of /proc/self/cgroup. Groups above the process limit it, too: the one with the least room
    counts. In a container the group's own folder can be the root.
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


def process_limits() -> dict[str, int | None]:
    """Open files and bytes of locked memory that a process may have. None: without limit."""
    try:
        import resource
    except ImportError:
        return {}  # not a Unix
    names = {"files": "RLIMIT_NOFILE", "locked": "RLIMIT_MEMLOCK"}
    limits: dict[str, int | None] = {}
    for key, name in names.items():
        if hasattr(resource, name):
            soft, hard = resource.getrlimit(getattr(resource, name))
            limits[key] = None if soft == resource.RLIM_INFINITY else soft
            limits[f"{key}_most"] = None if hard == resource.RLIM_INFINITY else hard
    return limits


# ------------------------------------------------------------------------------
# Verdicts


def findings(several_gpus: bool) -> list[Finding]:
    """The findings for this host and this process."""
    try:
        table = meminfo(Path("/proc/meminfo").read_text())
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        table, groups = {}, ""
    return [
        judge_host(table, group_limit(groups)),
        judge_swap(table),
        judge_shared(shared_memory(), several_gpus),
        judge_limits(process_limits(), _has_infiniband()),
    ]


def judge_host(table: Mapping[str, int], limit: tuple[int, int] | None) -> Finding:
    """The verdict on the memory of a host whose control group has a limit and a use."""
    if not {"MemTotal", "MemAvailable"} <= set(table):
        return unmeasured("memory", "this system has no /proc/meminfo")
    total, available = table["MemTotal"], table["MemAvailable"]
    text = f"{size(available)} available of {size(total)}"
    figures: dict[str, Any] = {"total": total, "available": available, "limit": None, "limit_used": None}
    advice = []
    if available < LEAST_AVAILABLE * total:
        advice.append("other programs hold this host's memory: end them, or the system kills ranks")
    if limit is not None and limit[0] < total:
        figures |= {"limit": limit[0], "limit_used": limit[1]}
        text += f"; this container may use {size(limit[0])} and uses {size(limit[1])}"
        if limit[0] < total // 4:
            advice.append(
                "ranks above the container's limit are killed: give the container more (docker --memory, Kubernetes "
                "resources.limits.memory, srun --mem)"
            )
        elif limit[0] - limit[1] < LEAST_AVAILABLE * limit[0]:
            advice.append("the container's memory is nearly used up: end its other programs, or give it more")
    return Finding("memory", text, joined(advice), figures)


def judge_swap(table: Mapping[str, int]) -> Finding:
    """The verdict on swap."""
    if not {"SwapTotal", "SwapFree"} <= set(table):
        return unmeasured("swap", "this system has no /proc/meminfo")
    total = table["SwapTotal"]
    used = total - table["SwapFree"]
    advice = ""
    if used > MUCH_SWAP:
        advice = (
            "the host was short of memory, and pages that come back from swap make a rank slow: end other programs, "
            "or turn swap off (swapoff -a)"
        )
    text = f"{size(used)} used of {size(total)}" if total else "none"
    return Finding("swap", text, advice, {"total": total, "used": used})


def judge_shared(facts: Mapping[str, Any], several_gpus: bool) -> Finding:
    """The verdict on /dev/shm."""
    subject = "shared memory"
    figures = {"total": facts["total"], "free": facts["free"]}
    if facts["error"]:
        advice = "NCCL and data loaders need it: mount a tmpfs there that this user may write"
        return Finding(subject, f"{facts['path']}: {facts['error']}", advice, figures)
    least, advice = LEAST_SHARED[several_gpus], ""
    if facts["free"] < least:
        advice = (
            f"NCCL and data loaders can fail with less than {size(least)}: give the container more (docker --shm-size, "
            "Kubernetes emptyDir of medium Memory), or delete old files there"
        )
    text = f"{facts['path']}, {size(facts['free'])} free of {size(facts['total'])}"
    return Finding(subject, text, advice, figures)


def judge_limits(limits: Mapping[str, int | None], infiniband: bool) -> Finding:
    """The verdict on the limits of a process (ulimit)."""
    if not limits:
        return unmeasured("limits", "this system has no limits of a process")
    files, locked, advice = limits.get("files"), limits.get("locked"), []
    if files is not None and files < LEAST_FILES:
        most = limits.get("files_most")
        advice.append(
            f"ranks with many connections or data loaders need more open files: ulimit -n {most or 65536} in the shell "
            "that starts the job"
        )
    if locked is not None and infiniband:
        advice.append(
            "InfiniBand needs locked memory: ulimit -l unlimited (docker --ulimit memlock=-1, SLURM "
            "PropagateResourceLimits)"
        )
    text = (
        f"{'any number of' if files is None else files} open files, "
        f"locked memory {'without limit' if locked is None else size(locked)}"
    )
    return Finding("limits", text, joined(advice), dict(limits))


def _has_infiniband() -> bool:
    try:
        return any(INFINIBAND.iterdir())
    except OSError:
        return False
