#!/usr/bin/env python3
"""The host time of a unit in a step: this engine and torch's FSDP2, in turn in one process.

    python benchmarks/host_time.py [--units 24] [--ranks 2] [--bf16] [--rounds 40]

A step is forward, backward, clipping and AdamW over a chain of small units, each library with functions of its own.
Collectives are those of torch's fake process group, which copies on the host and sends nothing; its time is in the
figures of both. Prints for each library, per unit and step, less the plain model's figures: operations that pass
torch's dispatcher in forward and backward, and the processor's time (lower quartile of the rounds) of forward and
backward, and of clipping and AdamW. Then the ratios to FSDP2.

"least" shows what the same collectives cost from Python without an engine around them: the class ``Least`` gathers,
releases, packs and reduces, and does nothing else. It does not prefetch, keeps no edit of a weight, supports one use of
each unit, and checks nothing. No engine that is written in Python can be cheaper than that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


class Least:
    """One unit in zero3 with nothing but its three collectives, for a module with one input that is called once."""

    def __init__(self, module: nn.Module, compute: torch.dtype | None) -> None:
        self.ranks = dist.get_world_size()
        self.slots = [(m._parameters, name) for m in module.modules() for name in m._parameters]
        whole = [registry[name] for registry, name in self.slots]
        dtype = compute or whole[0].dtype
        rows = [-(-p.shape[0] // self.ranks) for p in whole]
        sizes = [n * p[0].numel() for n, p in zip(rows, whole, strict=True)]
        self.shards = [nn.Parameter(p.detach()[:n].clone()) for n, p in zip(rows, whole, strict=True)]
        self.cast = [torch.empty_like(p, dtype=dtype) for p in self.shards] if compute else []
        self.sent = [p.detach().view(-1).view(torch.uint8) for p in (self.cast or self.shards)]
        self.nbytes = sum(self.ranks * size * dtype.itemsize for size in sizes)
        self.storage = torch.UntypedStorage(self.nbytes)
        self.received, self.full, end = [], [], 0
        for p, size in zip(whole, sizes, strict=True):
            start, end = end, end + self.ranks * size
            view = torch.empty(0, dtype=dtype).set_(self.storage, start, p.shape)
            self.full.append(nn.Parameter(view))
            place = start * dtype.itemsize, (self.ranks * size * dtype.itemsize,)
            self.received.append(torch.empty(0, dtype=torch.uint8).set_(self.storage, *place))
        self.sums = torch.empty(sum(sizes))
        self.gradients = [g.view_as(p) for g, p in zip(self.sums.split(sizes), self.shards, strict=True)]
        self.group: Any = dist.group.WORLD
        self.show(self.shards)
        self.storage.resize_(0)
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def show(self, parameters: list[nn.Parameter]) -> None:
        for (registry, name), parameter in zip(self.slots, parameters, strict=True):
            registry[name] = parameter

    def gather(self) -> None:
        self.storage.resize_(self.nbytes)
        if self.cast:
            torch._foreach_copy_(self.cast, self.shards)
        self.group.allgather_into_tensor_coalesced(self.received, self.sent).wait()
        self.show(self.full)

    def release(self) -> None:
        self.show(self.shards)
        self.storage.resize_(0)

    @torch.no_grad()
    def reduce(self) -> None:
        self.release()
        packed = torch.empty(self.ranks, self.sums.numel())
        torch._chunk_cat([p.grad for p in self.full], 0, self.ranks, out=packed)  # type: ignore[misc]
        for p in self.full:
            p.grad = None
        self.group._reduce_scatter_base(self.sums, packed.view(-1)).wait()
        for p, gradient in zip(self.shards, self.gradients, strict=True):
            p.grad = gradient

    def before_forward(self, module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        with torch.no_grad():
            self.gather()
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        return (_AtEnd.apply(self, x),)

    def after_forward(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.release()
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda gradients: self.gather())


class _AtEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: Least, x: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.unit.reduce()
        return None, gradient


Part = Callable[[], Any]


def parts_of(library: Any, args: argparse.Namespace) -> tuple[Part, Part]:
    """The two parts of a training step with one of the libraries, or of the plain model (None)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(args.units)))
    dtypes = (torch.bfloat16, torch.float32) if args.bf16 else (None, None)
    parameters = list(model.parameters())
    if library is Least:
        parameters = [p for block in model for p in Least(block, dtypes[0]).shards]
    elif library is not None:
        policy = library.MixedPrecisionPolicy(*dtypes)
        for block in model:
            library.fully_shard(block, mp_policy=policy)
        parameters = list(library.fully_shard(model, mp_policy=policy).parameters())
    elif args.bf16:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    clip: Any = nn.utils.clip_grad_norm_
    if library is sw:
        optimizer, clip = sw.fully_shard_optimizer(optimizer), sw.clip_grad_norm_
    cast = args.bf16 and library in (None, Least)
    x = torch.randn(2, 16, dtype=torch.bfloat16 if cast else None)

    def compute() -> None:
        model(x).float().sum().backward()

    def update() -> None:
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return compute, update


def operations(part: Part) -> int:
    with Count() as count:
        part()
    return count.operations


def timed(part: Part) -> float:
    """The processor's time in microseconds."""
    start = time.process_time_ns()
    part()
    return (time.process_time_ns() - start) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    libraries = {"shardwright": sw, "FSDP2": fsdp2, "least": Least, "plain": None}
    parts = {name: parts_of(library, args) for name, library in libraries.items()}
    times: dict[tuple[str, int], list[float]] = {(name, i): [] for name in parts for i in (0, 1)}
    for number in range(args.rounds + 10):
        if number == 10:
            gc.collect()
            gc.freeze()
        for name, own in parts.items():
            for i, part in enumerate(own):
                elapsed = timed(part)
                if number >= 10:
                    times[name, i].append(elapsed)
    quartile = {key: statistics.quantiles(each, n=4)[0] / args.units for key, each in times.items()}
    counts = {name: operations(compute) / args.units for name, (compute, _) in parts.items()}
    precision = "bf16" if args.bf16 else "fp32"
    print(
        f"torch {torch.__version__}, {args.units} units, {args.ranks} ranks (fake), {precision}; per unit and step:"
    )
    costs: dict[str, list[float]] = {}
    for name in ("shardwright", "FSDP2", "least"):
        costs[name] = [
            counts[name] - counts["plain"],
            *(quartile[name, i] - quartile["plain", i] for i in (0, 1)),
        ]
        print(
            "{:12} {:5.1f} operations {:7.1f} us {:7.1f} us of clipping and AdamW".format(name, *costs[name])
        )
    for name in ("shardwright", "least"):
        ratios = [a / b for a, b in zip(costs[name], costs["FSDP2"], strict=True)]
        print("{:12} {:5.2f}            {:7.2f}    {:7.2f} of FSDP2".format(name, *ratios))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
