"""Links between two ranks of this machine and between the hosts of a job: a small all-reduce and a large all-gather.

Each rank of a measurement is a process of its own, which runs `measure_links`. The collectives are plain ones of torch:
ranks of this package on the CPU use shared memory where they can, which is faster. The report names ranks, not hosts.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwright.cli.doctor.children import TooLate, Unmeasured, measure_in_children
from shardwright.cli.doctor.findings import Finding, duration, rate, unmeasured

SECONDS = 40.0
"""Limit of a measurement. It takes about 4 s; the import of torch alone can take 30 s on a loaded machine."""
ARRIVAL_SECONDS = 30.0
"""Limit of the wait for the other ranks of a job, which start at different times."""
SMALL_CALLS, LARGE_CALLS = 50, 8
PART_BYTES = 2**25
"""Bytes that each of two ranks has in the large all-gather."""
BUDGET = 2.0
"""Seconds after which a slow link gets no further calls."""

SLOWEST = {"gloo": (5e-3, 100e6), "nccl": (500e-6, 5e9)}
"""Seconds of a small all-reduce, and bytes per second of a large all-gather, that are slow.

gloo on two busy cores took 0.2 ms and had 0.3 GB/s. A PCIe 4.0 slot has 32 GB/s, so NCCL that is below 5 GB/s takes a
detour.
"""
UNEVEN = 3
"""Return how many times faster than a link the fastest one is, if the link is worth a look."""
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
SLOW_ADVICE_FOR_HOSTS = {
    "gloo": (
        "take the fast network: set GLOO_SOCKET_IFNAME to its interface on every host; messages and checkpoints, and "
        "ranks on the CPU, use gloo"
    ),
    "nccl": (
        "run with NCCL_DEBUG=INFO: NET/IB or the plugin of your cloud is fast, NET/Socket is not; see that the devices "
        "of the network are in the container, and that NCCL_IB_DISABLE is not set"
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
FAILURE_ADVICE_FOR_HOSTS = (
    "the hosts do not reach each other: open all TCP ports between them, and set GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME to an interface by which they do"
)
LATE_ADVICE = (
    "end other programs that use the cores; if there are none, the ranks do not reach each other: set "
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to an interface of `ip addr`"
)

Link = Mapping[str, Any]
"""A measurement of `measure_links` between two ranks."""


def find_link(backend: str, torch: Mapping[str, Any]) -> Finding:
    """Measure the link of two ranks of this machine, and judge it.

    Args:
        backend: gloo or nccl.
        torch: what the report has about torch.
    """
    subject = NAMES[backend]
    if torch["version"] is None:
        return unmeasured(subject, "torch cannot be imported", "see `problems`")
    if not torch["backends"].get(backend):
        return unmeasured(subject, f"this torch has no {subject}", "install a torch that has it")
    try:
        with tempfile.TemporaryDirectory(prefix="shardwright-doctor-") as folder:
            calls = [(backend, [str(Path(folder) / "store")], rank, 2, rank) for rank in range(2)]
            figures, _ = measure_in_children(measure_links, calls, SECONDS)
    except TooLate as error:
        return unmeasured(subject, str(error), LATE_ADVICE)
    except Unmeasured as error:
        return unmeasured(subject, _reason(error), FAILURE_ADVICE[backend])
    return judge_link(backend, figures["links"][0])


def find_hosts(gpus: int) -> list[Finding]:
    """Measure the links between neighbouring hosts as a rank of a job, and judge them as the first rank.

    Every rank of the job calls this function, each with the number of its GPUs. It returns nothing on ranks that do not
    measure, and in a process that is alone.
    """
    if not is_rank_of_several(os.environ):
        return []
    from shardwright.train.rank.hosts import INTERFACE_VARIABLE, host_key, use_one_network

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, meeting = _store_of_job()
    store.set(f"host/{rank}", json.dumps([host_key(), gpus]))
    if rank == 0:
        store.set("silent", json.dumps(_silent_ranks(store, ranks)))
    if silent := json.loads(store.get("silent")):
        shown = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        reason = f"no answer from ranks {shown} within {ARRIVAL_SECONDS:g} s"
        return [unmeasured("hosts", reason, "see why they did not start")]
    hosts = [json.loads(store.get(f"host/{each}")) for each in range(ranks)]
    first_ranks = sorted({host: each for each, (host, _) in reversed([*enumerate(hosts)])}.values())
    if len(first_ranks) == 1:
        return [Finding("hosts", "all ranks are on one host, so no link between hosts was measured")]
    chosen = os.environ.get(INTERFACE_VARIABLE)
    use_one_network(store, rank, ranks)
    found = []
    if rank in first_ranks:
        at = first_ranks.index(rank)
        for backend in ("gloo", "nccl") if all(count for _, count in hosts) else ("gloo",):
            call = (backend, [*meeting, backend], at, len(first_ranks), 0)
            try:
                (figures,) = measure_in_children(measure_links, [call], SECONDS)
            except Unmeasured as error:
                subject = "hosts" if backend == "gloo" else f"hosts, {NAMES[backend]}"
                found.append(unmeasured(subject, _reason(error), FAILURE_ADVICE_FOR_HOSTS))
                continue
            links = [
                {**each, "ranks": [first_ranks[at] for at in each["ranks"]]} for each in figures["links"]
            ]
            found.append(judge_hosts(backend, links))
    if chosen is None:
        os.environ.pop(INTERFACE_VARIABLE, None)  # links of this machine need no such interface
    return found


def judge_link(backend: str, link: Link) -> Finding:
    """Return the finding for a link between two ranks of this machine."""
    advice = SLOW_ADVICE[backend] if _is_slow(backend, link) else ""
    return Finding(NAMES[backend], f"2 ranks of this machine: {_speed(link)}", advice, dict(link))


def judge_hosts(backend: str, links: Sequence[Link]) -> Finding:
    """Return the finding for links between hosts, of which it shows the slowest one."""
    by_speed = sorted(links, key=lambda each: each["all_gather_bytes_per_second"])
    slowest, fastest = by_speed[0], by_speed[-1]["all_gather_bytes_per_second"]
    uneven = [each for each in by_speed if each["all_gather_bytes_per_second"] < fastest / UNEVEN]
    advice = []
    if uneven:
        advice.append(
            f"{'; '.join(map(_ends, uneven[:4]))}: this link is much slower than others: compare cables, ports and "
            "drivers with those of other hosts"
        )
    if any(_is_slow(backend, each) for each in links if each not in uneven):
        advice.append(SLOW_ADVICE_FOR_HOSTS[backend])
    text = (
        f"{NAMES[backend]} between neighbours of {len(links) + 1} hosts, the slowest are the {_ends(slowest)}: "
        f"{_speed(slowest)}"
    )
    subject = "hosts" if backend == "gloo" else f"hosts, {NAMES[backend]}"
    return Finding(subject, text, "; ".join(advice), {"links": [dict(each) for each in links]})


def _speed(link: Link) -> str:
    small, large = link["all_reduce_seconds"], link["all_gather_bytes_per_second"]
    return f"a small all-reduce takes {duration(small)}, a large all-gather has {rate(large)}"


def _ends(link: Link) -> str:
    return "hosts of ranks {} and {}".format(*link["ranks"])


def _is_slow(backend: str, link: Link) -> bool:
    seconds, bandwidth = SLOWEST[backend]
    return bool(link["all_reduce_seconds"] > seconds or link["all_gather_bytes_per_second"] < bandwidth)


def _reason(error: Unmeasured) -> str:
    """Return the text of an error without the line of gloo's code that it names."""
    return re.sub(r"\[[^\]]* at [^\]]*\] *", "", str(error))


