"""The store of torchrun without what ranks of earlier attempts wrote there, such as addresses of ranks that are gone.

torchrun keeps one store over all attempts, and the variables of a rank do not say which attempt it is: their count of
restarts stays the same if a host came or went. So the first rank draws a prefix, and answers each rank that uses it.
"""

from __future__ import annotations

import os
import secrets
import threading
import time

import torch.distributed as dist

from shardwright.train.launch.environment import under_torchrun

PREFIX = "shardwright prefix"
"""Key of the newest prefix."""
SLOWEST = 0.5
"""Seconds between two looks at the store, at most."""


def fresh_store(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """Return a store that only the ranks of this attempt share. Called by every rank.

    The first rank returns at once. The others wait for its answer, for at most `seconds`, and raise a RuntimeError.
    """
    if not under_torchrun() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return store
    if rank == 0:
        prefix = secrets.token_hex(8)
        # A client of its own: one client does one thing at a time, and may wait long.
        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        client.set(PREFIX, prefix)
        answers = dist.PrefixStore(prefix, client)
        threading.Thread(target=_answer, args=(answers, size, seconds), daemon=True, name="answers").start()
        return dist.PrefixStore(prefix, store)
    return _answered(store, rank, seconds)


def _answered(store: dist.Store, rank: int, seconds: float) -> dist.Store:
    """Return the store with the newest prefix, once the first rank has answered there with what this rank wrote."""
    own, pause, deadline = secrets.token_hex(8), 0.01, time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check([PREFIX]):
            newest = dist.PrefixStore(store.get(PREFIX).decode(), store)
            newest.set(f"here/{rank}", own)
            # A prefix of an earlier attempt may have an answer to the rank before, or none.
            if newest.check([f"answer/{rank}"]) and newest.get(f"answer/{rank}").decode() == own:
                return newest
        time.sleep(pause)
        pause = min(2 * pause, SLOWEST)
    raise RuntimeError(f"rank 0 did not answer within {seconds:g} s (timeout); it may not have started")


def _answer(store: dist.Store, size: int, seconds: float) -> None:
    missing, pause, deadline = set(range(1, size)), 0.01, time.monotonic() + seconds
    try:
        while missing and time.monotonic() < deadline:
            for rank in [each for each in missing if store.check([f"here/{each}"])]:
                store.set(f"answer/{rank}", store.get(f"here/{rank}").decode())
                missing.remove(rank)
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST)
    except RuntimeError:
        pass  # the store is gone, and the job with it
