"""Activations that are stored in the host's memory from a block's forward to its backward: ``offload_activations``.

Hooks of autograd on saved tensors replace a block's tensors by handles. Their storages leave while the next block runs
forward, and come back while the next block runs backward. Weights never move. Nothing here decides what a block saves:
``checkpointing`` does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwright.activations.host_pool import HostMemoryError, HostPool, rounded
from shardwright.activations.saved_bytes import SavedView, StoredBytes, extent
from shardwright.engine import Host
from shardwright.engine.comm import streams_for
from shardwright.engine.compat import (
    dispatches,
    foreach_copy_,
    hide_from_dynamo,
    kept_results,
    saves_for_checkpoint,
    storage_key,
    takes_hooks_of_saved_tensors,
    tree_leaves,
    tree_map,
)
from shardwright.engine.memory import is_in_slab

#: Smaller tensors stay on the device: a copy of 64 KiB takes as long as its start.
SMALLEST = 64 << 10
STORE, FETCH = "store", "fetch"  #: the side streams
_OFFLOADED = "_shardwright_activation_offload"  #: set on a block

hide_from_dynamo(lambda: [__file__])


def offload_activations(
    blocks: Iterable[nn.Module],
    kind: Literal["blocks", "inputs"] = "blocks",
    *,
    min_bytes: int = SMALLEST,
    host_bytes: int | None = None,
) -> ActivationOffload:
    """Store the activations of blocks in the host's memory from forward to backward.

        for block in model.layers:
            sw.fully_shard(block)
        sw.fully_shard(model)
        sw.offload_activations(model.layers)

    The tensors that autograd saves in a block are copied to page-locked memory, on a stream of their own, while the
    next block runs forward. When backward begins the next block, they are copied back. So the device has the
    activations of two blocks at a time. Those of the last block never move. The host waits for nothing. Results keep
    their bits.

    Parameters, buffers and gathered weights stay where they are, as do small tensors. A storage moves once, whatever
    views of it are saved, also by the next block. Blocks may be sharded by any engine, before or after this call. Apply
    activation checkpointing and ``torch.compile`` to the blocks' ``forward`` before: then their inputs, or the results
    that the compiler keeps, move. Results that a selective policy of your own keeps stay on the device.

    Args:
        blocks: in the order in which forward runs them. Each exchanges its ``forward``.
        kind: "blocks" moves all that a block saves. "inputs" moves the tensors among a block's arguments, which are all
            that a recomputed block saves.
        min_bytes: smaller tensors stay on the device.
        host_bytes: bytes of the host's memory for this rank. None: the host's memory, divided by its ranks. Buffers
            have powers of two as sizes.

    Returns:
        An object whose ``host_bytes`` are the bytes that the host now stores buffers in.

    Raises:
        ValueError: no blocks, a block inside another one or given twice, another ``kind``, or sizes that are no sizes.
        RuntimeError: in forward, if the host has too little memory: before the first allocation, if all blocks need as
            much as the first one.
    """
    blocks = list(blocks)
    if kind not in ("blocks", "inputs"):
        raise ValueError(f"kind must be 'blocks' or 'inputs', got {kind!r}")
    if type(min_bytes) is not int or min_bytes < 0:
        raise ValueError(f"min_bytes must be a number of bytes, 0 or more, got {min_bytes!r}")
    if host_bytes is not None and (type(host_bytes) is not int or host_bytes < 0):
        raise ValueError(f"host_bytes must be a number of bytes, 0 or more, or None, got {host_bytes!r}")
    _check_blocks(blocks)
    offload = ActivationOffload(len(blocks), kind == "inputs", min_bytes, host_bytes)
    for block in blocks:
        setattr(block, _OFFLOADED, True)
        block.forward = functools.partial(offload.run, Weights(block), block.forward)
    return offload


def _check_blocks(blocks: list[nn.Module]) -> None:
    if not blocks:
        raise ValueError("offload_activations needs at least one block")
    seen: set[int] = set()
    for number, block in enumerate(blocks):
        name = f"block {number} ({type(block).__name__})"
        if not isinstance(block, nn.Module):
            raise ValueError(
                f"offload_activations takes modules, got {type(block).__name__} as block {number}"
            )
        inside = {id(module) for module in block.modules()}
        if inside & seen or any(hasattr(module, _OFFLOADED) for module in block.modules()):
            raise ValueError(f"The activations of {name}, or of a module inside it, are already offloaded")
        seen |= inside


class Weights:
    """The storages of a block's parameters and buffers."""

    def __init__(self, block: nn.Module) -> None:
        # Not the tensors: engines put others in their place around forward.
        self._places = [each for m in block.modules() for each in (m._parameters, m._buffers)]

    def keys(self) -> set[int]:
        tensors = [t for place in self._places for t in place.values() if t is not None]
        locals = [local_part(t) for t in tensors]
        return {storage_key(t) for t in locals if not dispatches(type(t))}


