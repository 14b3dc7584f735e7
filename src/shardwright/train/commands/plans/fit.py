"""`shardwright plan --fit`: the fastest settings of a job whose memory fits. Nothing is started."""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.common.json_text import strict_json
from shardwright.planner import (
    Device,
    Found,
    Keys,
    Later,
    Speed,
    Verdict,
    fastest,
    frontier,
    in_gib,
    in_time,
    load_program,
    one_collection,
    search_widely,
)
from shardwright.train.commands.pages.html_file import write_page
from shardwright.train.commands.plans.grids import changed, divides_loss, further_settings, grids_of
from shardwright.train.commands.plans.plan import (
    PROGRAMS,
    assumptions,
    begin_search,
    end_search,
    head,
    is_padded,
    one_line,
    program_and_verdict,
    say,
)
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config import Config
from shardwright.train.config.catalog.kinds import base_of
from shardwright.train.config.plans.cache_key import cache_key
from shardwright.train.errors import UserError, counted
from shardwright.train.report.page.plan import losses_of, plan_page
from shardwright.train.report.progress import patience, to_stderr

_Result = tuple[Found, Speed] | str | None
SHOWN = 5  #: plans beside the best one
USUAL = 20  #: plans of a search, about
SECONDS = 7.0  #: between two lines about a search, where stderr is no terminal
#: Modules that all plans need, and that take seconds to import. Importing them starts no threads.
PRELOADED = (PROGRAMS, "torch._dynamo")
OF_TRANSFORMERS = "transformers.modeling_utils"  #: the same for models of transformers
_PR_SET_PDEATHSIG = 1  #: of linux/prctl.h
EXPOSED = 0.1  #: the part of a step in which the device waits for collectives, from which on these may help


class Search(NamedTuple):
    """The result of a search.

    Attributes:
        plans: that were made.
        speeds: of the plans, by their keys.
        failed: errors of plans that should not fail, by their keys.
        searched: keys of the configuration of which several values may be tried, with these in order.
    """

    plans: list[Found]
    speeds: dict[Keys, Speed]
    failed: dict[Keys, str]
    searched: dict[str, list[str]]


def fit(
    job: PlannedJob,
    json: bool,
    processes: int = 1,
    assumed: Sequence[str] = (),
    html: Path | None = None,
) -> int:
    """Print the fastest settings that fit, with those that are slower and smaller; returns 0, or 3 if none fit.

    Args:
        job, processes: as for `search`.
        json: print all plans as JSON.
        assumed: keys whose values nobody gave, of a job that is a model alone.
        html: a file for a page.

    Raises:
        UserError: the device's speed is not known, no plan covers the job, or the page cannot be written.
    """
    started = time.monotonic()
    try:
        plans, speeds, failed, searched = search(job, processes)
    finally:
        say("")
    config = job()
    now = next((each for each in plans if not each.keys), None)
    best = fastest(plans)
    if json:
        values = {
            "now": None if now is None else _values(now, speeds),
            "best": None if best is None else _values(best, speeds),
            "plans": [_values(each, speeds) for each in plans],
            "failed": [{"keys": dict(keys), "error": error} for keys, error in failed.items()],
        }
        print(strict_json(values, indent=2))
    else:
        rows = _rows(config, job.device, now, plans, speeds, time.monotonic() - started, not job.assumes)
        print(*(f"{head:8} {text}" for head, text in rows), sep="\n")
        for i, (keys, error) in enumerate([*failed.items()][:SHOWN]):
            print(f"{'' if i else 'failed':8} {_options(config, keys)}: {error}")
        for line in assumptions(config, [key for key in assumed if key not in searched]):
            print(line)
        if "train.global_batch" in assumed:
            print(f"{'':8} A larger --train.global_batch allows larger micro-batches, which may be faster.")
    if html is not None:  # after the results, which a page that cannot be written must not lose
        sys.stdout.flush()
        found = Search(plans, speeds, failed, searched)
        page = _page(job, found, best or now, assumed)
        write_page(html, page, "Leave out plans: give values of some keys, which the search then keeps")
        if not json:
            print(f"wrote {html}")
    return 0 if best is not None else 3


