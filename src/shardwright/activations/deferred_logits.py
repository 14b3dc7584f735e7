"""Logits that are not computed: a record of the hidden states, the head, and what the model does with its result.

So the loss of a whole model is computed in chunks by the model's own code, soft caps and scales included, in its own
forward, where the engine has gathered the weights that it needs. Nothing here knows a class of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.activations.chunked_loss import ChunkedLoss
from shardwright.activations.head_call import prepare_once
from shardwright.activations.token_loss import TokenLoss, cross_entropy
from shardwright.engine.compat import quick_attributes

#: Operations that compute each logit by itself: with numbers, and tensors of one element or of one for each class.
_ELEMENTWISE = frozenset(
    {
        "add", "sub", "rsub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "tanh", "sigmoid",
        "clamp", "clip", "float", "double", "half", "bfloat16", "type", "contiguous", "clone",
        "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__",
    }
)  # fmt: skip
#: The same in place.
_IN_PLACE = {f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv")} | {
    f"{name}_": name for name in ("add", "sub", "mul", "div", "tanh", "clamp")
}
Step = Callable[[Tensor], Tensor]


class DeferredLogits(Tensor):
    """A record of logits [..., V] of hidden states [..., D]. It has their shape and no values.

    Arithmetic with numbers, ``tanh``, casts, ``flatten`` of tokens and slices of tokens give another record. Everything
    else raises TypeError.
    """

    hidden: Tensor
    head: nn.Module
    chunks: int | str
    steps: tuple[Step, ...]
    is_part: (
        bool  #: whether it was made of another record's tokens, which an operation in place would not change
    )

    def losses(
        self,
        targets: Tensor,
        weights: Tensor | None = None,
        ignore_index: int = -100,
        loss: TokenLoss = cross_entropy,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the loss of each token, as :func:`chunked_cross_entropy` does. Call it in
        the forward of the model."""
        logits = self._replay if self.steps else None
        arguments = ChunkedLoss(self.head, targets, self.chunks, weights, logits, ignore_index, loss)
        return arguments.of(self.hidden, prepared=True)

    def _replay(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # a shape, a dtype
            with quick_attributes():
                return func(*args, **kwargs)
        return _recorded(name, func, args, kwargs)


def _recorded(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    record = args[0] if args and isinstance(args[0], DeferredLogits) else None
    if name == "to" and record is not None:
        return _cast(record, args[1:], kwargs)
    others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    records = [each for each in others if isinstance(each, DeferredLogits)]
    if name in _ELEMENTWISE or (name in _IN_PLACE and record is not None and not record.is_part):
        if len(records) == 1 and all(_fits(each, records[0]) for each in others if each is not records[0]):
            function = getattr(Tensor, _IN_PLACE[name]) if name in _IN_PLACE else func
            result = _after(records[0], function, args, kwargs)
            if name not in _IN_PLACE:
                return result
            assert record is not None
            record.steps = result.steps
            return record
    elif record is not None and name in ("__getitem__", "flatten"):
        with quick_attributes():
            result = func(*args, **kwargs)
        if _keeps_classes(name, args, kwargs, record, result):
            part = _made(result, func(record.hidden, *args[1:], **kwargs), record, record.steps)
            part.is_part = True
            return part
    elif (known := _without_values(func, args, kwargs)) is not None:
        return known[0]
    raise TypeError(
        f"the model calls {name} with its logits, and a loss in chunks knows only casts, arithmetic with numbers, "
        "tanh, clamp, and slices of tokens. Compute the loss of whole logits, or leave this operation out"
    )


def _without_values(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """Return the result of a function that needs no values, such as the number of dimensions.

    None: it needs them, or makes tensors, and the caller refuses it.
    """
    try:
        with quick_attributes():
            result = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):  # torch's errors for a tensor on the meta device
        return None
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return None if any(isinstance(each, Tensor) for each in parts) else (result,)


def _cast(record: DeferredLogits, args: Any, kwargs: Any) -> DeferredLogits:
    """Compute ``to`` for a record, whose logits stay on their device."""
    given = [*args, *kwargs.values()]
    dtypes = [
        each if isinstance(each, torch.dtype) else each.dtype
        for each in given
        if isinstance(each, Tensor | torch.dtype)
    ]
    if not dtypes:
        return record
    with quick_attributes():
        plain = record.to(dtypes[0])
    return _made(plain, record.hidden, record, (*record.steps, lambda logits: logits.to(dtypes[0])))


def _fits(other: Tensor, record: DeferredLogits) -> bool:
    """Return whether a tensor has one element, or one for each class."""
    whole = other.numel() == 1 or (other.ndim > 0 and other.numel() == other.shape[-1] == record.shape[-1])
    return whole and not other.requires_grad


def _after(record: DeferredLogits, function: Any, args: Any, kwargs: Any) -> DeferredLogits:
    """Return the record after an operation on each logit."""

    def on(logits: Tensor, form: Callable[[Any], Any] = lambda each: each) -> Tensor:
        arguments = [logits if each is record else form(each) for each in args]
        return function(*arguments, **{key: form(each) for key, each in kwargs.items()})  # type: ignore[no-any-return]

    with quick_attributes():
        plain = on(record.as_subclass(Tensor), _on_meta)
    return _made(plain, record.hidden, record, (*record.steps, on))


def _on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _keeps_classes(name: str, args: Any, kwargs: Any, record: Tensor, result: Any) -> bool:
    """Return whether a change of shape is one of the tokens alone."""
    if not isinstance(result, Tensor) or not result.ndim or result.shape[-1] != record.shape[-1]:
        return False
    if name == "flatten":
        end = [*args[1:], *kwargs.values()][-1] if len(args) + len(kwargs) > 2 else -1
        return end not in (-1, record.ndim - 1)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    slices = all(isinstance(each, slice) for each in index)
    return slices and (len(index) < record.ndim or index[-1] == slice(None))


def _made(plain: Tensor, hidden: Tensor, like: Any, steps: tuple[Step, ...]) -> DeferredLogits:
    with quick_attributes():
        record = plain.detach().as_subclass(DeferredLogits)
    record.hidden, record.head, record.chunks, record.steps = hidden, like.head, like.chunks, steps
    record.is_part = False
    return record


class LogitsSource:
    """The head and the chunks of new records."""

    def __init__(self, head: nn.Module, chunks: int | str) -> None:
        self.head, self.chunks = head, chunks

    def record(self, hidden: Tensor) -> DeferredLogits:
        weight: Tensor | None = getattr(self.head, "weight", None)
        classes = getattr(self.head, "out_features", None) or (weight.shape[0] if weight is not None else 0)
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        shape = (*hidden.shape[:-1], classes)
        return _made(torch.empty(shape, dtype=dtype, device="meta"), hidden, self, ())


class LossInForward:
    """Takes the place of a model's forward, which can then end with a loss, where the weights of the head are there.

    Inside :meth:`computing` the head's result is a :class:`DeferredLogits`, and the model returns what a function makes
    of that. Outside of it the model returns logits as before.
    """

    def __init__(self, model: nn.Module, head: nn.Module, chunks: int | str) -> None:
        self._forward = model.forward
        self._source = LogitsSource(head, chunks)
        self._function: Callable[[Any], Any] | None = None
        model.forward = self

    @property
    def head(self) -> nn.Module:
        return self._source.head

    @property
    def runs(self) -> bool:
        """Whether the model's forward ends with a function of its records now."""
        return self._function is not None

    @contextmanager
    def computing(self, function: Callable[[Any], Any]) -> Iterator[None]:
        """Let the model return ``function(returned)`` inside this context, in place of ``returned``."""
        self._function = function
        try:
            yield
        finally:
            self._function = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function
        if function is None:
            return self._forward(*args, **kwargs)
        with prepare_once(self._source.head, self._source.record):
            returned = self._forward(*args, **kwargs)
        return function(returned)
