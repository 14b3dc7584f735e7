"""Notices in the store of the process groups: why a rank has left, for those that wait for it.

They say what no collective can say any more. Where the store is gone, too, nothing is known.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Iterable

import torch.distributed as dist

from shardwright._torch import default_store

_LONGEST = 500  #: characters of an exception's text


def describe(error: BaseException) -> str:
    """Its class and what it says, in one line."""
    text = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: What this rank has posted last, and how often each group had met by then.
_last: tuple[str, dict[str, int]] = ("", {})


def post(what: str) -> None:
    """Say why this rank leaves. A later notice replaces it."""
    global _last
    _last = what, numbers()
    try:
        store = default_store()
        if store is not None:
            store.set(_key(dist.get_rank()), json.dumps(_last))
    except Exception:  # the store may be gone, and this rank has an exception of its own
        return


def read(ranks: Iterable[int], group: str = "", number: int = 0) -> dict[int, str]:
    """Reasons of those ranks that have left, by rank; with ``group`` only after ``number`` of its meetings or later."""
    notices: dict[int, str] = {}
    try:
        store = default_store()
        for rank in ranks if store is not None else ():
            if store.check([_key(rank)]):
                what, met = json.loads(store.get(_key(rank)))
                if not group or met.get(group, -1) >= number:
                    notices[rank] = what
    except Exception:
        return notices
    return notices


def own(group: str, number: int) -> str:
    """This rank's last notice, if its group has met ``number`` times or more by then; else an empty text.

    It is there without the store, which may have ended with another rank.
    """
    what, met = _last
    return what if met.get(group, -1) >= number else ""


def _key(rank: int) -> str:
    return f"shardwright/left/{rank}"


_meetings: list[Callable[[], dict[str, int]]] = []


def numbers() -> dict[str, int]:
    """How often each group has met, so that an old notice is known."""
    return {group: number for meetings in _meetings for group, number in meetings().items()}


def count_by(meetings: Callable[[], dict[str, int]]) -> None:
    """Ask ``meetings`` for these numbers."""
    _meetings.append(meetings)


def post_at_exit() -> None:
    """When the process ends, say so, and by which exception.

    What is registered last is called first: before a ``destroy_process_group`` that was registered until now.
    """
    atexit.unregister(_post_at_exit)
    atexit.register(_post_at_exit)


def _post_at_exit() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if dist.is_initialized() and numbers():
        post("has ended" if error is None else f"has ended by {describe(error)}")
