"""Memory of a step with long samples, beside FSDP2 with full checkpointing: on two ranks of this machine's CPU.

    python -m benchmarks.long_context [--layers 112] [--rows "FSDP2, loss in chunks" "all together"]

A Llama of 112 layers with 32,000 tokens learns samples of 4,096. Each rank has one of them, or half of each of two. A
row has:

peak:    MiB on the rank with more, of all tensors of a step except activations in the host's memory, and of the
         parameters and the optimizer's state
step:    the same less what is there between steps
ratio:   step / FSDP2's with whole logits and with its loss in chunks
planned: MiB of the plan's peak, and its difference from the real one. An operation's own temporaries, such as those of
         attention on a CPU, are in the plan alone
time:    of a step on the clock, as a multiple of FSDP2's with whole logits
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.two_ranks import RANKS, Measure, of_both, trainer_of
from shardwright.train.config import Config
from shardwright.train.config.load import checked_config
from shardwright.train.launch.signals import StopRequest
from shardwright.train.planning.programs import program_of
from tests.support.storages import Storages

MIB = 1 << 20
STEPS = 3  #: of which the last two are looked at, for memory and for time
HOST = "host"
FULL = {"activations": {"checkpoint": "full"}}
FSDP2 = {**FULL, "parallel": {"engine": "fsdp2"}}
CHUNKS, OFFLOAD = {"train": {"loss_chunks": 128}}, {"activations": {"offload": "inputs"}}
CONTEXT = {"parallel": {"context": 2}}
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "FSDP2": (FSDP2,),
    "FSDP2, loss in chunks": (FSDP2, CHUNKS),
    "checkpoints": (FULL,),
    "and loss in chunks": (FULL, CHUNKS),
    "and offloaded inputs": (FULL, OFFLOAD),
    "and context 2": (FULL, CONTEXT),
    "all together": (FULL, CHUNKS, OFFLOAD, CONTEXT),
}
PEERS = ("FSDP2", "FSDP2, loss in chunks")


def config_of(row: Sequence[dict[str, Any]], layers: int, dim: int) -> Config:
    tables: dict[str, Any] = {
        "model": {
            "kind": "llama", "dim": dim, "n_layers": layers, "n_heads": dim // 32, "n_kv_heads": dim // 32,
            "ffn_dim": 32 * (dim * 8 // 3 // 32), "vocab_size": 32_000, "max_seq_len": 4096,
        },
        "data": {"workers": 0},
        "train": {"steps": 100, "seq_len": 4096, "micro_batch": 1, "global_batch": RANKS},
        "validation": {"every": 0},
    }  # fmt: skip
    for tables_of_row in copy.deepcopy(list(row)):
        for section, values in tables_of_row.items():
            tables[section] = {**tables.get(section, {}), **values}
    return checked_config(tables, "a row", ranks=RANKS)


def measuring() -> Measure:
    return measure


def measure(rank: int, configs: Sequence[Config]) -> dict[str, Any]:
    """The bytes at a step's peak and between steps, and the seconds of a step, of each row on one rank."""
    found: dict[str, Any] = {}
    for number, config in enumerate(configs):
        storages = Storages(_maker, left_out=(HOST,))
        with storages:
            trainer = trainer_of(config, rank)
            trainer.train_step(StopRequest())
            storages.begin()
            between = storages.peak.nbytes
            trainer.train_step(StopRequest())
            peak = storages.peak.nbytes
            on_host = sum(each.stop - each.start for _, each in storages._alive() if each.label == HOST)
        dist.barrier()
        before = time.perf_counter()
        trainer.train_step(StopRequest())
        seconds = time.perf_counter() - before
        found[str(number)] = {"peak": peak, "between": between, "on_host": on_host, "seconds": seconds}
        trainer.close()
        del trainer, storages
        if rank == 0:
            print(f"row {number + 1}: {found[str(number)]}", flush=True)
    return found


def _maker(frame: FrameType | None) -> str:
    """Whether a storage is in the memory of the host, which is not apart from the device's on a CPU."""
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_filename.endswith("host_pool.py"):
            return HOST
        frame = frame.f_back
    return ""


def planned(config: Config) -> int:
    """The bytes of the device at the peak of the steps, by the plan."""
    return program_of(config, RANKS, "cpu").peaks()["step"][0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=112)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=[*ROWS], help="the first one is the unit of time"
    )
    options = parser.parse_args()
    configs = [config_of(ROWS[name], options.layers, options.dim) for name in options.rows]
    of_ranks = of_both(measuring, configs)
    with ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
        plans = list(pool.map(planned, configs))
    print(
        f"torch {torch.__version__}, {platform.machine()}; {options.layers} layers, {options.dim} wide; gloo"
    )
    heads = f"{'row':24}{'peak':>8}{'step':>8}{'ratio':>7}{'':>7}{'planned':>9}{'':>8}{'time':>7}"
    print(f"{heads}  load {os.getloadavg()[0]:.1f}")
    rows = []
    for number in range(len(options.rows)):
        each = [of_rank[str(number)] for of_rank in of_ranks]
        worst = max(each, key=lambda figures: figures["peak"])
        seconds = max(figures["seconds"] for figures in each)
        rows.append(
            (worst["peak"] / MIB, (worst["peak"] - worst["between"]) / MIB, worst["on_host"], seconds)
        )
    peers = dict(zip(options.rows, (step for _, step, _, _ in rows), strict=True))
    for name, (peak, step, on_host, seconds), plan in zip(options.rows, rows, plans, strict=True):
        plan -= on_host  # on a CPU a plan has one memory
        ratios = (f"{step / peers[peer]:7.3f}" if peer in peers else f"{'':7}" for peer in PEERS)
        print(
            f"{name:24}{peak:8.1f}{step:8.1f}{''.join(ratios)}{plan / MIB:9.1f}"
            f"{plan / MIB / peak - 1:8.1%}{seconds / rows[0][3]:7.2f}"
        )


if __name__ == "__main__":
    main()
