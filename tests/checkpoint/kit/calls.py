"""Records the calls by which a save changes a file system, and lets one of them fail.

The functions of ``os`` that the room uses are wrapped. ``test_power_cuts.py`` compares the record with one of strace,
so that no call is missed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardwright.checkpoint.storage import local_store


class Call(NamedTuple):
    """A call that changes a file system. Paths are relative to the recorded folder."""

    kind: str  #: create, write, fsync, mkdir, rename, exchange, unlink or rmdir
    path: str
    other: str = ""  #: the second name of rename and exchange
    offset: int = 0  #: of a write
    data: bytes = b""
    when: int = 0  #: the end of the call, in nanoseconds of the machine's clock


Hook = Callable[[int, Call], None]  #: gets the number of the call from 0, and the call


def _nothing(number: int, call: Call) -> None:
    pass


@contextlib.contextmanager
def renames_alone() -> Iterator[None]:
    """Inside the context the system cannot exchange two names, as some file systems cannot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_store, "_exchange", lambda one, other: False)
        yield


@contextlib.contextmanager
def recorded(root: Path, before: Hook = _nothing, after: Hook = _nothing) -> Iterator[list[Call]]:
    """The calls below ``root``, in their order. ``before`` and ``after`` of a call may raise an error or kill."""
    calls: list[Call] = []
    top = os.path.realpath(root)
    begun = 0
    lock = threading.RLock()

    def below(path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            whole = os.readlink(f"/proc/self/fd/{path}")
        else:
            name = os.fspath(path)
            folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            whole = os.path.normpath(os.path.join(folder, os.fsdecode(name)))
        return os.path.relpath(whole, top) if whole == top or whole.startswith(top + "/") else None

    def perform(call: Call, action: Callable[[], Any]) -> Any:
        with lock:  # threads write the parts of a file
            return perform_alone(call, action)

    def perform_alone(call: Call, action: Callable[[], Any]) -> Any:
        nonlocal begun
        number, begun = begun, begun + 1
        before(number, call)
        try:
            result = action()
        except OSError:
            after(number, call)
            raise
        if call.kind == "write":
            call = call._replace(data=call.data[:result])
        if call.kind != "exchange" or result:
            calls.append(call._replace(when=time.monotonic_ns()))
        after(number, call)
        return result

    real = {
        name: getattr(os, name) for name in ("open", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")
    }

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def action() -> int:
            return real["open"](path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]

        name = below(path, dir_fd) if flags & os.O_CREAT else None
        assert not flags & (os.O_TRUNC | os.O_APPEND), "the model of the disk knows no such files"
        return action() if name is None else perform(Call("create", name), action)  # type: ignore[no-any-return]

    def written(fd: int, data: Any, offset: int) -> int:
        name = below(fd)
        if name is None:
            return real["pwrite"](fd, data, offset)  # type: ignore[no-any-return]
        call = Call("write", name, offset=offset, data=bytes(data))
        return perform(call, lambda: real["pwrite"](fd, data, offset))  # type: ignore[no-any-return]

    def one(kind: str) -> Callable[..., Any]:
        def function(path: Any, *more: Any, dir_fd: int | None = None) -> Any:
            def action() -> Any:
                return real[kind](path, *more, **({} if dir_fd is None else {"dir_fd": dir_fd}))

            name = below(path, dir_fd)
            return action() if name is None else perform(Call(kind, name), action)

        return function

    def renamed(one: Any, other: Any) -> None:
        names = below(one), below(other)
        assert names[0] is not None and names[1] is not None
        perform(Call("rename", *names), lambda: real["rename"](one, other))

    exchange = local_store._exchange

    def exchanged(one: Path, other: Path) -> bool:
        names = below(one), below(other)
        assert names[0] is not None and names[1] is not None
        return perform(Call("exchange", *names), lambda: exchange(one, other))  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, "pwrite", written)
        patch.setattr(os, "rename", renamed)
        for kind in ("fsync", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, kind, one(kind))
        patch.setattr(local_store, "_exchange", exchanged)
        yield calls