class ActivationOffload:
    """Blocks whose activations are offloaded together, and the order of their calls."""

    def __init__(self, blocks: int, inputs_alone: bool, min_bytes: int, host_bytes: int | None) -> None:
        self._settings = blocks, inputs_alone, min_bytes, host_bytes
        self._inputs_alone, self._min_bytes = inputs_alone, min_bytes
        self._host: Host | None = None
        self._pool: HostPool | None = None
        self._newest: weakref.ref[Call] = _NO_CALL  #: whose storages have not left
        self._leaving: list[_Copy] = []
        self._coming: list[_Copy] = []
        self._reading: list[weakref.ref[Call]] = []  #: calls that backward reads, the newest last
        self._fetched: list[weakref.ref[Call]] = []  #: calls whose storages have come back

    def __reduce__(self) -> Any:  # a copy of a model has buffers and an order of its own
        return type(self), self._settings

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the buffers have."""
        return self._pool.nbytes if self._pool is not None else 0

    def run(self, weights: Weights, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a block's forward."""
        inputs = [local_part(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inputs = [t for t in inputs if _is_plain(t) and not t.is_meta]
        if not torch.is_grad_enabled() or not inputs or not takes_hooks_of_saved_tensors():
            return forward(*args, **kwargs)
        if saves_for_checkpoint():
            raise RuntimeError(
                "A block whose activations are offloaded was called inside torch.utils.checkpoint, which would compute "
                "the block again and not read what was stored. Checkpoint the block's forward before "
                "offload_activations: block.forward = functools.partial(checkpoint, block.forward, "
                "use_reentrant=False)."
            )
        call = self._enter(inputs, weights.keys())
        outer, _local.call = getattr(_local, "call", None), call
        try:
            with saved_tensors_hooks(call.pack, call.unpack):
                return forward(*args, **kwargs)
        finally:
            _local.call = outer
            self._exit(call)

    # -- forward

    def _enter(self, inputs: list[Tensor], weights: set[int]) -> Call:
        device = inputs[0].device
        if self._host is None or self._host.device != device:
            host_bytes = self._settings[3]
            self._host = host = Host(streams_for(device), device, pin_memory=True)
            self._pool = HostPool(host, host.bytes_for_rank() if host_bytes is None else host_bytes)
        self._arrive()
        for each in self._live(self._fetched):  # of a graph that was retained
            self._let_go(each)
        self._fetched.clear()
        self._reading.clear()
        previous = self._newest()
        if previous is not None:
            self._send(previous)
        only = {storage_key(t) for t in inputs} if self._inputs_alone else None
        return Call(self, previous, device, weights, only)

    def _exit(self, call: Call) -> None:
        call.move_kept_results()
        self._leave()
        self._newest = weakref.ref(call) if call.saved else _NO_CALL

    def _send(self, call: Call) -> None:
        """Begin to copy a call's storages to the host. They stay until :meth:`_leave`."""
        host, pool = self._host, self._pool
        assert host is not None and pool is not None
        saved = call.live()
        new = [each for each in saved if each.buffer is None and each.has_bytes]
        if not self.host_bytes and new:
            self._check_host(sum(rounded(each.nbytes) for each in new), pool.limit)
        if new:
            for each, buffer in zip(new, pool.take_all([each.nbytes for each in new]), strict=True):
                each.keep_in(buffer, pool)
            with host.streams.fork(STORE):
                foreach_copy_([each.host_bytes for each in new], [each.device_bytes for each in new], True)
        mark = host.streams.mark(STORE) if new else None
        self._leaving.append(_Copy(call, saved, mark, host.streams.capturing))

    def _check_host(self, first: int, limit: int) -> None:
        blocks = self._settings[0]
        # The last block's storages stay on the device.
        if first * max(1, blocks - 1) > limit:
            raise HostMemoryError(
                f"The activations of {blocks} blocks need about {first * (blocks - 1):,} bytes of the host's memory, "
                f"of which this rank may use {limit:,}. Offload fewer blocks, keep less with activation checkpointing, "
                "use smaller batches or fewer ranks on this host, or raise host_bytes."
            )

    def _leave(self) -> None:
        """Let the computation wait for copies to the host, and release the device's memory of what was copied."""
        for copy in self._leaving:
            self._join(copy)
            if copy.call is not None:
                self._let_go(copy.call)
        self._leaving.clear()

    def in_copy(self, key: Key) -> StoredBytes | None:
        """Return a storage that an earlier call has saved, and that the device still has."""
        for copy in self._leaving:
            ref = copy.call.saved.get(key) if copy.call is not None else None
            if ref is not None and (storage := ref()) is not None:
                return storage
        return None

    # -- backward

    def read(self, call: Call) -> None:
        """Note that backward reads a storage of this call. At the first one fetch those of the call before it."""
        if self._reading and self._reading[-1]() is call:
            return
        self._arrive()
        self._reading = [*self._reading[-1:], weakref.ref(call)]
        ahead = call.previous()
        needed = [*self._live(self._reading), ahead]
        for each in self._live(self._fetched):
            if not any(each is other for other in needed):  # a retained graph would keep all on the device
                self._let_go(each)
        self._fetch(call)
        self._arrive()
        if ahead is not None:
            self._fetch(ahead)

    def _fetch(self, call: Call) -> None:
        """Begin to copy a call's storages to the device, as far as they are not there."""
        if call.present:
            return
        call.present = True
        self._fetched = [ref for ref in self._fetched if ref() is not None] + [weakref.ref(call)]
        saved = call.live()
        for each in saved:
            each.uses += 1
        self._copy_back([each for each in saved if each.memory is None])

    def _copy_back(self, saved: list[StoredBytes]) -> None:
        if not saved:
            return
        host = self._host
        assert host is not None
        for each in saved:
            each.make_memory()
        with host.streams.fork(FETCH):
            foreach_copy_([each.device_bytes for each in saved], [each.host_bytes for each in saved], True)
        mark = host.streams.mark(FETCH)
        for each in saved:
            each.mark = mark
        self._coming.append(_Copy(None, saved, mark, host.streams.capturing))

    def wait_for(self, storage: StoredBytes) -> None:
        """Let the computation wait until a storage is on the device."""
        assert self._host is not None
        if storage.memory is None:  # its memory was released before this use
            self._copy_back([storage])
            self._arrive()
        self._host.streams.join(storage.mark)

    def _arrive(self) -> None:
        """Let the computation wait for all copies to the device, and drop their storages.

        If nothing reads a storage, its memory must not be freed while the copy runs.
        """
        for copy in self._coming:
            self._join(copy)
        self._coming.clear()

    # -- both

    def _let_go(self, call: Call) -> None:
        """Release the device's memory of a call's storages that no other call uses."""
        if call.present:
            call.present = False
            for each in call.live():
                each.uses -= 1
                if not each.uses:
                    each.release_memory()

    def _join(self, copy: _Copy) -> None:
        assert self._host is not None
        # A mark of a capture is none outside of it, and the work of before it is over when it begins.
        if copy.captured == self._host.streams.capturing:
            self._host.streams.join(copy.mark)

    @staticmethod
    def _live(refs: list[weakref.ref[Call]]) -> list[Call]:
        return [call for ref in refs if (call := ref()) is not None]


Key = tuple[int, int, int]  #: a storage, and the first byte and the number of bytes that move


class Call:
    """One call of a block in forward.

    Attributes:
        previous: the call before it, whose storages backward needs after this one's.
        saved: what autograd has saved in it. Those who use a storage keep it alive.
        present: whether its storages are on the device.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        previous: Call | None,
        device: torch.device,
        weights: set[int],
        only: set[int] | None,
    ) -> None:
        self._offload = offload
        self.previous: weakref.ref[Call] = weakref.ref(previous) if previous is not None else _NO_CALL
        self.saved: dict[Key, weakref.ref[StoredBytes]] = {}
        self.present = True
        self.policies: list[Any] = []  #: modes of selective checkpoints that have kept results
        self._device, self._weights, self._only = device, weights, only

    def live(self) -> list[StoredBytes]:
        """Return the storages that somebody uses."""
        return [storage for ref in self.saved.values() if (storage := ref()) is not None]

    def pack(self, tensor: Tensor) -> Any:
        """Return a handle for a tensor that moves; the tensor itself if it stays."""
        tensor = tensor.detach()  # what is returned may not hold the argument, which holds the graph
        local = local_part(tensor)
        if not takes_hooks_of_saved_tensors() or not self._moves(local):
            return tensor
        storage = self._storage_of(local)
        storage.note(local)
        return SavedView(storage, local, tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of a handle."""
        if not isinstance(packed, SavedView):
            return packed  # type: ignore[no-any-return]
        storage = packed.storage
        if storage.was_changed():
            raise RuntimeError(
                f"A tensor of shape {tuple(packed.size)} that autograd has saved in an offloaded block was changed by "
                "an operation in place before its backward. Use an operation that makes a new tensor."
            )
        self._offload.read(self)
        self._offload.wait_for(storage)
        return packed.tensor()

    def move_kept_results(self) -> None:
        """Put handles in the place of the results that selective checkpoints keep beside autograd."""
        for mode in self.policies:
            for container, key, entry in kept_results(mode.storage):
                container[key] = tree_map(self._packed_result, entry)
        self.policies.clear()

    def _packed_result(self, wrapper: Any) -> Any:
        value = getattr(wrapper, "val", None)
        if not isinstance(value, Tensor) or not hasattr(wrapper, "get_val"):
            return wrapper
        packed = self.pack(value)
        return _KeptResult(self, packed) if isinstance(packed, SavedView) else wrapper

    def _moves(self, tensor: Tensor) -> bool:
        if not _is_plain(tensor) or tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < max(1, self._offload._min_bytes) or tensor.is_conj() or tensor.is_neg():
            return False
        key = storage_key(tensor)
        if key in self._weights or (self._only is not None and key not in self._only):
            return False
        return not is_in_slab(tensor)

    def _storage_of(self, tensor: Tensor) -> StoredBytes:
        start, nbytes = extent(tensor)
        if 2 * nbytes >= (whole := tensor.untyped_storage().nbytes()):
            start, nbytes = 0, whole
        key = storage_key(tensor), start, nbytes
        ref = self.saved.get(key)
        storage = ref() if ref is not None else None
        if storage is None:
            storage = self._offload.in_copy(key)
            if storage is None:
                storage = StoredBytes(tensor.untyped_storage(), start, nbytes)
            storage.uses += 1
            self.saved[key] = weakref.ref(storage)
        return storage


_NO_CALL: Any = lambda: None  # noqa: E731  # as a weak reference whose call is gone
_local = threading.local()  #: ``call``: the call of an offloaded block that runs on this thread


def note_policy(mode: Any) -> None:
    """A selective checkpoint begins, and its forward mode keeps results: those of an offloaded block move."""
    call: Call | None = getattr(_local, "call", None)
    if call is not None and call._only is None:
        call.policies.append(mode)


class _Copy(NamedTuple):
    """Copies of storages in one direction.

    Attributes:
        call: the one whose storages leave; None: they come.
        storages: which nobody may free before.
        mark: the mark after the copies.
        captured: whether a graph has captured them.
    """

    call: Call | None
    storages: list[StoredBytes]
    mark: Any
    captured: bool


class _KeptResult:
    """A result that a selective checkpoint keeps, in the place of torch's wrapper."""

    def __init__(self, call: Call, view: SavedView) -> None:
        self._call, self._view = call, view

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        return self._call.unpack(self._view)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor of torch's or the engine's that is spread over ranks; other tensors as they
    are."""
    return getattr(tensor, "_local_tensor", tensor)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)
