"""``deferred_init``: a context in which every new tensor is a deferred tensor."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from shardwright.engine.compat import TorchDispatchMode, fill_truncated_normal
from shardwright.init.recorder import RECORDER, UNNAMED, DeferredTensor
from shardwright.init.truncated import with_little_memory

_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
#: torch's error, from C++, if a deferred tensor should become a tensor of another class.
_SUBCLASS_REFUSED = re.compile(r"Creating a new Tensor subclass (\S+) .* type DeferredTensor")
_WAY_OUT = "Build the module with this tensor outside of deferred_init, or pass it plain tensors."
_thread: int | None = None  #: the thread in which a context is active


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Build models without memory: record the operations that initialise them, for :func:`materialize`.

        with sw.deferred_init():
            model = Model(config)

    This works for any model without changes. Its parameters and buffers have shapes, dtypes and devices. You can tie,
    convert, initialise and shard them and pass them to optimizers, inside the context and after it. Code that reads a
    value (``item``, ``tolist``, ``numpy``, a branch) gets the right value: the recorded operations that it depends on
    run for it. ``torch.get_rng_state`` draws the recorded numbers first.

    From the first random operation until :func:`materialize`, generators hold placeholder states. ``materialize``
    leaves them in the same state as the plain build. If you draw numbers between the context and ``materialize``, it
    raises an error, since the plain build would draw other numbers. You may seed or restore a generator in between. If
    the constructor fails, generators are as they were before it.

    Tensors made outside keep their memory. Values that the constructor reads must not change before ``materialize``.

    Raises:
        RuntimeError: the default device is meta, where nothing can be recorded, or a context is active in another
            thread.
        NotImplementedError: a parameter or buffer of another class than ``torch.Tensor`` or ``nn.Parameter``, or one
            that is sparse, quantized or nested.
    """
    global _thread
    refuse_on_meta("deferred_init")
    if _thread is not None:
        if _thread != threading.get_ident():
            raise RuntimeError(
                "deferred_init is active in another thread, and all threads share the random generators. Build one "
                "model after the other."
            )
        yield
        return
    _thread = threading.get_ident()
    RECORDER.memories.live()
    before = RECORDER.streams.places()
    try:
        with _patched(), _Naming(), _Recording():
            yield
    except BaseException as error:
        RECORDER.streams.go_back(before)
        refused = _SUBCLASS_REFUSED.search(str(error))
        if refused is None:
            raise
        raise NotImplementedError(
            f"deferred_init cannot build a {refused[1]}{_where(_raised_at(error))}: a deferred tensor cannot have "
            f"another class. {_WAY_OUT}"
        ) from error
    finally:
        _thread = None
        RECORDER.named_by_default = False


def refuse_on_meta(doing: str) -> None:
    """Raise RuntimeError if the meta device is the default device of new tensors."""
    if torch.get_default_device().type == "meta":
        raise RuntimeError(
            f"{doing} was called under torch.device('meta'), where initialisers do nothing. Call it outside of that "
            "context; deferred_init allocates no memory either."
        )


class _Recording(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not RECORDER.recording:
            return func(*args, **(kwargs or {}))
        return RECORDER.dispatch(func, args, kwargs or {})


class _Naming(TorchFunctionMode):
    """Reports to the recorder whether the constructor named the device of an operation. torch itself always names
    one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        named = (device is not None and device is not UNNAMED) or RECORDER.named_by_default
        if func in _MOVES:
            named = named or func is not torch.Tensor.to or any(_is_device(a) for a in args[1:])
        before, RECORDER.named = RECORDER.named, named
        try:
            result = func(*args, **kwargs)
            if named and func in _MOVES and RECORDER.recording:
                return RECORDER.moved(result)
            return result
        finally:
            RECORDER.named = before


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and value is not UNNAMED


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Replace functions that no mode sees: readers of generators' states, and ``trunc_normal_``, which loops."""
    with contextlib.ExitStack() as undo:
        for owner in (torch, torch.random):
            for name in ("get_rng_state", "initial_seed"):
                _replace(undo, owner, name, _settled)
        if torch.cuda.is_available():
            for owner in (torch.cuda, torch.cuda.random):
                for name in ("get_rng_state", "initial_seed"):
                    _replace(undo, owner, name, _settled)
        _replace(undo, torch, "set_default_device", _naming)
        _replace(undo, nn.init, fill_truncated_normal, _whole)
        _replace(undo, nn.Parameter, "__new__", _of_no_other_class)
        for lazy in (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer):
            _replace(undo, lazy, "__new__", _unrecorded)
        undo.callback(register_module_parameter_registration_hook(_no_wrapper).remove)
        undo.callback(register_module_buffer_registration_hook(_no_wrapper).remove)
        yield


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, change(original))


def _settled(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        RECORDER.settle(RECORDER.streams.waiting())
        return original(*args, **kwargs)

    return read


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes that the constructor named a device by setting the default, even the CPU."""

    def set_default_device(device: Any) -> None:
        original(device)
        RECORDER.named_by_default = device is not None

    return set_default_device


def _no_wrapper(module: nn.Module, name: str, tensor: Any) -> None:
    """Raise for a tensor of another class that holds deferred tensors, since nothing would show that it has no
    values."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DeferredTensor):
        return
    inner = [*getattr(tensor, "__dict__", {}).values()]
    if hasattr(tensor, "__tensor_flatten__"):
        inner += [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]]
    if any(isinstance(each, DeferredTensor) for each in inner):
        raise NotImplementedError(
            f"deferred_init cannot build {name!r} of {type(module).__name__}, a {type(tensor).__name__} that holds "
            f"deferred tensors. {_WAY_OUT}"
        )


def _raised_at(error: BaseException) -> Iterable[tuple[FrameType, int]]:
    """Return the frames and lines of an error's traceback, the innermost first."""
    return reversed(list(traceback.walk_tb(error.__traceback__)))


def _where(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the module under construction and its line of code, which has the name of the parameter."""
    for frame, number in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            line = linecache.getline(frame.f_code.co_filename, number).strip()
            return f", in {type(module).__name__} at {line!r}"
    return ""


def _of_no_other_class(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, data, *args, **kwargs)
        if isinstance(result, DeferredTensor) and cls is not nn.Parameter:
            where = _where(traceback.walk_stack(inspect.currentframe()))
            raise NotImplementedError(
                f"deferred_init cannot build a {cls.__name__}{where}: it would lose the subclass of nn.Parameter. "
                "Build the module with this parameter outside the context, or use a plain nn.Parameter."
            )
        return result

    return new


def _unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters of lazy modules have no memory yet; their first forward makes them as in the plain build."""

    def new(*args: Any, **kwargs: Any) -> Any:
        with RECORDER.paused():
            return original(*args, **kwargs)

    return new


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    frugal = with_little_memory(original)

    def fill(
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not isinstance(tensor, DeferredTensor):
            return original(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]
        return RECORDER.record_whole(frugal, tensor, (mean, std, a, b), generator)

    return fill
