"""Links between the hosts of a job, with gloo and NCCL: first ranks of two hosts send data to each other.

The hosts of a job are a row, and each measures with its neighbours: first every other pair, then the rest. So a job of
many hosts takes as long as one of three. The ranks meet in the store of their launcher, and each measures in a process
of its own (`links.measure_pair`). The report names ranks, not hosts.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardwright.cli.doctor.children import Unmeasured, measure_in_children
from shardwright.cli.doctor.clocks import SECONDS as ARRIVAL_SECONDS, attempt, is_rank_of_several, rank_store
from shardwright.cli.doctor.finding import Finding, unmeasured
from shardwright.cli.doctor.links import NAMES, SECONDS, SLOWEST
from shardwright.cli.doctor.words import duration, error_text, rate

if TYPE_CHECKING:
    from shardwright.train.rank.hosts import HostAddress

SUBJECTS = {"gloo": "hosts", "nccl": "hosts, NCCL"}
SLOW_ADVICE = {
    "gloo": (
        "take the fast network: set GLOO_SOCKET_IFNAME to its interface on every host; messages and checkpoints, and "
        "ranks on the CPU, use gloo"
    ),
    "nccl": (
        "run with NCCL_DEBUG=INFO: NET/IB or the plugin of your cloud is fast, NET/Socket is not; see that the devices "
        "of the network are in the container, and that NCCL_IB_DISABLE is not set"
    ),
}
UNEVEN_ADVICE = (
    "the link is much slower than others: compare cables, ports and drivers with those of other hosts"
)
FAILURE_ADVICE = (
    "these hosts do not reach each other: open all TCP ports between hosts, and set GLOO_SOCKET_IFNAME and "
    "NCCL_SOCKET_IFNAME to an interface by which they do"
)
SHOWN = 4  #: pairs that a line names
UNEVEN = 3  #: times by which the fastest link is faster than one that is worth a look

Pair = tuple[int, int]
"""The first ranks of two neighbours."""


def find_hosts(gpus: int) -> list[Finding]:
    """Measure the links between hosts as the first rank of a job, and judge them. Empty if this process is alone."""
    if not is_rank_of_several(os.environ):
        return []
    try:
        store, ranks = rank_store(), int(os.environ["WORLD_SIZE"])
        plan = _plan(store, ranks, gpus)
        if len(plan["first_ranks"]) == 1:
            return [Finding("hosts", "all ranks are on one host, so no link between hosts was measured")]
        _measure(store, 0, plan)
        return [judge_hosts(backend, _results(store, backend, plan)) for backend in plan["backends"]]
    except Exception as error:  # the store is gone, or never came
        return [unmeasured("hosts", error_text(error)[:120])]


def answer_as_host(gpus: int) -> None:
    """Take part as another rank. What fails is in the first rank's report."""
    try:
        store, rank = rank_store(), int(os.environ["RANK"])
        _introduce(store, rank, gpus)
        store.wait(["hosts/plan"], timedelta(seconds=2 * ARRIVAL_SECONDS))
        _measure(store, rank, json.loads(store.get("hosts/plan")))
    except Exception:
        pass


def judge_hosts(backend: str, results: Mapping[Pair, Mapping[str, Any]]) -> Finding:
    """The verdict on the links of neighbours: figures of `links.measure_pair` by pair, or the reason as `error`."""
    subject, advice = SUBJECTS[backend], []
    failed = {pair: str(each["error"]) for pair, each in results.items() if "error" in each}
    measured = {pair: each for pair, each in results.items() if pair not in failed}
    facts = []
    if measured:
        bandwidths = {pair: each["all_gather_bytes_per_second"] for pair, each in measured.items()}
        latencies = {pair: each["all_reduce_seconds"] for pair, each in measured.items()}
        slowest, latest = (
            min(bandwidths, key=bandwidths.__getitem__),
            max(latencies, key=latencies.__getitem__),
        )
        facts.append(
            f"{NAMES[backend]} between neighbours of {len(results) + 1} hosts: a small all-reduce takes up to "
            f"{duration(latencies[latest])} ({_of(latest)}), a large all-gather has at least "
            f"{rate(bandwidths[slowest])} ({_of(slowest)})"
        )
        slow_seconds, slow_bandwidth = SLOWEST[backend]
        best = max(bandwidths.values())
        uneven = [pair for pair, each in bandwidths.items() if each < best / UNEVEN]
        if uneven:
            advice.append(f"{', '.join(map(_of, uneven[:SHOWN]))}: {UNEVEN_ADVICE}")
        if best < slow_bandwidth or latencies[latest] > slow_seconds:
            advice.append(SLOW_ADVICE[backend])
    if failed:
        pair, reason = next(iter(failed.items()))
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        facts.append(f"not measured: {_of(pair)}{more} ({reason})")
        advice.append(FAILURE_ADVICE)
    figures = {"pairs": [{"ranks": list(pair), **each} for pair, each in results.items()]}
    return Finding(subject, "; ".join(facts), "; ".join(advice), figures)


