#!/usr/bin/env python3
"""What only GPUs show of planned memory: reserved against active bytes, graphs, and streams in order.

    python benchmarks/gpu_memory.py [--layers 16] [--dim 2048] [--seq 2048] [--bf16] [--steps 200]

One process per GPU, over NCCL. The same Llama is trained by torch's FSDP2 and by this engine on every kind of memory:

* *active*: the most bytes that tensors had at once in the last steps; *reserved*: what the process had taken from the
  device by then, which is what other processes miss. With everything planned the two should be the same within 2%.
* *graph*: whether forward and backward replayed from a CUDA graph give the losses of the step as it is, bit for bit.
* *streams*: whether so many steps give the losses of as many in which the host waits for the device after every unit:
  a missing wait between streams would show as other numbers sooner or later.

``--device cpu`` runs the same program over gloo on two CPU ranks, to try it: without the columns that need a GPU.
Exit status 1 if numbers differ.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright._torch import memory_can_be_swapped
from shardwright.train.models.llama import Llama, LlamaConfig

KINDS = ["fsdp2", "dynamic", *(["double_buffer", "max_pool", "arena"] if memory_can_be_swapped else [])]


class Run:
    """A model in training on one kind of memory."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        self.args = args
        library = fsdp2 if kind == "fsdp2" else sw
        shape = LlamaConfig(
            dim=args.dim, n_layers=args.layers, n_heads=args.dim // 64, n_kv_heads=args.dim // 64,
            ffn_dim=4 * args.dim, vocab_size=args.vocab, max_seq_len=args.seq,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model: nn.Module = Llama(shape)
        policy = library.MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if args.bf16 else ()))
        options = {"mesh": init_device_mesh(args.device, (dist.get_world_size(),)), "mp_policy": policy}
        for block in self.model.layers:  # type: ignore[union-attr]
            library.fully_shard(block, **options)
        library.fully_shard(self.model, **options, **({} if kind == "fsdp2" else {"memory": kind}))
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.optimizer = adamw if kind == "fsdp2" else sw.fully_shard_optimizer(adamw)
        self.done = 0
        self.work: Any = self.forward_and_backward

    def forward_and_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss.detach()

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.done * dist.get_world_size() + dist.get_rank())
            tokens = torch.randint(0, self.args.vocab, (self.args.batch, self.args.seq), generator=generator)
            losses.append(self.work(tokens.to(self.args.device)).clone())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
        return [float(loss) for loss in losses]

    def wait_after_every_unit(self) -> None:
        """The host waits for the device before and after each unit's forward and backward."""

        def wait(*_: Any) -> None:
            if self.args.device == "cuda":
                torch.cuda.synchronize()

        for block in self.model.layers:  # type: ignore[union-attr]
            block.register_forward_pre_hook(wait)
            block.register_forward_hook(wait)
            block.register_full_backward_pre_hook(wait)
            block.register_full_backward_hook(wait)


def measured(args: argparse.Namespace, kind: str) -> dict[str, float]:
    """Bytes and seconds of the steps after the plan was made."""
    cuda = args.device == "cuda"
    run = Run(args, kind)
    run.train(3)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    run.train(args.timed)
    if cuda:
        torch.cuda.synchronize()
    found = {"ms": (time.perf_counter() - begun) / args.timed * 1e3}
    if cuda:
        stats = torch.cuda.memory_stats()
        found["active"] = stats["active_bytes.all.peak"]
        found["reserved"] = stats["reserved_bytes.all.peak"]
    return found


def graph_is_equal(args: argparse.Namespace, kind: str) -> bool:
    plain, graphed = Run(args, kind), Run(args, kind)
    graphed.work = sw.GraphedStep(graphed.model, graphed.forward_and_backward)
    return plain.train(12) == graphed.train(12) and graphed.work.captured


def streams_are_equal(args: argparse.Namespace, kind: str) -> bool:
    plain, waiting = Run(args, kind), Run(args, kind)
    waiting.wait_after_every_unit()
    return plain.train(args.steps) == waiting.train(args.steps)


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def everywhere(value: bool, args: argparse.Namespace) -> bool:
    """Whether it holds on all ranks."""
    all_of_them = torch.tensor(int(value), device=args.device)
    dist.all_reduce(all_of_them, op=dist.ReduceOp.MIN)
    return bool(all_of_them)


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=args.ranks, init_method=f"file://{store}"
    )
    atexit.register(dist.destroy_process_group)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    name = torch.cuda.get_device_name() if cuda else "CPU"
    say(f"{args.ranks} ranks on {name}, torch {torch.__version__}, {args.layers} layers, dim {args.dim}, "
        f"batch {args.batch} x {args.seq}, {'bf16 compute, fp32 reduce' if args.bf16 else 'fp32'}")  # fmt: skip
    say(f"{'memory':14}{'active GiB':>12}{'reserved GiB':>14}{'reserved/active':>17}{'ms/step':>10}{'of FSDP2':>10}"
        f"{'graph':>9}{'streams':>9}")  # fmt: skip
    peer, right = 0.0, True
    for kind in KINDS:
        found = measured(args, kind)
        forget()
        peer = peer or found["ms"]
        cells = ["-", "-", "-"]
        if cuda:
            active, reserved = found["active"], found["reserved"]
            cells = [f"{active / 2**30:.3f}", f"{reserved / 2**30:.3f}", f"{reserved / active:.3f}"]
        verdicts = ["-", "-"]
        if kind != "fsdp2":
            for i, (test, wanted) in enumerate(((graph_is_equal, cuda), (streams_are_equal, True))):
                if wanted:
                    equal = everywhere(test(args, kind), args)
                    verdicts[i] = "equal" if equal else "DIFFERS"
                    right = right and equal
                    forget()
        say(f"{kind:14}{cells[0]:>12}{cells[1]:>14}{cells[2]:>17}{found['ms']:>10.1f}{found['ms'] / peer:>10.2f}"
            f"{verdicts[0]:>9}{verdicts[1]:>9}")  # fmt: skip
    if not right:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"layers": 16, "dim": 2048, "batch": 1, "seq": 2048, "vocab": 32000, "steps": 200, "timed": 10}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --device cpu runs what does not")
    args.ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
