"""How a model becomes parallel: the ranks, the engine's recipe, and the calls in which engines differ.

Everything that depends on `[parallel] engine` is in this file, so that the loop reads as if there were one engine.
The recipe cuts a model into units, its blocks and its head; the model itself knows nothing of it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
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
from shardwright._torch import use_one_gloo_thread
from shardwright.engine.parameter import has_no_values
from shardwright.train.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from shardwright.train.errors import UserError
from shardwright.train.float8 import check_float8
from shardwright.train.host_memory import builds_deferred, check_model_fits, ranks_of_host
from shardwright.train.models.build import build_model
from shardwright.train.models.decoder import Decoder
from shardwright.train.models.hybrid import Hybrid, HybridConfig, MixtureOfExperts
from shardwright.train.models.plans import expert_layers, tensor_plan, uneven
from shardwright.train.models.styles import spread_experts
from shardwright.train.precision import dtype_of, engine_policy

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives them up. SHARDWRIGHT_TIMEOUT (seconds) replaces it."""
EPOCHS_PER_STEP = 1000
"""Passes over the training text in one step from which on a global batch is taken for a mistake."""


# ---------------------------------------------------------------------------------------------------------------
# The ranks


@dataclass(frozen=True)
class World:
    """The processes of a job, as one of them sees them."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    tensor: int = 1  #: ranks that have the same data, next to one another

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Ranks, or groups of them, that have data of their own."""
        return self.size // self.tensor


