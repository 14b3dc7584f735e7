"""Counts the bytes of every storage that is alive in this process, whenever there are more, and says who made them.

Bytes are counted by address: storages that share memory, such as slabs inside an arena, count once. What an operator
of torch allocates and frees within one call is not seen. Private names of torch: there are no others for this.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_OURS = (str(Path(torch.__file__).parent), __file__, "<")


class Alive(NamedTuple):
    """A storage with memory: its addresses, and who made it."""

    start: int
    stop: int
    label: str


@dataclass
class Peak:
    """The most bytes that were alive at once, what they were, and the most of each kind, whenever that was.

    The kind of a storage is its label up to the first colon.
    """

    nbytes: int = 0
    alive: list[Alive] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        found: Counter[str] = Counter()
        for start, stop, label in self.alive:
            found[label] += stop - start
        lines = [f"{nbytes:>12,} {label}" for label, nbytes in found.most_common()]
        return "\n".join([f"{self.nbytes:,} bytes at most, counted once where they overlap:", *lines])


class Storages(TorchDispatchMode):
    """Watches what is called inside, in this thread.

    ``label`` names the maker of a storage, given the innermost frame that is neither torch's nor this file's. Storages
    of the kinds ``left_out`` do not count.

    Attributes:
        peak: since the last :meth:`begin`.
        made: storages made or made larger since then, by label.
    """

    def __init__(self, label: Callable[[FrameType | None], str], left_out: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._label = label
        self._left_out = left_out
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}  #: by the address of the storage object
        self._rest: dict[int, tuple[StorageWeakRef, str]] = {}
        self._watching = False
        self.peak, self.made = Peak(), Counter[str]()

    def settle(self) -> int:
        """Storages that are alive now are at rest: they do not count from here on. Returns their bytes."""
        alive = self._alive()
        self._rest |= {key: self._known.pop(key) for key, _ in alive}
        return _union([each for _, each in alive])

    def begin(self) -> None:
        """Count anew."""
        self._watching = True
        self.peak, self.made = Peak(), Counter[str]()
        self.sample()

    def know(self, storage: torch.UntypedStorage, label: str | None = None) -> bool:
        """Count this storage from now on, under ``label`` or its maker's. Returns whether it was not known."""
        key = storage._cdata
        if key in self._rest or storage.device.type != "cpu":
            return False
        new = key not in self._known
        if new or label is not None:
            # The weak reference keeps the address from being given to another storage.
            self._known[key] = StorageWeakRef(storage), label or self._label(_caller())
        return new

    def sample(self) -> None:
        """Look at what is alive, as is done after every operation that has made more of it."""
        if not self._watching:
            return
        alive = []
        kinds: Counter[str] = Counter()
        for _, each in self._alive():
            kind = each.label.partition(":")[0]
            if kind not in self._left_out:
                alive.append(each)
                kinds[kind] += each.stop - each.start
        for kind, nbytes in kinds.items():
            self.peak.kinds[kind] = max(nbytes, self.peak.kinds.get(kind, 0))
        nbytes = _union(alive)
        if nbytes > self.peak.nbytes:
            self.peak.nbytes, self.peak.alive = nbytes, alive

    def _alive(self) -> list[tuple[int, Alive]]:
        found, gone = [], []
        for key, (ref, label) in self._known.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                gone.append(key)
            elif nbytes := storage.nbytes():
                start = storage.data_ptr()
                found.append((key, Alive(start, start + nbytes, label)))
        for key in gone:
            del self._known[key]
        return found

    def __enter__(self) -> Storages:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if size > storage.nbytes():
                self.made[self._label(_caller())] += 1
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # has no memory
            return func(*args, **(kwargs or {}))
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # subclasses first become calls on plain tensors
        before = _sizes((args, kwargs))
        out = func(*args, **(kwargs or {}))
        more = False
        for key, (storage, nbytes) in _sizes((out, args, kwargs)).items():
            if self.know(storage) or (key in before and before[key][1] < nbytes):
                more = True
                self.made[self._label(_caller())] += 1
        if more:
            self.sample()
        return out


def _sizes(tree: Any) -> dict[int, tuple[torch.UntypedStorage, int]]:
    # Wrappers of other tensors have a storage without memory, which may not be looked at.
    storages = (t.untyped_storage() for t in _tensors(tree) if not is_traceable_wrapper_subclass(t))
    return {s._cdata: (s, s.nbytes()) for s in storages}


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(inner)


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def _union(alive: list[Alive]) -> int:
    nbytes = end = 0
    for start, stop, _ in sorted(alive):
        nbytes += max(0, stop - max(start, end))
        end = max(end, stop)
    return nbytes
