"""``shardwright doctor --measure``: tables of programs and of the system, and the advice that follows from facts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.doctor import clocks, devices, folders, hosts, links, memory, network
from shardwright.cli.doctor.finding import Finding
from shardwright.cli.doctor.words import GIB, duration, rate

ROWS = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 81000, 0, 34, 16, 16
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 1000, 2, 88, 8, 16
2, GPU-cccc, NVIDIA GeForce RTX 4090, 24564, 24000, [N/A], [Unknown Error], [N/A], [N/A]
Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error
"""
GPU = {"name": "A", "uuid": "GPU-a", "total": 80 * GIB, "free": 79 * GIB}
FOLDER = {
    "write": 1e9, "read": 2e9, "sync_seconds": 1e-3, "atomic_rename": True, "free": 100 * GIB, "free_files": 10**6,
    "file_system": "ext4",
}  # fmt: skip
TABLE = {"MemTotal": 64 * GIB, "MemAvailable": 60 * GIB, "SwapTotal": 0, "SwapFree": 0}
LIMITS = {"files": 65536, "files_most": 65536, "locked": None, "locked_most": None}
SHARED = {"path": "/dev/shm", "total": 32 * GIB, "free": 32 * GIB, "error": None}


def expect(finding: Finding, found: str, advice: str) -> None:
    """Both are regular expressions; no advice is an empty one."""
    assert re.search(found, finding.found), finding.found
    assert re.search(advice, finding.advice) if advice else not finding.advice, finding.advice
    assert len(finding.lines) == 1 + bool(finding.advice)
    assert not any("\n" in text for _, text in finding.lines)


# ------------------------------------------------------------------------------
# GPUs


def test_rows_of_gpus_have_numbers_or_nothing() -> None:
    first, second, third = devices.gpu_rows(ROWS)
    assert first["name"] == "NVIDIA H100 80GB HBM3" and first["total"] == 81559 * 2**20
    assert (second["free"], second["ecc_errors"], second["width"]) == (1000 * 2**20, 2, 8)
    assert third["ecc_errors"] is third["temperature"] is third["most_width"] is None
    assert devices.gpu_rows("") == devices.gpu_rows("NVIDIA-SMI has failed") == []


def test_faults_that_lower_clocks_are_told_from_idleness() -> None:
    text = "GPU-a, 0x0000000000000001\nGPU-b, 0x0000000000000048\nGPU-c, [N/A]\nGPU-d, 0x4\n"
    assert devices.throttles(text) == {
        "GPU-a": [],
        "GPU-b": ["hardware slowdown", "heat (hardware)"],
        "GPU-d": [],
    }


def test_processes_of_gpus() -> None:
    text = "GPU-a, 4711, 2048\nGPU-a, 12, [N/A]\nGPU-b, 13, 100\n"
    assert devices.processes(text) == {"GPU-a": [(4711, 2 * GIB)], "GPU-b": [(13, 100 * 2**20)]}
    assert devices.processes("No running processes found") == {}


@pytest.mark.parametrize("start", ["\t", "\x1b[4m\t", ""])
def test_topology(start: str) -> None:
    text = (
        f"{start}GPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\nGPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\nGPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n  SYS  = between sockets\n"
    )
    assert devices.topology(text) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PHB"}
    assert devices.topology("") == devices.topology("NVIDIA-SMI has failed") == {}


def judged(slow: Any = (), held: Any = (), row: Any = None, **changes: Any) -> Finding:
    return devices.judge_gpu(0, GPU | changes, row or {}, slow, held)