def under_launcher() -> bool:
    """Whether this process is one rank of a job that torchrun, SLURM or our own launcher has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_environment() -> None:
    """Refuse variables of a launcher, or of ours, that no job can run with. Needs no process group."""
    collective_timeout()
    if not under_launcher():
        return
    size = _whole_number("WORLD_SIZE", 1)
    _whole_number("RANK", 0, size - 1)
    _whole_number("LOCAL_RANK", 0)
    _whole_number("LOCAL_WORLD_SIZE", 1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"{name}: expected it beside RANK and WORLD_SIZE, found none; set it, or unset those two"
            )
    _whole_number("MASTER_PORT", 0, 65535)


def _whole_number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ.get(name, str(least))
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise UserError(
            f"{name}: expected an integer {limits}, found {text!r}; unset it to train without a launcher"
        )
    return value


def collective_timeout() -> timedelta:
    """How long to wait for other ranks. Raises UserError where SHARDWRIGHT_TIMEOUT is no such time."""
    text = os.environ.get("SHARDWRIGHT_TIMEOUT")
    if not text:
        return COLLECTIVE_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 1e9:  # What the backends can count.
        raise UserError(f"SHARDWRIGHT_TIMEOUT: expected seconds from 0.001 to 1e9, found {text!r}")
    return timedelta(seconds=seconds)


def choose_device(config: Config) -> str:
    """cpu or cuda. Raises UserError where cuda is asked for and there is none."""
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device: expected a CUDA device, found none; set run.device to cpu or auto")
    return "cuda" if config.run.device != "cpu" and torch.cuda.is_available() else "cpu"


def check_device(config: Config, kind: str) -> None:
    """Refuse what only a GPU, or some GPUs, can do on another device."""
    check_float8(config, kind)
    for key, wanted in (
        ("cuda_graph", config.train.cuda_graph),
        ("memory_snapshot", config.train.memory_snapshot),
    ):
        if wanted and kind != "cuda":
            raise UserError(
                f"train.{key}: expected none on the {kind.upper()}, found {wanted}; it needs a CUDA device"
            )


def check_ranks(config: Config, ranks: int) -> None:
    """Refuse a job that this many ranks cannot run, or an option its engine cannot honour. Needs no process group."""
    parallel, world = config.parallel, ranks
    if parallel.engine == "none" and ranks != 1:
        raise UserError(
            f"parallel.engine: none runs on exactly 1 rank, found {ranks}; give --nproc 1 or another engine"
        )
    if parallel.engine == "ddp" and parallel.reduce_dtype != "float32":
        raise UserError(
            f"parallel.reduce_dtype: engine ddp reduces in float32, found {parallel.reduce_dtype}"
        )
    if parallel.engine in ("ddp", "none") and parallel.reshard_after_forward != "default":
        raise UserError(
            f"parallel.reshard_after_forward: engine {parallel.engine} shards nothing, found "
            f"{parallel.reshard_after_forward}; leave it at default"
        )
    if ranks % parallel.tensor:
        raise UserError(
            f"parallel.tensor: expected a divisor of the number of ranks, {ranks}, found {parallel.tensor}"
        )
    if parallel.tensor > 1:
        _check_tensor_parallel(config)
        ranks //= parallel.tensor
    if ranks % parallel.replicas:
        raise UserError(
            f"parallel.replicas: expected a divisor of the number of ranks, {ranks}, found {parallel.replicas}"
        )
    gathered = ranks // parallel.replicas
    if isinstance(parallel.reshard_after_forward, int) and gathered % parallel.reshard_after_forward:
        raise UserError(
            f"parallel.reshard_after_forward: expected a divisor of the number of ranks that shard parameters, "
            f"{gathered}, found {parallel.reshard_after_forward}"
        )
    if parallel.expert > 1:
        _check_expert_parallel(config, gathered)
    config.train.accumulation_steps(ranks)
    check_model_fits(config, world, ranks_of_host(world, under_launcher()), choose_device(config))


def _check_tensor_parallel(config: Config) -> None:
    """Refuse what tensor parallelism cannot be combined with, or does not divide."""
    ranks, shape = config.parallel.tensor, config.model.shape()
    if config.optimizer.name != "adamw":
        raise UserError(
            f"parallel.tensor: optimizer {config.optimizer.name!r} needs tensors or blocks that are not cut; expected "
            f'1, found {ranks}, or optimizer.name = "adamw"'
        )
    if config.train.cuda_graph:
        raise UserError(
            f"parallel.tensor: expected 1 with train.cuda_graph, found {ranks}; leave train.cuda_graph at its default"
        )
    for key, size, multiple in uneven(shape, config.train.seq_len, ranks):
        of_what = (
            f"parallel.tensor = {ranks}"
            if multiple == ranks
            else f"{multiple // ranks} x parallel.tensor = {multiple}"
        )
        raise UserError(f"{key}: expected a multiple of {of_what}, found {size}")


def _check_expert_parallel(config: Config, ranks: int) -> None:
    """Refuse what expert parallelism cannot be combined with, or does not divide. `ranks` share a replica's data."""
    parallel, shape = config.parallel, config.model.shape()
    if not isinstance(shape, HybridConfig) or "E" not in shape.pattern + shape.mtp_pattern:
        raise UserError(f"parallel.expert: expected 1 for a model without experts, found {parallel.expert}")
    found = {
        "optimizer.name": (config.optimizer.name, "adamw", "others need tensors or blocks that are not cut"),
        "train.cuda_graph": (config.train.cuda_graph, False, "sizes depend on the routing"),
        "train.compile": (config.train.compile, "none", "sizes depend on the routing"),
    }
    for key, (value, wanted, why) in found.items():
        if value != wanted:
            raise UserError(
                f"{key}: expected {wanted!r} with parallel.expert = {parallel.expert}, found {value!r}; {why}"
            )
    for what, size in (
        ("the number of ranks that share a replica", ranks),
        ("model.n_experts", shape.n_experts),
    ):
        if size % parallel.expert:
            raise UserError(f"parallel.expert: expected a divisor of {what}, {size}, found {parallel.expert}")
    same = ranks // parallel.expert
    if isinstance(parallel.reshard_after_forward, int) and same % parallel.reshard_after_forward:
        raise UserError(
            f"parallel.reshard_after_forward: expected a divisor of the number of ranks that have the same experts, "
            f"{same}, found {parallel.reshard_after_forward}"
        )


def check_batch_fits(train: TrainConfig, windows: int) -> None:
    """Refuse a global batch that no step would ever get through. `windows` is the sequences of the training text."""
    if train.global_batch > EPOCHS_PER_STEP * windows:
        raise UserError(
            f"train.global_batch: expected at most {EPOCHS_PER_STEP} times the {windows} sequences of the training "
            f"text (that is {EPOCHS_PER_STEP * windows}), found {train.global_batch}"
        )


