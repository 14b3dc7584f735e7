"""Context parallelism of a module that calls torch's scaled_dot_product_attention: its code stays as it is.

Each forward inside the module runs with the module's split, also when a checkpoint runs it again in backward. Nothing
here computes attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardwright._torch import uncompiled
from shardwright.context import attending
from shardwright.context import split as splits
from shardwright.context.split import Split

Module = TypeVar("Module", bound=nn.Module)


def context_parallel(module: Module, mesh: DeviceMesh | Split) -> Module:
    """Let the ranks of `mesh` divide each sample of a module: returns the same module.

    Its forward then takes this rank's part of the tokens (`sw.context.shard`) and computes as if it had the whole
    samples: its calls of ``torch.nn.functional.scaled_dot_product_attention`` and of ``sw.context.attention`` attend to
    all of them. Everything else must compute each token by itself. The module must use the positions of the tokens in
    the whole sample; ``sw.context.positions`` has them. Gradients of a rank are those of its tokens: shard the
    parameters over these ranks, too, and take the sum.

    Call it before activation checkpointing and `fully_shard`, on all ranks. torch.compile runs the module as it is.
    Checkpoint modules, not methods or closures that attend: backward runs those again outside of the module, and
    without the split. Such an attention raises RuntimeError in forward.

    Args:
        module: any module. Its masks must be those of whole samples.
        mesh: the ranks, of one dimension.

    Raises:
        ValueError: the module has them already, or has a layer that mixes tokens in another way.
    """
    split = mesh if isinstance(mesh, Split) else Split(mesh)
    for name, inner in module.named_modules():
        if isinstance(inner, _MIXING):
            raise ValueError(
                f"{name or type(inner).__name__}: a {type(inner).__name__} mixes tokens, and context parallelism knows "
                "only torch.nn.functional.scaled_dot_product_attention; call that, or sw.context.attention"
            )
        if isinstance(getattr(inner.forward, "func", None), _Within):
            raise ValueError(f"{name or type(inner).__name__}: context_parallel was called for it before")
    for inner in module.modules():
        if type(inner).forward is not nn.Module.forward:  # a list of modules has no forward
            inner.forward = functools.partial(_Within(split), inner.forward)
    return module


#: Layers of torch whose tokens see others without scaled_dot_product_attention in sight.
_MIXING = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Within:
    """Runs a forward with a split in use."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and splits.in_use() is self.split:
            return splits.in_forward(forward, args, kwargs)
        return _run(self.split, forward, args, kwargs)


@uncompiled  # torch 2.13 compiles calls under a mode of functions into graphs with other results
def _run(split: Split, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if splits.in_use() is split:
        return splits.in_forward(forward, args, kwargs)
    with splits.within(split), _Attention():
        return splits.in_forward(forward, args, kwargs)


class _Attention(TorchFunctionMode):
    """Calls `sw.context.attention` in the place of torch's attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and splits.current() is not None:
            return attending.attention(*args, **kwargs)
        return func(*args, **kwargs)