def search(job: PlannedJob, processes: int = 1) -> Search:
    """Plan the job as it is, then settings with which it may be faster, or fit.

    The settings change no number of the run, except for the order of sums. Keys of the command line stay. Tensor and
    expert parallelism are tried if nothing fits without them, or if a step waits long for collectives; context
    parallelism and both kinds of offload if nothing fits without them.

    Args:
        job: the job.
        processes: plans that are made at a time. With 1 they are made in this process.

    Raises:
        UserError: the device's speed is not known, or no plan covers the job.
    """
    device = job.device
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

    def likeness(keys: Keys) -> Hashable:
        return frozenset(changed(config, keys))

    further, smaller, last = further_settings(config, job.ranks, device.figures, dict(job.keys))
    made = _Plans(functools.partial(planned, job))
    with (
        _pool(processes, _modules(job, config)) as made.pool,
        patience(_Shown(), made.words),
    ):
        now = made.plan(())()
        fixed: Keys = (("parallel.layout", "ragged"),) if now is not None and now.is_padded else ()
        of_job = functools.partial(grids_of, job, config, device.figures.node, better=fixed)
        grids = functools.partial(of_job, divides_loss(job, config, made.plan, of_job(True, ())))
        wide = functools.partial(
            search_widely, grids, further=further, smaller=smaller, last=last, helps=made.waits_long,
            width=processes, likeness=likeness,
        )  # fmt: skip
        plans = wide(made.plan)
        if fastest(plans) is None and any(each.barely for each in plans):
            again = wide(made.barely)
            seen = {each.keys for each in again}
            plans = [*again, *(each for each in plans if each.keys not in seen)]
    if not plans:
        program_and_verdict(job, config)  # raises an error of the job itself
        raise UserError("--fit: no plan covers any of its settings")
    searched: dict[str, list[str]] = {}
    for axis in (axis for axes in grids(()) for axis in axes):
        for key, value in (pair for keys in axis.values for pair in keys):
            if value not in searched.setdefault(key, []):
                searched[key].append(value)
    return Search(plans, made.speeds, made.failed, searched)


def _modules(job: PlannedJob, config: Config) -> list[str]:
    """Return the modules that plans of a search will need: none if the job's own plan is kept, and so probably all are
    of an earlier search."""
    key = cache_key(config, job.ranks, job.device.kind) if job.caches else None
    if key is not None and load_program(key) is not None:
        return []
    return [*PRELOADED, *([OF_TRANSFORMERS] if base_of(config.model.shape()) is not None else [])]