def rank_and_size() -> tuple[int, int]:
    # Of one variable without the other nothing follows: some systems leave RANK behind.
    return (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if under_launcher() else (0, 1)


def pick_device(config: Config) -> torch.device:
    """The device of this rank. Raises UserError for what this rank, or every rank, cannot run. Waits for nobody."""
    _, size = rank_and_size()
    check_ranks(config, size)
    kind = choose_device(config)
    check_device(config, kind)
    device = torch.device(kind)
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"expected a GPU for each rank of this machine, found {torch.cuda.device_count()} for at least "
                f"{local + 1} ranks; give a smaller --nproc"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


@contextmanager
def join_world(config: Config, store: dist.Store | None = None) -> Iterator[World]:
    """Become a rank: pick the device, set up the process group (also for one rank), take it down again at the end.

    `store` is where the ranks of a launched job have met.
    """
    (rank, size), device = rank_and_size(), pick_device(config)
    kind = device.type
    options: dict[str, Any] = {"timeout": collective_timeout()}
    if store is not None or not under_launcher():
        meeting = dist.HashStore() if store is None else dist.PrefixStore("default_pg", store)
        options |= {"store": meeting, "rank": rank, "world_size": size}
    if kind == "cuda":
        options["device_id"] = device
    use_one_gloo_thread()
    # gloo beside NCCL: checkpoints exchange plain objects, which need not pass through the GPU.
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", **options)
    try:
        yield World(rank, size, device, make_mesh(config.parallel, kind, size), config.parallel.tensor)
        dist.barrier()  # Nobody leaves while another still works: a rank that is gone looks like one that died.
    except BaseException:
        # The other ranks may be anywhere: taking NCCL down could wait for them for ever.
        if kind == "cpu" or size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------
# The recipe


def make_mesh(config: ParallelConfig, kind: str, size: int) -> DeviceMesh:
    """All ranks, or with `replicas` a mesh of them outside and of shards inside; tensor-parallel ranks innermost."""
    data = size // config.tensor
    axes = {"data": data}
    if config.replicas > 1:
        axes = {"replicate": config.replicas, "shard": data // config.replicas}
    if config.tensor > 1:
        axes["tensor"] = config.tensor
    return init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))


