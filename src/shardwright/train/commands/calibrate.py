"""`shardwright calibrate`: measures this machine, and writes a file of a device whose plans have its times.

Ranks of a job of their own measure at the same time, as ranks of a run compute at the same time. Each one traces steps
of small models, and runs the operations of these again. Then they make collectives and steps together.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from shardwright.comm.collectives import Communicator
from shardwright.comm.division import plan_division
from shardwright.durable import replace_file
from shardwright.planner.devices import GIB, MEASURED, Figures, known_devices
from shardwright.planner.measured import (
    HOST,
    Measured,
    Point,
    as_toml,
    as_values,
    merged,
    table_of,
)
from shardwright.planner.program import HostWait, Kernel, Mark, Wait
from shardwright.planner.rates import Rates
from shardwright.planner.timeline import Step, replay
from shardwright.planner.work import work_of
from shardwright.strict_json import strict_json
from shardwright.tracing.timing import MOST_SETS, Operation, Timer, noting
from shardwright.train.config import Config
from shardwright.train.config.load import checked_config
from shardwright.train.data.dataset import Dataset
from shardwright.train.errors import UserError
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.planning import AbsentData, traced_program
from shardwright.train.step.trainer import Trainer

Kind = Literal["cpu", "cuda"]
CPU: Kind = "cpu"
CUDA: Kind = "cuda"
PASSES = 3  #: over all operations
MOST = 0.15  #: by which repeated measurements may differ
LEAST = 0.02  #: the smallest spread that a file has
#: Bytes of the tensors among which repeated collectives change: a step comes back to a parameter after as many.
MOVED = 128 << 20
WARM, STEPS = 3, 12  #: steps of small jobs
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Task:
    """The measurements to make.

    Attributes:
        operations: jobs whose operations are measured.
        steps: jobs whose steps are measured, for the time of the host.
        sizes: bytes of collectives.
    """

    operations: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    sizes: tuple[int, ...]


def _job(
    dim: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    batch: int,
    layers: int = 2,
    head_dim: int = 32,
    **others: Any,
) -> dict[str, Any]:
    """A Llama. ``others``: further tables."""
    heads = max(dim // head_dim, 2)
    model = {
        "kind": "llama", "dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": heads // 2,
        "ffn_dim": ffn, "vocab_size": vocab, "max_seq_len": max(seq_len, 2048),
    }  # fmt: skip
    return {"model": model, **_training(seq_len, batch), **others}


def _training(seq_len: int, batch: int) -> dict[str, Any]:
    return {"data": {"workers": 0}, "train": {"steps": 1000, "seq_len": seq_len, "micro_batch": batch}}


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
ON_CPU = Task(
    (
        _job(96, 256, 512, 128, 2),
        _job(192, 512, 1024, 128, 2, parallel={"strategy": "zero2"}),
        _job(256, 640, 2048, 256, 4, parallel={"strategy": "ddp"}),
        _job(512, 1408, 4096, 512, 2, head_dim=64),
        _job(96, 256, 512, 128, 2, parallel=_BF16),
        _job(192, 512, 1024, 128, 2, parallel=_BF16),
        _job(512, 1408, 4096, 512, 2, head_dim=64, parallel=_BF16),
        _job(192, 384, 512, 256, 2, layers=1, head_dim=64),
        _job(192, 384, 512, 256, 2, layers=1, head_dim=64, parallel=_BF16),
        {"model": {"kind": "hybrid", "preset": "debug"}, **_training(256, 2)},
    ),
    (
        _job(128, 256, 256, 128, 2, layers=1),
        _job(128, 256, 256, 128, 2, layers=5),
        _job(128, 256, 256, 128, 2, layers=5, parallel={"strategy": "ddp"}),
        _job(128, 256, 256, 128, 2, layers=5, parallel=_BF16),
        _job(128, 256, 256, 128, 2, layers=4, activations={"checkpoint": "full"}),
    ),
    (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
)
ON_GPU = Task(
    (
        _job(1024, 2816, 32768, 1024, 2, head_dim=64, parallel=_BF16),
        _job(2048, 5632, 32768, 2048, 2, head_dim=128, parallel=_BF16),
        _job(4096, 14336, 32768, 2048, 2, head_dim=128, layers=1, parallel=_BF16),
        _job(4096, 14336, 32768, 8192, 1, head_dim=128, layers=1, parallel=_BF16),
        _job(2048, 5632, 32768, 1024, 2, head_dim=128),
        {"model": {"kind": "hybrid", "preset": "150M"}, "parallel": _BF16, **_training(2048, 2)},
    ),
    ON_CPU.steps,
    (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30),
)


def calibrate(out: Path, ranks: int, kind: Kind, most: float = MOST, task: Task | None = None) -> int:
    """Measure and write the file ``out``, also over one that is there; returns 0.

    Raises:
        UserError: a rank fails; repeated measurements differ by more than ``most``; the file cannot be written.
    """
    began = time.monotonic()
    task = task or (ON_CPU if kind == "cpu" else ON_GPU)
    print(f"measuring {_name(kind)} with {ranks} rank{'s' * (ranks > 1)}; stop other programs", flush=True)
    measurements = _measured_by_ranks(task, ranks, kind)
    measured, figures = summary(measurements, task, ranks, kind)
    unsteady = max(measured.spread, key=lambda name: measured.spread[name])
    difference = measured.spread[unsteady]
    if difference > most:
        raise UserError(
            f"calibrate: repeated measurements ({unsteady}) differ by {difference:.0%}, and at most {most:.0%} may: "
            "other programs run on this machine. Stop them and repeat, or set --most to accept this"
        )
    text = as_toml(_values(measured, figures, kind))
    try:
        replace_file(out, text.encode())
    except OSError as error:
        raise UserError(f"calibrate: cannot write {out}: {error.strerror or error}") from error
    print(*_words(measured, figures), sep="\n")
    if without := sorted({name for rank in measurements for name in rank["without"]}):
        print(f"{'without':10} {', '.join(without)}: they do not run alone")
    print(f"{out} is written, after {time.monotonic() - began:.0f} s; for plans with these times:")
    print(f"  shardwright plan JOB.toml --on {ranks}x{_named(out)}")
    return 0


def _named(out: Path) -> str:
    text = str(out)
    return text if "/" in text else f"./{text}"


def default_place(kind: Kind) -> Path:
    """A file with the device's name in the working folder, where the user sees it and names it as ``./NAME.toml``."""
    return Path(re.sub(r"[^a-z0-9]+", "-", _name(kind).lower()).strip("-") + ".toml")


