"""Checks of the values that a model returns: logits and losses as the trainer needs them.

Errors name the model with `owner`, the words of `model_in_words` in `config/catalog/kinds.py`.

The checks read types and shapes only, so they cost microseconds and never wait for a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.engine import is_lost_contact
from shardwright.engine.extend import ExtensionError, call, in_words


def check_class(owner: str, model: nn.Module, auxiliary: object) -> None:
    """Check the signature of forward, and the weights of the losses beside the cross-entropy.

    Raises:
        ExtensionError: forward cannot be called as the trainer calls it, or ``auxiliary`` has no numbers by name.
    """
    if not isinstance(auxiliary, Mapping) or not all(
        isinstance(name, str) and isinstance(weight, int | float) for name, weight in auxiliary.items()
    ):
        raise ExtensionError(
            f"auxiliary of {owner} is {auxiliary!r}; expected a weight for each name of a loss, such as "
            '{"balance": 0.01}'
        )
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    extras = {"extras": True} if auxiliary else {}
    try:
        signature.bind("tokens", **extras)
    except TypeError as error:
        expected = (
            "forward(tokens, extras=False), since it has auxiliary losses" if auxiliary else "forward(tokens)"
        )
        raise ExtensionError(f"forward{signature} of {owner}: {error}. Expected {expected}") from None


def called(owner: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a user's function.

    Raises:
        ExtensionError: the function raised an error that is not about memory or about other ranks.
    """
    try:
        return function(*arguments)
    except (ExtensionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_lost_contact(error):
            raise
        raise ExtensionError(f"{owner} raised {in_words(error)}. Correct this function") from error


def check_logits(owner: str, logits: Any, targets_BS: Tensor, vocab_size: int) -> Tensor:
    """Return the logits that forward returned, float [B, S, V] with V >= ``vocab_size``.

    Raises:
        ExtensionError: forward returned something else.
    """
    good = isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim == 3
    if not good or logits.shape[:2] != targets_BS.shape or logits.shape[2] < vocab_size:
        raise ExtensionError(
            f"forward of {owner} returned {_described(logits)} for tokens of shape "
            f"{list(targets_BS.shape)}; expected a float tensor of logits of shape "
            f"{[*targets_BS.shape, vocab_size]}, or with more logits in the last dimension"
        )
    return logits  # type: ignore[no-any-return]


def check_pair(owner: str, returned: Any) -> tuple[Any, Any]:
    """Return the logits and the extras that forward returned with ``extras=True``.

    Raises:
        ExtensionError: forward returned something else.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ExtensionError(
            f"forward(tokens, extras=True) of {owner} returned {_described(returned)}; expected a tuple of two: the "
            "logits, and the extras for auxiliary_sums"
        )
    return returned[0], returned[1]


def auxiliary_sums(
    owner: str, function: Callable[..., Any], names: Mapping[str, float], extras: Any, targets_BS: Tensor
) -> list[Tensor]:
    """Return the losses beside the cross-entropy, each 0-d, in the order of ``names``.

    Raises:
        ExtensionError: ``auxiliary_sums`` raised an error, or returned something other than one number for each name.
    """
    method = f"auxiliary_sums of {owner}"
    sums = call(method, function, extras, targets_BS)
    expected = f"a dict with one tensor without dimensions for each of {', '.join(names)}"
    if not isinstance(sums, Mapping) or set(sums) != set(names):
        shown = (
            f"a dict with {', '.join(map(str, sums)) or 'nothing'}"
            if isinstance(sums, Mapping)
            else _described(sums)
        )
        raise ExtensionError(f"{method} returned {shown}; expected {expected}")
    for name in names:
        if not isinstance(sums[name], Tensor) or sums[name].ndim or not sums[name].is_floating_point():
            raise ExtensionError(
                f"{method} returned {_described(sums[name])} for {name!r}; expected {expected}"
            )
    return [sums[name] for name in names]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r} ({type(value).__name__})" if value is None else f"a {type(value).__name__}"
