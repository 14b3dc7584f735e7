"""torch's engines, for comparison, and none: a plain model on one rank."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP1,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from shardwright.train.models.language_model import LanguageModel
from shardwright.train.parallel.engines.base import Engine, Ranks
from shardwright.train.parallel.engines.units import UnitEngine
from shardwright.train.parallel.precision import dtype_of


class PlainEngine(Engine):
    """A plain model on one rank."""

    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        return model.to(ranks.device)


class DDPEngine(Engine):
    """DistributedDataParallel."""

    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        # The only buffers are rotary tables, equal everywhere: no need to broadcast them in every forward pass.
        # torch 2.13 renamed the option.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        no_broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {"gradient_as_bucket_view": True, no_broadcast: False}
        return DistributedDataParallel(model.to(ranks.device), device_mesh=ranks.data, **options)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        return cast(DistributedDataParallel, model).module

    def gradient_sync(
        self, model: nn.Module, synchronise: bool, last: bool
    ) -> AbstractContextManager[object]:
        return nullcontext() if synchronise else cast(DistributedDataParallel, model).no_sync()


class FSDP1Engine(Engine):
    """FullyShardedDataParallel, which flattens the parameters of each block."""

    def spread(self, model: LanguageModel, ranks: Ranks) -> nn.Module:
        keep = self.config.reshard_after_forward == "never"
        return FSDP1(
            model.to(ranks.device),
            device_mesh=ranks.data,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks()}),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
            mixed_precision=MixedPrecision(
                param_dtype=dtype_of(self.config.param_dtype), reduce_dtype=dtype_of(self.config.reduce_dtype)
            ),
            device_id=ranks.device,
            use_orig_params=True,
        )

    def gradient_sync(
        self, model: nn.Module, synchronise: bool, last: bool
    ) -> AbstractContextManager[object]:
        return nullcontext() if synchronise else cast(FSDP1, model).no_sync()

    def clip_gradients(self, model: nn.Module, limit: float) -> Tensor:
        """Return the gradients are also scaled by a norm that is not finite."""
        return cast(FSDP1, model).clip_grad_norm_(limit)


class FSDP2Engine(UnitEngine):
    """torch's `fully_shard`."""

    def shard(self, module: Any, reshard: bool | int, options: dict[str, Any]) -> None:
        fully_shard(module, reshard_after_forward=reshard, **options)

    def options(self, model: LanguageModel, ranks: Ranks) -> dict[str, Any]:
        param_dtype, reduce_dtype = dtype_of(self.config.param_dtype), dtype_of(self.config.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        return {"mesh": ranks.data, "mp_policy": policy}