def check_place(out: Path, force: bool) -> None:
    """Raises UserError if ``out`` cannot be written, or is there and not to be written over by ``force``."""
    if out.suffix != ".toml":
        raise UserError(f"--out: expected the path of a .toml file, found {str(out)!r}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(
            f"--out: expected a file in a folder that is there and can be written, found {str(out)!r}"
        )
    if out.exists() and not force:
        raise UserError(f"{out} exists already; choose another --out, or add --force to measure again")


def _name(kind: Kind) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name(0)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} CPU"
    except OSError:
        pass
    return f"{platform.machine()} CPU"


# -- ranks


def _measured_by_ranks(task: Task, ranks: int, kind: Kind) -> list[dict[str, Any]]:
    """The measurements of each rank.

    Raises:
        UserError: a rank has failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _one_thread(kind):
        processes = [
            context.Process(target=_rank, args=(task, rank, ranks, kind, folder), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            while any(process.is_alive() for process in processes):
                for process in processes:
                    process.join(0.1)
                if any(process.exitcode for process in processes):
                    break
        finally:
            for process in processes:
                process.kill()
        for rank, process in enumerate(processes):
            process.join()
            if process.exitcode and (error := Path(folder, f"{rank}.error")).exists():
                raise UserError(f"calibrate: rank {rank} failed: {error.read_text()}")
        if failed := [rank for rank, process in enumerate(processes) if process.exitcode]:
            raise UserError(f"calibrate: rank {failed[0]} ended with status {processes[failed[0]].exitcode}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


class _one_thread:
    """Processes that start inside the context compute in one thread on the CPU."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        self._before = os.environ.get("OMP_NUM_THREADS")
        if self._kind == "cpu":
            os.environ["OMP_NUM_THREADS"] = "1"

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = self._before


