"""Operations of a model of transformers, from those of the same model with few of its layers.

`flops` counts the operations of a model that it runs. Layers of a kind take the same operations, so a model of 80 equal
layers is counted with one, two and three of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from shardwright.train.config.shapes.foreign import HuggingFaceShape
from shardwright.train.models.hf.building import build
from shardwright.train.models.hf.flops import flops_of_sample
from shardwright.train.models.hf.layers import described, shape_with_layers

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
