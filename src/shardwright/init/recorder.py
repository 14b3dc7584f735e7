"""Tensors without memory. Every operation on them is recorded instead of run.

A :class:`DeferredTensor` is a meta tensor that reports its future device. The recorder handles every operation on such
tensors. ``replay.py`` runs the recorded operations later. ``context.py`` has the context manager.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.engine import DEFERRED, FILLING
from shardwright.engine.compat import (
    disabled_torch_function,
    set_data,
    storage_key,
    tensor_without_memory,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from shardwright.init.captured import Captured
from shardwright.init.log import Entry, View, record
from shardwright.init.memories import Memories
from shardwright.init.origin import origin_of
from shardwright.init.replay import HERE, replay
from shardwright.init.streams import GeneratorStream, GeneratorStreams

UNNAMED = torch.device("cpu")  #: the device of tensors whose constructor named none; compared by identity
_prim_device = torch.ops.prim.device.default
_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted,
}  # fmt: skip


_LIKE = {getattr(_aten, name) for name in dir(_aten) if name.endswith("_like") or name.startswith("new_")}


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed by :func:`shardwright.materialize`, or when they are read."""

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return RECORDER.dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return RECORDER.memories.of(self).device or UNNAMED

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value if isinstance(value, DeferredTensor) else RECORDER.constant(value))

    def tolist(self) -> Any:
        return RECORDER.read(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return _read_only(RECORDER.read(self).numpy(force=force))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy else array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return RECORDER.read(self).__dlpack__(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter, " if isinstance(self, nn.Parameter) else ""
        return f"{type(self).__name__}({kind}shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                if isinstance(self, nn.Parameter):
                    memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
                else:  # tensors that share a memory also share it in the copy
                    copied = RECORDER.copy_of_memory(self, memo).requires_grad_(self.requires_grad)
                    copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
                    memo[id(self)] = copied
        return memo[id(self)]

    @property
    def origin(self) -> int:
        """A 64-bit hash of the origin of its values. It is equal on ranks with equal records."""
        return origin_of(RECORDER.memories.view_of(self))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"A deferred tensor of shape {tuple(self.shape)} has no values to save yet. Call shardwright.materialize "
            "first."
        )


setattr(DeferredTensor, DEFERRED, True)


#: Namespaces of torch's collectives.
_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class OperationRecorder:
    """Records operations on deferred tensors. There is only one recorder, because all contexts share the generators."""

    def __init__(self) -> None:
        self.memories = Memories()
        self.streams = GeneratorStreams()
        self.recording = True
        self.named = False  #: whether the constructor named the device of the running operation
        self.named_by_default = False  #: whether the constructor has set a default device

    # -- tensors ---------------------------------------------------------------------------------------------------

    def wrap(self, meta: torch.Tensor, device: torch.device | None = None) -> DeferredTensor:
        """Return a deferred tensor over the memory that ``meta`` views.

        If the memory is new, its device is ``device``.
        """
        memory = self.memories.add(meta, device)
        with torch.no_grad():
            return tensor_without_memory(DeferredTensor, meta, memory.device or UNNAMED)  # type: ignore[no-any-return]

    def uninitialised(self, like: torch.Tensor, stride: tuple[int, ...]) -> DeferredTensor:
        """Return a deferred tensor with the shape and dtype of another, and a new memory without content."""
        meta = torch.empty_strided(like.shape, stride, dtype=like.dtype, device="meta")
        return self.wrap(meta)

    def copy_of_memory(self, tensor: torch.Tensor, memo: dict[int, Any]) -> DeferredTensor:
        """Return the same view of a copy of the whole memory. ``memo`` has one copy of each memory."""
        memory = self.memories.of(tensor)
        if id(memory) not in memo:
            block = torch.empty(0, dtype=torch.uint8, device="meta").set_(memory.storage)  # type: ignore[call-overload]
            memo[id(memory)] = self.wrap(block).clone()
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        storage = memo[id(memory)].untyped_storage()
        meta.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return self.wrap(meta.conj() if tensor.is_conj() else meta)

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that a deferred tensor has now.

        Replays the entries that they depend on, and all earlier draws.
        """
        view = self.memories.view_of(tensor)
        result: list[torch.Tensor] = []
        with self.paused():
            replay([view.memory], lambda memory, tensor: result.append(tensor(view)), device=UNNAMED)
        return result[0]

    def settle(self, streams: list[GeneratorStream]) -> None:
        """Set generators to the states that they would have in a plain build now."""
        for stream in streams:
            self._resolve(stream)
            if isinstance(last := stream.position(), Entry):
                with self.paused():
                    ends = replay([], _nothing, device=UNNAMED, drawing={stream: last})
                stream.resume(ends[stream], last)

    def _resolve(self, stream: GeneratorStream) -> None:
        """Give a generator that got another one's placeholder the state that the placeholder stands for."""
        if (origin := self.streams.origin_of(stream)) is not None:
            other, entry = origin
            with self.paused():
                ends = replay([], _nothing, device=UNNAMED, drawing={other: entry})
            stream.generator.set_state(ends[other])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which operations run, even inside an active ``deferred_init``."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    # -- recording -------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or record one operation. Called with no mode active."""
        if func is _prim_device:
            return self.memories.of(args[0]).device or UNNAMED
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        deferred = [t for t in tensors if isinstance(t, DeferredTensor)]
        packet = func.overloadpacket
        if packet is _aten.lift_fresh and not deferred:
            return self.constant(args[0])
        device = kwargs.get("device")
        random = torch.Tag.nondeterministic_seeded in func.tags
        makes = random or not tensors or packet in _LIKE
        if not deferred and (not makes or (device is not None and device.type == "meta")):
            return func(*args, **kwargs)
        if packet is _aten.set_ and len(args) > 1 and not _is_on_meta(args[1]):  # as in torch.load
            real = torch.empty(0, dtype=args[0].dtype, device=args[1].device)
            set_data(args[0], self.constant(func(real, *args[1:], **kwargs)))
            return args[0]
        _refuse_collectives(func, deferred)
        written = written_arguments(func, args, kwargs)
        returns_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
        if not returns_tensors or any(not isinstance(t, DeferredTensor) for t in written):
            return self.carry_out(func, args, kwargs, written, random)
        for t in tensors:
            _refuse_other_layouts(t)
        metas = {id(t): _as_meta(t) for t in tensors}
        meta_args, meta_kwargs = _meta_arguments(leaves, spec, metas)
        try:
            result = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            # A shape depends on values, the operation has no meta kernel, or the user made a mistake.
            return self.carry_out(func, args, kwargs, written, random)
        for out in tree_flatten(result)[0]:
            _refuse_other_layouts(out)
        views = {t: self.memories.view_of(t) for t in deferred}
        if torch.Tag.inplace_view in func.tags:
            written = []
        where = self._where(device, deferred)
        outputs, out_spec = tree_flatten(result)
        storage_keys = {storage_key(m) for m in metas.values()}
        originals = {id(metas[id(t)]): t for t in deferred}
        results: list[tuple[int, View]] = []
        for position, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor):
                continue
            original = originals.get(id(out))
            if original is None:
                outputs[position] = wrapped = self.wrap(out, where)
                if storage_key(out) not in storage_keys:
                    results.append((position, self.memories.view_of(wrapped)))
            else:
                outputs[position] = original
        for t in deferred:  # ``out=`` may be resized; operations such as ``t_`` change only the view
            if _geometry(metas[id(t)]) != _geometry(t):
                set_data(t, self.wrap(metas[id(t)]))
        if (results and packet not in _UNINITIALISED) or written:
            self._record(func, args, kwargs, views, written, results, where, random)
        return tree_unflatten(outputs, out_spec)

    def _where(self, device: torch.device | None, deferred: list[DeferredTensor]) -> torch.device | None:
        """Return the device of an operation's results. None if the constructor named none."""
        if device is not None:
            return device if self.named or device != UNNAMED else None
        of_inputs = [self.memories.of(t).device for t in sorted(deferred, key=lambda t: not t.ndim)]
        return of_inputs[0] if of_inputs else None

    def _record(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        views: dict[DeferredTensor, View],
        written: Sequence[torch.Tensor],
        results: list[tuple[int, View]],
        where: torch.device | None,
        random: bool,
    ) -> None:
        def described(value: torch.Tensor) -> Any:
            return views[value] if isinstance(value, DeferredTensor) else Captured.of(value)

        generator = kwargs.get("generator")
        args, kwargs = tree_map_only(torch.Tensor, described, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": HERE if where is None else where}
        fresh = [view.memory for _, view in results]
        changed = [views[t].memory for t in written]  # type: ignore[index]
        self.memories.refuse_if_moved(changed)
        memories = [v.memory for v in tree_flatten((args, kwargs))[0] if isinstance(v, View)]
        fills = [view for t in written if memories.count((view := views[t]).memory) == 1 and _fills(call)]  # type: ignore[index]
        renews = [view.memory for view in fills if view.whole]
        entry = Entry(
            call,
            args,
            kwargs,
            reads=tuple(dict.fromkeys(m for m in memories if m not in changed)),
            writes=(*fresh, *dict.fromkeys(changed)),
            renews=(*fresh, *renews),
            results=tuple(results),
            default_dtype=torch.get_default_dtype(),
            fills=tuple(fills),
        )
        if random:
            place = where if results or where is not None else views[written[0]].memory.device  # type: ignore[index]
            for stream in self.streams.read_by(generator, place):
                self._resolve(stream)
                stream.enter(entry)
        record(entry)

    def record_whole(
        self, call: Callable[..., Any], tensor: DeferredTensor, args: tuple[Any, ...], generator: Any
    ) -> DeferredTensor:
        """Record a function that fills its first argument with an unknown number of random draws, as one entry."""
        views = {tensor: self.memories.view_of(tensor)}
        device = views[tensor].memory.device
        kwargs = {"generator": generator} if generator is not None else {}
        self._record(call, (tensor, *args), kwargs, views, [tensor], [], device, random=True)
        return tensor

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of a constructor's move to a device. A move to the CPU may record no operation."""
        if not isinstance(tensor, DeferredTensor) or self.memories.of(tensor).device is not None:
            return tensor
        copied = _aten._to_copy.default(tensor, device=torch.device("cpu"))
        self.memories.note_move(self.memories.of(tensor), self.memories.of(copied))
        return copied  # type: ignore[no-any-return]

    def constant(self, value: torch.Tensor) -> DeferredTensor:
        """Return a deferred tensor that becomes a copy of a tensor that nobody else changes."""
        _refuse_other_layouts(value)
        result = self.wrap(_as_meta(value), value.device if value.device != UNNAMED else None)
        view = self.memories.view_of(result)
        memories = (view.memory,)
        call = torch.Tensor.clone
        entry = Entry(call, (Captured.of(value),), {}, (), memories, memories, ((0, view),), value.dtype)
        entry.default_dtype = torch.get_default_dtype()
        record(entry)
        return result

    def carry_out(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        random: bool,
    ) -> Any:
        """Run an operation now, on the values of its arguments, because they are read or its result's shape is
        unknown."""
        deferred = [t for t in written if isinstance(t, DeferredTensor)]
        if random:
            streams = self.streams.read_by(kwargs.get("generator"), None)
            self.settle(streams)
            before = [(stream, stream.generator.get_state()) for stream in streams]
        values = tree_map_only(DeferredTensor, self.read, (args, kwargs))
        result = func(*values[0], **values[1])
        if deferred:  # it works, so record it like other operations
            if random:
                for stream, state in before:
                    stream.resume(state)
            views = {
                t: self.memories.view_of(t)
                for t in tree_flatten((args, kwargs))[0]
                if isinstance(t, DeferredTensor)
            }
            self._record(func, args, kwargs, views, deferred, [], None, random)
            return deferred[0] if len(deferred) == 1 else deferred
        if written:
            return result if random or len(written) > 1 else written[0]
        return tree_map_only(torch.Tensor, self.constant, result)


RECORDER = OperationRecorder()


def value_of(value: Any) -> Any:
    """Return the values of a deferred tensor, computed now; anything else as it is."""
    return RECORDER.read(value) if isinstance(value, DeferredTensor) else value


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operation changes, according to its schema."""
    tensors: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
    return tensors


def _fills(call: Any) -> bool:
    """Return whether the operation writes every element of the tensors that it changes, and reads none of them."""
    packet = getattr(call, "overloadpacket", None)
    if packet is None:
        return True  # an initialiser that was recorded whole
    return packet in FILLING or any(argument.is_out for argument in call._schema.arguments)


def _refuse_collectives(func: Any, deferred: list[DeferredTensor]) -> None:
    if deferred and func.namespace in _COLLECTIVE:
        raise RuntimeError(
            f"{func} was called on a deferred tensor of shape {tuple(deferred[0].shape)}, which has no values to "
            "communicate yet. For parallelize_module and distribute_tensor pass src_data_rank=None, so that each "
            "rank takes its part of its own tensor; or call them after materialize."
        )


def _meta_arguments(
    leaves: list[Any], spec: Any, metas: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operation for a call on the meta device. ``metas`` has the tensors, by id."""
    args, kwargs = tree_unflatten([metas[id(t)] if isinstance(t, torch.Tensor) else t for t in leaves], spec)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    return args, kwargs


def _is_on_meta(source: torch.Tensor | torch.UntypedStorage) -> bool:
    return isinstance(source, DeferredTensor) or source.device.type == "meta"


def _refuse_other_layouts(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        return
    kind = (
        "nested" if tensor.is_nested
        else "quantized" if tensor.is_quantized
        else str(tensor.layout).removeprefix("torch.") if tensor.layout is not torch.strided
        else None
    )  # fmt: skip
    if kind is not None:
        raise NotImplementedError(
            f"deferred_init records only dense tensors, but the constructor made a {kind} one. Build the module with "
            "this tensor outside of deferred_init, or make the tensor outside and pass it in."
        )


def _read_only(array: Any) -> Any:
    """Make a numpy array read-only, because writes into it would be lost."""
    array.flags.writeable = False
    return array


def _nothing(*_: Any) -> None:
    pass


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain meta tensor of the same geometry. For a deferred tensor it has the same storage."""
    if not isinstance(tensor, DeferredTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    meta.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return meta.conj() if tensor.is_conj() else meta