def _of(pair: Pair) -> str:
    return f"hosts of ranks {pair[0]} and {pair[1]}"


def _introduce(store: Any, rank: int, gpus: int) -> None:
    from shardwright.train.rank.hosts import HostAddress, host_key, own_address

    address = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"hosts/{rank}", json.dumps([asdict(HostAddress(host_key(), address)), gpus]))


def _plan(store: Any, ranks: int, gpus: int) -> dict[str, Any]:
    """Written by the first rank: the first rank of each host that has answered, two addresses, and the backends."""
    from shardwright.train.rank.hosts import HostAddress, two_hosts

    _introduce(store, 0, gpus)
    deadline = time.monotonic() + ARRIVAL_SECONDS
    addresses: list[HostAddress] = []
    first_ranks: dict[str, int] = {}
    have_gpus = True
    for rank in range(ranks):
        try:
            store.wait([f"hosts/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
        except RuntimeError:
            continue  # the line about clocks names it
        address, its_gpus = json.loads(store.get(f"hosts/{rank}"))
        addresses.append(HostAddress(**address))
        first_ranks.setdefault(address["host"], rank)
        have_gpus = have_gpus and its_gpus > 0
    plan = {
        "first_ranks": list(first_ranks.values()),
        "addresses": [asdict(each) for each in two_hosts(addresses)],
        "backends": ["gloo", *(["nccl"] if have_gpus else [])],
    }
    store.set("hosts/plan", json.dumps(plan))
    return plan


def _pairs(first_ranks: Sequence[int]) -> list[Pair]:
    """All neighbours, in the order in which they are measured."""
    row = list(itertools.pairwise(first_ranks))
    return row[::2] + row[1::2]


def _measure(store: Any, rank: int, plan: Mapping[str, Any]) -> None:
    """Measure with this rank's neighbours, if it is the first of its host. Each pair's first rank writes the result."""
    from shardwright.train.rank.hosts import INTERFACE_VARIABLE, HostAddress, gloo_interface

    mine = [pair for pair in _pairs(plan["first_ranks"]) if rank in pair]
    if not mine:
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = HostAddress(**json.loads(store.get(f"hosts/{rank}"))[0])
    interface = os.environ.get(INTERFACE_VARIABLE) or gloo_interface(
        address, [HostAddress(**each) for each in plan["addresses"]]
    )
    for backend in plan["backends"]:
        for pair in mine:
            meeting = [host, port, f"{attempt()}/{backend}/{pair[0]}"]
            call = ("pair", backend, meeting, pair.index(rank), interface)
            result: dict[str, Any]
            try:
                _meet(store, backend, pair, rank)
                (result,) = measure_in_children([call], SECONDS)
            except Unmeasured as error:
                result = {"error": str(error)}
            if rank == pair[0]:
                store.set(f"hosts/{backend}/{pair[0]}", json.dumps(result))


def _meet(store: Any, backend: str, pair: Pair, rank: int) -> None:
    """Wait for the other rank of a pair, which may still measure with another.

    Raises:
        Unmeasured: it does not come.
    """
    store.set(f"hosts/{backend}/{pair}/{rank}", "")
    try:
        store.wait([f"hosts/{backend}/{pair}/{each}" for each in pair], timedelta(seconds=2 * SECONDS))
    except RuntimeError:
        raise Unmeasured("one of them did not come") from None


def _results(store: Any, backend: str, plan: Mapping[str, Any]) -> dict[Pair, dict[str, Any]]:
    """The results of all pairs. One that no rank has written in time is an error."""
    deadline = time.monotonic() + 4 * SECONDS  # two rounds, in each a wait for a partner and a measurement
    results: dict[Pair, dict[str, Any]] = {}
    for pair in _pairs(plan["first_ranks"]):
        key = f"hosts/{backend}/{pair[0]}"
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            results[pair] = json.loads(store.get(key))
        except RuntimeError:
            results[pair] = {"error": "no answer in time"}
    return dict(sorted(results.items()))
