"""Notes of collectives on the heartbeat, for those that torch's functions make and that are not called for each unit.

Those of DTensor are on no heartbeat: a listener can hear of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwright.engine import heartbeat
from shardwright.engine.compat.dtensor import functional_collectives

_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def name_of(group: dist.ProcessGroup | None) -> str:
    """The name of a group on heartbeats. None: all ranks."""
    if group is None:
        return heartbeat.group_name(range(dist.get_world_size()))
    if group not in _names:
        _names[group] = heartbeat.group_name(dist.get_process_group_ranks(group))
    return _names[group]


@contextmanager
def noted(
    collective: str,
    group: dist.ProcessGroup | None = None,
    nbytes: int = 0,
    subject: str = "",
    begins: bool = True,
) -> Iterator[None]:
    """Note that this rank is in a collective of ``group``, as long as the context runs.

    ``begins``: False to wait for the end of one that was begun before.
    """
    beat = heartbeat.current
    if beat is None:
        yield
        return
    (beat.enter if begins else beat.await_result)(collective, name_of(group), nbytes, subject)
    try:
        yield
    finally:
        beat.leave()


DTENSOR = {
    "all_reduce": "DTensor all-reduce",
    "all_gather_into_tensor": "DTensor all-gather",
    "reduce_scatter_tensor": "DTensor reduce-scatter",
    "all_to_all_single": "DTensor all-to-all",
    "broadcast": "DTensor broadcast",
    "wait_tensor": "DTensor collective",
}
"""The names of DTensor's collectives for listeners, by the operation. The last one waits for any of them."""


@contextmanager
def hears_dtensor(listener: heartbeat.Listener) -> Iterator[None]:
    """Inside the context ``listener`` hears of the collectives that DTensor begins and waits for, as of tensor
    parallelism. Not inside a graph of ``torch.compile``, which calls the operations themselves, and which must not be
    made inside the context. Several listeners may come and go in any order."""
    if not _listeners:
        for name in DTENSOR:
            setattr(functional_collectives, name, _Heard(getattr(functional_collectives, name), name))
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            for name in DTENSOR:
                setattr(functional_collectives, name, getattr(functional_collectives, name).operation)


_listeners: list[heartbeat.Listener] = []  #: of DTensor's collectives


class _Heard:
    """An operation, whose calls the listeners hear."""

    def __init__(self, operation: Any, name: str) -> None:
        self.operation = operation
        self._tell = "await_result" if name == "wait_tensor" else "enter"
        self._name = DTENSOR[name]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        tensor = arguments[0] if arguments else None
        nbytes = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        listeners = [*_listeners]
        for listener in listeners:
            getattr(listener, self._tell)(self._name, "", nbytes, "")
        try:
            return self.operation(*arguments, **options)
        finally:
            for listener in listeners:
                listener.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operation, name)
