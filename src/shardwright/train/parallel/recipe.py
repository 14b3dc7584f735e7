"""The recipe that makes a model parallel, and the calls in which engines differ.

The calls of a step that differ between engines are in this file, so that the loop reads as if there were one engine.
Other files ask for the engine where they name what one alone has: its memory report, the rank of a wrong gradient.
`checks` and `config.schema` refuse settings that an engine does not have.
The recipe cuts a model into units, its blocks and its head; the model itself knows nothing of it.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright._torch import MissingCompilerError
from shardwright.collective import RankGroup
from shardwright.engine.base.names import plain_name
from shardwright.engine.tensors.parameter import has_no_values
from shardwright.extend import strategies
from shardwright.optim.clip import clip_finite_grad_norm_
from shardwright.train.config import Config, ParallelConfig
from shardwright.train.config.catalog.kinds import tensor_plan
from shardwright.train.config.catalog.optimizers import optimizers
from shardwright.train.config.dims import ParallelDims
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt
from shardwright.train.models.build import build_model
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.models.native.decoder import Decoder
from shardwright.train.models.native.hybrid import Hybrid, MixtureOfExperts
from shardwright.train.models.native.plans import expert_layers
from shardwright.train.models.native.styles import spread_experts
from shardwright.train.parallel.host_memory import builds_deferred
from shardwright.train.parallel.precision import dtype_of, engine_policy

# ---------------------------------------------------------------------------------------------------------------
# The recipe


def make_expert_mesh(config: ParallelConfig, mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in other dimensions: those that have the same experts, `edp`, then those that divide them."""
    axes = ParallelDims.of(config, mesh.size()).expert_axes
    return init_device_mesh(mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def build_for(
    config: Config, vocab_size: int, reads_weights: bool = True, mesh: DeviceMesh | None = None
) -> LanguageModel:
    """The model of `config`, for `parallelize`: without memory where the engine can shard it so.

    Random numbers are drawn on the CPU for any device and engine, so that one seed means one model everywhere. A model
    that is not deferred reads its stored weights here, unless a checkpoint will replace them.

    Raises:
        UserError: the weights cannot be read, on every rank of `mesh`.
    """
    if not builds_deferred(config):
        return _adapted(config, vocab_size, reads_weights, mesh)
    with sw.deferred_init(), torch.device("cpu"):
        return _adapted(config, vocab_size, reads_weights=False)


def _adapted(
    config: Config, vocab_size: int, reads_weights: bool, mesh: DeviceMesh | None = None
) -> LanguageModel:
    model = build_model(config.model, vocab_size)
    if reads_weights:
        # A plain model does not know the other ranks. They would wait for this one in the engine's collectives.
        RankGroup.of_mesh(mesh).run_or_stop(model.read_weights, UserError)
    adapt(model, config.finetune, config.run.seed)
    return model


def _give_values(model: nn.Module, device: torch.device, reads: bool) -> None:
    """Read or draw a deferred model's weights straight into its shards, tensor by tensor. Tables follow it to its
    device."""
    if reads:
        cast(LanguageModel, model).read_weights()
    sw.materialize(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _is_deferred(model: nn.Module) -> bool:
    return any(has_no_values(parameter) for parameter in model.parameters())


def _source(model: nn.Module) -> int | None:
    """The rank whose values tensor-parallel ranks take; None: each its own, which are the same."""
    return None if _is_deferred(model) else 0


def divide_experts(model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """Spread the model's experts over an axis of `mesh`, and cut them over the tensor-parallel one."""
    assert isinstance(model, Hybrid)
    source = _source(model)
    for name in expert_layers(model.config):
        axes = mesh["expert"] if config.tensor == 1 else mesh["expert", "tensor"]
        spread_experts(cast(MixtureOfExperts, model.get_submodule(name)), axes, source)


def cut_layers(model: LanguageModel, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> DeviceMesh:
    """Cut the model's layers over the mesh's last axis; returns the mesh of the others, the data-parallel ones.

    Experts have been spread over the mesh `experts` before, if it is given.
    """
    names = mesh.mesh_dim_names
    assert names is not None and isinstance(model, Decoder)
    plan = tensor_plan(model.config, experts)
    parallelize_module(model, mesh[names[-1]], plan, src_data_rank=_source(model))
    if model.tied:  # which each became on its own
        model.output.weight = model.tok_embeddings.weight
    return mesh[names[0]] if len(names) == 2 else mesh[names[:-1]]


def axes_of(parameter: Tensor) -> tuple[str, ...]:
    """The names of the dimensions of the mesh that a parameter is on; none for a plain parameter."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def parallel_loss(config: ParallelConfig) -> AbstractContextManager[object]:
    """Around forward, loss and backward: with tensor parallelism the cross-entropy of logits that are never whole."""
    return loss_parallel() if config.tensor > 1 else nullcontext()


def parallelize(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, reads_weights: bool = True
) -> nn.Module:
    """The model, ready to train on the ranks of `mesh` with the engine of `config`. May return the same object.

    With the engine shardwright it may be a deferred one, which gets its values here: stored ones if it has any and
    `reads_weights`, else drawn ones.
    """
    deferred = _is_deferred(model)
    device = torch.device("cpu" if mesh.device_type == "cpu" else torch.cuda.current_device())
    experts = make_expert_mesh(config, mesh) if config.expert > 1 else None
    if experts is not None:
        divide_experts(model.to(device), config, experts)
    if config.tensor > 1:
        mesh = cut_layers(model.to(device), mesh, experts and experts["expert"])
    if config.engine == "none":
        return model.to(device)
    if config.engine == "ddp":
        return _with_ddp(model.to(device), mesh)
    if config.engine == "fsdp1":
        return _with_fsdp1(model.to(device), config, mesh, device)
    _shard_units(model, config, mesh, experts)
    if isinstance(model, sw.FSDPModule):
        _check_memory(model, config)
        _give_values(model, device, reads_weights and deferred)
    return model


def _with_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # The only buffers are rotary tables, equal everywhere: no need to broadcast them in every forward pass.
    # torch 2.13 renamed the option.
    parameters_of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast = (
        "forward_sync_buffers" if "forward_sync_buffers" in parameters_of_ddp else "broadcast_buffers"
    )
    buffers: dict[str, Any] = {no_broadcast: False}
    return DistributedDataParallel(model, device_mesh=mesh, gradient_as_bucket_view=True, **buffers)


def _with_fsdp1(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    keep = config.reshard_after_forward == "never"
    param_dtype, reduce_dtype = dtype_of(config.param_dtype), dtype_of(config.reduce_dtype)
    return FSDP1(
        model,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks()}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        device_id=device,
        use_orig_params=True,
    )


def _shard_units(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, experts: DeviceMesh | None
) -> None:
    """Shard each parameter, with our engine or FSDP2.

    The units are: each block, the head with the final norm (and the embedding, where it is the same matrix), and the
    root with what is left.
    """
    ours = config.engine == "shardwright"
    fully_shard: Any = sw.fully_shard if ours else torch_fully_shard
    options = _sharding_options(model, config, mesh, experts)
    # Backward first needs the unit that forward used last: by default it stays gathered.
    reshard = config.reshard_after_forward
    reshard_blocks: bool | int = reshard if isinstance(reshard, int) else not _keeps_parameters(config)
    reshard_last = reshard == "always"

    *blocks, last_block = model.blocks()
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_blocks, **options)
    fully_shard(last_block, reshard_after_forward=reshard_last, **options)

    if head := model.head():
        fully_shard(head, reshard_after_forward=reshard_last, **options)

    if experts is not None:
        for block in model.blocks():
            # The gradient of an expert is the sum over the ranks whose tokens reach it before anything is reduced. So
            # all units divide by the ranks that have data of their own.
            cast(sw.FSDPModule, block).set_gradient_divide_factor(mesh.size())

    if ours:
        options |= {"memory": config.memory, "prefetch": config.prefetch}
    try:
        fully_shard(model, reshard_after_forward=reshard_last, **options)
    except MissingCompilerError as error:
        raise UserError(f"parallel.memory: found {config.memory!r}. {error}") from error


def _sharding_options(
    model: LanguageModel, config: ParallelConfig, mesh: DeviceMesh, experts: DeviceMesh | None
) -> dict[str, Any]:
    """Arguments of `fully_shard` for every unit."""
    options: dict[str, Any] = {"mesh": mesh}
    if experts is not None:
        same = experts["replicate", "edp"] if config.replicas > 1 else experts["edp"]
        options["shard_placement_fn"] = lambda p: (
            sw.ShardPlacementResult(None, same) if "expert" in axes_of(p) else None
        )
    if config.engine != "shardwright":
        param_dtype, reduce_dtype = dtype_of(config.param_dtype), dtype_of(config.reduce_dtype)
        return options | {"mp_policy": TorchPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)}
    layout = config.layout if isinstance(config.layout, str) else sw.Ragged(config.layout)
    options |= {"mp_policy": engine_policy(model, config), "strategy": config.strategy, "layout": layout}
    if config.offload != "none":
        with_weights = config.offload == "cpu"
        options["offload_policy"] = sw.Offload(parameters=with_weights, gradients=with_weights)
    return options | {"check_module_states": True}


def _strategy_keeps_parameters(config: ParallelConfig) -> bool:
    """Whether parameters stay whole until the optimizer's step, and their gradients do not."""
    strategy = strategies.get(config.strategy)
    return strategy.keeps_parameters and any(strategy.stages)


def _keeps_parameters(config: ParallelConfig) -> bool:
    return config.reshard_after_forward == "never" or _strategy_keeps_parameters(config)


def _check_memory(model: sw.FSDPModule, config: ParallelConfig) -> None:
    """Raise UserError if the units do not fit the memory of `config`."""
    try:
        model.set_is_last_backward(True)  # the first call that looks at all units together
    except ValueError as error:
        if _keeps_parameters(config):  # the engine's advice is about arguments that have no key here
            key = "strategy" if _strategy_keeps_parameters(config) else "reshard_after_forward"
            raise UserError(
                f"parallel.memory: expected 'arena' or 'dynamic' with parallel.{key} {getattr(config, key)!r}, "
                f"found {config.memory!r}; all units keep their full parameters, so no slot ever becomes free"
            ) from error
        raise UserError(
            f"parallel.memory: found {config.memory!r}, which does not work with this model. {error}"
        ) from error


# ---------------------------------------------------------------------------------------------------------------
# The calls in which engines differ


def compute_precision(config: ParallelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Around forward and loss: autocast for the engines that leave the weights alone, nothing for the others."""
    if config.engine in ("none", "ddp") and config.param_dtype != "float32":
        return torch.autocast(device.type, dtype=dtype_of(config.param_dtype))
    return nullcontext()


def build_optimizer(model: nn.Module, config: Config, matrices: set[str]) -> torch.optim.Optimizer:
    """The configured optimizer, which decays the parameters named in `matrices` and no others.

    The names are those of the plain model, because FSDP1 flattens its parameters and their shapes are lost.
    """
    named = [(plain_name(name, model), p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [pair for pair in named if pair[0] in matrices]
    others = [pair for pair in named if pair[0] not in matrices]
    own = optimizers.get(config.optimizer.name)
    optimizer = own.build(decayed, others, config.optimizer)
    if config.parallel.engine != "shardwright":
        return optimizer
    try:
        wrap = sw.optim.in_backward if config.optimizer.in_backward else sw.fully_shard_optimizer
        return wrap(optimizer, needs=own.needs)
    except ValueError as error:  # a block that must stay whole is cut
        raise UserError(
            f"parallel.layout: found {config.parallel.layout!r}, which does not work with {config.optimizer.name}. "
            f"{error} (For sw.Ragged(k) set parallel.layout to k.)"
        ) from error


def matrix_names(model: nn.Module) -> set[str]:
    """Names of the plain model's parameters of two dimensions or more."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def clip_gradients(model: nn.Module, config: Config) -> Tensor | None:
    """Scale gradients down to `train.max_norm` over all ranks; return their norm before that, 0-d and plain.

    None where the optimizer has used them already. If the norm is not finite, the gradients stay as they are, so that a
    wrong one can be named: not with FSDP1, which always scales.
    """
    if config.optimizer.in_backward:
        return None
    limit = config.train.max_norm or float("inf")
    if config.parallel.engine == "shardwright":
        return clip_finite_grad_norm_(model.parameters(), limit)
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(limit)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    # A norm of 0 leaves them.
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, torch.where(norm.isfinite(), norm, 0.0))
    return norm


def gradient_sync(model: nn.Module, synchronise: bool, last: bool) -> AbstractContextManager[object]:
    """Around forward and backward of one micro-batch: whether its gradients are reduced over the ranks.

    Without it they are kept whole on every rank until a micro-batch with it comes. A strategy's reductions of a step,
    such as the sum over replicas, run in the `last` micro-batch.
    """
    if isinstance(model, DistributedDataParallel | FSDP1):
        return nullcontext() if synchronise else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        cast(Any, model).set_requires_gradient_sync(synchronise)
        cast(Any, model).set_is_last_backward(last)
    return nullcontext()


def free_gathered(model: nn.Module) -> None:
    """After passes without a backward: release the weights that were kept gathered for it."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):
            cast(Any, module).reshard()