@pytest.mark.parametrize(
    ("finding", "found", "advice"),
    [
        (judged(), "A, 79.0 GiB free of 80.0 GiB", ""),
        (judged(held=[(4711, 30 * GIB)], free=50 * GIB), r"process 4711 \(30.0 GiB\)", "end these processes"),
        (judged(held=[(4711, GIB // 2)]), "79.0 GiB free", ""),
        (judged(free=50 * GIB), "50.0 GiB free", "another program.*CUDA_VISIBLE_DEVICES"),
        (judged(row={"ecc_errors": 3}), "3 uncorrected ECC errors", "nvidia-smi -r"),
        (judged(row={"ecc_errors": 0, "temperature": 34}), "34 degrees C", ""),
        (judged(slow=["heat (hardware)"]), "clocks lowered by heat", "cooling"),
        (judged(row={"width": 8, "most_width": 16}), "PCIe x8 of x16", "slot"),
        (devices.judge_absent(0), "no GPU", ""),
        (devices.judge_absent(2), "lists 2 GPUs, torch finds none", "install a torch"),
        (devices.judge_pairs(2, [], {(0, 1): "NV18"}), "1 pairs by NVLink, peer access between all", ""),
        (devices.judge_pairs(2, [], {}), "links unknown", ""),
        (devices.judge_pairs(2, [(0, 1)], {(0, 1): "SYS"}), "no peer access between 0-1", "ACS.*micro_batch"),
        (devices.judge_pairs(3, [], {(0, 1): "NV4", (0, 2): "PHB"}), "NVLink, 1 pairs", "no NVLink"),
    ],
)
def test_gpus(finding: Finding, found: str, advice: str) -> None:
    expect(finding, found, advice)


# ------------------------------------------------------------------------------
# Links, networks, clocks


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


def networks(**facts: Any) -> Finding:
    return network.judge_network(network.Network(("lo", "eth0"), **facts))


@pytest.mark.parametrize(
    ("finding", "found", "advice"),
    [
        (networks(address="10.0.0.7", interface="eth0"), "plain gloo takes eth0", ""),
        (networks(address="127.0.1.1", interface="lo"), "127.0.1.1.*enough for one host", ""),
        (networks(address="127.0.1.1", hosts=2, to_first_rank="eth0"), "takes eth0, by which", "other hosts cannot"),
        (networks(address="::1", hosts=2), "loopback address", "correct /etc/hosts"),
        (networks(name_error="the host's name has no address"), "no address", "/etc/hosts"),
        (networks(address="10.0.0.7", chosen={"GLOO_SOCKET_IFNAME": "eth0"}), "IFNAME=eth0", ""),
        (networks(address="10.0.0.7", chosen={"GLOO_SOCKET_IFNAME": "ib0"}), "=ib0", "no interface ib0.*lo, eth0"),
        (networks(address="10.0.0.7", chosen={"NCCL_SOCKET_IFNAME": "eth"}), "=eth", ""),
        (networks(address="10.0.0.7", chosen={"NCCL_SOCKET_IFNAME": "^lo,docker"}), "=.lo", ""),
        (networks(address="10.0.0.7", chosen={"NCCL_SOCKET_IFNAME": "=ib0"}), "=ib0", "NCCL finds no"),
    ],
)  # fmt: skip
def test_networks(finding: Finding, found: str, advice: str) -> None:
    expect(finding, found, advice)
    assert "10.0.0.7" not in finding.found + finding.advice + str(finding.figures)


@pytest.mark.parametrize(
    ("skews", "silent", "found", "advice"),
    [
        ({1: (0.01, 1e-4), 2: (-0.002, 1e-4)}, [], "3 ranks.*rank 1 is the farthest, 10 ms ahead of rank 0", ""),
        ({1: (-3.0, 1e-4)}, [], "3.0 s behind rank 0", "chrony"),
        ({1: (0.6, 0.3)}, [], "within 300 ms", ""),
        ({1: (0.0, 1e-4)}, [2], "rank 2 did not answer", "why rank 2"),
        ({}, list(range(1, 20)), "not measured: ranks 1, 2, 3, 4, 5, 6, 7, 8, ... did", "did not start"),
    ],
)  # fmt: skip
def test_clocks(skews: Any, silent: list[int], found: str, advice: str) -> None:
    expect(clocks.judge_clocks(skews, silent), found, advice)


def pair(bandwidth: float, seconds: float = 1e-4) -> dict[str, float]:
    return {"all_reduce_seconds": seconds, "all_gather_bytes_per_second": bandwidth}


@pytest.mark.parametrize(
    ("backend", "results", "found", "advice"),
    [
        ("gloo", {(0, 8): pair(2e9), (8, 16): pair(1.5e9)}, "of 3 hosts.* ranks 8 and 16", ""),
        ("gloo", {(0, 8): pair(2e9), (8, 16): pair(1e8)}, "100 MB/s", "^hosts of ranks 8 and 16: the link"),
        ("gloo", {(0, 8): pair(2e7)}, "20 MB/s", "^take the fast network"),
        ("gloo", {(0, 8): pair(2e9, 0.02)}, "20 ms", "^take the fast network"),
        ("nccl", {(0, 8): pair(1e9)}, "^NCCL between neighbours of 2 hosts", "NCCL_DEBUG=INFO"),
        ("gloo", {(0, 8): {"error": "late"}}, r"^not measured: hosts of ranks 0 and 8 \(late\)", "do not reach"),
        (
            "gloo", {(0, 1): pair(2e9), (1, 2): {"error": "late"}, (2, 3): {"error": "late"}},
            r"ranks 1 and 2, and 1 more", "do not reach",
        ),
    ],
)  # fmt: skip
def test_links_of_hosts(backend: str, results: Any, found: str, advice: str) -> None:
    finding = hosts.judge_hosts(backend, results)
    assert re.search(found, finding.found)
    assert re.search(advice, finding.advice) if advice else finding.advice == ""
    assert len(finding.figures["pairs"]) == len(results)


@pytest.mark.parametrize(("first_ranks", "pairs"), [([0], []), ([0, 4, 8, 12], [(0, 4), (8, 12), (4, 8)])])
def test_no_host_measures_with_two_at_a_time(first_ranks: list[int], pairs: list[tuple[int, int]]) -> None:
    assert hosts._pairs(first_ranks) == pairs


def test_one_process_measures_no_link_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert hosts.find_hosts(0) == []


def test_one_process_compares_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    expect(clocks.find_clocks(), "alone, so no clocks were compared", "")
    variables = {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert clocks.is_rank_of_several({**variables, "WORLD_SIZE": "2"})
    assert not clocks.is_rank_of_several({**variables, "WORLD_SIZE": "1"})
    assert not clocks.is_rank_of_several({**variables, "WORLD_SIZE": "two"})


# ------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    ("finding", "found", "advice"),
    [
        (memory.judge_host(TABLE, None), "60.0 GiB available of 64.0 GiB$", ""),
        (memory.judge_host(TABLE | {"MemAvailable": GIB}, None), "1.0 GiB available", "end them"),
        (memory.judge_host(TABLE, (8 * GIB, GIB)), "container may use 8.0 GiB and uses 1.0 GiB", "--memory"),
        (memory.judge_host(TABLE, (60 * GIB, GIB)), "container may use 60.0 GiB", ""),
        (memory.judge_host(TABLE, (60 * GIB, 59 * GIB)), "uses 59.0 GiB", "is nearly used up"),
        (memory.judge_host({}, None), "not measured", ""),
        (memory.judge_swap(TABLE), "none", ""),
        (memory.judge_swap({"SwapTotal": 4 * GIB, "SwapFree": GIB}), "3.0 GiB used of 4.0 GiB", "swapoff"),
        (memory.judge_swap({}), "not measured", ""),
        (memory.judge_shared(SHARED, True), "32.0 GiB free", ""),
        (memory.judge_shared(SHARED | {"free": 2**26}, True), "64 MiB free", "--shm-size"),
        (memory.judge_shared(SHARED | {"free": 2**26}, False), "64 MiB free", ""),
        (memory.judge_shared(SHARED | {"error": "Permission denied"}, False), "Permission denied", "tmpfs"),
        (memory.judge_limits(LIMITS, True), "65536 open files, locked memory without limit", ""),
        (memory.judge_limits(LIMITS | {"files": 256}, False), "256 open files", "ulimit -n 65536"),
        (memory.judge_limits(LIMITS | {"files": None}, False), "any number of open files", ""),
        (memory.judge_limits(LIMITS | {"locked": 2**16}, True), "locked memory 64 KiB", "ulimit -l unlimited"),
        (memory.judge_limits(LIMITS | {"locked": 2**23}, False), "locked memory 8 MiB", ""),
        (memory.judge_limits({}, False), "not measured", ""),
    ],
)  # fmt: skip
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
        ({}, "ext4: writes 1.0 GB/s with fsync, reads 2.0 GB/s, an fsync takes 1 ms, rename is atomic", ""),
        (
            {"write": 2e7},
            "writes 20 MB/s",
            r"^write is slow: .*\[checkpoint\] asynchronous = true.*--run.dir",
        ),
        ({"sync_seconds": 0.5}, "takes 500 ms", "^fsync is slow"),
        ({"write": 2e6, "sync_seconds": 2.0}, "writes 2.0 MB/s.*2.0 s", "^write is slow and fsync is slow"),
        ({"read": 2e7}, "reads 20 MB/s", "^read is slow"),
        ({"read": None}, "reading was not measured", ""),
        ({"atomic_rename": False}, "rename is NOT atomic", "do not save here"),
        ({"free": GIB}, "1.0 GiB free", "keep"),
        ({"free_files": 0}, "ext4", "inodes"),
        ({"free_files": None}, "ext4", ""),
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
