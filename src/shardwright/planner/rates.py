"""Times of kernels and collectives on a device, by figures of the device and by shares of them.

Figures of a device are in its file. Shares of them, which programs reach, are here, each with a range. None is fitted
to a published step (``docs/planning_accuracy.md``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.planner.devices import OF_MEMORY, Figures
from shardwright.planner.measured import Measured
from shardwright.planner.program import HOST, Kernel
from shardwright.planner.work import Work

TILE = 128  #: rows and columns of a product that one part of the device computes at a time
RAMP = 128  #: the length of the sums of a product whose beginning and end take as long as the rest
ROWS_AT_HALF = 256  #: the length of a sequence at which attention reaches half of its share


class Range(NamedTuple):
    """A number that is not known well: a value with which programs are slow, the likely one, and one with which they
    are fast."""

    low: float
    likely: float
    high: float


#: Shares of all generations, and times of the host in seconds:
#: ``memory``: of the memory's bandwidth that kernels reach which only read and write;
#: ``links`` and ``network``: of the bandwidth that large collectives reach within a node and between nodes. On H100
#: with 400 Gb/s each, gathers and reduce-scatters over 2 to 32 nodes reach 0.61 to 0.89 of it with one rank of each
#: node, as beside tensor parallelism, and 0.66 to 0.89 with eight (meta-pytorch/autoparallel,
#: h100_nvswitch_roce_400g.py). A network whose flows collide gives 0.50: 200 GB/s a node for 256 ranks
#: (NVIDIA/nccl#1218);
#: ``beside``: the time that a kernel takes beside a collective, as a multiple (pytorch/pytorch#179937 has 1.3 to 1.4
#: for matrix products that NCCL runs beside all the time);
#: ``launch``: from one kernel's end to the next one's begin, on the device;
#: ``host``, ``host_compiled`` and ``host_collective``: of the host for an operation that torch runs, for a kernel of a
#: compiled graph, and for a collective with the copies around it;
#: ``host_memory``: of the bandwidth of the host's memory that its operations reach if all ranks of a node compute.
#: AdamW for 30.5B parameters takes under 4 s on the host of 8 H200, which is 0.35 or more, with ranks bound to cores
#: (PrimeIntellect-ai/prime-rl#3234). Binding took 23% off a step (deepspeedai/DeepSpeed#7474), and no rank of ours is
#: bound. The slowest report is 40 GB/s: 8.2 s for 11.6B parameters (deepspeedai/DeepSpeed#735);
#: ``pcie``: of the bandwidth between host and device that copies reach: 55.6 of 63 GB/s on one H100 (NVIDIA's post on
#: nvbandwidth), 25 of 31.5 on an A100 and an RTX 4090, and half of it if copies run in both directions or two devices
#: share a switch (NVIDIA/nvbandwidth#11 and #15).
_OF_ALL = {
    "memory": Range(0.75, 0.83, 0.90),
    "links": Range(0.70, 0.80, 0.88),
    "network": Range(0.50, 0.75, 0.88),
    "beside": Range(1.30, 1.15, 1.05),
    "launch": Range(3e-6, 2e-6, 1e-6),
    "host": Range(10e-6, 6e-6, 4e-6),
    "host_compiled": Range(8e-6, 4e-6, 2e-6),
    "host_collective": Range(150e-6, 60e-6, 30e-6),
    "host_memory": Range(0.15, 0.35, 0.60),
    "pcie": Range(0.35, 0.75, 0.88),
}
#: Shares of the peak of each generation: ``products`` that large products reach at nominal power (cuBLAS: 600 to 750
#: TFLOP/s on an H100 with 700 W, 230 to 270 on an A100); ``attention`` and ``attention_backward`` that fused attention
#: reaches with long sequences (FlashAttention-2: 50 to 73% on an A100, arXiv 2307.08691; 35% on an H100, arXiv
#: 2407.08608). Those of "ada" and "blackwell" are guesses from these.
_OF_GENERATION = {
    "ampere": (Range(0.70, 0.80, 0.87), Range(0.48, 0.58, 0.66), Range(0.40, 0.50, 0.58)),
    "ada": (Range(0.72, 0.85, 0.93), Range(0.50, 0.62, 0.72), Range(0.42, 0.54, 0.64)),
    "hopper": (Range(0.60, 0.68, 0.76), Range(0.30, 0.35, 0.42), Range(0.24, 0.28, 0.34)),
    "blackwell": (Range(0.58, 0.68, 0.78), Range(0.25, 0.33, 0.45), Range(0.18, 0.26, 0.38)),
}


@dataclass(frozen=True)
class Rates:
    """The rates of a device, from which the time of each kernel follows.

    Attributes:
        figures: of the device.
        shares: by name; :meth:`with_share` chooses other ones.
        ranks: of the job. Those of a node share the memory of its host.
    """

    figures: Figures
    shares: dict[str, float] = field(repr=False)
    ranks: int = 1

    @classmethod
    def of(cls, figures: Figures, ranks: int = 1) -> Rates:
        """Return the likely rates."""
        return cls(figures, {name: span.likely for name, span in ranges_of(figures).items()}, ranks)

    def with_share(self, name: str, value: float) -> Rates:
        """Return these rates with another value of one share."""
        return replace(self, shares={**self.shares, name: value})

    @property
    def clock(self) -> float:
        """The part of its sustained clock at which a device computes that may take less power. What it takes beside its
        memory grows with the square of the clock."""
        return math.sqrt(max(self.figures.power - OF_MEMORY, 0.0) / (1 - OF_MEMORY))

    def seconds(self, kernel: Kernel, work: Work) -> float:
        """Return the time of a kernel where nothing else runs: on the device, or on its host."""
        if work.kind == "communication":
            return self.collective(kernel)
        if work.kind == "nothing":
            return 0.0
        if work.kind == "copies":
            return work.nbytes / (self.figures.pcie * self.shares["pcie"])
        if kernel.stream == HOST:
            part = self.figures.host_memory / min(self.ranks, self.figures.node)
            return work.nbytes / (part * self.shares["host_memory"])
        if (measured := self.figures.measured) is not None and measured.has(kernel, work):
            name = work.kind if work.kind in ("products", "attention") else "memory"
            return measured.seconds(kernel, work) / self._beside_likely(name)
        shares, launch = self.shares, self.shares["launch"] * work.launches
        moved = work.nbytes / (self.figures.bandwidth * shares["memory"])
        if work.kind == "products":
            peak = self.peak(kernel.dtype) * self.clock * shares["products"]
            return max(work.flops / (peak * self._filled(*work.sizes)), moved) + launch
        if work.kind == "attention":
            backward = kernel.name.endswith("backward")
            share = shares["attention_backward" if backward else "attention"]
            rows = work.sizes[1]
            share *= rows / (rows + ROWS_AT_HALF)
            return max(work.flops / (self.peak(kernel.dtype) * self.clock * share), moved) + launch
        return moved + launch

    def _beside_likely(self, name: str) -> float:
        """Return a share as a multiple of the likely one, by which measured times are divided."""
        return self.shares[name] / ranges_of(self.figures)[name].likely

    def ideal(self, kernel: Kernel, work: Work) -> float:
        """Return the time of its products at the device's peak."""
        return work.flops / self.peak(kernel.dtype) if work.kind in ("products", "attention") else 0.0

    def host(self, kernel: Kernel, work: Work) -> float:
        """Return the time of the host until it has queued a kernel."""
        if work.kind == "communication":
            return self.shares["host_collective"]
        return self.shares["host_compiled" if kernel.name.startswith("fused_") else "host"]

    def peak(self, dtype: str) -> float:
        """Operations a second of dense products."""
        flops = self.figures.flops
        name = "float8" if dtype.startswith("float8") else dtype
        return flops.get(name) or flops["float32"]

    def _filled(self, batch: int, rows: int, columns: int, length: int) -> float:
        """Return the part of the device that a product uses: its last tiles leave some parts idle, and
        short sums all."""
        tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
        rounds = math.ceil(tiles / self.figures.units)
        covered = rows * columns * batch / (tiles * TILE * TILE)
        return max(tiles / (rounds * self.figures.units) * covered * length / (length + RAMP), 1e-3)

    def collective(self, kernel: Kernel) -> float:
        """Return the time of a collective: rings within a node and between nodes, of which the slower one counts."""
        ranks, stride = kernel.group
        if ranks < 2:
            return 0.0
        figures = self.figures
        nodes, members = spread(ranks, stride, figures.node)
        whole, rounds = _traffic(kernel)
        measured = figures.measured
        if measured is not None and measured.ranks and nodes == 1:
            return measured.collective(kernel.name, whole, ranks) / self._beside_likely("links")
        seconds = _latency(ranks, nodes) * rounds
        within = whole * (ranks - 1) / ranks / (figures.within * self.shares["links"])
        if nodes == 1:
            return seconds + rounds * within
        # A ring passes each node once, and all but one part of the tensor pass each of its edges.
        across = whole * (ranks - 1) / ranks / (figures.across * self.shares["network"] * members)
        return seconds + rounds * max(across, within if members > 1 else 0.0)


