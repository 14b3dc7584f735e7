"""DeepSpeed's ZeRO stages on CPU ranks, with the same AdamW. Needs ``pip install deepspeed``.

DeepSpeed's sizes are made for large models: with its defaults ZeRO-3 never cuts parameters of under 100,000 elements,
frees no parameters between forward and backward, and reduces through a buffer of 2 GB. So the contenders get limits of
the size of a unit, and ``defaults=True`` leaves all of them as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.shapes import largest_unit, loss_of
from benchmarks.peers.step import CLIP, Step, adamw_options


def deepspeed(stage: int, defaults: bool = False) -> Callable[[nn.Module, str], Step]:
    def build(model: nn.Module, adamw: str) -> Step:
        _start()
        import deepspeed as library

        zero: dict[str, Any] = {"stage": stage}
        if not defaults:
            zero |= _limits(largest_unit(model), stage)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "zero_optimization": zero,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **adamw_options(adamw))
        engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: Tensor, weight: float) -> tuple[Any, Any]:
            loss = loss_of(engine, tokens) * weight
            engine.backward(loss)
            engine.step()  # clips, steps and ends the gradients
            return loss.detach(), engine.get_global_grad_norm()

        return step

    return build


def _limits(unit: int, stage: int) -> dict[str, Any]:
    if stage < 3:
        return {"reduce_bucket_size": unit, "allgather_bucket_size": unit}
    return {
        "reduce_bucket_size": unit,
        "stage3_prefetch_bucket_size": unit,  # one unit ahead, as the other engines
        "stage3_max_live_parameters": 2 * unit,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }


def _start() -> None:
    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    ranks["LOCAL_SIZE"] = dist.get_world_size()
    os.environ.update({name: str(value) for name, value in ranks.items()})
    import deepspeed as library
    import deepspeed.ops as operators

    # Only inference uses these all-reduces. Building them takes minutes and every rank would begin it.
    operators.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    library.init_distributed(dist_backend=dist.get_backend())
