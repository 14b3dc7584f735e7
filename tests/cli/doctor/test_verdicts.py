"""``shardwright doctor --measure``: tables of the system, and the advice that follows from facts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.doctor import devices, folders, links, memory
from shardwright.cli.doctor.findings import GIB, Finding, duration, rate

GPU = {"name": "A", "total": 80 * GIB, "free": 79 * GIB}
FOLDER = {"write": 1e9, "read": 2e9, "free": 100 * GIB, "file_system": "ext4"}
HOST = {"total": 64 * GIB, "available": 60 * GIB, "limit": None, "limit_used": None}
SHARED = {"path": "/dev/shm", "total": 32 * GIB, "free": 32 * GIB, "error": None}


def expect(finding: Finding, found: str, advice: str) -> None:
    """Both are regular expressions; no advice is an empty one."""
    assert re.search(found, finding.found), finding.found
    assert re.search(advice, finding.advice) if advice else not finding.advice, finding.advice
    assert len(finding.lines) == 1 + bool(finding.advice)
    assert not any("\n" in text for _, text in finding.lines)


# ------------------------------------------------------------------------------
# GPUs


@pytest.mark.parametrize(
    ("finding", "found", "advice"),
    [
        (devices.judge_gpu(0, GPU), "A, 79.0 GiB free of 80.0 GiB", ""),
        (
            devices.judge_gpu(0, GPU | {"free": 50 * GIB}),
            "50.0 GiB free",
            "another program.*CUDA_VISIBLE_DEVICES",
        ),
        (devices.judge_pairs(2, []), "peer access between all", ""),
        (devices.judge_pairs(2, [(0, 1)]), "no peer access between 0-1", "ACS"),
        (devices.judge_pairs(6, [(0, each) for each in range(1, 6)]), "0-4, ...", "ACS"),
    ],
)
def test_gpus(finding: Finding, found: str, advice: str) -> None:
    expect(finding, found, advice)


# ------------------------------------------------------------------------------
# Links


@pytest.mark.parametrize(
    ("backend", "small", "bandwidth", "advice"),
    [
        ("gloo", 1e-4, 1e9, ""),
        ("gloo", 2e-2, 1e9, "cores"),
        ("gloo", 1e-4, 5e7, "GLOO_SOCKET_IFNAME=lo"),
        ("nccl", 3e-5, 2e11, ""),
        ("nccl", 3e-5, 3e9, "NCCL_DEBUG=INFO.*ACS"),
    ],
)
def test_links(backend: str, small: float, bandwidth: float, advice: str) -> None:
    figures = {"all_reduce_seconds": small, "all_gather_bytes_per_second": bandwidth}
    finding = links.judge_link(backend, figures)
    expect(finding, f"takes {duration(small)}.*has {rate(bandwidth)}", advice)
    assert finding.figures == figures


def link(ranks: tuple[int, int], bandwidth: float, seconds: float = 1e-4) -> dict[str, Any]:
    return {"ranks": ranks, "all_reduce_seconds": seconds, "all_gather_bytes_per_second": bandwidth}


@pytest.mark.parametrize(
    ("backend", "measured", "found", "advice"),
    [
        ("gloo", [link((0, 8), 2e9), link((8, 16), 1.5e9)], "of 3 hosts.* ranks 8 and 16: .*1.5 GB/s", ""),
        ("gloo", [link((0, 8), 2e9), link((8, 16), 1e8)], "100 MB/s", "^hosts of ranks 8 and 16: this link"),
        ("gloo", [link((0, 8), 2e7)], "20 MB/s", "^take the fast network"),
        ("gloo", [link((0, 8), 2e9, 0.02)], "20 ms", "^take the fast network"),
        ("nccl", [link((0, 8), 1e9)], "^NCCL between neighbours of 2 hosts", "NCCL_DEBUG=INFO"),
    ],
)
def test_links_of_hosts(backend: str, measured: Any, found: str, advice: str) -> None:
    finding = links.judge_hosts(backend, measured)
    expect(finding, found, advice)
    assert len(finding.figures["links"]) == len(measured)


def test_one_process_measures_no_link_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert links.find_hosts(0) == []
    variables = {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert links.is_rank_of_several({**variables, "WORLD_SIZE": "2"})
    assert not links.is_rank_of_several({**variables, "WORLD_SIZE": "1"})
    assert not links.is_rank_of_several({**variables, "WORLD_SIZE": "two"})


# ------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("finding", "found", "advice"),
    [
        (memory.judge_host(HOST), "60.0 GiB available of 64.0 GiB$", ""),
        (memory.judge_host(HOST | {"available": GIB}), "1.0 GiB available", "end them"),
        (
            memory.judge_host(HOST | {"limit": 8 * GIB, "limit_used": GIB}),
            "container may use 8.0 GiB and uses 1.0 GiB",
            "--memory",
        ),
        (memory.judge_host(HOST | {"limit": 60 * GIB, "limit_used": GIB}), "may use 60.0 GiB", ""),
        (
            memory.judge_host(HOST | {"limit": 60 * GIB, "limit_used": 59 * GIB}),
            "uses 59.0 GiB",
            "is nearly used up",
        ),
        (memory.judge_host(HOST | {"available": None}), "not measured", ""),
        (memory.judge_shared(SHARED, True), "32.0 GiB free", ""),
        (memory.judge_shared(SHARED | {"free": 2**26}, True), "64 MiB free", "--shm-size"),
        (memory.judge_shared(SHARED | {"free": 2**26}, False), "64 MiB free", ""),
        (memory.judge_shared(SHARED | {"error": "Permission denied"}, False), "Permission denied", "tmpfs"),
    ],
)
def test_memory(finding: Finding, found: str, advice: str) -> None:
    expect(finding, found, advice)


def test_the_narrowest_control_group_counts(tmp_path: Path) -> None:
    for name, limit, used in (("", "max", 10), ("job", 8 * GIB, GIB), ("job/step", 16 * GIB, GIB)):
        group = tmp_path / name
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
    assert memory.group_limit("0::/job/step\n", tmp_path) == (8 * GIB, GIB)
    assert memory.group_limit("0::/elsewhere\n", tmp_path) is None
    assert memory.group_limit("0::/../../other\n", tmp_path) is None


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    group = tmp_path / "memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (group / "memory.usage_in_bytes").write_text("7\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("7\n")
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert memory.group_limit(groups, tmp_path) == (GIB, 7)
    assert memory.group_limit("4:memory:/\n", tmp_path) is None


# ------------------------------------------------------------------------------
# Folders


@pytest.mark.parametrize(
    ("changes", "found", "advice"),
    [
        ({}, "ext4: writes 1.0 GB/s with fsync, reads 2.0 GB/s, 100.0 GiB free", ""),
        (
            {"write": 2e7},
            "writes 20 MB/s",
            r"^write is slow: .*\[checkpoint\] asynchronous = true.*--run.dir",
        ),
        ({"write": 2e6}, "writes 2.0 MB/s", "^write is slow"),
        ({"read": 2e7}, "reads 20 MB/s", "^read is slow"),
        ({"read": None}, "reading was not measured", ""),
        ({"free": GIB}, "1.0 GiB free", "keep"),
        ({"file_system": "tmpfs"}, "tmpfs", "lost"),
        ({"file_system": ""}, "unknown file system", ""),
    ],
)
def test_folders(changes: dict[str, Any], found: str, advice: str) -> None:
    expect(folders.judge_folder(FOLDER | changes), found, advice)


def test_the_mount_of_a_folder(tmp_path: Path) -> None:
    parent = str(tmp_path.parent).replace(" ", "\\040")
    mounts = f"disk / ext4 rw 0 0\nserver:/a {parent} nfs4 rw 0 0\nserver:/b {parent}x xfs rw 0 0\nbroken\n"
    assert folders.file_system(tmp_path, mounts) == "nfs4"
    assert folders.file_system(Path("/"), mounts) == "ext4"
    assert folders.file_system(Path("/"), "") == ""


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.2e-4, "0.12 ms"), (0.0099, "9.9 ms"), (0.0996, "100 ms"), (0.35, "350 ms"), (2.5, "2.5 s")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
