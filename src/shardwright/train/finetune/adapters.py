"""Adapters on a model: put there before it is sharded, trained, and folded into the base for an export.

The order of calls is: `adapt`, then `fully_shard`, then values (drawn or loaded), then `reset_magnitudes` if a base was
loaded, then training, then `merge`. Files are in `peft_files`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.engine import unit_of
from shardwright.train.config.sections.finetune import FinetuneConfig
from shardwright.train.finetune.layers import (
    Adapter,
    Dropout,
    adapted_class,
    plain_class,
    row_lengths,
)
from shardwright.train.finetune.selection import layers_to_adapt, parameters_to_freeze, parameters_to_train
from shardwright.train.models.foreign.module import ADAPTER_PARAMETERS


def adapt(model: nn.Module, settings: FinetuneConfig, seed: int) -> None:
    """Put adapters on a model that is not sharded yet, and freeze its other parameters, in place.

        with sw.deferred_init():
            model = build()
            adapt(model, settings, seed=0)

    The model may hold values, be deferred, or be on the meta device. The names of its own parameters stay, and an
    adapted layer is still an ``nn.Linear``. The adapters change nothing yet, since one of their two matrices
    is 0. The other one is drawn on the CPU from a generator that depends on ``seed`` alone, in the order of the layers.
    Adapters and the parameters in ``train_also`` are float32. Frozen matrices get ``base_dtype``; frozen vectors
    (norms, biases) stay float32, because their memory is small.

    Args:
        model: any module; see ``selection.blocks_of`` for its blocks.
        settings: the section `[finetune]`. With method "full" the parameters that it names are frozen.
        seed: of the adapters and of their dropout.

    Raises:
        UserError: a pattern or the rank does not fit the model. Nothing was changed.
        RuntimeError: the model is sharded, or has adapters.
    """
    if not settings.has_adapters:
        for parameter in parameters_to_freeze(model, settings):
            parameter.requires_grad_(False)
        return
    if any(unit_of(parameter) is not None for parameter in model.parameters()):
        raise RuntimeError("adapt was called for a sharded model; call it before fully_shard")
    if any(True for _ in adapted_layers(model)):
        raise RuntimeError("adapt was called for a model that has adapters already; call merge first")
    layers = layers_to_adapt(model, settings)
    trained = parameters_to_train(model, settings)
    _freeze(model, trained, settings)
    dropout = Dropout(settings.dropout, seed) if settings.dropout else None
    generator = torch.Generator("cpu").manual_seed(_own_seed(seed))
    for number, layer in enumerate(layers.values()):
        _add(layer, settings, dropout, number, generator)


def _own_seed(seed: int) -> int:
    """Another seed than the base's: equal ones would draw equal numbers."""
    return int.from_bytes(hashlib.sha256(f"adapters {seed}".encode()).digest()[:7], "big")


def _freeze(model: nn.Module, trained: list[str], settings: FinetuneConfig) -> None:
    dtype = getattr(torch, settings.base_dtype)
    for name, parameter in model.named_parameters():
        if name in trained:
            _convert(parameter, torch.float32)
        else:
            parameter.requires_grad_(False)
            _convert(parameter, dtype if parameter.ndim >= 2 else torch.float32)
        parameter.requires_grad_(name in trained)


def _convert(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.is_floating_point() and parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)  # the same object, which ties and optimizers know


def _add(
    layer: nn.Linear,
    settings: FinetuneConfig,
    dropout: Dropout | None,
    number: int,
    generator: torch.Generator,
) -> None:
    outputs, inputs = layer.weight.shape
    device = torch.device("cpu") if layer.weight.is_meta else layer.weight.device
    # As peft draws it (and nn.Linear its weight).
    drawn = torch.empty(settings.rank, inputs, dtype=torch.float32, device="cpu")
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    layer.__class__ = adapted_class(type(layer))  # type: ignore[arg-type]  # mypy takes its __hash__ for a method
    adapter = cast(Adapter, layer)
    adapter.lora_a = nn.Parameter(drawn.to(device))
    adapter.lora_b = nn.Parameter(torch.zeros(outputs, settings.rank, dtype=torch.float32, device=device))
    lengths = (
        nn.Parameter(row_lengths(layer.weight.detach()).to(device)) if settings.method == "dora" else None
    )
    layer.register_parameter("lora_magnitude", lengths)
    adapter.scale, adapter.dropout, adapter.number, adapter.called = settings.scale, dropout, number, False


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield the names and layers with adapters, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS


