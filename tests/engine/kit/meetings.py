"""Where ranks meet: on pages that they share, or by gloo, as ranks of different hosts do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwright.engine.comm import meeting, pages
from shardwright.engine.comm.meeting import Meeting
from shardwright.engine.front import api


class Interrupt(BaseException):
    """The exception of a signal's handler."""


@contextmanager
def fresh_meetings(way: str = "pages") -> Iterator[None]:
    """Communicators that are made here meet for the first time. All ranks enter and leave this together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_meetings", weakref.WeakKeyDictionary())
        patch.setattr(api, "_communicators", weakref.WeakValueDictionary())
        patch.delenv(pages.SWITCH, raising=False)
        if way == "gloo":
            patch.setattr(pages, "usable", lambda: False)
        yield


def goes_by_pages(of: Meeting) -> bool:
    """Whether the ranks of a meeting write to memory of their host, in place of gloo."""
    return of._way.hall is not None
