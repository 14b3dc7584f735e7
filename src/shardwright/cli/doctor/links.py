"""Links between two ranks of this machine: a small all-reduce and a large all-gather, with gloo and with NCCL.

Each rank is a process of its own (`measure_link`), and they meet in a file of a folder that is deleted afterwards. The
collectives are plain ones of torch: ranks of this package on the CPU use shared memory where they can, which is faster.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwright.cli.doctor.children import TooLate, Unmeasured, measure_in_children
from shardwright.cli.doctor.finding import Finding, unmeasured
from shardwright.cli.doctor.words import duration, rate

SECONDS = 40.0
"""Limit of a measurement. It takes about 4 s; the import of torch alone can take 30 s on a loaded machine."""
RANKS = 2
SMALL_CALLS, LARGE_CALLS = 50, 8
PART_BYTES = 2**25
"""Bytes that each rank has in the large all-gather."""
BUDGET = 2.0
"""Seconds after which a slow link gets no further calls."""

SLOWEST = {"gloo": (5e-3, 100e6), "nccl": (500e-6, 5e9)}
"""Seconds of a small all-reduce, and bytes per second of a large all-gather, that are slow on one machine.

gloo on two busy cores took 0.2 ms and had 0.3 GB/s. A PCIe 4.0 slot has 32 GB/s, so NCCL that is below 5 GB/s takes a
detour.
"""
NAMES = {"gloo": "gloo", "nccl": "NCCL"}
SLOW_ADVICE = {
    "gloo": (
        "end other programs that use the cores, pin ranks to cores of their own, and set GLOO_SOCKET_IFNAME=lo for a "
        "job of one host"
    ),
    "nccl": (
        "run with NCCL_DEBUG=INFO and look for 'via': P2P is fast, SHM and NET are not; unset NCCL_P2P_DISABLE, give "
        "the container --ipc=host, and turn off ACS of the PCIe switches"
    ),
}
FAILURE_ADVICE = {
    "gloo": (
        "ranks on the CPU, and checkpoints of every job, need gloo: set GLOO_SOCKET_IFNAME to an interface of `ip "
        "addr`, or unset it"
    ),
    "nccl": (
        "run with NCCL_DEBUG=INFO, which prints the reason; NCCL_P2P_DISABLE=1 shows whether peer access is at fault"
    ),
}
LATE_ADVICE = (
    "end other programs that use the cores; if there are none, the ranks do not reach each other: set "
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to an interface of `ip addr`"
)


def find_link(backend: str) -> Finding:
    """Measure the link of two ranks of this machine, and judge it."""
    subject = NAMES[backend]
    try:
        with tempfile.TemporaryDirectory(prefix="shardwright-doctor-") as folder:
            meeting = str(Path(folder) / "meeting")
            calls = [("link", backend, meeting, rank) for rank in range(RANKS)]
            ranks = measure_in_children(calls, SECONDS)
    except TooLate as error:
        return unmeasured(subject, str(error), LATE_ADVICE)
    except Unmeasured as error:
        reason = re.sub(r"\[[^\]]* at [^\]]*\] *", "", str(error))  # the line of gloo's code
        return unmeasured(subject, reason, FAILURE_ADVICE[backend])
    except OSError as error:
        return unmeasured(subject, f"no folder for temporary files ({error.strerror})")
    return judge_link(backend, ranks[0])


def judge_link(backend: str, figures: Mapping[str, Any]) -> Finding:
    """The verdict on seconds of a small all-reduce and bytes per second of a large all-gather."""
    small, bandwidth = figures["all_reduce_seconds"], figures["all_gather_bytes_per_second"]
    slow_seconds, slow_bandwidth = SLOWEST[backend]
    advice = SLOW_ADVICE[backend] if small > slow_seconds or bandwidth < slow_bandwidth else ""
    text = (
        f"{RANKS} ranks of this machine: a small all-reduce takes {duration(small)}, a large all-gather has "
        f"{rate(bandwidth)}"
    )
    return Finding(NAMES[backend], text, advice, dict(figures))


def measure_link(backend: str, meeting: str, rank: int) -> dict[str, Any]:
    """Run the collectives as one of two ranks of this machine, which meet in a file."""
    import torch.distributed as dist

    return _measure(backend, dist.FileStore(meeting, RANKS), rank, device_index=rank)


def measure_pair(backend: str, meeting: tuple[str, int, str], rank: int, interface: str) -> dict[str, Any]:
    """Run the collectives as one of two ranks of different hosts.

    Args:
        backend: gloo or nccl; with nccl each rank uses the first GPU of its host.
        meeting: host, port and prefix of a store.
        rank: 0 or 1.
        interface: of gloo; empty: it decides.
    """
    import torch.distributed as dist

    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    host, port, prefix = meeting
    store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    return _measure(
        backend, dist.PrefixStore(f"shardwright doctor pair {prefix}", store), rank, device_index=0
    )


def _measure(backend: str, store: Any, rank: int, device_index: int) -> dict[str, Any]:
    """The times of the collectives. Bandwidth counts the bytes that a rank receives from the other one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", device_index) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS)
    )
    try:
        small = torch.zeros(1, device=device)
        part = torch.ones(PART_BYTES // 4, device=device)
        whole = torch.empty(RANKS * part.numel(), device=device)
        small_seconds = _seconds(lambda: dist.all_reduce(small), SMALL_CALLS, device)
        large_seconds = _seconds(lambda: dist.all_gather_into_tensor(whole, part), LARGE_CALLS, device)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {
        "all_reduce_seconds": small_seconds,
        "all_gather_bytes_per_second": (RANKS - 1) * PART_BYTES / large_seconds,
        "ranks": RANKS,
    }


def _seconds(call: Any, most: int, device: Any) -> float:
    """The median time of a collective after a first call. All ranks make the same number of calls."""
    import torch
    import torch.distributed as dist

    def timed() -> float:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    timed()
    first = torch.tensor([timed()], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    calls = max(1, min(most, int(BUDGET / max(first.item(), 1e-6))))
    return statistics.median(timed() for _ in range(calls))