def make_expert_mesh(config: ParallelConfig, mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in other dimensions: those that have the same experts, `edp`, then those that divide them."""
    sizes = {"replicate": config.replicas, "edp": 1, "expert": config.expert, "tensor": config.tensor}
    sizes["edp"] = mesh.size() // math.prod(sizes.values())
    axes = {name: size for name, size in sizes.items() if size > 1 or name in ("edp", "expert")}
    return init_device_mesh(mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def build_for(config: Config, vocab_size: int) -> Decoder:
    """The model of `config`, for `parallelize`: without memory where the engine can shard it so.

    Random numbers are drawn on the CPU for any device and engine, so that one seed means one model everywhere.
    """
    if not builds_deferred(config):
        return build_model(config.model, vocab_size)
    with sw.deferred_init(), torch.device("cpu"):
        return build_model(config.model, vocab_size)


def _give_values(model: nn.Module, device: torch.device) -> None:
    """Draw a deferred model's weights straight into its shards, tensor by tensor. Tables follow it to its device."""
    sw.materialize(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _source(model: nn.Module) -> int | None:
    """Whose values tensor-parallel ranks take: rank 0's, or each its own, which are the same and not there yet."""
    return None if any(has_no_values(parameter) for parameter in model.parameters()) else 0


def divide_experts(model: Decoder, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """Spread the model's experts over an axis of `mesh`, and cut them over the tensor-parallel one."""
    assert isinstance(model, Hybrid)
    source = _source(model)
    for name in expert_layers(model.config):
        axes = mesh["expert"] if config.tensor == 1 else mesh["expert", "tensor"]
        spread_experts(cast(MixtureOfExperts, model.get_submodule(name)), axes, source)


def cut_layers(model: Decoder, mesh: DeviceMesh, experts: DeviceMesh | None = None) -> DeviceMesh:
    """Cut the model's layers over the mesh's last axis; returns the mesh of the others, the data-parallel ones.

    Experts have been spread over the mesh `experts` before, if it is given.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    plan = tensor_plan(model.config, experts)
    parallelize_module(model, mesh[names[-1]], plan, src_data_rank=_source(model))
    if model.tied:  # which each became on its own
        model.output.weight = model.tok_embeddings.weight
    return mesh[names[0]] if len(names) == 2 else mesh[names[:-1]]


def axes_of(parameter: Tensor) -> tuple[str, ...]:
    """The names of the dimensions of the mesh that a parameter lies on; none of a plain one."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def parallel_loss(config: ParallelConfig) -> AbstractContextManager[object]:
    """Around forward, loss and backward: with tensor parallelism the cross-entropy of logits that are never whole."""
    return loss_parallel() if config.tensor > 1 else nullcontext()


def parallelize(model: Decoder, config: ParallelConfig, mesh: DeviceMesh) -> nn.Module:
    """The model, ready to train on the ranks of `mesh` with the engine of `config`. May return the same object.

    With the engine shardwright it may be a deferred one, which gets its values here.

    For the two engines with per-parameter sharding the units are: each block, the head with the final norm (and the
    embedding, where it is the same matrix), and the root with what is left.
    """
    device = torch.device("cpu" if mesh.device_type == "cpu" else torch.cuda.current_device())
    expert_mesh = make_expert_mesh(config, mesh) if config.expert > 1 else None
    if expert_mesh is not None:
        divide_experts(model.to(device), config, expert_mesh)
    if config.tensor > 1:
        mesh = cut_layers(model.to(device), mesh, expert_mesh and expert_mesh["expert"])
    if config.engine == "none":
        return model.to(device)

    if config.engine == "ddp":
        # The only buffers are rotary tables, equal everywhere: no need to broadcast them in every forward pass.
        # torch 2.13 renamed the option.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        buffers: dict[str, Any] = {no_broadcast: False}
        return DistributedDataParallel(
            model.to(device), device_mesh=mesh, gradient_as_bucket_view=True, **buffers
        )

    param_dtype, reduce_dtype = dtype_of(config.param_dtype), dtype_of(config.reduce_dtype)
    if config.engine == "fsdp1":
        keep = config.reshard_after_forward == "never"
        return FSDP1(
            model.to(device),
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks()}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            device_id=device,
            use_orig_params=True,
        )

    fully_shard: Any = sw.fully_shard if config.engine == "shardwright" else torch_fully_shard
    policy: TorchPolicy = TorchPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    if config.engine == "shardwright":
        policy = engine_policy(model, config)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if expert_mesh is not None:
        same = expert_mesh["replicate", "edp"] if config.replicas > 1 else expert_mesh["edp"]
        options["shard_placement_fn"] = lambda p: (
            sw.ShardPlacementResult(None, same) if "expert" in axes_of(p) else None
        )
    if config.engine == "shardwright":
        whole_rows = config.layout in ("per_parameter", "ragged")
        layout = config.layout if whole_rows else sw.Ragged(config.layout)
        options |= {"strategy": config.strategy, "layout": layout, "check_module_states": True}
        if config.offload != "none":
            with_weights = config.offload == "cpu"
            options["offload_policy"] = sw.Offload(parameters=with_weights, gradients=with_weights)
    # What forward uses last, backward needs first: by default it stays gathered.
    keeps = config.reshard_after_forward == "never" or config.strategy in ("zero1", "zero2")
    reshard = config.reshard_after_forward
    reshard_blocks: bool | int = reshard if isinstance(reshard, int) else not keeps
    reshard_last = config.reshard_after_forward == "always"

    *blocks, last_block = model.blocks()
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_blocks, **options)
    fully_shard(last_block, reshard_after_forward=reshard_last, **options)

    fully_shard(model.head(), reshard_after_forward=reshard_last, **options)

    if expert_mesh is not None:
        for block in model.blocks():
            # The gradient of an expert is the sum over the ranks whose tokens reach it before anything is reduced. So
            # all units divide by the ranks that have data of their own.
            cast(sw.FSDPModule, block).set_gradient_divide_factor(mesh.size())

    if config.engine == "shardwright":
        options |= {"memory": config.memory, "prefetch": config.prefetch}
    fully_shard(model, reshard_after_forward=reshard_last, **options)
    if isinstance(model, sw.FSDPModule):
        try:
            model.set_is_last_backward(True)  # the first call that looks at all units together
        except ValueError as error:
            raise UserError(
                f"parallel.memory: found {config.memory!r}, which this model refuses. {error}"
            ) from error
        _give_values(model, device)
    return model


# ---------------------------------------------------------------------------------------------------------------
# The calls in which engines differ


def compute_precision(config: ParallelConfig, device: torch.device) -> AbstractContextManager[object]:
    """Around forward and loss: autocast for the engines that leave the weights alone, nothing for the others."""
    if config.engine in ("none", "ddp") and config.param_dtype != "float32":
        return torch.autocast(device.type, dtype=dtype_of(config.param_dtype))
    return nullcontext()


def build_optimizer(model: nn.Module, config: Config, matrices: set[str]) -> torch.optim.Optimizer:
    """The configured optimizer, which decays the parameters named in `matrices` and no others.

    The names are those of the plain model: FSDP1 flattens its parameters, so their shapes no longer tell.
    """
    named = [(_plain_name(name), parameter) for name, parameter in model.named_parameters()]
    decayed = [pair for pair in named if pair[0] in matrices]
    others = [pair for pair in named if pair[0] not in matrices]
    optimizer = OPTIMIZERS[config.optimizer.name](decayed, others, config.optimizer)
    if config.parallel.engine != "shardwright":
        return optimizer
    try:
        wrap = sw.optim.in_backward if config.optimizer.in_backward else sw.fully_shard_optimizer
        return wrap(optimizer)
    except ValueError as error:  # a block that must stay whole is cut
        found = f"parallel.layout: found {config.parallel.layout!r}, which {config.optimizer.name} refuses."
        raise UserError(f"{found} {error} (For sw.Ragged(k) set parallel.layout to k.)") from error


Named = list[tuple[str, torch.nn.Parameter]]


def _adamw(decayed: Named, others: Named, settings: OptimizerConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [parameter for _, parameter in decayed]},
        {"params": [parameter for _, parameter in others], "weight_decay": 0.0},
    ]
    # The fused kernel is asked for with every engine, so that losses compare.
    return torch.optim.AdamW(
        groups, settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True
    )


