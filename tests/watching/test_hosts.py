"""Messages between hosts: each one hears what the leader of another host sees, and nothing of an earlier watch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.watching import HeartbeatReader, Watcher, WatchSettings, api, hosts
from shardwright.watching.hosts import Courier
from shardwright.watching.reading import RUNS, Seen
from shardwright.watching.watcher import Finding
from tests.support import multirank

RANKS = {0: [0, 1], 1: [2, 3]}


@contextmanager
def couriers(*of_hosts: int) -> Iterator[list[Courier]]:
    store = dist.HashStore()
    everyone = [Courier(store, host, RANKS, ["a", "b"]) for host in of_hosts]
    yield everyone
    for each in everyone:
        each.close()
        each._thread.join()


def seen(*ranks: int) -> list[Seen]:
    return [Seen(rank, "", rank, RUNS, True, age=9.0) for rank in ranks]


def test_a_rank_that_does_not_lead_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of host 1 has led for a while, and its courier goes on."""
    monkeypatch.setattr(hosts, "EVERY", 0.01)
    with couriers(0, 1, 1) as (asks, leads, rests):
        rests.exchange(seen(2, 3), suspects=True)
        rests.rest()
        heard, deadline = 0, time.monotonic() + 30
        while heard < 50:
            assert time.monotonic() < deadline
            leads.exchange(seen(2, 3), suspects=False)
            everyone = asks.exchange(seen(0, 1), suspects=True)
            if everyone is not None:
                assert [each.rank for each in everyone] == [0, 1, 2, 3]
                heard += 1
            time.sleep(0.01)


def test_only_a_rank_that_leads_calls_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks outnumber hosts, and one store serves them all."""
    monkeypatch.setattr(hosts, "EVERY", 0.01)

    class Counting(dist.HashStore):  # type: ignore[misc]
        calls = 0

        def add(self, key: str, amount: int) -> int:
            self.calls += 1
            return int(super().add(key, amount))

    store = Counting()
    courier = Courier(store, 0, RANKS, ["a", "b"])
    try:
        time.sleep(0.1)
        assert store.calls == 0
        courier.exchange(seen(0, 1), suspects=False)
        deadline = time.monotonic() + 30
        while not store.calls:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        courier.rest()
        time.sleep(0.1)
        calls = store.calls
        time.sleep(0.1)
        assert store.calls == calls
    finally:
        courier.close()
        courier._thread.join()


@pytest.mark.extensive("it waits for timeouts")
@multirank(2)
def test_a_new_watch_does_not_find_the_verdict_of_an_earlier_one(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    texts: list[str] = []
    settings = WatchSettings(600.0, tmp_path, say=texts.append)
    posted = json.dumps(Finding("the job hangs", "hang-1", [1]))
    with api.start(settings, host=str(rank)) as watch:
        courier = watch._watcher._courier
        assert courier is not None
        assert courier.post(posted, silent=()) == posted
        dist.barrier()
    texts.clear()
    with api.start(settings, host=str(rank)):
        time.sleep(3 * hosts.EVERY)
        dist.barrier()
    assert texts == []


def test_a_message_that_is_too_long_for_a_heartbeat_is_cut(tmp_path: Path) -> None:
    beat = heartbeat.open_heartbeat(0, 1, tmp_path)
    reader = HeartbeatReader(beat)
    watcher = Watcher(beat, {0: reader}, WatchSettings(600.0, tmp_path / "hangs", judges=False))
    try:
        watcher._leave(Finding("\U0001f6d1" * heartbeat.MESSAGE_SIZE, "hang-1", []), None, [])
        assert str(tmp_path / "hangs" / "hang-1") in json.loads(reader.message)["text"]
    finally:
        watcher.close()
        heartbeat.close_heartbeat()