def trained_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are trained, a tied one under its first name; the same for a sharded
    model."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def set_samples(model: nn.Module, samples: Tensor, part: int = 0) -> None:
    """Give dropout the numbers of the samples of the next micro-batch: int64 [B], on the device of the inputs.

    `part`: that this rank has of their tokens, where ranks divide samples. Call it before each forward in training.
    Without dropout it does nothing.
    """
    for _, layer in adapted_layers(model):
        if layer.dropout is not None:
            layer.dropout.set_samples(samples, part)
        return  # all layers share one


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of dora to the lengths of the rows of the base's weights. Called by every rank.

    Call it once after a base was loaded, before adapters are loaded or trained. Without dora it does nothing.
    """
    for _, layer in adapted_layers(model):
        if layer.lora_magnitude is not None:
            with sw.unsharded(layer, recurse=False):
                assert layer.lora_magnitude is not None
                layer.lora_magnitude.copy_(row_lengths(layer.weight))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Fold the adapters into the base, in place, for an export. Called by every rank, between steps.

    The new weight is W + scale B A, computed in float32 and rounded once to the dtype of W (with dora its rows get the
    trained lengths). One layer at a time is gathered. A plain model has plain linear layers afterwards. A sharded model
    keeps its adapters with B = 0, so that the results of the model stay the same; leave them out of the export.
    """
    for _, layer in list(adapted_layers(model)):
        if unit_of(cast(nn.Parameter, layer.weight)) is None:
            layer.weight.copy_(layer.merged())
            _remove(layer)
            continue
        with sw.unsharded(layer, recurse=False):
            layer.weight.copy_(layer.merged())
            layer.lora_b.zero_()
            if layer.lora_magnitude is not None:
                layer.lora_magnitude.copy_(row_lengths(layer.weight))


def _remove(layer: Adapter) -> None:
    for name in ADAPTER_PARAMETERS:
        delattr(layer, name)
    for name in ("scale", "dropout", "number", "called"):
        delattr(layer, name)
    cast(nn.Module, layer).__class__ = plain_class(type(layer))


def uncalled_layers(model: nn.Module) -> list[str]:
    """Return the names of adapted layers that no eager forward has reached, nor any layer with the same last part of
    its name.

    After a step this list has the layers whose weights the model uses directly; adapters there change nothing. An
    expert that no token has chosen is not in it, if another expert was chosen.
    """
    called = {name.rpartition(".")[2] for name, layer in adapted_layers(model) if layer.called}
    return [name for name, _ in adapted_layers(model) if name.rpartition(".")[2] not in called]


def statement(model: nn.Module) -> str:
    """Return a line that says which parameters are trained. Works for sharded models, too."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = sum(sizes[name] for name in trained_names(model))
    kinds = Counter(name.rpartition(".")[2] for name, _ in adapted_layers(model))
    layers = ", ".join(f"{name} x {count}" for name, count in kinds.items())
    if not kinds:
        return (
            f"trains {trained:,} of {sum(sizes.values()):,} parameters ({trained / sum(sizes.values()):.2%})"
        )
    rank = next((layer.lora_a.shape[0] for _, layer in adapted_layers(model)), 0)
    also = [name for name in trained_names(model) if not is_adapter(name)]
    more = f" and {len(also)} parameters of the base" if also else ""
    return (
        f"trains {trained:,} of {sum(sizes.values()):,} parameters ({trained / sum(sizes.values()):.2%}): adapters of "
        f"rank {rank} on {layers}{more}"
    )


def skipped_flops(model: nn.Module) -> int:
    """Floating-point operations per token that frozen linear layers save: no gradient of their weights is computed.

    Two for each element. For a model whose `flops_per_token` counts six.
    """
    return sum(
        2 * module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad
    )
