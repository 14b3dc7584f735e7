"""`shardwright plan --fit`: the fastest settings of a job whose memory fits. Nothing is started."""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from shardwright.planner.allocator import Rules
from shardwright.planner.devices import Device
from shardwright.planner.search import Axis, Found, Keys, fastest, frontier, search
from shardwright.planner.speed import Speed, in_time, speed_of
from shardwright.planner.verdict import in_gib, judge
from shardwright.strict_json import strict_json
from shardwright.train.commands.plan import program_of
from shardwright.train.commands.planned_job import PlannedJob
from shardwright.train.config import Config
from shardwright.train.config.assumed import value_at
from shardwright.train.config.dims import ParallelDims
from shardwright.train.errors import UserError, counted

SHOWN = 5  #: plans beside the best one


def fit(
    job: PlannedJob, device: Device, rules: Rules, json: bool, caches: bool = True, processes: int = 1
) -> int:
    """Print the fastest settings that fit, with those that are slower and smaller; returns 0, or 3 if none fit.

    The settings change no number of the run, except for the order of sums. Keys of the command line stay.

    Args:
        job: the job.
        device: of each rank.
        rules: of PyTorch's allocator.
        json: print all plans as JSON.
        caches: take programs that were traced before, and keep new ones.
        processes: plans that are made at a time. With 1 they are made in this process.

    Raises:
        UserError: the device's speed is not known, or no plan covers the job.
    """
    if device.figures is None:
        raise UserError(
            f"--fit: expected a device whose speed is known, found {device.name!r}; its file needs a table [speed]"
        )
    config = job()
    if config.parallel.offload != "none" and not device.figures.knows_host:
        raise UserError(
            f"--fit: expected a device of which host_memory and pcie are known with parallel.offload "
            f"{config.parallel.offload!r}, found {device.name!r}; its table [speed] needs both"
        )
    speeds: dict[Keys, Speed] = {}
    started = time.monotonic()
    planned = functools.partial(_planned, job, device, rules, caches)

    def plan(points: Sequence[Keys]) -> Iterator[Found | None]:
        for result in map(planned, points) if pool is None else pool.map(planned, points):
            if result is not None:
                found, speeds[found.keys] = result
                _say(len(speeds), found)
            yield None if result is None else result[0]

    plans: list[Found] = []
    with _pool(processes) as pool:
        now = next(plan([()]))
        for axes in axes_of(config, job.ranks, device.figures.node, dict(job.keys)):
            plans += search(axes, plan, processes)
            if fastest(plans) is not None:
                break  # blocks that are compiled are faster and smaller
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if not plans:
        program_of(config, job.ranks, caches, device.kind)  # an error of the job itself
        raise UserError("--fit: no plan covers any of its settings")
    best = fastest(plans)
    if json:
        values = {
            "now": None if now is None else _values(now, speeds),
            "best": None if best is None else _values(best, speeds),
            "plans": [_values(each, speeds) for each in plans],
        }
        print(strict_json(values, indent=2))
    else:
        rows = _rows(config, device, now, plans, speeds, time.monotonic() - started)
        print(*(f"{head:8} {text}" for head, text in rows), sep="\n")
    return 0 if best is not None else 3


def _planned(
    job: PlannedJob, device: Device, rules: Rules, caches: bool, keys: Keys
) -> tuple[Found, Speed] | None:
    """The plan of some settings; None: they do not go together."""
    try:
        config = job(keys)
        program = program_of(config, job.ranks, caches, device.kind)
    except UserError:
        return None
    speed = speed_of(program, device, job.ranks, with_range=False)
    if speed is None:
        return None
    verdict = judge(program, device, job.ranks, rules, speed)
    return Found(keys, verdict.fits, verdict.unlimited.reserved, speed.seconds[1]), speed


def _pool(processes: int) -> AbstractContextManager[Executor | None]:
    if processes == 1:
        return nullcontext()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, functools.partial(warnings.simplefilter, "ignore"))


def _say(count: int, found: Found) -> None:
    if sys.stderr.isatty():
        words = f"{in_gib(found.nbytes)} GiB, {in_time(found.seconds)} a step"
        print(f"\r{count} plans, the last one {words}\033[K", end="", file=sys.stderr, flush=True)


def _values(each: Found, speeds: Mapping[Keys, Speed]) -> dict[str, object]:
    return {
        "keys": dict(each.keys),
        "fits": each.fits,
        "reserved_bytes": each.nbytes,
        "step_seconds": each.seconds,
        "tokens_per_second": speeds[each.keys].tokens_per_second[1],
    }


