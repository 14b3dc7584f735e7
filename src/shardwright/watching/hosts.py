"""The exchange between the hosts of a job, through the store at which the ranks have met.

One rank of each host publishes what it sees of the ranks there, but only while some rank waits: a job of many hosts
must not load the store. A store that does not answer blocks its caller, so all calls are in a thread of their own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace

import torch.distributed as dist

from shardwright.watching.reading import SILENT, Seen

#: Seconds between two calls, and seconds after which a host that does not answer is silent.
EVERY, SILENCE = 0.5, 4.0
#: Seconds in which a host may wait for the others before its ranks end.
TO_MEET = 3.0


class Courier:
    """The thread of one rank of a host. Only the courier of the leading rank calls the store, the others :meth:`rest`.

    Ages of what others have published grow while they travel.
    """

    def __init__(
        self, store: dist.Store, host: int, ranks: Mapping[int, Sequence[int]], places: Sequence[str]
    ) -> None:
        """``host``: the number of this one. ``ranks``: of each host. ``places``: the hosts' names, for messages."""
        self._store, self._host, self._ranks, self._places = store, host, ranks, places
        self._heard: dict[int, tuple[float, int, list[Seen]]] = {}
        self._own: list[Seen] = []
        self._asked_at: float | None = None
        self._verdict: str | None = None  #: to post
        self._expected = len(ranks)  #: hosts that can end their ranks
        self._is_ready = self._met = False
        self._rests = True
        self.verdict: str | None = None  #: of whichever host was first
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-courier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def rest(self) -> None:
        """Leave the store alone, because this rank does not lead. It serves all hosts, and a host has one key."""
        self._rests, self._own, self._asked_at = True, [], None

    def exchange(self, own: list[Seen], suspects: bool) -> list[Seen] | None:
        """Hand over what is seen here. Returns the ranks of all hosts, or None while that is not known.

        ``suspects``: a rank of this host waits long.
        """
        self._rests, self._own = False, own
        now = time.monotonic()
        if not suspects:
            self._asked_at = None
            return None
        if self._asked_at is None:
            self._asked_at = now
        seen = list(own)
        for host, ranks in self._ranks.items():
            if host == self._host:
                continue
            at, _, theirs = self._heard.get(host, (0.0, 0, []))
            if at >= self._asked_at and now - at < SILENCE:
                seen += [replace(each, age=each.age + now - at) for each in theirs]
            elif now - max(at, self._asked_at) < SILENCE:
                return None
            else:
                age = now - max(at, self._asked_at)
                seen += [Seen(rank, self._places[host], 0, SILENT, None, age) for rank in ranks]
        return seen

    def post(self, text: str, silent: Collection[int]) -> str:
        """Post a verdict. Returns the one that holds for all hosts, or this one if the store does not answer.

        ``silent``: ranks of hosts that do not answer.
        """
        hosts = sum(not any(rank in silent for rank in ranks) for ranks in self._ranks.values())
        self._verdict = json.dumps([text, hosts])
        deadline = time.monotonic() + 3 * EVERY
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.verdict or text

    def meet(self, beat: Callable[[], None]) -> None:
        """Wait until all hosts know the verdict: the end of a rank looks like a failure to ranks of other hosts."""
        self._is_ready = True
        deadline = time.monotonic() + TO_MEET
        while not self._met and time.monotonic() < deadline:
            beat()
            time.sleep(0.05)

    def _run(self) -> None:
        asks, counted = 0, False
        while not self._ended.wait(0.1 if counted else EVERY):
            if self._rests:
                continue
            try:
                asked = self._store.add("asks", int(self._asked_at is not None))
                if asked != asks:
                    asks = asked
                    if own := [asdict(each) for each in self._own]:
                        self._store.set(f"host/{self._host}", json.dumps([time.time_ns(), own]))
                    self._hear()
                if self._verdict is not None:
                    self._store.compare_set("verdict", "", self._verdict)
                if self._store.check(["verdict"]):
                    self.verdict, self._expected = json.loads(self._store.get("verdict"))
                if self._is_ready:
                    self._met = self._store.add("ready", int(not counted)) >= self._expected
                    counted = True
            except RuntimeError:
                continue  # the store has gone, perhaps with its host: then the others are silent

    def _hear(self) -> None:
        for host in self._ranks:
            key = f"host/{host}"
            if host == self._host or not self._store.check([key]):
                continue
            published, theirs = json.loads(self._store.get(key))
            if published != self._heard.get(host, (0.0, 0, []))[1]:
                self._heard[host] = (time.monotonic(), published, [Seen.of(each) for each in theirs])
