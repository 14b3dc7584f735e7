"""Context parallelism of a module that calls torch's scaled_dot_product_attention: its code stays as it is.

Each forward inside the module runs with the module's split, also when a checkpoint runs it again in backward. Nothing
here computes attention.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardwright.context import attending, split as splits
from shardwright.context.inputs import POSITIONS, ComparedInputs, is_of_transformers
from shardwright.context.split import Split
from shardwright.engine import RankGroup
from shardwright.engine.compat import uncompiled

Module = TypeVar("Module", bound=nn.Module)


def context_parallel(module: Module, mesh: DeviceMesh | Split) -> Module:
    """Let the ranks of `mesh` divide each sample of a module: returns the same module.

    Its forward then takes this rank's part of the tokens (`sw.context.shard`) and computes as if it had the whole
    samples: its calls of ``torch.nn.functional.scaled_dot_product_attention`` and of ``sw.context.attention`` attend to
    all of them. Everything else must compute each token by itself. The module must use the positions of the tokens in
    the whole sample; ``sw.context.positions`` has them. Gradients of a rank are those of its tokens: shard the
    parameters over these ranks, too, and take the sum.

    Call it before activation checkpointing, and before or after `fully_shard`, on all ranks. torch.compile runs the
    module as it is. Checkpoint modules, not methods or closures that attend: backward runs those again outside of the
    module, and without the split. Such an attention raises RuntimeError in forward.

    The first forward compares the inputs of the ranks. If all are equal, it warns: they may be whole samples.

    A model of transformers needs ``attn_implementation="sdpa"``, and the places of its tokens:
    ``position_ids=sw.context.shard(torch.arange(length)[None], mesh)``. Its forward raises RuntimeError on all ranks
    without them, or if they do not go on from rank to rank, as those of packed documents, or with a padding mask.

    Args:
        module: any module. Its masks must be those of whole samples.
        mesh: the ranks, of one dimension. With a `Split` inputs are not compared.

    Raises:
        ValueError: the module has them already, or has a layer that mixes tokens in another way.
        RuntimeError: in forward, if no attention of this kind has run: the tokens of other ranks were not seen.
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
    inside: set[nn.Module] = set()  # modules of models of transformers, each inside another one
    for inner in module.modules():
        if type(inner).forward is nn.Module.forward:  # a list of modules
            continue
        within = _Within(split)
        if inner is module:
            within = _WithinWhole(split, inner, split is not mesh)
        elif is_of_transformers(inner) and inner not in inside:
            within = _WithinModel(split, inner)
        if is_of_transformers(inner):
            inside.update(inner.modules())
        inner.forward = functools.partial(within, inner.forward)
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


class _WithinModel(_Within):
    """Runs the forward of a model that takes positions of its tokens, after the ranks have compared these."""

    def __init__(self, split: Split, module: nn.Module) -> None:
        super().__init__(split)
        self._signature = inspect.signature(module.forward)
        self._inputs = ComparedInputs(split, module) if POSITIONS in self._signature.parameters else None

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inputs is not None and self.split.divides and not torch.compiler.is_compiling():
            self._compare_positions(self._inputs, args, kwargs)
        return super().__call__(forward, *args, **kwargs)

    def _compare_positions(
        self, inputs: ComparedInputs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            arguments = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return  # forward itself says what is wrong
        tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
        if tensors:
            inputs.compare(arguments, tensors[0].device)


class _WithinWhole(_WithinModel):
    """Runs the forward of the whole module, and raises an error if it cannot have seen the tokens of other ranks.

    The first one that `compares` warns if all ranks have the same inputs.
    """

    def __init__(self, split: Split, module: nn.Module, compares: bool) -> None:
        super().__init__(split, module)
        self._compares = compares
        self._name = type(module).__name__

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        split = self.split
        if torch.compiler.is_compiling() or not split.divides:
            return super().__call__(forward, *args, **kwargs)
        if self._compares:
            self._compares = False  # later ones do not make the host wait
            self._compare((*args, *kwargs.values()))
        split.attended = False
        result = super().__call__(forward, *args, **kwargs)
        if not splits.has_attended(split):
            raise RuntimeError(
                f"forward of {self._name} has called neither torch.nn.functional.scaled_dot_product_attention nor "
                "sw.context.attention, so its tokens have not seen those of other ranks; a model of transformers needs "
                'attn_implementation="sdpa"'
            )
        return result

    def _compare(self, inputs: tuple[Any, ...]) -> None:
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        if not tensors or any(type(each) is not Tensor or each.is_meta for each in tensors):
            return  # without values, or with those of a subclass
        begins = [(list(each.shape), each.detach().flatten()[:_COMPARED].tolist()) for each in tensors]
        ranks = RankGroup(self.split.group)
        if not ranks.different(ranks.all_gather(begins, "beginnings of inputs")):
            warnings.warn(
                f"forward of {self._name} got equal inputs on all {self.split.ranks} ranks of the context, the first "
                f"one of shape {list(tensors[0].shape)}. Each rank takes its input for another part of a longer "
                "sample. If these are whole samples, pass sw.context.shard(inputs, mesh)",
                stacklevel=2,
            )


_COMPARED = 4096  #: values of each input, from its first one


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
