"""One call of a head, the module that makes logits, for work in pieces: its weights are gathered once.

The hooks of the sharding engine, of this package or of torch's FSDP2, run once around all pieces. So do hooks that
prepare the input. The other hooks see the logits of each piece. Nothing here knows losses.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.engine import UNIT, Calls, Managed, ModuleState, call_as_forward, spare_weights, unit_of

_BEFORE, _AFTER = "_forward_pre_hooks", "_forward_hooks"
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_COMPILED = "_compiled_call_impl"
_FSDP2 = "torch.distributed.fsdp."


@torch.compiler.disable
def call_once(head: nn.Module, hidden: Tensor, work: Callable[[Tensor], Any], prepared: bool = False) -> Any:
    """Return the result of ``work(hidden)``, called in the place of the head's forward.

    ``work`` may call the head as often as it likes: the weights are there, and no hook gathers or frees them. Its graph
    must not save the weights, since backward does not gather them for it. ``prepared``: hooks that prepare the input
    have run already.
    """
    sharded = next((p for p in head.parameters() if isinstance(p, Managed)), None)
    if UNIT in head.__dict__ or sharded is None or (unit := unit_of(sharded)) is None:
        return _call(head, hidden, work, prepared, head.__dict__.get(UNIT))
    # The weights belong to a unit around the head, no call of which runs.
    results: list[Any] = []

    def call(hidden: Tensor) -> Any:
        results.append(_call(head, hidden, work, prepared, unit))
        return results[0]

    call_as_forward(unit.watch.modules()[0], call, hidden)
    return results[0]


def _call(head: nn.Module, hidden: Tensor, work: Callable[[Tensor], Any], prepared: bool, unit: Any) -> Any:
    results: list[Any] = []

    def forward(hidden: Tensor) -> Any:
        with _attributes(head, pieces):
            results.append(work(hidden))
        if unit is not None and torch.is_grad_enabled():
            spare_weights(unit)
        return results[0]

    before, after = head.__dict__[_BEFORE], head.__dict__[_AFTER]
    pieces = {
        **_without_hooks(head),
        "forward": head.__dict__.get("forward"),
        _COMPILED: head.__dict__.get(_COMPILED),
        _AFTER: OrderedDict([*_casts(after), *_those(after, _shards, False).items()]),
    }
    once: dict[str, Any] = {_AFTER: _those(after, _shards), "forward": forward, _COMPILED: None}
    if prepared:
        once[_BEFORE] = _those(before, _shards)
    with _attributes(head, once):
        head(hidden)
    return results[0]  # as it was before a hook cast it to the precision of outputs


def prepare_once(head: nn.Module, run: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
    """Let calls of the head return ``run(hidden)`` inside this context, after the hooks that prepare the input."""
    before = _those(head.__dict__[_BEFORE], _shards, False)
    return _attributes(head, {**_without_hooks(head), _BEFORE: before, "forward": run, _COMPILED: None})


class Piece(NamedTuple):
    """The place of some rows in the input of a head."""

    first: int  #: row
    rows: int  #: of the whole input


_piece: Piece | None = None


def piece_of_call() -> Piece | None:
    """Return the rows that the head computes now, or None if it computes all. A row is a token, in the input's order.

    Random numbers that depend on a token's place, as those of dropout in an adapter, need it.
    """
    return _piece


@contextmanager
def computing_piece(first: int, rows: int) -> Iterator[None]:
    """Say that calls of the head inside this context have some of ``rows`` rows, from row ``first`` on."""
    global _piece
    before, _piece = _piece, Piece(first, rows)
    try:
        yield
    finally:
        _piece = before


def _without_hooks(head: nn.Module) -> dict[str, Any]:
    return {name: OrderedDict() for name in (_BEFORE, _AFTER, *_BACKWARD) if name in head.__dict__}


def _those(hooks: dict[int, Any], chosen: Callable[[Any], bool], yes: bool = True) -> dict[int, Any]:
    """Return the hooks for which ``chosen`` is ``yes``."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if chosen(hook) is yes)


def _casts(hooks: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Hooks that cast logits as the policies of hooks that shard say."""
    for key, hook in _those(hooks, _shards).items():
        owner = _owner(hook)
        policy = owner.unit.arguments.policy if isinstance(owner, Calls) else owner._mp_policy
        if policy.output_dtype is not None:
            yield key, functools.partial(_cast, policy.output_dtype)


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, logits: Tensor) -> Tensor:
    return logits.to(dtype)


@contextmanager
def _attributes(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Give the module these attributes inside this context. An attribute whose value is None is taken away."""
    attributes = module.__dict__
    before = {name: attributes.get(name) for name in values}
    _set(attributes, values)
    try:
        yield
    finally:
        _set(attributes, before)


def _set(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is None:
            attributes.pop(name, None)
        else:
            attributes[name] = value


def _shards(hook: Any) -> bool:
    """Return whether a hook gathers or frees weights."""
    owner = _owner(hook)
    return isinstance(owner, Calls | ModuleState) or type(owner).__module__.startswith(_FSDP2)


def _owner(hook: Any) -> Any:
    """Return the object whose method a hook is; torch wraps it for a group of modules."""
    while hook is not None and not hasattr(hook, "__self__"):
        hook = getattr(hook, "__wrapped__", None)
    return getattr(hook, "__self__", None)
