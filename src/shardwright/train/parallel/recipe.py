"""The recipe that makes a model parallel: built, its layers divided, its parameters spread by an engine, its optimizer.

No call differs between engines here: those are methods of `engines`. `checks` and `config/conflicts` refuse settings
that an engine does not have.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import shardwright as sw
from shardwright.context import Split
from shardwright.engine import RankGroup, TakenTensor, check_states, has_no_values, plain_name
from shardwright.engine.comm import make_mesh
from shardwright.train.config import OptimizerConfig, ParallelConfig
from shardwright.train.config.axes import ParallelDims
from shardwright.train.config.shapes.presets import Shape
from shardwright.train.config.values import BuildSettings
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.finetune.adapters import adapt
from shardwright.train.models.build import build_model
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.models.native.decoder import Decoder
from shardwright.train.models.native.hybrid import MixtureOfExperts
from shardwright.train.models.native.styles import spread_experts
from shardwright.train.models.offers import offer_of_axis, tensor_plan
from shardwright.train.parallel.engines import engine_of
from shardwright.train.parallel.engines.base import Ranks


def make_expert_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks in other dimensions: those that have the same experts, then those that divide them."""
    axes = dims.expert_axes
    return make_mesh(mesh.device_type, tuple(axes.values()), tuple(axes))


def build_for(
    settings: BuildSettings, vocab_size: int, reads_weights: bool = True, mesh: DeviceMesh | None = None
) -> LanguageModel:
    """Return the model of `settings`, for `parallelize`: without memory where the engine can shard it so.

    Random numbers are drawn on the CPU for any device and engine, so that one seed means one model everywhere. A model
    that is not deferred reads its stored weights here, unless a checkpoint will replace them.

    Raises:
        UserError: the weights cannot be read, on every rank of `mesh`.
    """
    if not settings.builds_deferred:
        return _adapted(settings, vocab_size, reads_weights, mesh)
    with sw.deferred_init(), torch.device("cpu"):
        return _adapted(settings, vocab_size, reads_weights=False)


def _adapted(
    settings: BuildSettings, vocab_size: int, reads_weights: bool, mesh: DeviceMesh | None = None
) -> LanguageModel:
    model = build_model(settings.model, vocab_size)
    if settings.has_own_loss:
        model.has_loss = False  # the run's loss takes the place of its own
    if reads_weights:
        # A plain model does not know the other ranks. They would wait for this one in the engine's collectives.
        RankGroup.of_mesh(mesh).run_own(model.read_weights, others_raise=UserError)
    adapt(model, settings.finetune, settings.seed)
    return model


def _is_deferred(model: nn.Module) -> bool:
    return any(has_no_values(parameter) for parameter in model.parameters())


def _source(model: nn.Module) -> int | None:
    """Return the rank whose values tensor-parallel ranks take; None: each its own, which are the same."""
    return None if _is_deferred(model) else 0


def divide_samples(model: LanguageModel, shape: Shape, context: Split | None) -> None:
    """Let the ranks of `context`, if any, divide the samples of the model. Before its blocks are checkpointed."""
    if context is not None:
        offer_of_axis(shape, "samples")(model, context)


def divide_experts(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Spread the model's experts over the first axis of `mesh`, and cut them over the second one, if any."""
    source, shape = _source(model), cast(Any, model).config
    for name in offer_of_axis(shape, "experts")(shape):
        spread_experts(cast(MixtureOfExperts, model.get_submodule(name)), mesh, source)


def cut_layers(model: LanguageModel, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> None:
    """Cut the model's layers over `mesh`, which has one axis.

    Experts have been spread over the mesh `experts` before, if it is given.
    """
    plan = tensor_plan(cast(Any, model).config, experts)
    parallelize_module(model, mesh, plan, src_data_rank=_source(model))
    if isinstance(model, Decoder) and model.tied:  # which each became on its own
        model.output.weight = model.tok_embeddings.weight


def parallel_loss(dims: ParallelDims) -> AbstractContextManager[object]:
    """Around forward, loss and backward: with tensor parallelism the cross-entropy of logits that are never whole."""
    return loss_parallel() if dims.axes_of("layers") else nullcontext()


def parallelize(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, reads_weights: bool = True
) -> nn.Module:
    """Return the model, ready to train on the ranks of `mesh` with the engine of `config`. May return the same object.

    With an engine that builds in shards it may be a deferred one, which gets its values here: stored ones if it has any
    and `reads_weights`, else drawn ones.
    """
    engine, deferred = engine_of(config), _is_deferred(model)
    device = torch.device("cpu")
    if mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    dims = config.dims(mesh.size())
    experts = make_expert_mesh(dims, mesh) if dims.axes_of("experts") else None
    if experts is not None:
        divide_experts(model.to(device), experts[tuple(dims.spread_axes)])
    if dims.axes_of("layers"):
        alone = experts and experts[tuple(dims.axes_of("experts"))]
        cut_layers(model.to(device), mesh[tuple(dims.axes_of("layers"))], alone)
        mesh = mesh[tuple(dims.data_axes)]
    same_experts = None if experts is None else experts[tuple(dims.same_expert_axes)]
    spread = engine.spread(model, Ranks(mesh, device, same_experts))
    engine.give_values(spread, device, reads_weights and deferred)
    return spread


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, parallel: ParallelConfig, matrices: set[str]
) -> torch.optim.Optimizer:
    """Return the configured optimizer, which decays the parameters named in `matrices` and no others.

    The names are those of the plain model, because FSDP1 flattens its parameters and their shapes are lost.
    """
    named = [(plain_name(name, model), p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [pair for pair in named if pair[0] in matrices]
    others = [pair for pair in named if pair[0] not in matrices]
    own = config.entry
    optimizer = own.build(decayed, others, config)
    return engine_of(parallel).wrap_optimizer(optimizer, own, config)


def matrix_names(model: nn.Module) -> set[str]:
    """Return the names of the plain model's parameters of two dimensions or more."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def check_same_model(model: nn.Module, mesh: DeviceMesh, owner: str) -> None:
    """Raise if the ranks have not built the same model: its names, shapes, dtypes or hashes of values differ.

    Each rank calls this once, before the model is sharded and any collective depends on it. The engine finds ranks that
    diverge later, and `rank/startup_check.py` compares what ranks have before a model exists. Tensors that get their
    values later are compared by the operations and random numbers that make the values.

    Args:
        owner: the model in messages.

    Raises:
        UserError: they differ; on every rank the same, which names the ranks and the tensors.
    """
    if mesh.size() == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    remedy = "The code of the model, its files and the numbers that it draws must not depend on the rank."
    with as_user_errors(ValueError):
        check_states(mesh, [TakenTensor(name, tensor) for name, tensor in tensors], owner, remedy)
