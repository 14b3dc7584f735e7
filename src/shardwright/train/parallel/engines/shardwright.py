"""The engine of this package, which also draws or reads the values of a model without memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.engine.compat import MissingCompilerError
from shardwright.optim import ParameterNorms, clip_finite_grad_norm_
from shardwright.train.config.axes import axes_that_divide
from shardwright.train.config.catalog.optimizers import NamedOptimizer
from shardwright.train.config.sections.optimizer import OptimizerConfig
from shardwright.train.errors import UserError
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.parallel.engines.base import Ranks
from shardwright.train.parallel.engines.units import UnitEngine
from shardwright.train.parallel.precision import engine_policy


class ShardwrightEngine(UnitEngine):
    """`shardwright.fully_shard`, with every option that has a key."""

    def shard(self, module: Any, reshard: bool | int, options: dict[str, Any]) -> None:
        sw.fully_shard(module, reshard_after_forward=reshard, **options)

    def options(self, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        config = self.config
        layout = config.layout if isinstance(config.layout, str) else sw.Ragged(config.layout)
        options: dict[str, Any] = {
            "mesh": ranks.data,
            "mp_policy": engine_policy(model, config),
            "strategy": config.strategy,
            "layout": layout,
            "check_module_states": True,
        }
        if (same := ranks.same_experts) is not None:
            spread = {axis.name for axis in axes_that_divide("experts")}
            options["shard_placement_fn"] = lambda p: (
                None if spread.isdisjoint(_axes_of(p)) else sw.ShardPlacementResult(None, same)
            )
        if config.offload != "none":
            with_weights = config.offload == "cpu"
            options["offload_policy"] = sw.Offload(parameters=with_weights, gradients=with_weights)
        return options

    @property
    def frees_embeddings(self) -> bool:
        # The slots of the other kinds of memory have the size of the largest unit that is freed.
        return self.config.memory in ("dynamic", "arena")

    def shard_root(self, model: LanguageModel, reshard: bool, options: dict[str, Any]) -> None:
        config = self.config
        try:
            self.shard(model, reshard, options | {"memory": config.memory, "prefetch": config.prefetch})
        except MissingCompilerError as error:
            raise UserError(f"parallel.memory: found {config.memory!r}. {error}") from error

    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        sharded = super().spread(model, ranks)
        self._check_memory(cast(sw.FSDPModule, sharded))
        return sharded

    def give_values(self, model: nn.Module, device: torch.device, reads: bool) -> None:
        """Read or draw the weights straight into their shards, tensor by tensor. Tables follow them to the device."""
        if reads:
            cast(LanguageModel, model).read_weights()
        sw.materialize(model)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def _check_memory(self, model: sw.FSDPModule) -> None:
        """Raise UserError if the units do not fit `parallel.memory`."""
        config = self.config
        try:
            model.set_is_last_backward(True)  # the first call that looks at all units together
        except ValueError as error:
            if config.keeps_parameters:  # the engine's advice is about arguments that have no key here
                key = "strategy" if config.strategy_keeps_parameters else "reshard_after_forward"
                raise UserError(
                    f"parallel.memory: expected 'arena' or 'dynamic' with parallel.{key} {getattr(config, key)!r}, "
                    f"found {config.memory!r}; all units keep their full parameters, so no slot ever becomes free"
                ) from error
            raise UserError(
                f"parallel.memory: found {config.memory!r}, which does not work with this model. {error}"
            ) from error

    def clip_gradients(self, model: nn.Module, limit: float) -> Tensor:
        return clip_finite_grad_norm_(model.parameters(), limit)[0]

    def clip_with_units(self, model: nn.Module, limit: float) -> tuple[Tensor, ParameterNorms | None]:
        return clip_finite_grad_norm_(model.parameters(), limit, by_unit=True)

    def unit_norms(self, model: nn.Module) -> dict[str, float]:
        _, norms = clip_finite_grad_norm_(model.parameters(), float("inf"), by_unit=True)
        return {} if norms is None else norms.by_unit(norms.norms.tolist())

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, own: NamedOptimizer, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        try:
            wrap = sw.optim.in_backward if config.in_backward else sw.fully_shard_optimizer
            return wrap(optimizer, needs=own.needs)
        except ValueError as error:  # a block that must stay whole is cut
            raise UserError(
                f"parallel.layout: found {self.config.layout!r}, which does not work with {config.name}. "
                f"{error} (For sw.Ragged(k) set parallel.layout to k.)"
            ) from error


def _axes_of(parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the dimensions of the mesh that a parameter is on; none for a plain parameter."""
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