def _rank(task: Task, rank: int, ranks: int, kind: Kind, folder: str) -> None:
    try:
        measurements = measure(task, rank, ranks, kind, folder)
        Path(folder, f"{rank}.json").write_text(strict_json(measurements))
    except BaseException as error:
        Path(folder, f"{rank}.error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(1)


def measure(
    task: Task, rank: int, ranks: int, kind: Kind, folder: str, timer: Timer | None = None
) -> dict[str, Any]:
    """The measurements of one rank: of operations, collectives and steps, each in every pass."""
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    operations: dict[Kernel, Operation] = {}
    without: set[str] = set()
    steps: list[list[float]] = []
    for values in task.operations:
        traced_program(configured(values, ranks), ranks, kind, lambda recorder: noting(recorder, operations))
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(str(Path(folder, "store")), ranks), rank=rank, world_size=ranks, timeout=TIMEOUT,
    )  # fmt: skip
    timer = timer or Timer(device)
    tables: dict[str, dict[Point, list[float]]] = defaultdict(dict)
    collectives: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for _ in range(PASSES):
        for kernel, operation in operations.items():
            seconds = timer.operation(operation)
            if seconds is None:
                without.add(kernel.name)
            else:
                table, point = table_of(kernel, work_of(kernel))
                tables[table].setdefault(point, []).append(seconds)
        if ranks > 1:
            _collectives(task.sizes, device, timer, collectives)
        steps.append([_step(configured(values, ranks), rank, ranks, device) for values in task.steps])
    dist.barrier()
    dist.destroy_process_group()
    return {
        "kernels": [
            [table, list(point), seconds]
            for table, points in tables.items()
            for point, seconds in points.items()
        ],
        "collectives": [
            [name, nbytes, seconds]
            for name, sizes in collectives.items()
            for nbytes, seconds in sizes.items()
        ],
        "without": sorted(without),
        "steps": [list(each) for each in zip(*steps, strict=True)],
    }


def configured(values: Mapping[str, Any], ranks: int) -> Config:
    """The configuration of a small job on so many ranks: one micro-batch a step on each."""
    tables: dict[str, Any] = copy.deepcopy(dict(values))
    tables["train"]["global_batch"] = tables["train"]["micro_batch"] * ranks
    return checked_config(tables, "a job of calibrate", ranks=ranks)


