#!/usr/bin/env python3
"""The host time of an optimizer's step on a sharded model, beside the same optimizer on plain tensors.

    python benchmarks/optimizer_time.py [--ranks 8] [--layers 12] [--dim 64] [--rounds 60] [--only clip,muon]

One process is rank 0 of torch's fake process group, whose collectives send nothing. Three forms of each optimizer run
in turn: "sharded" on this rank's shards; "local" on plain tensors of the same sizes, which for Muon are the matrices
that this rank steps; and "whole" on the plain model. Gradients are set once. Clipping uses each library's own function.

Prints for each optimizer the median processor time of "sharded", its ratios to "local" and "whole" (medians over the
rounds), and the dispatched operations and Python calls of "sharded" and "local". Counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.train.models.native.llama import Llama, LlamaConfig

Step = Callable[[], Any]


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3, **options)


def muon(named: Any) -> torch.optim.Optimizer:
    return sw.Muon(named, lr=0.02, adamw={"lr": 1e-3})


def adamw8bit(named: Any) -> torch.optim.Optimizer:
    # Every form has codes for the same elements, also where a local tensor is small.
    return sw.AdamW8bit([p for _, p in named], lr=1e-3, min_size=256)


#: Name: the optimizer, the layout, and whether a step clips first.
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer] | None, Any, bool]] = {
    "clip": (None, "per_parameter", True),
    "AdamW foreach": (adamw(foreach=True), "per_parameter", False),
    "AdamW fused": (adamw(fused=True), "per_parameter", False),
    "clip + AdamW": (adamw(), "per_parameter", True),
    "clip + AdamW fused": (adamw(fused=True), "per_parameter", True),
    "Muon": (muon, "per_parameter", False),
    "AdamW8bit": (adamw8bit, sw.Ragged(256), False),
}


def llama(args: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    heads = {"n_heads": 4, "n_kv_heads": 4, "ffn_dim": 4 * args.dim}
    return Llama(LlamaConfig(dim=args.dim, n_layers=args.layers, vocab_size=256, max_seq_len=8, **heads))


def forms(name: str, args: argparse.Namespace) -> dict[str, Step]:
    make, layout, clips = CASES[name]
    whole, model = llama(args), llama(args)
    for block in model.layers:
        sw.fully_shard(block, layout=layout)
    sw.fully_shard(model, layout=layout)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for each in (whole, model):
        each(tokens).float().sum().backward()
    named = dict(model.named_parameters())
    sharded = make(named.items()) if make is not None else None
    sizes = {key: p.to_local().shape for key, p in named.items()}
    if sharded is not None:
        sharded = sw.fully_shard_optimizer(sharded)
    if name == "Muon":
        sharded.step()  # makes state; its owner has all of it
        for group in sharded.param_groups:
            for key, p in zip(group["param_names"], group["params"], strict=True):
                if group["muon"]:
                    momentum = sharded.state[p].get("momentum_buffer")
                    steps_here = momentum is not None and momentum.to_local().numel() > 0
                    sizes[key] = p.shape if steps_here else None
    local = {}
    for key, size in sizes.items():
        if size is not None:
            local[key] = nn.Parameter(torch.randn(size))
            local[key].grad = torch.randn(size)

    def step_of(named: Any, clip: Any, optimizer: torch.optim.Optimizer | None) -> Step:
        parameters = [p for _, p in named]

        def step() -> None:
            if clips:
                clip(parameters, 1.0)
            if optimizer is not None:
                optimizer.step()

        return step

    torchs = nn.utils.clip_grad_norm_
    plain = {"local": list(local.items()), "whole": list(whole.named_parameters())}
    return {
        "sharded": step_of(named.items(), sw.clip_grad_norm_, sharded),
        **{
            form: step_of(own, torchs, make(own) if make is not None else None) for form, own in plain.items()
        },
    }


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(step: Step) -> int:
    with Operations() as mode:
        step()
    return mode.count


def python_calls(step: Step) -> int:
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def timed(step: Step) -> float:
    """The processor's time in microseconds."""
    start = time.process_time_ns()
    step()
    return (time.process_time_ns() - start) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default=",".join(CASES), help=f"some of: {', '.join(CASES)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}, rank 0 of {args.ranks} (fake)"
    )
    print(f"Llama of {args.layers} layers, dim {args.dim}; {args.rounds} rounds")
    print("| step | sharded | to local | to whole | operations, local's | Python calls, local's |")
    print("|---|---|---|---|---|---|")
    for name in args.only.split(","):
        steps = forms(name, args)
        times: dict[str, list[float]] = {form: [] for form in steps}
        for number in range(args.rounds + 5):
            if number == 5:
                gc.collect()
                gc.freeze()
            for form, step in steps.items():
                elapsed = timed(step)
                if number >= 5:
                    times[form].append(elapsed)
        gc.unfreeze()
        ratios = [
            statistics.median(a / b for a, b in zip(times["sharded"], times[form], strict=True))
            for form in ("local", "whole")
        ]
        counts = [f(steps[form]) for f in (operations, python_calls) for form in ("sharded", "local")]
        print(
            "| {} | {:.0f} us | {:.2f} | {:.2f} | {}, {} | {}, {} |".format(
                name, statistics.median(times["sharded"]), *ratios, *counts
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
