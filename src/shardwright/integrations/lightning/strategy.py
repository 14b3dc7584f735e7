"""``ShardwrightStrategy``, the object that Fabric calls. This is the one file that imports ``lightning``.

It derives from Lightning's ``DDPStrategy``, which launches the processes and lets them join. Its own methods come in
the order in which Fabric calls them: the process, models and optimizers, gradients, checkpoints.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

try:
    from lightning.fabric.accelerators import Accelerator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ShardwrightStrategy needs the extra lightning ({error}): pip install -e '.[lightning]' in the checkout",
        name=error.name,
    ) from error

import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from shardwright.engine import TAKEN, Managed, ShardPlacementFn, fully_shard, has_no_values
from shardwright.engine.layout import Ragged, Strategy
from shardwright.engine.memory import Allocator
from shardwright.init import DeferredTensor, deferred_init, materialize
from shardwright.integrations.lightning.checkpoints import (
    load_state,
    load_weights,
    read_state,
    save_full,
    save_sharded,
)
from shardwright.integrations.lightning.gradients import GradientSync, clip_values, scaler_of
from shardwright.integrations.lightning.models import (
    AutoWrapPolicy,
    Forward,
    GeneratorStates,
    checked_policy,
    checked_sizes,
    mesh_of,
    refuse_wrapped,
    sharded_model,
    state_of_generators,
    units_of,
)
from shardwright.optim import clip_grad_norm_, fully_shard_optimizer

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

    Other arguments have the meaning that they have in :func:`shardwright.fully_shard` and Fabric's ``DDPStrategy``.

    Args:
        auto_wrap_policy: which modules are units, besides the whole model: classes; a function of a module; or one of
            torch's policies, ``policy(module=, recurse=, nonwrapped_numel=)``. None: only the model, and modules that
            ``fully_shard`` was applied to before ``setup``.
        device_mesh: the mesh's sizes, ``(ranks,)`` or ``(replicas, shards)``. Default: all ranks in one dimension.
        state_dict_type: "sharded": ``fabric.save`` writes a folder with a part from every rank. "full": rank 0 writes
            one file, as an unsharded run does. ``fabric.load`` reads both.
        init: initialises a model that was built on the meta device, after it is sharded. Default: each module's
            ``reset_parameters``. Models from ``fabric.init_module(empty_init=True)`` need none.
        sync_module_states: broadcast the values of models with memory from rank 0.
        check_module_states: raise an error if ranks have built different models.
        start_method: how ``fabric.launch`` starts processes. "popen" runs the script again for each process. "spawn",
            "fork" and "forkserver" call the function that you pass to ``launch``.
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
        self._auto_wrap_policy = checked_policy(auto_wrap_policy)
        self._mesh_sizes = checked_sizes(device_mesh)
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
        self._generators = GeneratorStates()
        self._early: list[Optimizer] = []  #: optimizers that were set up before their model
        self._backward_sync_control = GradientSync()

    def __repr__(self) -> str:
        # Lightning's Trainer, which cannot use this strategy, prints this in its error.
        return (
            f"<{type(self).__name__} of lightning.fabric.Fabric; the Trainer cannot use it: write the loop with "
            "Fabric, or run `shardwright train`>"
        )

    # -- start ---------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        joined_before = dist.is_initialized()
        super().setup_environment()
        if not joined_before:
            # Lightning leaves gloo's threads running, which abort the process at its end.
            atexit.register(_leave_processes)
        if self._mesh is None:
            self._mesh = mesh_of(self._mesh_sizes, self.root_device)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which models are sharded, which exists once ``fabric.launch`` has started the processes."""
        if self._mesh is None:
            raise RuntimeError("The strategy has no mesh before fabric.launch().")
        return self._mesh

    # -- training: precision -------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = _checked_precision(precision, type(self).__name__)

    # -- training: models and optimizers -------------------------------------------------------------------------------

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build models inside this context: with ``empty_init`` without memory, else on the CPU.

        ``setup`` gives models without memory the values of a plain build. Of others it moves this rank's part to its
        device.
        """
        with self.precision.module_init_context():
            if not empty_init:
                yield
                return
            self._generators.add(state_of_generators(self.root_device))
            with deferred_init():
                yield

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing, because ``setup`` moves each rank's part and never the whole model."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shard a model in place, and give it its values if it has none."""
        refuse_wrapped(module)
        mesh = self.device_mesh
        empty = [t for t in (*module.parameters(), *module.buffers()) if has_no_values(t)]
        on_meta = any(t.is_meta for t in empty)  # fully_shard changes the tensors themselves
        if any(isinstance(t, DeferredTensor) for t in empty):
            self._generators.check()
        for unit in units_of(module, self._auto_wrap_policy):
            fully_shard(unit, mesh=mesh, **self._of_units)  # type: ignore[arg-type]
        fully_shard(module, mesh=mesh, **self._of_units, **self._of_root)  # type: ignore[arg-type]
        if on_meta:
            with self._generators.watched(self.root_device):
                materialize(module, init=partial(self._init, module) if self._init else None)
        else:
            materialize(module)
        self._early = [optimizer for optimizer in self._early if not _sharded(optimizer)]
        return Forward(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer step on shards, in place. It may have the model's parameters from before ``setup``."""
        if not _sharded(optimizer):
            self._early.append(optimizer)
        return optimizer

    # -- training: gradients -------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of the whole gradients, over all ranks."""
        sharded_model(module, "clip_gradients")
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(
            self.precision.main_params(optimizer),
            max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element by its value, in the local parts."""
        sharded_model(module, "clip_gradients")
        self.precision.unscale_gradients(optimizer)
        clip_values(list(self.precision.main_params(optimizer)), clip_val)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        raise NotImplementedError(f"{type(self).__name__} writes checkpoints itself and has no CheckpointIO.")

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} writes checkpoints itself. Remove {type(io).__name__} from Fabric(plugins=...)."
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return sharded_model(module, "state_dict").state_dict()  # type: ignore[no-any-return]

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        sharded_model(module, "load_state_dict").load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a state as one file or as a folder; see ``state_dict_type``. Every rank must call it."""
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} writes to the file system and has no storage_options. Call save without them."
            )
        save = save_full if self._state_dict_type == "full" else save_sharded
        save(self._common_path(path), state, filter or {})

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
            load_weights(path, state, strict, weights_only)
            return {}
        if isinstance(state, Optimizer):
            raise NotImplementedError(
                f"{type(self).__name__} needs the model to load an optimizer, since optimizer state is stored by "
                "parameter names. Use fabric.load(path, {'model': model, 'optimizer': optimizer})."
            )
        if not state:
            return read_state(path, weights_only)
        return load_state(path, state, strict, weights_only)

    def _common_path(self, path: str | Path) -> Path:
        """Return the first rank's path. Raises ValueError for a URL."""
        path = self.broadcast(path)
        if "://" in str(path):
            raise ValueError(
                f"{path} is a remote path, but {type(self).__name__} reads and writes only local file systems. Use a "
                "local path."
            )
        return Path(path)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing, because users pass the strategy as an object with its options."""


def _checked_precision(precision: Precision | None, strategy: str) -> Precision | None:
    """Return the same object, with a scaler for sharded gradients if it has one. Errors name ``strategy``."""
    if isinstance(precision, _OTHER_PRECISIONS):
        raise TypeError(
            f"{strategy} does not support {type(precision).__name__}. Choose precision='32-true', "
            "'64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed', or pass mp_policy."
        )
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        precision.scaler = scaler_of(precision.scaler, precision.device)
    return precision


def _sharded(optimizer: Optimizer) -> bool:
    """Shard an optimizer if its model is set up. Return whether it is sharded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(p, Managed) or TAKEN in p.__dict__ for p in parameters):
        fully_shard_optimizer(optimizer)
    return any(hasattr(p, "to_local") for group in optimizer.param_groups for p in group["params"])


def _leave_processes() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
