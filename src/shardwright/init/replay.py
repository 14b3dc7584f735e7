"""Runs recorded entries, with their memory and the right states of generators, and drops memory early.

A memory exists from the first entry that uses it to the last. ``log.py`` decides which entries run, in which order. The
caller uses the finished memories.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from shardwright.engine.compat import storage_key, tree_flatten, tree_map
from shardwright.init.captured import Captured
from shardwright.init.log import Entry, Memory, View, plan, schedule, touched
from shardwright.init.streams import GeneratorStream

HERE = object()  #: in an entry's arguments: the device that the caller of ``replay`` gives

Materialise = Callable[[View], torch.Tensor]


@contextlib.contextmanager
def _as_recorded() -> Iterator[None]:
    """A context without the caller's modes, since operations were recorded below autograd and autocast."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        for kind in {"cpu", accelerator.type if accelerator is not None else "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Replay:
    def __init__(self, device: torch.device, keep: Collection[Entry] | None) -> None:
        self.device = device
        self.keep = keep
        self.storages: dict[Memory, torch.UntypedStorage] = {}
        self.at: dict[GeneratorStream, Entry] = {}

    def tensor(self, view: View) -> torch.Tensor:
        """Return the real tensor for a view. Its memory is made if it does not exist yet."""
        memory = view.memory
        storage = self.storages.get(memory)
        if storage is None:
            block = torch.empty(
                memory.storage.nbytes(), dtype=torch.uint8, device=memory.device or self.device
            )
            storage = self.storages[memory] = block.untyped_storage()
        result = torch.empty(0, dtype=view.dtype, device=storage.device)
        result.set_(storage, view.offset, view.size, view.stride)
        return result.conj() if view.conjugate else result

    def run(self, entry: Entry, drawn: bool) -> None:
        dropped = set(entry.renews) if drawn else set()

        def real(value: Any) -> Any:
            if isinstance(value, View):
                if value.memory in dropped:
                    place = value.memory.device or self.device
                    return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=place)
                return self.tensor(value)
            if isinstance(value, Captured):
                return value.tensor
            return self.device if value is HERE else value

        args, kwargs = tree_map(real, (entry.args, entry.kwargs))
        for stream in entry.draws:
            self._begin(stream, entry)
        if torch.get_default_dtype() != entry.default_dtype:
            torch.set_default_dtype(entry.default_dtype)
        outputs = entry.call(*args, **kwargs)
        for stream in entry.draws:
            self.at[stream] = entry
            if stream in entry.ends:
                entry.ends[stream] = stream.generator.get_state()
        if not drawn and entry.results:
            self._keep_results(entry, tree_flatten(outputs)[0])

    def _begin(self, stream: GeneratorStream, entry: Entry) -> None:
        draw = entry.draws[stream]
        if draw.state is not None:
            stream.generator.set_state(draw.state)
        elif self.at.get(stream) is not draw.after:
            assert draw.after is not None
            end = draw.after.ends[stream]
            assert end is not None
            stream.generator.set_state(end)
        if self.keep is None or entry in self.keep:
            draw.after, draw.state = None, stream.generator.get_state()

    def _keep_results(self, entry: Entry, outputs: list[Any]) -> None:
        storage_keys = {storage_key(s) for s in self.storages.values()}
        for position, view in entry.results:
            out = outputs[position]
            same = (
                out.shape == view.size and out.stride() == view.stride and out.storage_offset() == view.offset
            )
            own = storage_key(out) not in storage_keys and type(out) is torch.Tensor
            if not (
                same and own and out.dtype == view.dtype
            ):  # strides of real kernels can differ from those of meta kernels
                place = view.memory.device or self.device
                out = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=place).copy_(out)
            self.storages[view.memory] = out.untyped_storage()


def replay(
    targets: Iterable[Memory],
    deliver: Callable[[Memory, Materialise], None],
    *,
    device: torch.device,
    drawing: Mapping[GeneratorStream, Entry] | None = None,
    keep: Collection[Entry] | None = None,
) -> dict[GeneratorStream, torch.Tensor]:
    """Run the entries that make the targets. Give each target to ``deliver`` when it is finished, then drop it.

    Afterwards the generators have their old states.

    Args:
        deliver: gets the memory and a function from views to tensors. It may keep tensors of this memory.
        device: for memories whose device was not named.
        drawing: entries up to which draws are also made; the generators' states after them are returned.
        keep: entries that will run again, whose generators' states are stored. None: all.
    """
    targets = dict.fromkeys(targets)
    drawing = drawing or {}
    the = plan(targets, drawing.values())
    for entry in the.entries:
        for value in tree_flatten((entry.args, entry.kwargs))[0]:
            if isinstance(value, Captured):
                value.check()  # before anything is delivered
    left = Counter(m for entry in the.entries for m in touched(entry, entry in the.drawn))
    streams = {stream for entry in the.entries for stream in entry.draws}
    before = {stream: stream.generator.get_state() for stream in streams}
    for stream, last in drawing.items():
        last.ends.setdefault(stream)
    dtype = torch.get_default_dtype()
    now = _Replay(device, keep)
    try:
        with _as_recorded():
            for entry in schedule(the):
                drawn = entry in the.drawn
                now.run(entry, drawn)
                for memory in touched(entry, drawn):
                    left[memory] -= 1
                    if not left[memory]:
                        if memory in targets:
                            deliver(memory, now.tensor)
                        now.storages.pop(memory, None)
            for memory in targets:
                if memory not in left:  # no entry wrote it
                    deliver(memory, now.tensor)
                    now.storages.pop(memory, None)
    finally:
        torch.set_default_dtype(dtype)
        for stream, state in before.items():
            stream.generator.set_state(state)
    return {stream: last.ends[stream] for stream, last in drawing.items()}  # type: ignore[misc]
