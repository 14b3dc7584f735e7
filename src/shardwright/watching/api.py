"""``sw.watch``: watch the ranks of a job that torchrun, ``mp.spawn`` or a script has started."""

from __future__ import annotations

import atexit
import hashlib
import math
import numbers
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from shardwright.engine import FSDPModule, RankGroup, heartbeat
from shardwright.engine.compat import another_client, default_store
from shardwright.watching import evidence
from shardwright.watching.hosts import Courier
from shardwright.watching.reading import HeartbeatReader
from shardwright.watching.watcher import Watcher, WatchSettings

#: The default of ``stall_seconds``: half of the time after which NCCL gives up.
STALL_SECONDS = 300.0


def watch(
    model: nn.Module,
    stall_seconds: float = STALL_SECONDS,
    folder: str | os.PathLike[str] | None = None,
    *,
    on_stall: Callable[[str], None] | None = None,
) -> Watch:
    """Watch the ranks of this job from now on. If they hang, say on every rank which one is behind, and end.

    Call it once on every rank, after :func:`fully_shard`: the ranks exchange where they are. Each rank then writes
    what it does into a small file of shared memory (docs/hangs.md has the cost), and a thread reads the files. If a
    rank waits for others longer than ``stall_seconds``, one rank of each host prints to stderr where each rank is, and
    which one is behind. The others print the first line of it. Stacks and latest actions go to a folder. The processes
    then end with status 75. docs/hangs.md shows an output.

    Args:
        model: a model of :func:`fully_shard`, or a module that contains some.
        stall_seconds: how long a rank may wait. Steps in which kernels are compiled, loads and saves may take ten times
            as long. Code between two steps may take any time if no other rank waits for it.
        folder: for files about a hang. It is made if there is a hang. Default: ``shardwright-hangs-`` and the number
            of the user, in the system's folder for temporary files.
        on_stall: called with the text, in a thread, on every rank that can run, instead of printing the text and ending
            the process. After it returns, the process goes on and is not watched any more. If it raises, the text
            and the error are printed, and the process ends with status 75.

    Returns:
        An object whose ``close()`` ends the watch. It is a context manager.

    Raises:
        RuntimeError: this process watches already, or has no process group.
        TypeError: ``model`` is no module, ``stall_seconds`` no number, ``folder`` no path, or ``on_stall`` no function.
        ValueError: ``model`` has no sharded part, or ``stall_seconds`` is no positive number.
        OSError: on every rank: a rank cannot write in ``folder``, or has no room for the file in shared memory.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sw.watch expects a model (torch.nn.Module), got {type(model).__name__}.")
    if not any(isinstance(each, FSDPModule) for each in model.modules()):
        raise ValueError(
            f"sw.watch expects a model that fully_shard has sharded, got a {type(model).__name__} without a sharded "
            "part: nothing would say where a rank is. Call it after fully_shard."
        )
    if not isinstance(stall_seconds, numbers.Real):
        raise TypeError(f"stall_seconds must be a number of seconds, got {stall_seconds!r}.")
    if isinstance(stall_seconds, bool) or not math.isfinite(stall_seconds) or stall_seconds <= 0:
        raise ValueError(f"stall_seconds must be a positive number of seconds, got {stall_seconds!r}.")
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, got {folder!r}.")
    if on_stall is not None and not callable(on_stall):
        raise TypeError(f"on_stall must be a function that takes a text, got {on_stall!r}.")
    _check_process()
    place = Path(folder) if folder is not None else _default_folder()
    try:
        RankGroup().run_on_all(lambda: evidence.check_folder(place))
    except OSError as error:
        raise OSError(f"sw.watch: {error}") from error
    return start(WatchSettings(float(stall_seconds), place, say=on_stall))


def _default_folder() -> Path:
    """Return the folder of this user: each user has one, because no other could write into it."""
    return Path(tempfile.gettempdir()) / f"shardwright-hangs-{os.getuid()}"


def _check_process() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "sw.watch needs a process group: call torch.distributed.init_process_group before."
        )
    if heartbeat.own is not None:
        raise RuntimeError("This process watches already. Close the earlier watch before another one begins.")


class Watch:
    """A running watch. ``close()`` ends it on this rank, which then looks to the others as if it had left."""

    def __init__(self, watcher: Watcher, readers: list[HeartbeatReader]) -> None:
        self._watcher, self._readers = watcher, readers
        self._open = True
        atexit.register(self.close)

    def close(self) -> None:
        """Watch no more, and remove the file of this rank, without a wait for others. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        self._watcher.close()
        heartbeat.close_heartbeat()
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start(settings: WatchSettings, host: str | None = None) -> Watch:
    """Open the heartbeat of this rank, exchange places with the others, and begin to watch. Every rank of the job calls
    it.

    ``host``: the name of this host. The default also differs for containers that cannot see each other.
    """
    _check_process()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = RankAddress(host or _host(), socket.gethostname(), os.getpid(), 0)
    readers: dict[int, HeartbeatReader] = {}

    def open_own() -> RankAddress:
        return mine._replace(began=heartbeat.open_heartbeat(rank, size).began)

    def open_others() -> None:
        for other, place in enumerate(places):
            if place.host == mine.host:
                beat = heartbeat.own if other == rank else None
                readers[other] = HeartbeatReader(beat or heartbeat.heartbeat_of(place.pid))
                if readers[other].began != place.began:
                    raise OSError(f"the heartbeat of rank {other} has been replaced by another process")

    try:
        places = RankGroup().run_on_all(open_own)
        # After this each rank has opened the files, so one that leaves at once may remove its own.
        RankGroup().run_on_all(open_others)
    except OSError as error:
        heartbeat.close_heartbeat()
        raise OSError(
            f"The ranks cannot share files in {heartbeat.folder_of_heartbeats()} ({error}). Make room "
            "there, or run without a watch."
        ) from error
    courier = _courier(places, mine) if settings.judges and len({each.host for each in places}) > 1 else None
    assert heartbeat.own is not None
    job = hashlib.sha256(repr(places[0]).encode()).hexdigest()[:6]
    watcher = Watcher(heartbeat.own, readers, settings, courier, mine.name if courier else "", job)
    return Watch(watcher, list(readers.values()))


class RankAddress(NamedTuple):
    """The place of a rank: a key of its host, the host's name, its process, and when its heartbeat began."""

    host: str
    name: str
    pid: int
    began: int


def _courier(places: Sequence[RankAddress], mine: RankAddress) -> Courier:
    hosts = list(dict.fromkeys(each.host for each in places))
    ranks = {n: [r for r, each in enumerate(places) if each.host == host] for n, host in enumerate(hosts)}
    names = [next(each.name for each in places if each.host == host) for host in hosts]
    # Only this watch's verdict counts: an earlier watch may have left one.
    prefix = f"shardwright-watch/{places[0].began}"
    store = dist.PrefixStore(prefix, another_client(default_store()))
    return Courier(store, hosts.index(mine.host), ranks, names)


def _host(namespace: str = "/proc/self/ns/pid") -> str:
    """Return a text that is equal for processes that see each other's heartbeats and processes."""
    boot = processes = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        processes = os.readlink(namespace)
    return f"{socket.gethostname()} {boot} {processes} {heartbeat.folder_of_heartbeats().stat().st_ino}"
