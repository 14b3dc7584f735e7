"""Process groups: their backends, timeouts, stores and records of collectives, and options that gloo does not offer.

A plan for absent ranks runs in a process group that moves nothing, which is made here, too. What the engine sends, and
when, is not here.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from shardwright.engine.compat.probe import probe

AllgatherOptions = probe(_c10d, "AllgatherOptions")
AllreduceOptions = probe(_c10d, "AllreduceOptions")
AllToAllOptions = probe(_c10d, "AllToAllOptions")
ReduceScatterOptions = probe(_c10d, "ReduceScatterOptions")
_default_store = probe(_c10d, "_get_default_store")


#: The flight recorders of torch: of gloo's and other CPU collectives, and of NCCL's. A build may have both.
_FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def flight_entries() -> list[dict[str, Any]] | None:
    """Return the collectives of this process that torch's flight recorders remember, or None if torch has no recorder.

    They come without stacks, because a recorder that adds stacks may wait for the interpreter.
    """
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in _FLIGHT_RECORDERS]
    records = []
    for dump in dumps:
        if dump is not None:
            with suppress(RuntimeError, ValueError):
                records.append(json.loads(dump(True, False)))
    entries = [record.get("entries", []) for record in records if isinstance(record, dict)]
    return list(itertools.chain.from_iterable(entries)) if entries else None


def ranks_by_group_name() -> dict[str, list[int]]:
    """Return the ranks of each process group of this process, by the name that the flight recorder uses."""
    return {name: dist.get_process_group_ranks(group) for group, name in list(_c10d._world.pg_names.items())}


def another_client(store: Any) -> Any:
    """Return another connection to a store, for use in another thread.

    While a call waits for the store, later calls of the same connection wait, too.
    """
    return store.clone() if hasattr(store, "clone") else store


#: Gathers one flat tensor. Torch before 2.13 has it under the second name.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


#: Methods of a group or of its backend that gather, or reduce and scatter, one flat tensor
all_gather_of: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_allgather_base")
reduce_scatter_of: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_reduce_scatter_base")


def backend_for(group: Any, device: torch.device) -> Any:
    """Return the backend that serves ``device`` in a group, however the group was made."""
    return group._get_backend(device)


def timeout_of_world() -> timedelta:
    """Return the timeout of the job's group: that of its accelerator's backend, if it has one."""
    world: Any = dist.group.WORLD
    kinds = sorted(world._device_types, key=lambda device: device.type == "cpu")
    return timeout_of(world._get_backend(kinds[0]))


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Let the collectives of a group wait this long. Backends without a timeout that can be set are left alone."""
    for kind in group._device_types:
        setter = getattr(group._get_backend(kind), "_set_default_timeout", None)
        if setter is not None:
            setter(timeout)


@contextmanager
def without_bound_device() -> Iterator[None]:
    """Unbind the job's group from its device inside the context, so that new groups are not bound to it either."""
    world: Any = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def ranks_of_collective(arguments: Iterable[Any]) -> list[int]:
    """Return the ranks of the group that is among the arguments of a collective, as itself or by its name.

    The list is empty if there is none.
    """
    resolved: Any = _c10d._resolve_process_group
    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            each = dist.ProcessGroup.unbox(each).group_name
        if isinstance(each, str):
            with suppress(Exception):
                return dist.get_process_group_ranks(resolved(each))
    return []


def timeout_of(backend: Any) -> timedelta:
    """Return the time after which collectives of a backend stop waiting for other ranks."""
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


def use_one_gloo_thread() -> None:
    """Give each gloo group that this process makes from now on one worker thread instead of two.

    After every collective the worker threads of a group write its name into one string that no lock guards. A name of
    16 characters or more is stored on the heap, and two threads that write such names corrupt it. torch's Python
    ignores the option for the number of threads, so its class is replaced by one that sets it. A torch without that
    option is left as it is.
    """
    original: Any = getattr(_c10d, "ProcessGroupGloo", None)
    if not hasattr(original, "_Options") or getattr(original, "one_thread", False):
        return

    # Group objects stay of torch's own class: C++ hands them out as such, and torch checks that with isinstance.
    class OneThread(type(original)):  # type: ignore[misc]
        one_thread = True  # so that a second call changes nothing

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __call__(cls, store: Any, rank: int, size: int, timeout: Any = None, **settings: Any) -> Any:
            options = original._Options()
            options._threads = 1
            names = os.environ.get("GLOO_SOCKET_IFNAME", "")  # as torch reads it
            options._devices = [original.create_device(interface=name) for name in names.split(",") if name]
            options._devices = options._devices or [original.create_default_device()]
            if timeout is not None:
                options._timeout = timeout
            for name, value in settings.items():  # of newer versions: enable_reconfigure
                setattr(options, name, value)
            return original(store, rank, size, options)

    vars(_c10d)["ProcessGroupGloo"] = OneThread("ProcessGroupGloo", (original,), {})


def default_store() -> Any:
    """Return the key-value store in which the ranks of this job met, or None without process groups."""
    return _default_store() if dist.is_initialized() else None


@contextmanager
def absent_ranks(size: int) -> Iterator[None]:
    """Make this process rank 0 of ``size`` ranks that do not exist, inside the context. Collectives move nothing.

    Raises:
        RuntimeError: the process has joined a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("This process is a rank of a process group; a plan needs a process of its own.")
    _forget_meshes()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Let DTensor forget the results of its operations.

    They refer to meshes, and a later mesh can be equal to one whose groups are gone, or whose names belong to other
    groups now.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
