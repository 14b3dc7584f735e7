"""``torch.sim``: the simulated device's Python side, and what tests ask of it."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import pickle
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from tests.support.sim.building import library

__all__ = ["Sim", "load"]


class Sim:
    """The device of this process."""

    def __init__(self) -> None:
        torch.utils.rename_privateuse1_backend("sim")
        spec = importlib.util.spec_from_file_location("sim_extension", library())
        assert spec is not None and spec.loader is not None
        self.extension: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.extension)
        atexit.register(self.extension.stop)
        self.device = torch.device("sim", 0)
        torch._register_device_module("sim", _module(self.device, self.extension))
        importlib.import_module("torch._meta_registrations")  # kernels that give shapes
        self._joined = False
        self._left: list[Any] = []  #: groups whose destructors might wait for other ranks
        self._store: Any = None
        self._meetings = 0
        self._splits = 0
        self.patience = 60.0  #: seconds in which all ranks must have entered the making of a communicator
        dist.Backend.register_backend("sim", self._make_group, devices=["sim"])
        make = _c10d._new_process_group_helper

        def split_and_make(*given: Any, **named: Any) -> Any:
            if dist.is_initialized() and dist.group.WORLD.bound_device_id is not None:
                self._split()
            return make(*given, **named)

        _c10d._new_process_group_helper = split_and_make

    def _make_group(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return self.extension.group(dist.ProcessGroupGloo(store, rank, size, timeout))

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Inside, the job's group is bound to the device, as a group of NCCL that was made with ``device_id``."""
        dist.group.WORLD.bound_device_id, self._splits = self.device, 0
        try:
            yield
        finally:
            dist.group.WORLD.bound_device_id = None

    def _split(self) -> None:
        """Wait for all ranks, as ``ncclCommSplit`` does: it makes a communicator from the job's own, which is bound."""
        self._splits += 1
        key, size = f"sim split {len(self._left)} {self._splits}", dist.get_world_size()
        entered, begin = self._store.add(key, 1), time.monotonic()
        while entered < size:
            if time.monotonic() - begin > self.patience:
                raise RuntimeError(
                    f"sim: {entered} of {size} ranks make a communicator; the others never enter"
                )
            time.sleep(0.01)
            entered = self._store.add(key, 0)

    def join_groups(self) -> None:
        """The default group of this process serves the device, too, from now on. All ranks must call it."""
        if self._joined:
            return
        self._store, rank, size = _c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        self._left.append(dist.group.WORLD)
        dist.destroy_process_group()
        store = dist.PrefixStore(f"sim {len(self._left)}", self._store)
        dist.init_process_group("cpu:gloo,sim:sim", store=store, rank=rank, world_size=size)
        self._joined = True

    def leave_groups(self) -> None:
        """A failure has left collectives unfinished. The next :meth:`join_groups` makes another group."""
        self._joined = False

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, whatever has happened to the groups."""
        self._meetings += 1
        rank, size = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore(f"sim values {self._meetings}", self._store)
        store.set(str(rank), pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(store.get(str(peer)).decode())) for peer in range(size)]

    @contextmanager
    def running(self, seed: int) -> Iterator[None]:
        """Inside, work runs later, in the order of ``seed``; 0: at once. At the end all of it is over."""
        self.extension.begin(seed)
        try:
            yield
        except BaseException:
            self.extension.forget()
            raise
        finally:
            self.extension.begin(0)

    @contextmanager
    def waits(self, by_function: bool = False) -> Iterator[Counter[str]]:
        """The waits of the host inside: their places in the package, and how often each comes.

        `by_function`: a place is the name of the innermost function of the package outside of streams.py.
        """
        found: Counter[str] = Counter()

        def waits(name: str) -> None:
            frames = [f for f in traceback.extract_stack() if "shardwright/" in f.filename]
            places = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[:-4:-1])
            if by_function:
                places = next((f.name for f in reversed(frames) if "streams.py" not in f.filename), "")
            found[f"{name} in {places}" if places else name] += 1

        self.extension.watch(waits)
        try:
            yield found
        finally:
            self.extension.watch(None)

    @property
    def drained(self) -> dict[str, int]:
        """Operations without a meta kernel, or with draws that depend on data: each has waited for its stream."""
        return dict(self.extension.drained())


@functools.cache
def load() -> Sim:
    """Register the device with torch, once in this process."""
    return Sim()


def _module(device: torch.device, extension: Any) -> types.ModuleType:
    module = types.ModuleType("torch.sim")

    class Stream(torch.Stream):
        def __new__(cls, device_: Any = None, priority: int = 0, **given: Any) -> Any:
            given.pop("device", None)
            given.pop("name", None)
            return (
                super().__new__(cls, **given)
                if given
                else super().__new__(cls, device=device, priority=priority)
            )

    @contextmanager
    def stream(new: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(new)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    class Graph:
        """As ``torch.cuda.CUDAGraph``."""

        def replay(self) -> None:
            extension.replay(self.captured)

    @contextmanager
    def graph(target: Graph, stream: Any, capture_error_mode: str = "global") -> Iterator[None]:
        extension.synchronize()
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        target.captured = extension.begin_capture()
        try:
            yield
        finally:
            extension.end_capture(
                target.captured
            )  # if it raises, the stream stays, as in torch.cuda.graph.__exit__
            torch.accelerator.set_stream(before)

    def seed(value: int) -> None:
        extension.generator().manual_seed(value)

    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": torch.Event,
        "stream": stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "is_current_stream_capturing": extension.is_capturing,
        "current_stream": lambda _=None: torch.accelerator.current_stream(device),
        "default_generators": (extension.generator(),),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda _=None: extension.generator().get_state(),
        "set_rng_state": lambda state, _=None: extension.generator().set_state(state),
        "synchronize": lambda _=None: extension.synchronize(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda _=None: extension.memory_allocated(),
        "max_memory_allocated": lambda _=None: extension.max_memory_allocated(),
        "reset_peak_memory_stats": lambda _=None: extension.reset_peak_memory_stats(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in names.items():
        setattr(module, name, value)
    sys.modules["torch.sim"] = module
    return module
