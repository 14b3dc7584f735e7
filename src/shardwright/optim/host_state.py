"""Optimizer state that is stored in the CPU's memory and moves to the device for the step of its parameters.

It moves in parts: the state of a unit, or of the whole tensors of a round. Tensors of one dimension or more are copied
to the device before the step of their part, and back after it. Numbers and 0-d tensors stay where the optimizer has put
them. ``in_calls.py``, ``in_backward.py`` and ``whole/step.py`` decide when a part is stepped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.engine import Host, RaggedTensor, as_sharded, unit_of
from shardwright.engine.compat import dtensor_of, local_of
from shardwright.engine.memory import Owner, Slab
from shardwright.optim.kept import Kept
from shardwright.optim.whole.state import leaves, mapped

_ALIGNMENT = 16  # bytes
TensorStates = Mapping[Any, dict[str, Any]]  #: an optimizer's state, by local tensor


@dataclass
class _OnDevice:
    """A part's state on the device.

    Attributes:
        pairs: the tensors on the host and on the device, by the id of the host tensor.
        mark: the mark after the copy to the device.
    """

    part: Hashable
    host: Host
    slab: Slab
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]]
    mark: Any


@dataclass
class _Leaving:
    """The tensors that a copy to the host reads, and the mark after it."""

    host: Host
    slab: Slab
    tensors: list[torch.Tensor]
    mark: Any


class HostState:
    """One optimizer's state on its way to the device and back.

    The device has the state of at most two parts: the part that is being stepped, and either the part before it or the
    part after it, whose copy runs. Tensors that a step creates, instead of writing into old ones, need extra memory.
    The key of a part may be anything hashable.
    """

    def __init__(self) -> None:
        self._owner = Owner("optimizer state")
        self._coming: _OnDevice | None = None
        self._waiting: dict[Hashable, tuple[Host, list[dict[str, Any]]]] = {}  #: parts after that one
        self._here: _OnDevice | None = None  #: the part that is being stepped
        self._leaving: list[_Leaving] = []  #: the oldest first
        self._last: tuple[Host, Any] | None = None  #: the last copy to the host, and the mark after it

    def send(self, part: Hashable, host: Host, states: Iterable[dict[str, Any]]) -> None:
        """Begin to copy the state of a part that is stepped soon. Without room it waits for earlier parts."""
        if self._coming is None or self._coming.part == part:
            self._drop_coming()
            self._coming = self._send(part, host, _on_host(states))
        else:
            self._waiting[part] = host, list(states)

    @torch.no_grad()
    def take(self, part: Hashable, host: Host, state: TensorStates) -> defaultdict[Any, dict[str, Any]]:
        """``state`` of the part with its tensors on the device. The computation waits for them."""
        host_tensors = _on_host(state.values())
        self._waiting.pop(part, None)
        sent = None
        if self._coming is not None and self._coming.part == part:
            if {id(t) for t in host_tensors} <= self._coming.pairs.keys():
                sent, self._coming = self._coming, None
            else:  # some tensors were replaced
                self._drop_coming()
        self._here = here = sent or self._send(part, host, host_tensors)
        here.host.streams.join(here.mark)
        self._make_room(0)  # a first step creates as much state again
        pairs = here.pairs
        on_device = {
            p: mapped(values, lambda v: pairs[id(v)][1] if id(v) in pairs else v)
            for p, values in state.items()
        }
        return defaultdict(dict, on_device)

    @torch.no_grad()
    def give_back(self, state: TensorStates) -> defaultdict[Any, dict[str, Any]]:
        """Begin to copy a part's state to the host after its step, and return ``state`` with the host's tensors.

        Raises:
            ValueError: the optimizer keeps some of its state on another device, or as a tensor of its own class.
        """
        here, self._here = self._here, None
        assert here is not None
        host = here.host
        host_copies = {id(on_device): on_host for on_host, on_device in here.pairs.values()}
        sources: dict[int, torch.Tensor] = {}

        def leave(value: Any) -> Any:
            if not _moves(value):
                return value
            if value.device.type != here.slab.device.type:
                raise ValueError(
                    f"The optimizer keeps state of shape {tuple(value.shape)} on {value.device} but steps parameters "
                    f"on {here.slab.device}. So shardwright cannot decide which state to move to the device. Leave "
                    "offload_policy at its default."
                )
            if id(value) not in host_copies:
                host_copies[id(value)] = _like(value, host, lasting=not here.pairs)
            sources[id(value)] = value
            return host_copies[id(value)]

        try:
            return defaultdict(dict, {p: mapped(values, leave) for p, values in state.items()})
        finally:
            mark = None
            if sources:
                mark = host.copy_down([host_copies[key] for key in sources], list(sources.values()))
                self._last = host, mark
            self._leaving.append(_Leaving(host, here.slab, list(sources.values()), mark))
            for part in list(self._waiting)[:1]:
                self.send(part, *self._waiting.pop(part))

    @contextmanager
    def on_device(
        self, part: Hashable, host: Host, state: dict[Any, dict[str, Any]]
    ) -> Iterator[defaultdict[Any, dict[str, Any]]]:
        """A context for the step of a part: it gives the part's state on the device, and puts what the step has made
        of it into ``state``, on the host."""
        on_device = self.take(part, host, state)
        try:
            yield on_device
        finally:
            state.update(self.give_back(on_device))

    def settle(self) -> None:
        """Let the computation wait for all running copies, and release the device's memory."""
        self._waiting.clear()
        self._drop_coming()
        if self._here is not None:  # after an exception
            self._here.slab.release()
            self._here = None
        self._free(0)

    def host_wait(self) -> None:
        """Let the host wait until all state has arrived there."""
        if self._last is not None:
            host, mark = self._last
            host.streams.host_wait(mark)
            self._last = None

    def _send(self, part: Hashable, host: Host, tensors: list[torch.Tensor]) -> _OnDevice:
        offsets, nbytes = [], 0
        for t in tensors:
            offsets.append(nbytes)
            nbytes += -(-t.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._make_room(1)
        slab = Slab(nbytes, host.device, "optimizer state", self._owner)
        slab.lease()
        copies = [
            slab.view(t.dtype, offset // t.itemsize, t.shape, t.stride())
            for t, offset in zip(tensors, offsets, strict=True)
        ]
        mark = host.copy_up(copies, tensors) if tensors else None
        pairs = {id(t): (t, copy) for t, copy in zip(tensors, copies, strict=True)}
        return _OnDevice(part, host, slab, pairs, mark)

    def _make_room(self, more: int) -> None:
        """Let the computation wait for copies to the host until there is room for ``more`` parts."""
        self._free(max(0, 2 - more - (self._here is not None) - (self._coming is not None)))

    def _free(self, keep: int) -> None:
        while len(self._leaving) > keep:
            gone = self._leaving.pop(0)
            gone.host.streams.join(gone.mark)
            gone.slab.release()
            gone.tensors.clear()

    def _drop_coming(self) -> None:
        if self._coming is not None:
            self._coming.host.streams.join(self._coming.mark)
            self._coming.slab.release()
            self._coming = None


def _moves(value: Any) -> bool:
    """Return whether a value of the state moves to the device for a step."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(
            f"The optimizer keeps state as {type(value).__name__}, a tensor subclass that shardwright cannot copy to "
            "the CPU. Leave offload_policy at its default."
        )
    return True


def _on_host(states: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors that must be copied to the device, each once."""
    tensors = [v for values in states for v in leaves(values) if _moves(v)]
    return list({id(t): t for t in tensors if t.device.type == "cpu"}.values())


def part_of_state(state: TensorStates, tensors: Iterable[torch.Tensor]) -> dict[Any, dict[str, Any]]:
    """Return the entries of ``state`` for these tensors."""
    return {t: state[t] for t in tensors if t in state}


def kept_from_device(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of which torch moves no tensor to the device, which may not hold all state.

    ``load_state_dict`` calls it before it loads.
    """
    state = dict(state_dict["state"])
    for group, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for p, number in zip(group["params"], theirs["params"], strict=False):
            if number in state and host_of_state(p) is not None:
                state[number] = {
                    key: value
                    if key == "step"
                    else mapped(value, lambda v: Kept(v) if isinstance(v, torch.Tensor) and v.ndim else v)
                    for key, value in state[number].items()
                }
    return {**state_dict, "state": state}


def loaded(values: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """Return the values without their wrappers, cast to the parameter's dtype as torch does."""

    def load(value: Any) -> Any:
        if isinstance(value, Kept):  # a copy, because the caller owns the checkpoint
            return value.tensor.to(p.dtype if p.is_floating_point() else value.tensor.dtype, copy=True)
        return value

    return mapped(values, load)  # type: ignore[no-any-return]


def host_of_state(p: torch.Tensor) -> Host | None:
    """Return the host that stores this parameter's state between steps, or None if the parameter's device does."""
    unit = unit_of(p)
    return unit.state_host if unit is not None else None


@torch.no_grad()
def moved_to_host(values: dict[str, Any], host: Host) -> dict[str, Any]:
    """Return a parameter's state of between steps, moved to the host's memory."""

    def move(value: Any) -> Any:
        local = local_of(value) if isinstance(value, (DTensor, RaggedTensor)) else value
        if not _moves(local) or host.has(local):
            return value
        moved = _like(local, host, lasting=True).copy_(local)
        if isinstance(value, RaggedTensor):
            return RaggedTensor(moved, value.spec)
        if isinstance(value, DTensor):
            mesh, placements = value.device_mesh, value.placements
            return as_sharded(dtensor_of(moved, mesh, placements, value.shape, value.stride()))
        return moved

    return mapped(values, move)  # type: ignore[no-any-return]


def _like(tensor: torch.Tensor, host: Host, lasting: bool) -> torch.Tensor:
    """New memory of the host, with the tensor's shape and the order of its dimensions. `lasting`: see
    :meth:`Host.lasting_zeros`; not for state that a step makes anew."""
    stride = torch.empty_like(tensor, device="meta").stride()
    zeros = host.lasting_zeros if lasting else host.zeros
    return zeros(tensor.numel(), tensor.dtype).as_strided(tensor.shape, stride)