def axes_of(config: Config, ranks: int, node: int, given: Mapping[str, str]) -> Iterator[list[Axis]]:
    """The grids of settings: one with blocks that inductor compiles, and one with the job's own `train.compile`.

    Args:
        config: the job.
        ranks: of the job.
        node: devices of a node.
        given: keys that stay as they are.
    """
    data = ParallelDims.of(config.parallel, ranks).data
    axes = [
        Axis("strategy", tuple(_strategies(config, data, node))),
        Axis("micro-batch", tuple((("train.micro_batch", str(n)),) for n in _micro_batches(config, data))),
        Axis("checkpoint", tuple((("activations.checkpoint", way),) for way in ("none", "ops", "full"))),
    ]
    axes = [axis for axis in axes if not any(key in given for keys in axis.values for key, _ in keys)]
    ways = [config.train.compile] if "train.compile" in given else [config.train.compile, "inductor"]
    for way in dict.fromkeys(reversed(ways)):
        yield [Axis("compile", ((("train.compile", way),),)), *axes]


def _micro_batches(config: Config, data: int) -> list[int]:
    """Sizes of micro-batches that divide a rank's samples of a step, each at least twice the one after it."""
    whole = config.train.global_batch // data
    sizes = [1]
    for n in range(2, whole + 1):
        if whole % n == 0 and n >= 2 * sizes[-1]:
            sizes.append(n)
    return sizes[::-1]


def _strategies(config: Config, data: int, node: int) -> Iterator[Keys]:
    """Ways to divide the model over so many ranks, those that communicate least first."""
    if not config.parallel.facts.has_own_keys or data == 1:
        yield ()
        return

    def keys(strategy: str, replicas: int, reshard: str) -> Keys:
        return (
            ("parallel.strategy", strategy),
            ("parallel.replicas", str(replicas)),
            ("parallel.reshard_after_forward", reshard),
        )

    node = max(1, node // config.parallel.tensor)
    if data > node and data % node == 0:  # replicas of whole nodes
        replicas = data // node
        while replicas > 1:
            yield keys("hsdp", replicas, "default")
            replicas = next((n for n in range(replicas // 2, 0, -1) if data // node % n == 0), 1)
    else:
        yield keys("zero2", 1, "default")
    yield keys("zero3", 1, "never")
    yield keys("zero3", 1, "default")


def _rows(
    config: Config,
    device: Device,
    now: Found | None,
    plans: Sequence[Found],
    speeds: Mapping[Keys, Speed],
    seconds: float,
) -> Iterator[tuple[str, str]]:
    """Heads and texts: the best plan and its file, then those that are slower and smaller, and why they are slower."""
    fitting = sum(each.fits for each in plans)
    yield (
        "fit",
        f"{counted(len(plans), 'plan', 'plans')} in {in_time(seconds)}, {fitting} of them fit {device.name}",
    )
    if now is not None:
        fits = "" if now.fits else ", which do not fit"
        yield "now", f"{_figures(now, speeds[now.keys])}{fits}"
    front = frontier(plans)
    if not front:
        least = min(plans, key=lambda each: each.nbytes)
        yield (
            "best",
            f"none; the smallest one needs {in_gib(least.nbytes)} GiB: {_options(config, least.keys)}",
        )
        return
    best, speed = front[0], speeds[front[0].keys]
    yield "best", f"{_figures(best, speed)}; as a file's lines:"
    yield from (("", line) for line in _toml(config, best.keys))
    for i, each in enumerate(front[1 : SHOWN + 1]):
        other = speeds[each.keys]
        yield "smaller" if not i else "", f"{_figures(each, other)}: {_options(config, each.keys)}"
        yield "", f"  {_why_slower(speed, other)}"


def _figures(found: Found, speed: Speed) -> str:
    return (
        f"{speed.tokens_per_second[1]:,.0f} tokens/s on each device, MFU {speed.mfu:.1%}, "
        f"{in_gib(found.nbytes)} GiB reserved"
    )


def _why_slower(best: Speed, other: Speed) -> str:
    """The losses that grow most."""
    before = {loss.name: loss.seconds for loss in best.losses()}
    grown = sorted(
        ((loss.seconds - before.get(loss.name, 0.0), loss.text) for loss in other.losses()), reverse=True
    )
    whole = other.seconds[1] - best.seconds[1]
    words = [f"{text} +{in_time(more)}" for more, text in grown[:2] if more > 0.1 * whole]
    return f"{in_time(whole)} a step more: {', '.join(words)}"


def _changed(config: Config, keys: Keys) -> Keys:
    """The keys whose values are not those of the job."""
    return tuple((key, value) for key, value in keys if str(value_at(config, key)) != value)


def _options(config: Config, keys: Keys) -> str:
    return " ".join(f"--{key} {value}" for key, value in _changed(config, keys)) or "the job as it is"


def _toml(config: Config, keys: Keys) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for key, value in _changed(config, keys):
        section, _, name = key.partition(".")
        text = value if value.isdigit() else f'"{value}"'
        sections.setdefault(section, []).append(f"{name} = {text}")
    if not sections:
        yield "the job as it is"
    for section, lines in sections.items():
        yield f"[{section}]"
        yield from lines
