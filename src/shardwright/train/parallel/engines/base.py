"""The calls of a job in which engines differ. A method with a body here is what most engines do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.optim import ParameterNorms
from shardwright.train.config import ParallelConfig
from shardwright.train.config.catalog.optimizers import NamedOptimizer
from shardwright.train.config.sections.optimizer import OptimizerConfig
from shardwright.train.models.language_model import LanguageModel
from shardwright.train.parallel.precision import dtype_of


class Ranks(NamedTuple):
    """The ranks of a model, as one of them sees them.

    Attributes:
        data: those with data of their own, as a mesh.
        device: of this rank.
        same_experts: those that have the same experts, as a mesh; None if experts are not spread.
    """

    data: DeviceMesh
    device: torch.device
    same_experts: DeviceMesh | None = None


class Engine(ABC):
    """An engine with the values of `[parallel]`. It has no state: models are arguments."""

    def __init__(self, config: ParallelConfig) -> None:
        self.config = config

    @abstractmethod
    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        """Return the model, ready to train on these ranks. May return the same object."""

    def give_values(self, model: nn.Module, device: torch.device, reads: bool) -> None:
        """Give a model that was built without memory its values: stored ones if it `reads`, else drawn ones."""
        return

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the module of the model's own class in what `spread` returned."""
        return model

    def compute_precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Around forward and loss: autocast if the engine leaves the weights alone."""
        if self.config.facts.casts_weights or self.config.param_dtype == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=dtype_of(self.config.param_dtype))

    def gradient_sync(
        self, model: nn.Module, synchronise: bool, last: bool
    ) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch: whether its gradients are reduced over the ranks.

        Without it they are kept whole on every rank until a micro-batch with it comes. A strategy's reductions of a
        step, such as the sum over replicas, run in the `last` micro-batch.
        """
        return nullcontext()

    def clip_gradients(self, model: nn.Module, limit: float) -> Tensor:
        """Scale gradients down to the norm `limit` over all ranks; return their norm before that, 0-d and plain.

        If the norm is not finite, the gradients stay as they are, so that a wrong one can be named.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # A norm of 0 leaves them.
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), limit, torch.where(norm.isfinite(), norm, 0.0)
        )
        return norm

    def clip_with_units(self, model: nn.Module, limit: float) -> tuple[Tensor, ParameterNorms | None]:
        """Clip, and return the norms by unit, too. None: the engine reports no unit."""
        return self.clip_gradients(model, limit), None

    def unit_norms(self, model: nn.Module) -> dict[str, float]:
        """Return the norms of gradients as they are now, over all ranks, by unit. The host waits for them. Empty: the
        engine reports no unit."""
        return {}

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, own: NamedOptimizer, config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        """Return the optimizer of parameters that `spread` has spread. `own`: its entry in the registry.

        Raises:
            UserError: it cannot step on them.
        """
        return optimizer

    def free_gathered(self, model: nn.Module) -> None:
        """After passes without a backward: release the weights that were kept gathered for it."""
        return