# ------------------------------------------------------------------------------
# The ranks of a job


def is_rank_of_several(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of several ranks."""
    numbers = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    there = all(each.isdecimal() for each in numbers) and environment.get("MASTER_ADDR")
    return bool(there) and int(environment["WORLD_SIZE"]) > 1


def _store_of_job() -> tuple[Any, list[Any]]:
    """Return the store of the job, and the host, the port and the prefix with which others can open it.

    torchrun may have a store; else the first rank has it, until it ends. The number of restarts keeps the keys of two
    attempts apart.
    """
    import torch.distributed as dist

    first = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"shardwright doctor {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    limit = timedelta(seconds=2 * ARRIVAL_SECONDS)  # so that the first rank decides who is late
    store = dist.TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=limit)
    return dist.PrefixStore(prefix, store), [host, port, prefix]


def _silent_ranks(store: Any, ranks: int) -> list[int]:
    """Return the ranks that have not come in time."""
    deadline = time.monotonic() + ARRIVAL_SECONDS
    silent = []
    for rank in range(1, ranks):
        try:
            store.wait([f"host/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        except RuntimeError:
            silent.append(rank)
    return silent


# ------------------------------------------------------------------------------
# In the process that measures


def measure_links(
    backend: str, meeting: Sequence[Any], rank: int, ranks: int, device_index: int
) -> dict[str, Any]:
    """Measure the links between neighbours as one of the ranks, and return what all of them found.

    The ranks are a row, and each measures with its neighbours: first every other pair, then the rest. So many ranks
    take as long as three.

    Args:
        backend: gloo or nccl.
        meeting: where the ranks meet: a file, or the host, the port and prefixes of a store.
        rank: this one.
        ranks: the number of ranks.
        device_index: this rank's GPU, for nccl.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    if len(meeting) == 1:
        store: Any = dist.FileStore(meeting[0], ranks)
    else:
        host, port, *prefixes = meeting
        store = dist.TCPStore(host, port, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore("/".join([*prefixes, "links"]), store)
    device = torch.device("cuda", device_index) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        pairs = [*itertools.pairwise(range(ranks))]
        groups = {pair: dist.new_group(list(pair)) for pair in pairs}
        measured = {
            pair: _measure_pair(groups[pair], device) for pair in pairs[::2] + pairs[1::2] if rank in pair
        }
        everyones: list[dict[tuple[int, int], dict[str, float]]] = [{}] * ranks
        dist.all_gather_object(everyones, measured)
    finally:
        dist.destroy_process_group()
    return {"links": [{"ranks": list(pair), **everyones[pair[0]][pair]} for pair in pairs]}


def _measure_pair(group: Any, device: Any) -> dict[str, float]:
    """Return the speed of the link between the two ranks of a group. Both count the bytes that they receive."""
    import torch
    import torch.distributed as dist

    small = torch.zeros(1, device=device)
    part = torch.ones(PART_BYTES // 4, device=device)
    whole = torch.empty(2 * part.numel(), device=device)

    def seconds(call: Any, most: int) -> float:
        """Return the median time of a collective after a first call. Both ranks make the same number of calls."""

        def timed() -> float:
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begin

        timed()
        first = torch.tensor([timed()], device=device)
        dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
        calls = max(1, min(most, int(BUDGET / max(first.item(), 1e-6))))
        return statistics.median(timed() for _ in range(calls))

    return {
        "all_reduce_seconds": seconds(lambda: dist.all_reduce(small, group=group), SMALL_CALLS),
        "all_gather_bytes_per_second": PART_BYTES
        / seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group), LARGE_CALLS),
    }