def _adamw8bit(decayed: Named, others: Named, settings: OptimizerConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return sw.AdamW8bit(groups, settings.lr, settings.betas, settings.eps, settings.weight_decay)


def _muon(decayed: Named, others: Named, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Both rules have one rate and one decay, since Muon's updates are scaled to AdamW's."""
    return sw.Muon(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        ns_steps=settings.ns_steps,
        adjust_lr_fn="match_rms_adamw",
        adamw={
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "fused": True,
        },
    )


#: By `optimizer.name`: made of the parameters that are decayed, of those that are not, and of the section's values.
OPTIMIZERS: dict[str, Callable[[Named, Named, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
}


def matrix_names(model: nn.Module) -> set[str]:
    """Names of the plain model's parameters of two dimensions or more."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def _plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def clip_gradients(model: nn.Module, config: Config) -> Tensor | None:
    """Scale gradients down to `train.max_norm` over all ranks; return their norm before that, 0-d and plain.

    None where the optimizer has used them already.
    """
    if config.optimizer.in_backward:
        return None
    limit = config.train.max_norm or float("inf")
    if config.parallel.engine == "shardwright":
        return sw.clip_grad_norm_(model.parameters(), limit)
    if isinstance(model, FSDP1):
        return model.clip_grad_norm_(limit)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def gradient_sync(model: nn.Module, wanted: bool, last: bool) -> AbstractContextManager[object]:
    """Around forward and backward of one micro-batch: whether its gradients are reduced over the ranks.

    Without it they are kept whole on every rank until a micro-batch with it comes. What a strategy does once per step,
    such as the sum over replicas, it does in the `last` one.
    """
    if isinstance(model, DistributedDataParallel | FSDP1):
        return nullcontext() if wanted else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        cast(Any, model).set_requires_gradient_sync(wanted)
        cast(Any, model).set_is_last_backward(last)
    return nullcontext()


def free_gathered(model: nn.Module) -> None:
    """After passes without a backward: give back the weights that were kept gathered for one."""
    for module in model.modules():
        if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):
            cast(Any, module).reshard()
