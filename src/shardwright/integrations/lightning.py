"""``ShardwrightStrategy``: Lightning Fabric on this engine. The one module that imports ``lightning``.

    from lightning.fabric import Fabric
    from shardwright.integrations.lightning import ShardwrightStrategy

    fabric = Fabric(devices=2, strategy=ShardwrightStrategy(auto_wrap_policy={Block}))

Processes are launched and joined as ``DDPStrategy`` does it; what it does with models, gradients and checkpoints is
replaced here. docs/fabric.md is the page for users.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import (
    BitsandbytesPrecision,
    CheckpointIO,
    ClusterEnvironment,
    DeepSpeedPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwright._torch import foreach_norm, local_of
from shardwright.checkpoint import load_pretrained
from shardwright.engine import FSDPModule, fully_shard
from shardwright.engine.construct import ShardPlacementFn
from shardwright.engine.parameter import has_no_values
from shardwright.engine.root import reduce_held
from shardwright.engine.wrap import as_policy
from shardwright.init import deferred_init, materialize
from shardwright.init.recorder import DeferredTensor
from shardwright.integrations import named_files, named_state
from shardwright.layout import Ragged, Strategy
from shardwright.memory import Allocator
from shardwright.optim import clip_grad_norm_, fully_shard_optimizer

AutoWrapPolicy = Collection[type[nn.Module]] | Callable[..., bool]

_OTHER_PRECISIONS = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)


class ShardwrightStrategy(DDPStrategy):
    """Shard models that Lightning Fabric sets up, their optimizers and their checkpoints.

        fabric = Fabric(devices=2, strategy=ShardwrightStrategy(auto_wrap_policy={Block}))
        fabric.launch()
        fabric.seed_everything(0)
        with fabric.init_module(empty_init=True):
            model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = fabric.setup(model, optimizer)

    Arguments that are not told here are those of :func:`shardwright.fully_shard` and of Fabric's ``DDPStrategy``.

    Args:
        auto_wrap_policy: which modules are units, besides the whole model: classes; a function of a module; or one of
            torch's policies, ``policy(module=, recurse=, nonwrapped_numel=)``. None: only the model, and modules that
            ``fully_shard`` was applied to before ``setup``.
        device_mesh: the mesh's sizes, ``(ranks,)`` or ``(replicas, shards)``. Default: all ranks in one dimension.
        state_dict_type: "sharded": ``fabric.save`` writes a folder, to which every rank adds its part; "full": one
            file, from rank 0, as an unsharded run writes it. ``fabric.load`` reads both.
        init: called with a model that was built on the meta device, once it is sharded, to initialise it. Default:
            each module's ``reset_parameters``. Models from ``fabric.init_module(empty_init=True)`` need none.
        sync_module_states: broadcast the values of models that were built for real from rank 0.
        check_module_states: raise where ranks have built different models.
        start_method: how ``fabric.launch`` makes processes: "popen" runs the script once more for each, "spawn",
            "fork" and "forkserver" call the function that ``launch`` is given.
    """

    def __init__(
        self,
        *,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        strategy: str | Strategy | None = None,
        layout: str | Ragged = "per_parameter",
        memory: str | Allocator = "dynamic",
        prefetch: int | str = 1,
        strict: bool = False,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: ShardPlacementFn | None = None,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
        device_mesh: tuple[int, ...] | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        init: Callable[[nn.Module], Any] | None = None,
        sync_module_states: bool = False,
        check_module_states: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        if state_dict_type not in ("sharded", "full"):
            raise ValueError(f'state_dict_type must be "sharded" or "full", got {state_dict_type!r}')
        self._auto_wrap_policy = _checked_policy(auto_wrap_policy)
        self._mesh_sizes = _checked_sizes(device_mesh)
        self._of_units = {
            "strategy": strategy,
            "layout": layout,
            "reshard_after_forward": reshard_after_forward,
            "shard_placement_fn": shard_placement_fn,
            "mp_policy": mp_policy,
            "sync_module_states": sync_module_states,
            "check_module_states": check_module_states and not sync_module_states,
        }
        self._of_root = {"memory": memory, "prefetch": prefetch, "strict": strict}
        self._state_dict_type = state_dict_type
        self._init = init
        self._mesh: DeviceMesh | None = None
        self._generators: list[bytes] = []  #: in what state they were when models without values were begun
        self._early: list[Optimizer] = []  #: set up before the model that they step
        self._backward_sync_control = _GradientSync()

    def __repr__(self) -> str:
        # Lightning's Trainer, which cannot take it, shows this in its error.
        return (
            f"<{type(self).__name__} of lightning.fabric.Fabric; the Trainer cannot use it: write the loop with "
            "Fabric, or run `shardwright train`>"
        )

    # -- processes -----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        joined_before = dist.is_initialized()
        super().setup_environment()
        if not joined_before:
            # Lightning leaves gloo's threads running, which abort the process at its end.
            atexit.register(_leave_processes)
        if self._mesh is None:
            world = dist.get_world_size()
            sizes = self._mesh_sizes or (world,)
            if torch.Size(sizes).numel() != world:
                raise ValueError(
                    f"device_mesh={sizes} is a mesh of {torch.Size(sizes).numel()} ranks, and there are {world}. Give "
                    "sizes whose product is devices * num_nodes."
                )
            names = ("replicate", "shard")[-len(sizes) :]
            self._mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which models are sharded, once processes are launched."""
        if self._mesh is None:
            raise RuntimeError("The strategy has no mesh before fabric.launch().")
        return self._mesh

    # -- precision -----------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if isinstance(precision, _OTHER_PRECISIONS):
            raise TypeError(
                f"{type(self).__name__} does not support {type(precision).__name__}. Choose precision='32-true', "
                "'64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed', or pass mp_policy."
            )
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = _scaler(precision.scaler, precision.device)
        self._precision = precision

    # -- models and optimizers -----------------------------------------------------------------------------------------

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init`` models take no memory, and ``setup`` gives them the values that they would have had.

        Otherwise they are built on the CPU, and ``setup`` moves what this rank keeps to its device.
        """
        with self.precision.module_init_context():
            if not empty_init:
                yield
                return
            self._generators.append(_state_of_generators(self.root_device))
            with deferred_init():
                yield

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: ``setup`` moves each rank's part, never the whole model."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shard a model in place, and give it its values if it has none."""
        _refuse_wrapped(module)
        mesh = self.device_mesh
        empty = [t for t in (*module.parameters(), *module.buffers()) if has_no_values(t)]
        if any(isinstance(t, DeferredTensor) for t in empty):
            self._check_generators()
        for unit in _units(module, self._auto_wrap_policy):
            fully_shard(unit, mesh=mesh, **self._of_units)  # type: ignore[arg-type]
        fully_shard(module, mesh=mesh, **self._of_units, **self._of_root)  # type: ignore[arg-type]
        on_meta = any(t.is_meta for t in empty)
        before = _state_of_generators(self.root_device)
        materialize(module, init=partial(self._init, module) if on_meta and self._init else None)
        if on_meta:
            drew = _state_of_generators(self.root_device) != before
            self._generators.append(before if drew else b"")
            self._check_generators()
        for optimizer in self._early:
            fully_shard_optimizer(optimizer)
        self._early = [o for o in self._early if not _is_sharded(o)]
        return _Forward(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let it step on shards, in place; its parameters may be those that the model had before ``setup``."""
        fully_shard_optimizer(optimizer)
        if not _is_sharded(optimizer):
            self._early.append(optimizer)
        return optimizer

    def _check_generators(self) -> None:
        """What ranks have initialised is the same model only if their generators were in the same state."""
        mine, self._generators = b"".join(self._generators), []
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        different = [rank for rank, each in enumerate(found) if each != found[0]]
        if different:
            raise ValueError(
                f"Rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} began to initialise the model from "
                "another state of the random generators than rank 0, so they build different ones. Call "
                "fabric.seed_everything(seed), with one seed for all ranks, before the model is made."
            )

    # -- gradients -----------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """By the norm of the whole gradients, over all ranks."""
        _sharded(module, "clip_gradients")
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(
            self.precision.main_params(optimizer),
            max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @torch.no_grad()
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Each element by itself, where it lies."""
        _sharded(module, "clip_gradients")
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        reduce_held(parameters)
        for gradient in _local_gradients(parameters):
            gradient.clamp_(-float(clip_val), float(clip_val))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        raise NotImplementedError(f"{type(self).__name__} writes checkpoints itself, without a CheckpointIO.")

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} writes checkpoints itself. Leave {type(io).__name__} out of Fabric(plugins=...)."
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return _sharded(module, "state_dict").state_dict()  # type: ignore[no-any-return]

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        _sharded(module, "load_state_dict").load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a state as one file or as a folder; see ``state_dict_type``. Every rank must call it."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} has no storage_options: it writes to the file system.")
        save = named_state.save_full if self._state_dict_type == "full" else named_state.save_sharded
        save(self._common_path(path), _unwrapped(state), self.device_mesh, filter or {})

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore a state from a file or folder, or a single model from a file of weights. Every rank must call it."""
        path = self._common_path(path)
        if isinstance(state, nn.Module):
            self._load_weights(path, state, strict, weights_only)
            return {}
        if isinstance(state, Optimizer):
            raise NotImplementedError(
                f"{type(self).__name__} needs the model to load an optimizer, since it goes by names. Use "
                "fabric.load(path, {'model': model, 'optimizer': optimizer})."
            )
        if not state:
            if named_files.is_sharded(path):
                raise ValueError(
                    f"{path} is a sharded checkpoint, which is loaded into a model. Pass "
                    "fabric.load(path, state={'model': model, ...})."
                )
            return named_files.read_file(path, weights_only)  # type: ignore[no-any-return]
        unwrapped = _unwrapped(state)
        rest = named_state.load(path, unwrapped, self.device_mesh, strict, weights_only)
        state.update({key: value for key, value in unwrapped.items() if not isinstance(value, nn.Module)})
        return rest

    def _load_weights(self, path: Path, module: nn.Module, strict: bool, weights_only: bool | None) -> None:
        """Into a model that is set up, or is still to be; deferred ones remember the weights until they are."""
        model = module.module if isinstance(module, _Forward) else module
        if not isinstance(model, FSDPModule) and any(
            t.is_meta for t in (*model.parameters(), *model.buffers())
        ):
            raise TypeError(
                f"load_raw was given a {type(model).__name__} on the meta device, where there is nothing to load into. "
                "Set it up first (model = fabric.setup(model)), or build it under fabric.init_module(empty_init=True)."
            )
        if named_files.is_sharded(path):
            raise ValueError(
                f"{path} is a sharded checkpoint, not a file of weights. Use fabric.load(path, {{'model': model}})."
            )
        if path.is_dir() or path.name.endswith((".safetensors", ".json")):
            load_pretrained(model, path, allow_missing=not strict, allow_unexpected=not strict)
        else:
            model.load_state_dict(named_files.read_file(path, weights_only), strict=strict)

    def _common_path(self, path: str | Path) -> Path:
        path = self.broadcast(path)
        if "://" in str(path):
            raise ValueError(
                f"{path} is remote, and {type(self).__name__} writes to and reads from file systems only."
            )
        return Path(path)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """None: it is passed as an object, since its options are."""


class _Forward(nn.Module):
    """What Fabric calls: another module than the user's, so that methods marked as forward methods come through it.

    Fabric puts such a method in the place of ``forward`` for one call.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _GradientSync:
    """What ``fabric.no_backward_sync`` asks for."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        model = _sharded(module, "no_backward_sync")
        units = model._fsdp_units(recurse=True)
        before = [unit.settings.sync for unit in units]
        model.set_requires_gradient_sync(not enabled)
        try:
            yield
        finally:
            for unit, sync in zip(units, before, strict=True):
                unit.change(sync=sync)


class _Scaler(GradScaler):
    """Unscales gradients where they lie. What is not finite on one rank skips the step on all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unscaled: set[int] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        reduce_held(parameters)
        gradients = _local_gradients(parameters)
        groups = [group["params"] for group in optimizer.param_groups]
        try:
            # The gradients of one rank, and one more that tells of the other ranks'.
            for group in optimizer.param_groups:
                group["params"] = []
            told = [*gradients, _infinite_anywhere(gradients)] if gradients else []
            optimizer.param_groups[0]["params"] = [_owner_of(each) for each in told]
            super().unscale_(optimizer)
        finally:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self.is_enabled() and id(optimizer) not in self._unscaled
        ):  # fused ones would go by what is not reduced yet
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._unscaled.clear()


