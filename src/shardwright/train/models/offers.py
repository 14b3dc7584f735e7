"""Offers of kinds of models: those of this package, and functions that look up what the kind of a shape offers.

A kind's modules are imported when its function is called.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.engine.extend import ExtensionError, call
from shardwright.train.config.axes import Divided, axes_that_divide
from shardwright.train.config.catalog.kinds import Kind, Layers, Offers, kind_of
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.errors import UserError, as_user_errors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    Plan = dict[str, ParallelStyle]


def llama() -> Offers:
    from shardwright.train.models.native import context, hugging_face_tables, llama, plans

    return Offers(
        model=llama.Llama,
        tensor_plan=plans.llama_plan,
        uneven=plans.llama_uneven,
        divide_samples=context.divide_samples,
        key_map=hugging_face_tables.llama_keys,
        config_json=hugging_face_tables.llama_config,
        shapes={"llama": hugging_face_tables.llama_shape},
        layers=plans.llama_layers,
    )


def hybrid() -> Offers:
    from shardwright.train.models.native import context, hugging_face_tables, hybrid, plans

    return Offers(
        model=hybrid.Hybrid,
        tensor_plan=plans.hybrid_plan,
        uneven=plans.hybrid_uneven,
        divide_samples=context.divide_samples,
        check=context.check_hybrid,
        key_map=hugging_face_tables.hybrid_keys,
        config_json=hugging_face_tables.hybrid_config,
        shapes={
            "nemotron_h": hugging_face_tables.hybrid_shape,
            "shardwright_hybrid": hugging_face_tables.hybrid_shape,
        },
        expert_layers=plans.expert_layers,
        layers=plans.hybrid_layers,
    )


def hf() -> Offers:
    from shardwright.train.models.hf import checks, context, layers, transformers_model

    return Offers(
        model=transformers_model.HuggingFaceModel,
        key_map=transformers_model.key_map,
        config_json=transformers_model.config_json,
        divide_samples=context.divide_samples,
        check=checks.check,
        try_ahead=checks.try_ahead,
        layers=layers.layers_of,
        fingerprints=transformers_model.fingerprints,
    )


def python() -> Offers:
    from shardwright.train.models.foreign import python

    return Offers(
        model=python.PythonModel,
        divide_samples=python.divide_samples,
        check=python.check,
        fingerprints=python.fingerprints,
    )


_BUILT_IN = {"llama": llama, "hybrid": hybrid, "hf": hf, "python": python}


def offers_of(shape: Any) -> Offers:
    """Return the Offers of a shape's kind. Raise TypeError as :func:`kind_of`, and UserError for a wrong ``load``."""
    return offers_of_kind(kind_of(shape))


def offers_of_kind(kind: Kind) -> Offers:
    """Return what a kind of models offers, which is imported now.

    Raises:
        UserError: the kind's ``load`` raised an error, or returned something else.
    """
    owner = f"The function load of kind {kind.name!r}"
    with as_user_errors(ExtensionError, prefix="model.kind: "):
        offers = call(owner, kind.load or _BUILT_IN[kind.name])
    if not isinstance(offers, Offers):
        raise UserError(
            f"model.kind: {owner} returned {offers!r} ({type(offers).__name__}); expected an Offers, such as "
            "Offers(MyModel)"
        )
    return offers


def layers_of(shape: Any) -> Layers | None:
    """Return the layers of a shape's model; None if there are no models with some of them."""
    layers = offers_of(shape).layers
    return None if layers is None else layers(shape)


def offer(shape: Any, what: str, key: str) -> Any:
    """Return the function ``what`` of the Offers of a shape's kind. A configuration asks for it with ``key``.

    Raises:
        UserError: it offers no such thing.
    """
    value = getattr(offers_of(shape), what)
    if value is None:
        raise UserError(
            f"{key}: kind {kind_of(shape).name!r} does not support this, since its Offers have no {what}"
        )
    return value


def offer_of_axis(shape: Any, divides: Divided) -> Any:
    """Return the function of the Offers of a shape's kind that divides this thing of a model over ranks.

    Raises:
        UserError: models of this kind cannot be divided so.
    """
    axis = axes_that_divide(divides)[0]
    return offer(shape, axis.offer, axis.key)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, in elements.

    Attributes:
        parameters: of all parameters, a tied matrix counted once.
        tables: of all buffers.
        largest: of the largest parameter.
    """

    parameters: int
    tables: int
    largest: int


@functools.lru_cache(8)
def sizes_of(shape: Shape) -> Sizes:
    """Return the sizes of the model of that shape. Where the shape's class does not say them the model is built on
    meta."""
    if hasattr(shape, "parameters"):
        return Sizes(shape.parameters, shape.table_numel, shape.largest_parameter)
    import torch

    with torch.device("meta"):
        model = offers_of(shape).model(shape)
    sizes = [p.numel() for p in model.parameters()]
    return Sizes(sum(sizes), sum(b.numel() for b in model.buffers()), max(sizes, default=0))


def tensor_plan(shape: Shape, experts: DeviceMesh | None = None) -> Plan:
    """By pattern of module names, what each becomes in a model of that shape.

    The experts of a hybrid may have been spread over `experts` before.
    """
    plan: Plan = offer_of_axis(shape, "layers")(shape, experts)
    return plan


def uneven(shape: Shape, seq_len: int, ranks: int) -> list[tuple[str, int, int]]:
    """Return the keys whose values these many tensor-parallel ranks cannot cut, the values, and of what they must be
    multiples."""
    offer_of_axis(shape, "layers")
    sizes = offers_of(shape).uneven
    return [] if sizes is None else sizes(shape, seq_len, ranks)