class _Plans:
    """The plans of a search.

    Attributes:
        pool: processes that make them.
        speeds: by the keys of a plan.
        failed: errors of plans that should not fail, by their keys.
    """

    def __init__(self, planned: Callable[[Keys], _Result]) -> None:
        self._planned = planned
        self.pool: Executor | None = None
        self._started, self._begun, self._done, self._last = time.monotonic(), 0, 0, ""
        self._made: dict[Keys, Found | None] = {}
        self.speeds: dict[Keys, Speed] = {}
        self.failed: dict[Keys, str] = {}

    def barely(self, keys: Keys) -> Later:
        """Begin a plan in which settings that barely fit count as those that fit."""
        later = self.plan(keys)

        def lenient() -> Found | None:
            found = later()
            return found and found._replace(fits=found.fits or found.barely)

        return lenient

    def plan(self, keys: Keys) -> Later:
        """Begin a plan, or take the one that was made before. Without other processes it is made when it is read."""
        if keys in self._made:
            return functools.partial(self._made.get, keys)
        self._begun += 1
        if self.pool is None:
            return functools.partial(self._noted, keys, functools.partial(self._planned, keys))
        with _interrupts_held():
            future = self.pool.submit(self._planned, keys)
        return functools.partial(self._noted, keys, future.result)

    def _noted(self, keys: Keys, made: Callable[[], _Result]) -> Found | None:
        result = made()
        self._done += 1
        if isinstance(result, str):
            self.failed[keys] = result
        elif result is not None:
            self.speeds[keys] = result[1]
            words = f"{in_gib(result[0].nbytes)} GiB, {in_time(result[0].seconds)} a step"
            self._last = f"; the last one {words}{_which(result[0], 'does')}"
            say(self.words())
        self._made[keys] = found = result[0] if isinstance(result, tuple) else None
        return found

    def words(self) -> str:
        """Return the progress of the search. The number of plans depends on their results, so it is an estimate."""
        seconds = time.monotonic() - self._started
        return f"planning: {self._done} of about {max(USUAL, self._begun)} plans, {seconds:.0f} s{self._last}"

    def waits_long(self, found: Found) -> bool:
        """Return whether the device waits for collectives for a large part of a step."""
        losses = {loss.name: loss.seconds for loss in self.speeds[found.keys].losses()}
        return losses["waits"] > EXPOSED * found.seconds


def _which(found: Found, does: str) -> str:
    """Return the end of a sentence about settings: how they fit. ``does``: "does" or "do"."""
    if found.barely:
        return ", which BARELY fit" if does == "do" else ", which BARELY fits"
    if found.fits:
        return ""
    return f", which {does} not fit" + (": the host has too little memory" if found.lacks_host else "")


class _Shown:
    """Shows texts on stderr: on a terminal in place of the one before, elsewhere as lines, fewer of them."""

    def __init__(self) -> None:
        self._latest = time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            say(text)
        elif time.monotonic() - self._latest >= SECONDS:
            self._latest = time.monotonic()
            to_stderr(text)


@one_collection()
def planned(job: PlannedJob, keys: Keys) -> _Result:
    """Return the plan of some settings, None if they do not go together, or an error's text, which ends no search."""
    try:
        config = job(keys)
        _, verdict = program_and_verdict(job, config, with_range=False)
    except UserError:
        return None
    except Exception as error:
        return one_line(error)
    if (speed := verdict.speed) is None:
        return None
    found = found_of(keys, verdict, speed.seconds[1])
    return found._replace(is_padded=not keys and is_padded(config, job.ranks, verdict)), speed


def found_of(keys: Keys, verdict: Verdict, seconds: float) -> Found:
    """Return a plan for the search, in which only settings with room fit.

    A job that fits only because the allocator empties its cache needs more than the device has, so it does not count as
    one that barely fits.
    """
    barely = verdict.answer == "barely" and verdict.left >= 0
    reserved = verdict.unlimited.reserved
    filling = reserved / max(1, reserved + verdict.left)
    return Found(
        keys, verdict.answer == "yes", reserved, seconds, barely, verdict.needs_more_host, filling=filling
    )


@contextmanager
def _pool(processes: int, modules: Sequence[str] = ()) -> Iterator[Executor | None]:
    """Processes that make plans; None: this one does.

    They end at once with the search, also if it is interrupted. ``modules``: which all of them need.
    """
    if processes == 1:
        begin_search()
        try:
            yield None
        finally:
            end_search()
        return
    _start_tracker_quietly()
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, _context(modules), _begin_process) as pool:
        try:
            with _interrupts_held():
                pool.submit(int)  # forks, while this process has no other threads
            yield pool
        except BrokenProcessPool:
            raise UserError(
                "--fit: a process that makes plans was killed, probably since this machine has too little memory; "
                "choose fewer --processes"
            ) from None
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _begin_process() -> None:
    if (
        sys.platform == "linux"
    ):  # forks hold each other's pipes, and so would never notice that the search was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.simplefilter("ignore")
    begin_search()