def _collectives(
    sizes: Sequence[int], device: torch.device, timer: Timer, into: dict[str, dict[int, list[float]]]
) -> None:
    """Gathers, reductions and sums of so many whole bytes, with all ranks."""
    communicator = Communicator(dist.group.WORLD, device)
    ranks = communicator.world_size
    division = plan_division(torch.float32, ranks, None)

    def gather(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_gather([whole.view(torch.uint8)], [part.view(torch.uint8)]).wait()

    def scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.reduce_scatter([part], [whole], division).wait()

    def reduce(whole: torch.Tensor, part: torch.Tensor) -> None:
        communicator.all_reduce(whole, division).wait()

    for nbytes in sizes:
        count = max(2, min(MOST_SETS, MOVED // nbytes))
        sets = [(torch.ones(nbytes // 4, device=device), torch.ones(nbytes // 4 // ranks, device=device))
                for _ in range(count)]  # fmt: skip
        for name, call in (("gather", gather), ("scatter", scatter), ("reduce", reduce)):
            samples = []
            for i in range(count + (4 if nbytes > 1 << 25 else 9 if nbytes > 1 << 20 else 25)):
                dist.barrier()
                samples.append(timer.once(functools.partial(call, *sets[i % count])))
            into[name].setdefault(nbytes, []).append(statistics.median(samples[count:]))


def _step(config: Config, rank: int, ranks: int, device: torch.device) -> float:
    """Seconds of the host for a step of a small job."""
    world = World.of(config.parallel, rank, ranks, device)
    trainer = Trainer(config, world, cast(Dataset, AbsentData.of(config, ranks)), reads_weights=False)
    # With a GPU another thread makes the backward.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    samples = []
    try:
        for _ in range(WARM + STEPS):
            begin = clock()
            trainer.train_step(StopRequest())
            samples.append(clock() - begin)
    finally:
        trainer.close()
    return statistics.median(samples[WARM:])


# -- the summary


def summary(
    measurements: Sequence[Mapping[str, Any]], task: Task, ranks: int, kind: Kind
) -> tuple[Measured, Figures]:
    """Times and figures from the measurements of all ranks."""
    samples: dict[tuple[str, Point], list[float]] = defaultdict(list)
    of_links: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in measurements:
        for table, point, seconds in rank["kernels"]:
            samples[table, tuple(point)] += seconds
        for name, nbytes, seconds in rank["collectives"]:
            of_links[name, nbytes] += seconds
    kernels: dict[str, list[Point]] = defaultdict(list)
    differences: dict[str, list[float]] = {
        name: [] for name in ("products", "attention", "memory", "links", "host")
    }
    for (table, point), seconds in sorted(samples.items()):
        kernels[table].append((*point, steady(seconds)))
        which = "attention" if "attention" in table else "products" if len(point) == 4 else "memory"
        differences[which].append(difference(seconds))
    collectives: dict[str, list[Point]] = defaultdict(list)
    for (name, nbytes), seconds in sorted(of_links.items()):
        collectives[name].append((nbytes, steady(seconds)))
        differences["links"].append(difference(seconds))
    steps = [
        [seconds for rank in measurements for seconds in rank["steps"][i]] for i in range(len(task.steps))
    ]
    differences["host"] = [difference(each) for each in steps]
    spread = {
        name: round(max(LEAST, statistics.median(each)), 3) if each else LEAST
        for name, each in differences.items()
    }
    no_host = dict.fromkeys(HOST, 0.0)
    measured = Measured(kernels, collectives, no_host, spread, ranks if ranks > 1 else 0, kind == "cpu")
    figures = replace(_figures(measured, ranks, kind), measured=measured)
    host = _host(task, [steady(each) for each in steps], figures, ranks, kind)
    measured = replace(measured, host=host)
    return measured, replace(figures, measured=measured)


def steady(seconds: Sequence[float]) -> float:
    """The time of repeated measurements: their lower quartile, since other programs only make them longer."""
    return _quartiles(seconds)[0]


def difference(seconds: Sequence[float]) -> float:
    """The width of the middle half of repeated measurements: half of it, as a part of the median."""
    low, middle, high = _quartiles(seconds)
    return (high - low) / 2 / middle


def _quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return (seconds[0],) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def _host(task: Task, steps: Sequence[float], figures: Figures, ranks: int, kind: Kind) -> dict[str, float]:
    """Seconds of the host for an operation and for a collective, from steps of small jobs: what these take beside the
    kernels, by least squares over the jobs."""
    rows: list[tuple[float, float, float]] = []
    for values, seconds in zip(task.steps, steps, strict=True):
        step = Step.of(traced_program(configured(values, ranks), ranks, kind))
        queued = [each for each in step.events if not isinstance(each, (Mark, Wait, HostWait))]
        counts = Counter(step.kernels[each.number][1].kind == "communication" for each in queued)
        beside = replay(step, Rates.of(figures)).seconds if kind == "cpu" else 0.0
        rows.append((counts[False], counts[True] if ranks > 1 else 0, max(seconds - beside, 0.0)))
    one, other = _least_squares(rows)
    return {"host": one, "host_compiled": one, "host_collective": other or one}


def _least_squares(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """The factors of the first two columns with which their sums are nearest to the third one, relative to it. None is
    negative."""
    rows = [(a / c, b / c, 1.0) for a, b, c in rows if c > 0]
    aa, bb, ab = (sum(x * y for x, y in each) for each in (
        [(a, a) for a, _, _ in rows], [(b, b) for _, b, _ in rows], [(a, b) for a, b, _ in rows]
    ))  # fmt: skip
    ac, bc = sum(a for a, _, _ in rows), sum(b for _, b, _ in rows)
    alone = (ac / aa if aa else 0.0), 0.0
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return alone
    one, other = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    if one < 0:
        return 0.0, bc / bb
    return (one, other) if other >= 0 else alone


def _figures(measured: Measured, ranks: int, kind: Kind) -> Figures:
    """The figures beside the times: peaks of products and of bandwidth, and links."""
    flops: dict[str, float] = {}
    bandwidth = 1e9
    for table, points in measured.kernels.items():
        name, dtype, *_ = table.split(" ")
        for *sizes, seconds in points:
            if len(sizes) == 4 and "attention" not in name:
                flops[dtype] = max(flops.get(dtype, 0.0), 2 * math.prod(sizes) / seconds)
            elif (
                len(sizes) == 1 and name in ("add", "mul", "copy_", "_foreach_copy_") and sizes[0] >= 1 << 22
            ):
                bandwidth = max(bandwidth, sizes[0] / seconds)
    flops.setdefault("float32", max(flops.values(), default=1e9))
    node, within, across, host_memory, pcie = max(ranks, 1), 25e9, 12.5e9, 0.0, 0.0
    if measured.ranks:
        gathers = merged(measured.collectives["gather"])
        within = max(nbytes / 2 / seconds for nbytes, seconds in gathers)
        across = within / 2
    if kind == "cuda":
        node = max(torch.cuda.device_count(), 1)
        name = torch.cuda.get_device_name(0)
        like = next((each.figures for each in known_devices().values() if each.name == name), None)
        if like is not None:
            node, across = like.node, like.across
            within = within if measured.ranks else like.within
            host_memory, pcie = like.host_memory, like.pcie
    else:
        node = max(os.cpu_count() or 1, ranks)
    return Figures(
        MEASURED, flops, bandwidth, 1, 1.0, node, within, across, "", host_memory=host_memory, pcie=pcie
    )


def _values(measured: Measured, figures: Figures, kind: Kind) -> dict[str, Any]:
    """The tables of a device file."""
    nbytes = (
        torch.cuda.get_device_properties(0).total_memory
        if kind == "cuda"
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    source = f"shardwright calibrate, {datetime.now(UTC).date()}, torch {torch.__version__}"
    return {
        "name": _name(kind),
        "kind": kind,
        "gib": nbytes / GIB,
        "source": source,
        "speed": {
            "generation": figures.generation,
            "bandwidth": figures.bandwidth / 1e9,
            "units": figures.units,
            "node": figures.node,
            "within": figures.within / 1e9,
            "across": figures.across / 1e9,
            **(
                {"host_memory": figures.host_memory / 1e9, "pcie": figures.pcie / 1e9}
                if figures.knows_host
                else {}
            ),
            "source": source,
            "tflops": {dtype: flops / 1e12 for dtype, flops in sorted(figures.flops.items())},
        },
        "measured": as_values(measured),
    }


def _words(measured: Measured, figures: Figures) -> Iterable[str]:
    rates = ", ".join(f"{dtype} {flops / 1e12:,.3g}" for dtype, flops in sorted(figures.flops.items()))
    yield f"{'products':10} {rates} TFLOP/s at most"
    yield f"{'memory':10} {figures.bandwidth / 1e9:,.3g} GB/s"
    yield f"{'host':10} {measured.host['host'] * 1e6:.3g} us for an operation"
    if measured.ranks:
        yield f"{'links':10} {figures.within / 1e9:,.3g} GB/s between {measured.ranks} ranks"
    points = sum(map(len, measured.kernels.values()))
    differ = ", ".join(f"{name} {each:.0%}" for name, each in measured.spread.items())
    yield f"{'tables':10} {len(measured.kernels)} with {points} times; repeated measurements differ by {differ}"
