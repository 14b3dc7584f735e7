"""Floating-point operations of a token in models of transformers, counted while the model runs without memory.

The model is built again on the meta device, and one forward and backward of it count their products by torch's own
formulas. What its modules are named does not matter. Layers of a kind take the same operations, so a model of 80 equal
layers is counted with one, two and three of them. transformers is imported when a model is counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from shardwright.engine.compat import outside_dispatch_modes
from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.models.hf.building import build
from shardwright.train.models.hf.documents import unnoticed
from shardwright.train.models.hf.layers import described, shape_with_layers

#: The name of the attention here in transformers' interface.
NAME = "shardwright_counted"
#: Tokens of a trace, which is longer for models that work in chunks of so many tokens. transformers' linear attention
#: has chunks of 64 that no configuration states.
_LENGTH, _LINEAR = 8, 64
#: Keys of configurations: tokens of a chunk of a recurrent layer.
_CHUNKS = ("chunk_size", "mamba_chunk_size", "chunk_length", "linear_chunk_size")
#: Forward of a product, and the gradients of its two factors.
_PASSES = 3


class Uncountable(Exception):
    """The model does not run without memory."""


def flops_of_sample(
    build: Callable[[], nn.Module], trained: Callable[[str], bool], length: int, adapters: bool = False
) -> float:
    """Return the operations of forward and backward for a sample of `length` tokens.

    Attention of transformers' interface counts the keys that a token may see: all of the sample, as is usual, or those
    of its window. Other parts are linear in the tokens or quadratic, which two short traces show, so that recurrent
    layers that work token by token are traced in a moment.

    Args:
        build: makes the model of transformers, on the default device.
        trained: says by the name of a parameter whether it is trained: a frozen weight has no gradient to compute.
        length: of the sample.
        adapters: whether layers have adapters, which `build` leaves out: gradients reach the first layer then.

    Raises:
        Uncountable: the model does not run on the meta device.
    """
    failure: Exception | None = None
    with outside_dispatch_modes(), unnoticed(), torch.device("meta"), _RowsOfExperts():
        for own_attention in (True, False):
            try:
                # Code of a model may make parameters by torch.normal, which no default device reaches.
                model: Any = build().to("meta")
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(trained(name) and parameter.is_floating_point())
                if adapters:
                    model.get_input_embeddings().register_forward_hook(
                        lambda module, inputs, result: (
                            result if result.requires_grad else result.requires_grad_()
                        )
                    )
                return _counted(model, length, own_attention)
            except Exception as error:  # of code that is not ours
                failure = failure or error
    raise Uncountable(f"{type(failure).__name__}: {failure}") from failure


def _counted(model: Any, length: int, own_attention: bool) -> float:
    """Return the operations of a sample. With `own_attention` the model calls the attention here, else its own one."""
    attentions = _Attentions()
    values = model.config.get_text_config().to_dict()
    short = max(_LENGTH, *(n for key in _CHUNKS if isinstance(n := values.get(key), int)), 0)
    if any(key.startswith("linear_") for key in values):
        short = max(short, _LINEAR)
    with attentions.counted(model, own_attention):
        if length <= 3 * short:
            return _traced(model, length, own_attention, attentions) + attentions.flops(length)
        one, two, three = (_traced(model, n * short, own_attention, attentions) for n in (1, 2, 3))
    # The parabola through them: what convolutions pad takes as many operations in a sample of any length.
    bend = (three - 2 * two + one) / 2
    slope, constant = two - one - 3 * bend, 3 * one - 3 * two + three
    parts = length / short
    return constant + slope * parts + max(0.0, bend) * parts**2 + attentions.flops(length)


def _traced(model: Any, length: int, own_attention: bool, attentions: _Attentions) -> float:
    """Return the operations of a forward and backward, without those of attention that `_Attentions` counts by
    pairs."""
    attentions.length = length
    # transformers makes a mask by reading values, unless there is one, or the attention takes none.
    mask = {} if own_attention else {"attention_mask": torch.zeros(1, 1, length, length)}
    with FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(1, length, dtype=torch.int64)
        logits = model(input_ids=tokens, use_cache=False, return_dict=True, **mask).logits
        if logits.requires_grad:
            logits.sum().backward()
    return counter.get_total_flops() + attentions.others


class _RowsOfExperts(TorchFunctionMode):
    """Splits rows evenly where a model reads how many each expert has: without memory nobody knows, and products of all
    rows together take the same operations however they are split."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and args[0].is_meta and args[0].ndim == 1:
            return _Unread([0] * len(args[0]))
        if func is Tensor.split and len(args) > 1 and isinstance(args[1], _Unread):
            return args[0].tensor_split(len(args[1]), **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Unread(list[int]):
    """The numbers of a tensor without memory, of which only how many they are is known."""


class _Attentions:
    """The attention of the last forward: of each call its products for a pair of tokens, and the keys it may see.

    Attributes:
        length: tokens of the sample that is traced.
        others: operations of attention to anything but the tokens of the sample, such as to the layers before.
    """

    def __init__(self) -> None:
        self.length = 0
        self.others = 0.0
        self._calls: list[tuple[float, int | None]] = []

    @contextlib.contextmanager
    def counted(self, model: Any, own_attention: bool) -> Iterator[None]:
        """Prepare the model for traces. With `own_attention` it calls the attention here, if it takes another one."""
        from transformers import AttentionInterface

        if model._can_set_attn_implementation():
            AttentionInterface.register(NAME, functools.partial(_attention, self))
            model.set_attn_implementation(NAME if own_attention else "eager")
        if getattr(model, "_can_set_experts_implementation", bool)():
            model.set_experts_implementation("batched_mm")  # without reading which expert has which token
        model.train()
        model.register_forward_pre_hook(lambda *_: self._clear())
        yield

    def _clear(self) -> None:
        self._calls.clear()
        self.others = 0.0

    def add(self, query: Tensor, value: Tensor, window: int | None, passes: float) -> None:
        samples, heads, queries, width = query.shape
        of_pair = 2.0 * samples * heads * (width + value.shape[-1]) * passes
        if queries == value.shape[2] == self.length:
            self._calls.append((of_pair, window))
        else:
            self.others += of_pair * queries * value.shape[2]

    def flops(self, length: int) -> float:
        return sum(of_pair * length * min(window or length, length) for of_pair, window in self._calls)


def _attention(
    attentions: _Attentions,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return an attention of transformers' interface without a product: its result depends on all that it gets, such as
    biases of positions."""
    passes = _PASSES if any(t.requires_grad for t in (query, key, value)) else 1
    attentions.add(query, value, sliding_window, passes)
    result = value.mean((1, 2), keepdim=True) + (query.mean(-1, keepdim=True) + key.mean())
    for other in (attention_mask, *others.values()):
        if isinstance(other, Tensor) and other.requires_grad:
            result = result + other.mean()
    return result.transpose(1, 2).contiguous(), None


Count = Callable[[Sequence[int]], float | None]
"""Counts the model with these layers alone; None: there is no such model."""


@functools.lru_cache(64)
def flops_of_model(shape: HuggingFaceShape, length: int, frozen: frozenset[str], adapters: bool) -> float:
    """Return the operations of forward and backward for a sample of `length` tokens.

    Args:
        shape: of the model.
        length: of the sample.
        frozen: the names of parameters that are not trained, as transformers has them.
        adapters: whether layers have adapters, whose own operations are left out.

    Raises:
        Uncountable: the model does not run without memory.
    """
    description = described(shape)
    number = len(description.layers)
    inside = f"{description.blocks}."

    def count(kept: Sequence[int]) -> float | None:
        shorter = shape if len(kept) == number else shape_with_layers(shape, kept)
        if shorter is None:
            return None

        def is_trained(name: str) -> bool:
            if name.startswith(inside):
                index, _, rest = name.removeprefix(inside).partition(".")
                name = f"{inside}{kept[int(index)]}.{rest}"
            return name not in frozen

        model = functools.partial(build, replace(shorter, weights="pretrained"))  # which draws no values
        return flops_of_sample(model, is_trained, length, adapters)

    # Without adapters, gradients reach the layers behind the first trained one, so the place of a layer counts, too.
    if not frozen or adapters:
        of_layers: list[set[str]] = [set() for _ in description.layers]
        for name in frozen:
            if name.startswith(inside):
                index, _, rest = name.removeprefix(inside).partition(".")
                of_layers[int(index)].add(rest)
        kinds = [(kind, frozenset(own)) for kind, own in zip(description.layers, of_layers, strict=True)]
        if (flops := count_by_kinds(kinds, count)) is not None:
            return flops
    whole = count(range(number))
    assert whole is not None
    return whole


def count_by_kinds(kinds: Sequence[Hashable], count: Count) -> float | None:
    """Return the count of a model with layers of these kinds, from counts of models with fewer layers together.

    None: there are no such models, or the third layer of a kind adds something else than the second, as where layers
    attend to all layers before them.
    """
    firsts = sorted({kind: i for i, kind in reversed([*enumerate(kinds)])}.values())
    for base in dict.fromkeys(
        (tuple(firsts), tuple(range(firsts[-1] + 1)))
    ):  # or all up to the last new kind
        left: dict[Hashable, list[int]] = {}
        for i, kind in enumerate(kinds):
            if i not in base:
                left.setdefault(kind, []).append(i)
        traced = [base, *({*base, *others[:n]} for others in left.values() for n in (1, 2)[: len(others)])]
        if sum(map(len, traced)) >= len(kinds):
            continue
        found = _summed(base, [*left.values()], count)
        if found is not None:
            return found
    return None


def _summed(base: Sequence[int], left: Sequence[Sequence[int]], count: Count) -> float | None:
    """Return the count of the base and of all other layers, which are of one kind in each list."""
    if (of_base := count(base)) is None:
        return None
    total = of_base
    for others in left:
        if (with_one := count(sorted({*base, *others[:1]}))) is None:
            return None
        of_layer = with_one - of_base
        if len(others) > 1:
            with_two = count(sorted({*base, *others[:2]}))
            if with_two is None or not math.isclose(with_two, of_base + 2 * of_layer, rel_tol=1e-9):
                return None
        total += len(others) * of_layer
    return total