def _owner_of(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor that has this gradient."""
    owner = gradient.detach()
    owner.grad = gradient
    return owner


def _infinite_anywhere(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One element, the same on every rank: infinite if any element of theirs is not finite, else 0."""
    filled = [g for g in gradients if g.numel()]
    largest = torch.stack([n.float() for n in foreach_norm(filled, math.inf)]) if filled else torch.zeros(1)
    found = largest.isfinite().all().logical_not().float().to(gradients[0].device).view(1)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return torch.where(found > 0, math.inf, 0.0)


def _scaler(given: Any, device: str) -> GradScaler:
    if isinstance(given, _Scaler):
        return given
    if type(given) not in (GradScaler, torch.cuda.amp.GradScaler):
        raise TypeError(
            f"A {type(given).__name__} does not know of other ranks' gradients. Pass MixedPrecision a "
            "torch.amp.GradScaler, whose settings are taken over."
        )
    scaler = _Scaler(device=device, enabled=given.is_enabled())
    if given.is_enabled():
        scaler.load_state_dict(given.state_dict())
    return scaler


def _local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of those gradients that there are; of plain parameters the whole."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [local_of(g) if hasattr(g, "to_local") else g for g in gradients]


def _is_sharded(optimizer: Optimizer) -> bool:
    """Whether a parameter of it is: else its model is still to come, or it steps none that is set up."""
    return any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"])


def _leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _state_of_generators(device: torch.device) -> bytes:
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device.type).get_rng_state(device))
    return hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).digest()