def _context(modules: Sequence[str]) -> BaseContext:
    """Return the way in which processes start. On Linux this process imports what plans need, and each process is a
    fork of it: imports in each of eight processes were the larger part of the time of a short search. Without
    ``modules`` each process imports what it needs."""
    if sys.platform != "linux" or not modules:
        return multiprocessing.get_context("spawn")
    for name in modules:
        with suppress(ImportError):  # of what is not installed, which the plan says better
            importlib.import_module(name)
    import torch

    # A fork cannot use CUDA after its parent has. No plan does, but a driver may know better.
    return multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")


def _start_tracker_quietly() -> None:
    """Start Python's tracker of semaphores. It would print a warning about those of processes that an interrupt
    kills, which it removes."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before, "ignore:resource_tracker"]))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that start inside the context never get SIGINT, with which each would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _values(each: Found, speeds: Mapping[Keys, Speed]) -> dict[str, object]:
    return {
        "keys": dict(each.keys),
        "fits": each.fits,
        "barely": each.barely,
        "reserved_bytes": each.nbytes,
        "step_seconds": each.seconds,
        "tokens_per_second": speeds[each.keys].tokens_per_second[1],
    }


def _page(job: PlannedJob, found: Search, shown: Found | None, assumed: Sequence[str]) -> str:
    """Return the page of a search: the plan of some settings, without any those of the job, and all plans."""
    config = job(() if shown is None else shown.keys)
    program, verdict = program_and_verdict(job, config)
    values = {key: config.value_at(key) for key in assumed if key not in found.searched}
    what = "the fastest settings that fit" if shown is not None and shown.fits else "the job as it is"
    grid = {**grid_of(job(), found), "shown": what}
    lines = head(job, config).split("\n")
    return plan_page(config.run.name, lines, program, verdict, (), values, grid)


_TOGETHER = ("parallel.strategy", "parallel.replicas", "parallel.reshard_after_forward")
"""Keys that one dimension has: few of their combinations are planned."""


def grid_of(config: Config, found: Search) -> dict[str, Any]:
    """Return the plans of a search by dimension, for `plan_page`. Values that all plans share are no dimension."""

    def words(keys: Keys, names: Sequence[str]) -> str:
        values = [dict(keys).get(name, str(config.value_at(name))) for name in names]
        return ", ".join(
            [values[0], *(f"{n.partition('.')[2]} {v}" for n, v in zip(names[1:], values[1:], strict=True))]
        )

    keys = dict.fromkeys(key for plan in found.plans for key, _ in plan.keys)
    groups = [
        tuple(key for key in _TOGETHER if key in keys),
        *((key,) for key in keys if key not in _TOGETHER),
    ]
    dimensions, places = [], []
    for names in filter(None, groups):
        texts = [words(plan.keys, names) for plan in found.plans]
        order = found.searched.get(names[0], [])
        values = sorted(dict.fromkeys(texts), key=lambda text: _place(text, order))
        if len(values) > 1:
            dimensions.append({"name": names[0], "values": values})
            places.append([values.index(text) for text in texts])
    return {
        "dimensions": dimensions,
        "plans": [
            {
                **_values(plan, found.speeds),
                "keys": dict(changed(config, plan.keys)),
                "is_job": not plan.keys,
                "at": [place[i] for place in places],
                "losses": losses_of(found.speeds[plan.keys]),
            }
            for i, plan in enumerate(found.plans)
        ],
        "failed": [{"keys": dict(keys), "error": error} for keys, error in found.failed.items()],
    }


def _place(text: str, order: Sequence[str]) -> tuple[float, str]:
    """Numbers in ascending order, other values in the order of the search."""
    first = text.partition(",")[0]
    if first.isdigit():
        return float(first), text
    return float(order.index(first) if first in order else len(order)), text


def _rows(
    config: Config,
    device: Device,
    now: Found | None,
    plans: Sequence[Found],
    speeds: Mapping[Keys, Speed],
    seconds: float,
    has_file: bool,
) -> Iterator[tuple[str, str]]:
    """Heads and texts: the best plan and its file, then those that are slower and smaller, and why they are slower."""
    fitting, barely = sum(each.fits for each in plans), sum(each.barely for each in plans)
    if any(each.fits and each.barely for each in plans):  # which counted, since none fits with room
        fitting = 0
    marked = f" and {barely} BARELY fit" if barely else ""
    yield (
        "fit",
        f"{counted(len(plans), 'plan', 'plans')} in {in_time(seconds)}, {fitting} of them fit {device.name}{marked}",
    )
    if now is not None:
        yield "now", _figures(now, speeds[now.keys])
    yield from _largest(config, plans)
    front = frontier(plans)
    if not front:
        least = min(plans, key=lambda each: (each.lacks_host, each.nbytes))
        host = ", and more memory of the host than it has" if least.lacks_host else ""
        yield (
            "best",
            f"none; the smallest one needs {in_gib(least.nbytes)} GiB{host}: {_options(config, least.keys)}",
        )
        if not least.lacks_host and any(each.lacks_host for each in plans):
            yield "", "settings with offload need more memory of the host than it has"
        return
    best, speed = front[0], speeds[front[0].keys]
    if has_file:
        yield "best", f"{_figures(best, speed)}; as a file's lines:"
        yield from (("", line) for line in _toml(config, best.keys))
    else:
        yield "best", f"{_figures(best, speed)}: {_options(config, best.keys)}"
    for i, each in enumerate(front[1 : SHOWN + 1]):
        other = speeds[each.keys]
        yield "smaller" if not i else "", f"{_figures(each, other)}: {_options(config, each.keys)}"
        yield "", f"  {_why_slower(speed, other)}"


def _largest(config: Config, plans: Sequence[Found]) -> Iterator[tuple[str, str]]:
    """Yield a row about the largest micro-batch that fits, if plans differ in nothing else."""
    key = "train.micro_batch"
    differing = {name for each in plans for name, _ in changed(config, each.keys)}
    if differing != {key}:
        return
    sizes = {int(dict(each.keys).get(key, str(config.value_at(key)))): each for each in plans}
    fitting = max((size for size, each in sizes.items() if each.fits), default=0)
    larger = min((size for size, each in sizes.items() if size > fitting), default=0)
    if fitting:
        more = f"; {larger} needs {in_gib(sizes[larger].nbytes)} GiB" if larger else ", and is all of a step"
        yield "largest", f"{key} {fitting} fits, with {in_gib(sizes[fitting].nbytes)} GiB{more}"


def _figures(found: Found, speed: Speed) -> str:
    return (
        f"{speed.tokens_per_second[1]:,.0f} tokens/s on each device, MFU {speed.mfu:.1%}, "
        f"{in_gib(found.nbytes)} GiB reserved{_which(found, 'do')}"
    )


def _why_slower(best: Speed, other: Speed) -> str:
    """Return the losses that grow most."""
    before = {loss.name: loss.seconds for loss in best.losses()}
    grown = sorted(
        ((loss.seconds - before.get(loss.name, 0.0), loss.text) for loss in other.losses()), reverse=True
    )
    whole = other.seconds[1] - best.seconds[1]
    words = [f"{text} +{in_time(more)}" for more, text in grown[:2] if more > 0.1 * whole]
    return f"{in_time(whole)} a step more: {', '.join(words)}"


def _options(config: Config, keys: Keys) -> str:
    return " ".join(f"--{key} {value}" for key, value in changed(config, keys)) or "the job as it is"


def _toml(config: Config, keys: Keys) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for key, value in changed(config, keys):
        section, _, name = key.partition(".")
        text = value if value.isdigit() else f'"{value}"'
        sections.setdefault(section, []).append(f"{name} = {text}")
    if not sections:
        yield "the job as it is"
    for section, lines in sections.items():
        yield f"[{section}]"
        yield from lines
