"""Notices in the store of the process groups: they say why a rank has left, for ranks that wait for it.

They are needed because a rank that has left takes part in no collective. If the store has gone, too, they are lost.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
from collections.abc import Callable, Iterable

import torch.distributed as dist

from shardwright.engine.compat.collectives import default_store

_LONGEST = 500  #: characters of an exception's text


#: After so many seconds without an answer the store is taken for lost. If a network is cut without a reset, a call of
#: the store waits for many minutes, whatever its timeout, so a thread makes it.
_SECONDS = 3.0
_reader: threading.Thread | None = None


def describe(error: BaseException) -> str:
    """The class and the message of an exception, in one line."""
    text = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


#: The last notice of this rank, and how often each group had met before it.
_last: tuple[str, dict[str, int]] = ("", {})


def post(what: str) -> None:
    """Post why this rank leaves. A later notice replaces it."""
    global _last
    _last = what, numbers()
    if _waiting():
        return
    try:
        store = default_store()
        if store is not None:
            store.set(_key(dist.get_rank()), json.dumps(_last))
    except Exception:  # the store may have gone, and this rank must raise its own exception
        return


def read(ranks: Iterable[int], group: str = "", number: int = 0) -> dict[int, str]:
    """The reasons of ranks that have left. With ``group`` only those after ``number`` of its meetings or more."""
    global _reader
    notices: dict[int, str] = {}

    def ask() -> None:
        try:
            store = default_store()
            for rank in ranks if store is not None else ():
                if store.check([_key(rank)]):
                    what, met = json.loads(store.get(_key(rank)))
                    if not group or met.get(group, -1) >= number:
                        notices[rank] = what
        except Exception:  # the store may have gone
            return

    if not _waiting():
        _reader = threading.Thread(target=ask, daemon=True, name="notices")
        _reader.start()
        _reader.join(_SECONDS)
    return dict(notices)


def _waiting() -> bool:
    """Whether the store has not answered. Another call would wait behind the one that waits, perhaps for ever."""
    return _reader is not None and _reader.is_alive()


def own(group: str, number: int) -> str:
    """This rank's last notice, if its group had met ``number`` times or more before it. Otherwise an empty text.

    It does not need the store, which may have ended with another rank.
    """
    what, met = _last
    return what if met.get(group, -1) >= number else ""


def _key(rank: int) -> str:
    return f"shardwright/left/{rank}"


_meetings: list[Callable[[], dict[str, int]]] = []


def numbers() -> dict[str, int]:
    """Number of meetings of each group. With it a reader recognises an old notice."""
    return {group: number for meetings in _meetings for group, number in meetings().items()}


def count_by(meetings: Callable[[], dict[str, int]]) -> None:
    """Let :func:`numbers` call ``meetings``."""
    _meetings.append(meetings)


def post_at_exit() -> None:
    """Post a notice at the end of the process, with its exception.

    The function that is registered last runs first. So this one runs before an earlier ``destroy_process_group``.
    """
    atexit.unregister(_post_at_exit)
    atexit.register(_post_at_exit)


def _post_at_exit() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if dist.is_initialized() and numbers():
        post("has ended" if error is None else f"has ended by {describe(error)}")
