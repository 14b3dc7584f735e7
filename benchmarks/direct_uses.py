#!/usr/bin/env python3
"""Do programs train that use weights without a call of their unit? This engine and torch's FSDP2, on two CPU ranks.

    PYTHONPATH=src:. torchrun --nproc-per-node 2 benchmarks/direct_uses.py

Prints for each program of ``tests/engine/kit/direct.py`` whether the gradients of one step are those of the plain model
on the data of all ranks, or the error. Two towers in the shape of pi0.5 are the first of them, a table of positions in
that of GLM-4V another, and a loss that takes the output layer's weight after the forward.
"""

from __future__ import annotations

import atexit
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2

import shardwright as sw
from tests.engine.kit.direct import PROGRAMS, loss_of


def outcome(name: str, fully_shard: Callable[[Any], Any]) -> str:
    """Return what one step of a program does with this engine."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = PROGRAMS[name].model()
    model = copy.deepcopy(plain)
    for r in range(ranks):
        (loss_of(name, plain, r, 0) / ranks).backward()
    try:
        for unit in model.units():
            fully_shard(unit)
        fully_shard(model)
        loss_of(name, model, rank, 0).backward()
    except Exception as error:  # every engine has its own
        return f"{type(error).__name__}: {str(error)[:60]}"
    wrong = [
        parameter
        for (parameter, p), q in zip(plain.named_parameters(), model.parameters(), strict=True)
        if (p.grad is None) != (q.grad is None)
        or (p.grad is not None and not torch.allclose(p.grad, q.grad.full_tensor(), atol=1e-6))
    ]
    return f"WRONG: {wrong[0]}" if wrong else "equal"


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    for name in PROGRAMS:
        ours, theirs = outcome(name, sw.fully_shard), outcome(name, fsdp2.fully_shard)
        if dist.get_rank() == 0:
            print(f"{name:20}  shardwright {ours:8}  FSDP2 {theirs}", flush=True)


if __name__ == "__main__":
    main()