def _unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.module if isinstance(value, _Forward) else value for key, value in state.items()}


def _sharded(module: nn.Module, doing: str) -> Any:
    module = module.module if isinstance(module, _Forward) else module
    if not isinstance(module, FSDPModule):
        raise TypeError(
            f"{doing} was given a {type(module).__name__} that is not sharded. Set it up first: "
            "model = fabric.setup(model)."
        )
    return module


def _refuse_wrapped(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"This {type(module).__name__} is sharded already: a model is set up once, and the strategy's options "
            "would not hold for it. Pass the model before fully_shard; units inside it may be sharded."
        )
    for name, inner in module.named_modules():
        torchs = isinstance(inner, TorchFSDPModule) and not isinstance(inner, FSDPModule)
        if torchs or isinstance(inner, (DistributedDataParallel, FullyShardedDataParallel)):
            raise TypeError(
                f"The model has a {type(inner).__name__} at {name!r}, which torch shards or replicates itself. Pass it "
                "unwrapped."
            )


# -- units -------------------------------------------------------------------------------------------------------------


def _checked_sizes(sizes: Any) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if (
        not isinstance(sizes, (tuple, list))
        or len(sizes) not in (1, 2)
        or not all(isinstance(n, int) and n > 0 for n in sizes)
    ):
        raise ValueError(f"device_mesh must be one or two sizes, such as (replicas, shards), got {sizes!r}")
    return tuple(sizes)


def _checked_policy(policy: Any) -> AutoWrapPolicy | None:
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        return policy  # type: ignore[no-any-return]
    classes = tuple(policy) if isinstance(policy, (set, frozenset, list, tuple)) else ()
    if classes and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        return classes
    raise TypeError(
        f"auto_wrap_policy must be module classes, such as {{Block}}, or a function of a module, got {policy!r}"
    )


def _units(model: nn.Module, policy: Any) -> list[nn.Module]:
    """The modules below ``model`` that are to be units, inner ones first."""
    if policy is None:
        return []
    if isinstance(policy, tuple) and not any(isinstance(m, policy) for m in model.modules()):
        found = sorted({type(m).__name__ for m in model.modules()})
        warnings.warn(  # right for a small model beside the one that the policy is for
            f"auto_wrap_policy names {', '.join(c.__name__ for c in policy)}, and this model has only "
            f"{', '.join(found)}: all of it is one unit, gathered at once.",
            stacklevel=4,
        )
        return []
    return [unit for unit in as_policy(policy)(model) if unit is not model]  # type: ignore[misc]
