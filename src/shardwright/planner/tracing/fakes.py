"""Fake tensors: real CPU tensors whose memory is never touched, so that real code runs for its allocations alone.

:class:`FakeMemory` is a dispatch mode. Views run as they are, because they touch no memory. Small tensors are computed,
so that counts, tables and steps have their values. Everything else gets the shape of its result from the meta kernel,
and a result without content. So addresses, storages, version counters and graph hooks are real ones.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.engine.compat import (
    TorchDispatchMode,
    dispatches,
    infers_shapes,
    outside_dispatch_modes,
    ranks_of_collective,
)
from shardwright.planner.program import ALL_PAIRS, CROSSING, HOST
from shardwright.planner.tracing.kernels import META
from shardwright.planner.tracing.recorder import BY_LIFE, OF_ENGINE, OTHER, ProgramRecorder, reader_of_value
from shardwright.planner.tracing.workspaces import CUBLAS, PRODUCTS, TAKING, workspaces

SMALL = 16384  #: bytes; tensors up to this size are computed
#: Bytes from which on the storage of a resized tensor is resized first, since this machine may have too little memory.
LARGE = 1 << 30
#: The same as ``SMALL`` for integers and booleans that follow from no other tensors: positions, lengths and tables of
#: them, of which models ask whether a sample has one document.
NUMBERS = 64 << 20
#: Reads of unknown values by one line in a row, after which it must be a loop that waits for a value.
READS = 10_000
_NO_RESERVE = 0x4000  #: MAP_NORESERVE, which Python's mmap does not name
MAPPED = 1 << 20  #: bytes of a block from which on it is no part of the heap, see `map_large_blocks`
_M_MMAP_THRESHOLD = -3  #: of malloc.h
_OF_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.bool)
#: Operations that touch no memory, beside views.
_AS_THEY_ARE = frozenset(
    {
        "set_", "_unsafe_view", "detach", "detach_", "alias", "lift_fresh", "_reshape_alias", "is_pinned",
        "is_same_size", "sym_size", "sym_stride", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_",
        "swapaxes_", "swapdims_",
    }
)  # fmt: skip


A_VALUE = "a value"  #: how an :class:`UnknownValueError` calls what ``sw.plan(value=...)`` can stand for


class UnknownValueError(Exception):
    """Raised if a program reads a value that a trace does not compute.

    Args:
        what: what it reads.
        line: the file and line that reads it.
        way: another way round, for the end of the message.
    """

    def __init__(self, what: str, line: str, way: str = "") -> None:
        super().__init__(
            f"{line or 'PyTorch'} reads {what}, and a plan computes no values of large tensors and of what follows "
            f"from them. Leave this out while the model is planned, or let it depend on shapes alone{way}"
        )
        self.what, self.line = what, line


class AbsentDeviceError(ValueError):
    """Raised if a program uses a GPU, in whose place a plan runs on the CPU.

    Args:
        what: what it does.
        line: the file and line that does it.
        way: another way, for the end of the message.
    """

    WAY = (
        "Make and move all tensors, models and meshes with a variable, as in .to(device), that is 'cpu' there, and "
        "leave streams, synchronize, statistics and pinned memory of the GPU out"
    )

    def __init__(self, what: str, line: str, way: str = WAY) -> None:
        super().__init__(f"{line or 'PyTorch'} {what}, and a plan runs on the CPU in place of the GPU. {way}")


_ARE_PLAIN = frozenset({Tensor, torch.nn.Parameter})
#: Operations that may read one memory and write another.
_COPIES = frozenset({"copy_", "_foreach_copy_", "_to_copy"})
_Line = tuple[str, bool]  #: a line, and whether the engine runs inside it


class _Form(NamedTuple):
    """The facts of an operation that its schema gives."""

    name: str
    namespace: str
    touches_memory: bool
    writes: tuple[tuple[int, str, bool], ...]  #: position, name, keyword only
    returns_arguments: bool  #: and nothing else, so that no meta kernel is needed
    causal_at: int = -1  #: the position of the argument ``is_causal`` of fused attention; -1: it has none


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  #: of its storage


class _Result(NamedTuple):
    """The result of an operation on meta tensors. ``shapes`` has a shape for each tensor in it."""

    value: Any
    shapes: tuple[_Shape | None, ...]


#: Facts of operations, and results on meta tensors, of all traces of this process.
_FORMS: dict[Any, _Form] = {}
_RESULTS: dict[Any, _Result | None] = {}


class FakeMemory(TorchDispatchMode):
    """Inside the context, tensors on the CPU larger than ``SMALL`` have no content.

    Args:
        recorder: gets the blocks and kernels.
        value: the number that a program reads from a tensor of one element whose value was not computed; None: an
            error.
        on_gpu: whether kernels take the memory that those of a GPU take beside their results.

    Raises:
        UnknownValueError: inside the context, a program reads a value that was not computed.
    """

    def __init__(self, recorder: ProgramRecorder, value: float | None = None, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self._products_on: set[str] = set()  # streams that had a product
        self._recorder, self._value = recorder, value
        self._reader, self._reads = "", 0  # the line that has read a value last, and how often in a row
        self._forms = _FORMS
        self._results = _RESULTS

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile captures graphs also inside the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper takes time in each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if infers_shapes(types):  # DTensor asks for shapes; it makes tensors only for that
            return func(*args, **kwargs)
        if not _ARE_PLAIN.issuperset(types) and any(map(dispatches, types)):
            return NotImplemented
        self._recorder.look_at_backward()
        form = self._forms.get(func) or self._form_of(func)
        line = self._recorder.note_line() if torch.is_grad_enabled() else None
        if not form.touches_memory:
            return func(*args, **kwargs)
        if form.name == "wait_tensor":  # its meta kernel would make a new tensor
            return args[0]
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(kwargs, tensors)
        if form.namespace == "c10d":
            return self._communicate(func, form, tensors, args, kwargs)
        if self._recorder.uses_host and self._recorder.computes_on_host(tensors, copies=form.name in _COPIES):
            with self._recorder.on(HOST):
                return self._run(func, form, line, tensors, args, kwargs)
        return self._run(func, form, line, tensors, args, kwargs)

    def _run(
        self, func: Any, form: _Form, line: _Line | None, tensors: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Return an operation that may need memory."""
        if form.name == "_local_scalar_dense":
            if self._value is not None and not self._is_known(tensors[0]):
                self._check_progress()
                return torch.tensor(self._value, dtype=tensors[0].dtype).tolist()
            self._check_known(tensors, "item")
            return func(*args, **kwargs)
        if form.name == "resize_" and not args[0].is_meta:
            _make_room(func, args, kwargs)
            func(*args, **kwargs)
            self._recorder.resized(args[0].untyped_storage())
            return args[0]
        if _stays_on_meta(form.name, tensors, kwargs):
            return func(*args, **kwargs)
        if form.name == "equal" and not all(map(self._is_known, tensors)):
            self._check_known(tensors, "equal")
            return True
        small = all(map(self._has_content, tensors))
        result = None if form.returns_arguments else self._result(func, args, kwargs, small)
        shapes = result.shapes if result is not None else ()
        if small:
            known = all(map(self._is_known, tensors))
            if not known and result is None and not form.returns_arguments and (reader := reader_of_value()):
                raise UnknownValueError(f"the size of a result of {func}", reader)
            if all(shape is None or shape.nbytes <= _most(shape.dtype, known) for shape in shapes):
                try:
                    out = func(*args, **kwargs)
                except (NotImplementedError, RuntimeError) as error:
                    # Only a GPU has the kernel, or it refuses zeros in the place of unknown values: the result gets its
                    # shape alone.
                    if result is None or (known and not isinstance(error, NotImplementedError)):
                        raise
                else:
                    self._know(out, form, known, line)
                    if not known:  # as of large tensors; of constants the host computes small ones
                        self._note(self._as_it_runs(form, args, kwargs), tensors, out)
                    return out
        if form.writes:
            out = self._written(func, form, args, kwargs, result, line)
        else:
            assert result is not None
            out = self._make(result, form, line)
        if self._on_gpu and form.name in TAKING:
            self._take_workspaces(form.name, args, line)
        if form.namespace == "_c10d_functional":
            self._note(form._replace(name=f"c10d.{form.name}"), tensors, out, _group_of(args, kwargs))
        else:
            self._note(self._as_it_runs(form, args, kwargs), tensors, out)
        return out

    def _take_workspaces(self, name: str, args: Any, noted: _Line | None) -> None:
        """Take the memory that a kernel needs beside its results, and give it back."""
        line = noted[0] if noted else self._recorder.note_line()[0]
        if name in PRODUCTS and (stream := self._recorder.stream) not in self._products_on:
            self._products_on.add(stream)
            self._recorder.take(CUBLAS, "workspace of cuBLAS", OTHER)
        taken = [
            self._recorder.take(nbytes, f"{what} in {name}", BY_LIFE, line)
            for what, nbytes in workspaces(name, args)
        ]
        for block in taken:
            self._recorder.give_back(block)

    def _form_of(self, func: Any) -> _Form:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        aliases = [each.alias_info for each in schema.returns]
        writes = tuple(
            (i, each.name, each.kwarg_only)
            for i, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        )
        is_view = bool(aliases) and any(each is not None and not each.is_write for each in aliases)
        form = self._forms[func] = _Form(
            name,
            namespace,
            not is_view and name not in _AS_THEY_ARE,
            writes,
            all(each is not None for each in aliases),
            next((i for i, each in enumerate(schema.arguments) if each.name == "is_causal"), -1),
        )
        return form

    @staticmethod
    def _as_it_runs(form: _Form, args: Any, kwargs: Any) -> _Form:
        """Return the facts of an operation with its arguments: attention over all pairs has a name of its own, because
        it computes twice as much as causal attention of the same shapes."""
        at = form.causal_at
        if at < 0 or kwargs.get("is_causal", len(args) > at and args[at]):
            return form
        return form._replace(name=f"{ALL_PAIRS}{form.name}")

    # -- results

    def _result(self, func: Any, args: Any, kwargs: Any, small: bool) -> _Result | None:
        """Return the result, or None if its shape depends on values. These are there if all arguments are `small`."""
        key = (func, _key(args), _key(kwargs))
        try:
            return self._results[key]  # type: ignore[return-value]
        except KeyError:
            pass
        made = _mapped(_on_meta, args), _mapped(_on_meta, kwargs)
        if any(each.name == "device" for each in func._schema.arguments):
            made[1]["device"] = torch.device("meta")
        try:
            value = META.get(func._schema.name, func)(*made[0], **made[1])
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise
            if not small:
                raise UnknownValueError(f"the size of a result of {func}", reader_of_value()) from error
            self._results[key] = None
            return None
        flat: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        result = self._results[key] = _Result(value, tuple(map(_shape_of, flat)))
        return result

    def _make(self, result: _Result, form: _Form, noted: _Line | None) -> Any:
        line, in_engine = noted or self._recorder.note_line()
        group = OF_ENGINE if in_engine else BY_LIFE
        made: list[Tensor | None] = []
        for shape in result.shapes:
            if shape is None:
                made.append(None)
                continue
            # Sums of fake numbers may be read, also a row of the step with a number for each of many ranks.
            if shape.nbytes <= (NUMBERS if shape.dtype == torch.float64 else SMALL):
                tensor = torch.empty_strided(
                    shape.size, shape.stride, dtype=shape.dtype, device="cpu"
                ).zero_()
            else:
                tensor = untouched(shape.size, shape.stride, shape.dtype)
            self._recorder.know(tensor, _in_words(form.name, shape), line, group)
            self._recorder.contents.note_unknown(tensor)
            made.append(tensor)
        if not isinstance(result.value, (list, tuple)):
            return made[0] if made[0] is not None else result.value
        filled = [m if m is not None else v for m, v in zip(made, result.value, strict=True)]
        return filled if isinstance(result.value, list) else tuple(filled)

    def _written(
        self, func: Any, form: _Form, args: Any, kwargs: Any, result: _Result | None, noted: _Line | None
    ) -> Any:
        """Return the result of an operation that writes to arguments.

        Large ones stay as they are, small ones become zero.
        """
        returns = func._schema.returns
        written = [
            kwargs.get(name) if keyword or i >= len(args) else args[i] for i, name, keyword in form.writes
        ]
        tensors: list[Tensor] = []
        _collect(written, tensors)
        for each in tensors:
            if not each.is_meta and self._has_content(each):
                each.zero_()  # its memory may hold anything, and somebody may read it
                self._recorder.contents.note_unknown(each)
        if not returns:
            return None
        if all(each.alias_info is not None for each in returns):
            return written[0] if len(returns) == 1 else tuple(written)
        assert result is not None
        return self._make(result, form, noted)

    def _has_content(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed, and so is all of its storage."""
        storage = tensor.untyped_storage().nbytes()
        return max(_size(tensor), storage) <= SMALL or (
            storage <= NUMBERS and self._recorder.contents.is_computed(tensor)
        )

    def _is_known(self, tensor: Tensor) -> bool:
        return self._has_content(tensor) and not self._recorder.contents.is_unknown(tensor)

    def _check_known(self, tensors: list[Tensor], operation: str) -> None:
        """Refuse a read of a value that was not computed, except by the trainer and the engine: they get zero."""
        if not all(map(self._is_known, tensors)) and (line := reader_of_value()):
            raise UnknownValueError(f"{A_VALUE} ({operation})", line)

    def _check_progress(self) -> None:
        """Raise if one line reads unknown values again and again: it waits for one that the trace never has."""
        line = reader_of_value()
        self._reads = self._reads + 1 if line == self._reader else 1
        self._reader = line
        if self._reads > READS:
            raise UnknownValueError(f"{A_VALUE} {READS:,} times without another read between", line)

    def check_read(self, tensor: Tensor) -> None:
        """Refuse a read that does not come here as an operation, such as ``tolist``."""
        if _is_plain(tensor) and not tensor.is_meta:
            self._check_known([tensor], "tolist or numpy")

    def _know(self, out: Any, form: _Form, is_known: bool, noted: _Line | None) -> None:
        tensors: list[Tensor] = []
        _collect(out, tensors)
        for each in tensors:
            if not each.is_meta and _is_plain(each) and self._recorder.block_of(each) is None:
                line, in_engine = noted or self._recorder.note_line()
                group = OF_ENGINE if in_engine else BY_LIFE
                self._recorder.know(each, _in_words(form.name, each), line, group)
            if not _is_plain(each):
                continue
            if not is_known:
                self._recorder.contents.note_unknown(each)
            elif each.is_meta:
                continue
            elif each.untyped_storage().nbytes() > SMALL:
                self._recorder.contents.note_computed(each)
            elif each.dtype not in _OF_NUMBERS:
                self._recorder.contents.note_constant(each)

    def _note(self, form: _Form, tensors: list[Tensor], out: Any, group: tuple[int, int] = (1, 1)) -> None:
        outs: list[Tensor] = []
        if not form.writes:
            _collect(out, outs)
        name = form.name
        if name in _COPIES and self._recorder.uses_host and self._recorder.are_in_both([*tensors, *outs]):
            name = f"{CROSSING}{name}"
        nbytes = sum(map(_size, tensors)) + sum(map(_size, outs))
        shown = [*tensors[:4], *outs[:1]]
        self._recorder.kernel(
            name,
            nbytes,
            tuple([tuple(each.shape) for each in shown]),
            _word(shown[0].dtype) if shown else "",
            group,
        )

    def _communicate(self, func: Any, form: _Form, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Return a collective of a group whose other ranks do not exist. Large tensors keep what they have."""
        named = form._replace(writes=((0, "", False),), name=f"c10d.{form.name}")
        self._note(named, tensors, None, _group_of(args, kwargs))
        divides = any(
            map(_are_sizes, args)
        )  # an all-to-all, which the group refuses if this rank sends nothing
        if sum(map(_size, tensors)) <= 4 * SMALL and not divides:
            return func(*args, **kwargs)
        made = [[] if _are_sizes(each) else _mapped(_emptied, each) for each in args]
        with outside_dispatch_modes():
            out = func(*made, **_mapped(_emptied, kwargs))
        if isinstance(out, (tuple, list)):
            return type(out)(args[0] if not isinstance(each, torch.ScriptObject) else each for each in out)
        return out if isinstance(out, torch.ScriptObject) else args[0]


def _group_of(args: Any, kwargs: Any) -> tuple[int, int]:
    """Return the number of ranks of a collective's group, and how far apart neighbours are."""
    ranks = ranks_of_collective((*args, *kwargs.values())) or [0]
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def untouched(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose memory nobody touches. It may be larger than the memory of this machine."""
    try:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    words = f"{_word(dtype)} {list(size)}"
    return _addresses((last + 1) * dtype.itemsize, words).view(dtype).as_strided(size, stride)


def unallocated(nbytes: int) -> torch.UntypedStorage:
    """Return a storage of ``nbytes`` whose memory nobody touches, which may be more than this machine has."""
    return _addresses(nbytes, f"{nbytes:,} bytes").untyped_storage()


def map_large_blocks() -> None:
    """Let the C library give back the addresses of fake tensors when they are freed, for the rest of this process.

    glibc soon takes blocks of up to 32 MiB from the heap. Small objects then come to lie in the gaps between fake
    tensors, which nobody touched before, so each trace of a search would make the process larger.
    """
    with suppress(AttributeError, OSError):  # of other C libraries
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED)


def _addresses(nbytes: int, words: str) -> Tensor:
    """Return a tensor of bytes that have addresses and no memory. A write would allocate memory page by page.

    Raises:
        ValueError: the system has too few addresses.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if sys.platform == "linux" else 0)
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise ValueError(f"a tensor of {words} is larger than this system can address") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _make_room(resize: Any, args: Any, kwargs: Any) -> None:
    """Give the storage of a tensor the bytes that ``resize_`` will ask for, if this machine may refuse to."""
    storage = args[0].untyped_storage()
    nbytes = resize(_on_meta(args[0]), *args[1:], **kwargs).untyped_storage().nbytes()
    if nbytes > max(storage.nbytes(), LARGE):
        storage.resize_(nbytes)  # which has the way out, see `watch_resizes`


def _emptied(tensor: Tensor) -> Tensor:
    return torch.zeros(0, dtype=tensor.dtype)


def _are_sizes(value: Any) -> bool:
    """Return whether an argument says how an all-to-all divides its tensors."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter or not dispatches(type(tensor))


def _stays_on_meta(name: str, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Return whether the result is on the meta device, or is an error there.

    ``to_empty`` takes one from it to the CPU.
    """
    device = kwargs.get("device")
    if device is None:
        return any(each.is_meta for each in tensors)
    kind = torch.device(device).type
    if kind not in ("cpu", "meta"):
        raise AbsentDeviceError(f"makes a tensor on {kind!r}", reader_of_value())
    if kind == "meta" or not any(each.is_meta for each in tensors):
        return kind == "meta"
    return name == "_to_copy"


def _most(dtype: torch.dtype, known: bool) -> int:
    """Return the bytes up to which a result is computed. `known`: it follows from values that were computed."""
    return NUMBERS if known and dtype in _OF_NUMBERS else SMALL


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_words(name: str, shape: _Shape | Tensor) -> str:
    size = shape.size if isinstance(shape, _Shape) else tuple(shape.shape)
    return f"{name} {_word(shape.dtype)} [{', '.join(map(str, size))}]"


@functools.cache
def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape_of(value: Any) -> _Shape | None:
    if not isinstance(value, Tensor):
        return None
    return _Shape(tuple(value.shape), value.stride(), value.dtype, value.untyped_storage().nbytes())


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _collect(tree: Any, into: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        into.append(tree)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            _collect(each, into)
    elif isinstance(tree, dict):
        for each in tree.values():
            _collect(each, into)


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list):
        return [_mapped(function, each) for each in tree]
    if isinstance(tree, tuple):
        return tuple(_mapped(function, each) for each in tree)
    if isinstance(tree, dict):
        return {name: _mapped(function, each) for name, each in tree.items()}
    return tree


def _key(tree: Any) -> Any:
    """Return a value that is equal for arguments whose results have the same shapes."""
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.stride()
    if isinstance(tree, (list, tuple)):
        return tuple([_key(each) for each in tree])
    if isinstance(tree, dict):
        return tuple([(name, _key(each)) for name, each in sorted(tree.items())]) if tree else ()
    if isinstance(tree, torch.device | torch.Generator):
        return None
    return type(tree), tree
