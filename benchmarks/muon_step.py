#!/usr/bin/env python3
"""A Muon step on gloo ranks: each matrix once, by its owner, against every matrix on every rank.

    python benchmarks/muon_step.py [--ranks 2] [--layers 6] [--dim 512] [--layout ragged] [--rounds 9]

The peer is what is done with torch's FSDP2 today: gather every gradient (``DTensor.full_tensor``), let torch's Muon
step whole matrices on every rank, and keep one's own part; it runs on the very same processes and matrices, in turns.
"values" is shardwright with an optimizer that it steps whole, without updates: gradients and values move to the owners,
and new values back. One intra-op thread per rank. Prints the machine, the versions, the median step of each and the
ratios, which are what to compare, the bytes that owners' steps send, and whether all have the same bits.
"""

from __future__ import annotations

import argparse
import atexit
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw

OPTIONS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}


def build(args: argparse.Namespace) -> nn.Module:
    """The matrices of a Llama's blocks: four of attention and three of the feed-forward part."""
    d, h = args.dim, 4 * args.dim
    torch.manual_seed(0)
    sizes = [(d, d)] * 4 + [(h, d)] * 2 + [(d, h)]
    return nn.ModuleList(
        nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in sizes))
        for _ in range(args.layers)
    )


class MuonOfValues(torch.optim.Muon):
    """Torch's Muon. Of a subclass shardwright does not know updates, so values move."""


class GatheredMuon:
    """Torch's Muon over whole copies of DTensors, on every rank alike."""

    def __init__(self, model: nn.Module) -> None:
        self.sharded = list(model.parameters())
        self.whole = [nn.Parameter(p.full_tensor().detach()) for p in self.sharded]
        self.optimizer = torch.optim.Muon(self.whole, **OPTIONS)

    @torch.no_grad()
    def step(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for whole, p in zip(self.whole, self.sharded, strict=True):
            whole.grad = p.grad.full_tensor()
        self.optimizer.step()
        for whole, p in zip(self.whole, self.sharded, strict=True):
            p.to_local().copy_(whole.chunk(size)[rank])


def steps(args: argparse.Namespace) -> tuple[dict[str, Callable[[], None]], dict[str, nn.Module]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models, functions = {}, {}
    for name in ("shardwright", "values", "gathered"):
        model = build(args)
        library, options = (fsdp2, {}) if name == "gathered" else (sw, {"layout": args.layout})
        for block in model:
            library.fully_shard(block, mesh=mesh, **options)
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            whole = torch.randn(p.shape, generator=generator)
            p.grad = torch.empty_like(p)
            if name != "gathered":
                p.grad.copy_(whole)
            else:
                p.grad.to_local().copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])
        if name == "shardwright":
            optimizer = sw.fully_shard_optimizer(torch.optim.Muon(model.parameters(), **OPTIONS))
        elif name == "values":
            optimizer = sw.fully_shard_optimizer(MuonOfValues(model.parameters(), **OPTIONS), needs="tensor")
        else:
            optimizer = GatheredMuon(model)
        models[name], functions[name] = model, optimizer.step
    return functions, models


def bytes_sent(step: Callable[[], None]) -> float:
    """MiB that all ranks together send in all-to-alls."""
    sent = 0
    all_to_all = dist.all_to_all_single

    def counting(into: torch.Tensor, out: torch.Tensor, *args: object, **options: object) -> object:
        nonlocal sent
        sent += out.nbytes
        return all_to_all(into, out, *args, **options)

    dist.all_to_all_single = counting
    try:
        step()
    finally:
        dist.all_to_all_single = all_to_all
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return total.item() / 2**20


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    atexit.register(dist.destroy_process_group)
    functions, models = steps(args)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(args.rounds + 1):  # the first is a warm-up
        for name, step in functions.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - started)
    same = all(
        torch.equal(p.full_tensor(), q.full_tensor())
        for name in ("values", "gathered")
        for p, q in zip(models["shardwright"].parameters(), models[name].parameters(), strict=True)
    )
    sent = {name: bytes_sent(functions[name]) for name in ("shardwright", "values")}
    if rank == 0:
        medians = {name: statistics.median(each) for name, each in times.items()}
        matrices = sum(1 for _ in models["gathered"].parameters())
        numel = sum(p.numel() for p in models["gathered"].parameters())
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
        )
        print(f"{args.ranks} ranks, {matrices} matrices of {numel:,} elements in all, layout {args.layout}")
        for name, median in medians.items():
            ratio = median / medians["gathered"]
            print(
                f"  {name:12s} {1e3 * median:8.1f} ms   ratio {ratio:.2f}"
                + (f"   {sent[name]:.1f} MiB sent" if name in sent else "")
            )
        ratios = [a / b for a, b in zip(times["shardwright"], times["values"], strict=True)]
        print(
            f"shardwright to values, median of the rounds {statistics.median(ratios):.2f}; equal bits: {same}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layout", default="ragged", choices=("per_parameter", "ragged"))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
