"""The ranks that divide each sample, the part of a sample that a rank has, and the split that is in use.

A rank has one contiguous part; parts are equal and in rank order. Nothing here knows attention.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwright.context.rows import RowGather
from shardwright.engine.compat import hook_of_checkpoint


class Split:
    """The ranks of a mesh of one dimension that divide each sample, as one of them sees them.

    Attributes:
        group: their process group; None for one rank without a mesh.
        ranks: the number of ranks.
        rank: the number of this one; the part of a sample that it has.
        active: False while every rank computes whole samples, see `whole_samples`.
        attended: whether an attention has run over the samples that the ranks divide, outside of compiled code.
        name: another one for each split.
    """

    group: ProcessGroup | None
    _names = map("split {}".format, itertools.count())

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """None: this rank has whole samples. Raises ValueError for a mesh of several dimensions."""
        self.active, self.attended, self.name = True, False, next(Split._names)
        if mesh is None:
            self.group, self.ranks, self.rank = None, 1, 0
            return
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: expected one dimension, whose ranks divide each sample, found {mesh.ndim} "
                f"({mesh.mesh_dim_names}); take one of them, such as mesh['context']"
            )
        self.group, self.ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> Split:
        """Return a split of its own over the same ranks: a process group has no copies."""
        copied = copy.copy(self)
        copied.name = next(Split._names)
        memo[id(self)] = copied
        return copied

    @property
    def divides(self) -> bool:
        """Whether a rank has a part of a sample at this moment."""
        return self.active and self.ranks > 1

    def part(self, length: int) -> range:
        """Return the tokens that this rank has of a sample of so many.

        Raises:
            ValueError: the ranks do not divide the number.
        """
        if length % self.ranks:
            raise ValueError(
                f"expected a number of tokens that {self.ranks} ranks of the context divide, found {length}; pad the "
                "sample"
            )
        own = length // self.ranks
        return range(self.rank * own, (self.rank + 1) * own)


_compiled: set[str] = set()  #: names of splits over which compiled code attends


@torch.compiler.assume_constant_result
def note_compiled(name: str) -> None:
    """Note that code which is compiled now attends over this split. Compiled code does not call this function."""
    _compiled.add(name)


def has_attended(split: Split) -> bool:
    """Return whether an attention has run over the samples, as far as known: compiled code does not say
    when it runs."""
    return split.attended or split.name in _compiled


class _InUse(threading.local):
    """The split whose modules run in this thread. Backward has threads of its own, in which blocks run again."""

    split: Split | None = None
    #: The innermost forward of the split's modules: its frame, and what autograd did when it began.
    frame: FrameType | None = None
    grad_enabled = False
    checkpoint: Any = None


_in_use = _InUse()


def current() -> Split | None:
    """Return the split of the module that runs, see `context_parallel`; None outside of such modules, and if it has one
    rank or computes whole samples.

    Raises:
        RuntimeError: a checkpoint will run the caller again without the module's forward, so without the split.
    """
    split = _in_use.split
    if split is None or not split.divides:
        return None
    if _runs_again_outside():
        raise RuntimeError(
            "context_parallel: expected checkpoints of modules, found one of a function inside a module's forward, "
            "which attends or asks for positions. Backward would run it again with the tokens of this rank alone. "
            "Checkpoint a module that does it, or pass mesh= to shardwright.context.attention, and positions as an "
            "argument"
        )
    return split


def in_forward(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a forward of a module of the split in use, which a checkpoint of the module would run again."""
    state = _in_use
    before = state.frame, state.grad_enabled, state.checkpoint
    state.frame, state.grad_enabled = sys._getframe(), torch.is_grad_enabled()
    state.checkpoint = hook_of_checkpoint()
    try:
        return forward(*args, **kwargs)
    finally:
        state.frame, state.grad_enabled, state.checkpoint = before


def _runs_again_outside() -> bool:
    """Return whether a checkpoint began inside the innermost forward, so that backward runs the caller again without
    it."""
    state = _in_use
    if state.frame is None or not state.grad_enabled:
        return False
    if torch.is_grad_enabled():
        hook = hook_of_checkpoint()
        return hook is not None and hook is not state.checkpoint
    # A reentrant checkpoint is the forward of an autograd function. Otherwise the module has switched gradients off.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not state.frame:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names and isinstance(frame.f_locals.get(names[0]), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def in_use() -> Split | None:
    """Return the split that `within` has made the current one of this thread, active or not."""
    return _in_use.split


@contextmanager
def within(split: Split | None) -> Iterator[None]:
    """Make a split the current one of this thread, or with None let it have none."""
    before, _in_use.split = _in_use.split, split
    try:
        yield
    finally:
        _in_use.split = before


@contextmanager
def whole_samples(split: Split | None) -> Iterator[None]:
    """Every rank computes whole samples inside, without exchanges, as for a text that is generated token by token.

    Args:
        split: the ranks that divide samples outside; None: there are none.
    """
    if split is None:
        yield
        return
    before, split.active = split.active, False
    try:
        yield
    finally:
        split.active = before


def shard(value: Tensor, mesh: DeviceMesh | Split, dim: int = 1) -> Tensor:
    """Return this rank's part of the tokens of whole samples: a view of `value`, of any dtype and shape.

    Shift targets against inputs before: the target of the last token of a part is the first token of the next one.

    Args:
        value: whole samples, equal on all ranks of the mesh.
        mesh: the ranks that divide each sample, of one dimension.
        dim: the dimension of the tokens.

    Raises:
        ValueError: the ranks do not divide the tokens.
    """
    own = _split_of(mesh).part(value.shape[dim])
    return value.narrow(dim, own.start, len(own))


def gather(value: Tensor, mesh: DeviceMesh | Split, dim: int = 1) -> Tensor:
    """Return the whole samples from the parts of all ranks, which have equal shapes: the inverse of `shard`, for any
    dtype.

    Autograd knows it: the gradient of a part is the sum over the ranks that use it, so it may have the factor of their
    number if each computes the same loss.

    Args:
        value: this rank's part.
        mesh: the ranks that divide each sample, of one dimension.
        dim: the dimension of the tokens.
    """
    split = _split_of(mesh)
    rows = RowGather.apply(value.unsqueeze(0), split.group)
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions in the whole sample of the tokens that the running module has: int64, of shape [length].

    Without context parallelism they begin at 0.

    Args:
        length: the number of tokens of this rank.
        device: of the result.
    """
    split = current()
    first = 0 if split is None else split.rank * length
    return torch.arange(first, first + length, device=device)


def _split_of(mesh: DeviceMesh | Split) -> Split:
    return mesh if isinstance(mesh, Split) else Split(mesh)