def ranges_of(figures: Figures) -> dict[str, Range]:
    """Return the shares that programs reach on a device, by name."""
    if figures.measured is not None and figures.measured.whole:
        return _of_measured(figures.measured)
    names = "products", "attention", "attention_backward"
    return {**_OF_ALL, **dict(zip(names, _OF_GENERATION[figures.generation], strict=True))}


def _of_measured(measured: Measured) -> dict[str, Range]:
    """Return the shares of measured times: 1, with a range as far as repeated measurements differ."""

    def around(name: str, likely: float = 1.0, way: int = 1) -> Range:
        other = measured.spread[name]
        return Range(likely * (1 + other) ** -way, likely, likely * (1 + other) ** way)

    spans = {name: around(name) for name in ("products", "attention", "memory", "links")}
    spans["attention_backward"] = Range(1, 1, 1)  # of the same tables as ``attention``
    spans |= {name: around("host", seconds, -1) for name, seconds in measured.host.items()}
    spans["launch"] = Range(0, 0, 0)  # launches are part of measured times
    spans |= {name: _OF_ALL[name] for name in ("network", "host_memory", "pcie")}
    spans["beside"] = Range(1, 1, 1) if measured.on_host else _OF_ALL["beside"]
    if not measured.ranks:
        spans["links"] = _OF_ALL["links"]
    return spans


def spread(ranks: int, stride: int, node: int) -> tuple[int, int]:
    """Return the nodes of a group whose ranks are ``stride`` apart, and its members in each."""
    members = max(1, min(ranks, node // stride)) if stride < node else 1
    return math.ceil(ranks / members), members


def _traffic(kernel: Kernel) -> tuple[float, int]:
    """Return the bytes of the whole tensor of a collective, and how often they go round."""
    name, ranks = kernel.name, kernel.group[0]
    if "allreduce" in name or "all_reduce" in name:
        return kernel.nbytes, 2
    if "alltoall" in name or "all_to_all" in name:
        return kernel.nbytes / 2, 1
    if "gather" in name or "scatter" in name:  # the record has the whole and this rank's part
        return kernel.nbytes * ranks / (ranks + 1), 1
    return kernel.nbytes, 1


def _latency(ranks: int, nodes: int) -> float:
    """Return seconds until the first byte has gone round a ring, by ``torch/_inductor/comm_analysis.py``, for NCCL."""
    return 8.4e-6 + 3.4e-6 * (ranks - nodes) + 14e-6 * (nodes - 1)
