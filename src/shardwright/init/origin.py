"""The origin of a deferred tensor's values as one hash, without computing them. It is equal on ranks with equal
records.

The hash covers the operations, their arguments, the constants and the places in generators' streams from which they
draw. Values that were overwritten before a read do not count. This file does not know who compares the hashes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

from shardwright.engine.compat import tree_flatten
from shardwright.init.captured import Captured
from shardwright.init.log import Entry, Memory, View

#: Their draws depend only on the tensor that they fill, not on other arguments.
_DRAWS_BY_FORM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(None))


def origin_of(view: View) -> int:
    """Return a 64-bit hash of the future values of a deferred tensor."""
    last = view.memory.entries[-1:]
    for entry in last:
        _hash_all(entry)
    hashed = _hash(_form(view), *(_content(view.memory, entry) for entry in last))
    return int.from_bytes(hashed, "little", signed=True)


def mark_after(entry: Entry, stream: Any) -> bytes:
    """Return a hash of the place in a generator's stream after an entry's draw."""
    before = entry.draws[stream].mark
    if entry.call in _DRAWS_BY_FORM:
        return _hash(before, str(entry.call), _form(entry.args[0]))
    _hash_all(entry)
    return _hash(before, entry.origin)


def mark_of_state(state: torch.Tensor) -> bytes:
    """Return a hash of a generator's known state."""
    return _hash(state.numpy().tobytes())


def _hash_all(entry: Entry) -> None:
    """Set ``origin`` of the entry and of all entries that it depends on."""
    todo = [entry]
    while todo:  # no recursion, since chains of entries are longer than Python's stack
        now = todo[-1]
        before = [] if now.origin else [e for e in _read_by(now) if not e.origin]
        if before:
            todo += before
            continue
        todo.pop()
        if not now.origin:
            now.origin = _hash(*_parts(now))


def _read_by(entry: Entry) -> Iterator[Entry]:
    """Yield the entries that wrote the memories that this one reads."""
    for memory in (*entry.reads, *entry.writes):
        last = _last_before(memory, entry) if memory not in entry.renews else None
        if last is not None:
            yield last


def _last_before(memory: Memory, entry: Entry) -> Entry | None:
    place = bisect_left(memory.entries, entry.index, key=lambda e: e.index)
    return memory.entries[place - 1] if place else None


def _parts(entry: Entry) -> Iterator[object]:
    yield _name(entry.call)
    yield entry.default_dtype
    leaves, structure = tree_flatten((entry.args, entry.kwargs))
    yield structure
    for leaf in leaves:
        if isinstance(leaf, View):
            yield _form(leaf)
            last = _last_before(leaf.memory, entry) if leaf.memory not in entry.renews else None
            yield b"" if last is None else _content(leaf.memory, last)
        elif isinstance(leaf, Captured):
            yield (tuple(leaf.tensor.shape), leaf.tensor.stride(), leaf.tensor.dtype, leaf.hashes_of_values())
        elif isinstance(leaf, torch.device):
            yield leaf.type  # its index may differ
        else:
            yield (type(leaf).__qualname__, leaf if isinstance(leaf, _PLAIN) else "")
    for draw in entry.draws.values():
        yield draw.mark


def _content(memory: Memory, entry: Entry) -> bytes:
    """Return a hash of a memory's content after an entry that wrote it."""
    return _hash(entry.origin, entry.writes.index(memory))


def _form(view: View) -> tuple[object, ...]:
    return view.dtype, view.size, view.stride, view.offset, view.conjugate


def _name(call: Any) -> str:
    return (
        str(call)
        if hasattr(call, "overloadpacket")
        else getattr(call, "__qualname__", type(call).__qualname__)
    )


def _hash(*parts: object) -> bytes:
    text = "\n".join(part.hex() if isinstance(part, bytes) else repr(part) for part in parts)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
