"""`shardwright plan`: whether a configured job fits into the memory of its devices. Nothing is started."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shardwright.common.json_text import strict_json
from shardwright.planner import (
    Program,
    Verdict,
    as_values,
    in_gib,
    in_time,
    judge,
    load_program,
    search_all,
    speed_of,
    store_program,
    with_setting,
)
from shardwright.train.commands.pages.html_file import write_page
from shardwright.train.commands.plans.planned_job import PlannedJob
from shardwright.train.config import Config
from shardwright.train.config.axes import AXES
from shardwright.train.config.catalog.kinds import model_in_words
from shardwright.train.config.plans.cache_key import cache_key
from shardwright.train.config.plans.memory_edits import Keys, edits_of, edits_of_host, in_words
from shardwright.train.errors import UserError, counted
from shardwright.train.models.offers import sizes_of
from shardwright.train.report.page.plan import plan_page

PROGRAMS = "shardwright.train.planning.programs"  #: the module that makes plans, which imports PyTorch
EDITS = 3  #: shown at most
#: Times its part of the weights, from which on a rank has padding that another layout may save.
PADDED = 1.5
FEW_RANKS = 8  #: up to which hardly any parameter has fewer rows than there are ranks
LEAST = 0.01  #: part of the reserved bytes that an edit must be able to save, to be planned


def plan(
    job: PlannedJob,
    json: bool,
    assumed: Sequence[str] = (),
    names_edits: bool = True,
    html: Path | None = None,
) -> int:
    """Print the verdict on a job, and edits that save memory if it does not fit well.

    Args:
        job: the job.
        json: print the values as JSON.
        assumed: keys whose values nobody gave.
        names_edits: look for edits.
        html: a file for a page.

    Returns:
        The status of the process: 0, or 3 if the job does not fit.

    Raises:
        UserError: the configuration does not fit the number of ranks, no plan covers it, or the page cannot be written.
    """
    config = job()
    program, verdict = program_and_verdict(job, config)
    if not json:
        print(head(job, config), verdict, *_run(config, verdict), sep="\n")
        for line in assumptions(config, assumed):
            print(line)
        sys.stdout.flush()  # edits take some time
    edits: list[tuple[str, Verdict]] = []
    failed: dict[str, str] = {}
    if names_edits and verdict.answer != "yes":
        if not job.rules.expandable:
            rules = replace(job.rules, expandable=True)
            other = judge(program, job.device, job.ranks, rules, verdict.speed)
            edits.append((with_setting(os.environ, "expandable_segments:True"), other))
        tried = _edits_to_try(config, job.ranks, verdict)
        for i, keys in enumerate(tried):
            say(f"edit {i + 1} of {len(tried)}: {in_words(keys)}")
            try:
                _, other = program_and_verdict(job, job(keys), with_range=False)
            except UserError:  # it does not go together with another key
                continue
            except Exception as error:  # a mistake of one plan must not cost the others
                failed[in_words(keys)] = one_line(error)
                continue
            edits.append((in_words(keys), other))
        say("")
    edits = sorted((each for each in edits if _helps(verdict, each[1])), key=_merit)[:EDITS]
    values = {key: config.value_at(key) for key in assumed}
    if json:
        print(strict_json(as_values(verdict, edits, values, failed), indent=2))
    else:
        for i, row in enumerate(_rows_of_edits(verdict, edits, failed)):
            print(f"{'' if i else 'edits':8} {row}")
        is_enough = verdict.answer == "yes" or any(each.answer == "yes" for _, each in edits)
        if names_edits and not is_enough and job.device.figures is not None:
            print(f"{'':8} --fit looks for settings that fit, also several at a time")
    if html is not None:  # after the figures, which a page that cannot be written must not lose
        sys.stdout.flush()
        page = plan_page(
            config.run.name,
            head(job, config).split("\n"),
            program,
            verdict,
            edits,
            values,
            failed=failed,
        )
        write_page(html, page, "Leave out layers: plan the job with a smaller model.layers, or use --json")
        if not json:
            print(f"wrote {html}")
    return verdict.status


def say(text: str) -> None:
    """Show a line on a terminal's stderr, in place of the one before; without text none."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:width]}\033[K", end="", file=sys.stderr, flush=True)


def _run(config: Config, verdict: Verdict) -> Iterator[str]:
    if verdict.speed is not None and config.train.knows_steps:
        steps = config.train.steps
        seconds = steps * verdict.speed.seconds[1]
        hours = seconds / 3600 * verdict.ranks
        kind = "GPU" if verdict.device.kind == "cuda" else "CPU"
        words = f"{steps:,} steps take {in_time(seconds)}, {hours:,.3g} {kind}-hours, without validations and saves"
        yield f"{'run':8} {words}"


_searches = False  #: whether plans of this process belong to a search


def begin_search() -> None:
    """Let further plans of this process take over what earlier ones have compiled, until `end_search`."""
    global _searches
    _searches = True


def end_search() -> None:
    """End what `begin_search` has begun. PyTorch may not have been imported, since all plans were kept."""
    global _searches
    _searches = False
    search_all()
    if (programs := sys.modules.get(PROGRAMS)) is not None:
        programs.close_search()


def program_of(
    config: Config, ranks: int, caches: bool = True, kind: Literal["cpu", "cuda"] = "cuda"
) -> Program:
    """Return the program of the configuration on devices of this kind, from the cache if it is there."""
    key = cache_key(config, ranks, kind) if caches else None
    program = load_program(key) if key is not None else None
    if program is None:
        from shardwright.engine.compat import log_errors_alone
        from shardwright.planner.tracing import map_large_blocks
        from shardwright.train.planning import programs

        map_large_blocks()
        log_errors_alone()  # what torch says of code that it only traces is for runs
        if _searches:
            programs.open_search()
        program = programs.program_of(config, ranks, kind)
        if key is not None:
            store_program(key, program)
    return program


def program_and_verdict(job: PlannedJob, config: Config, with_range: bool = True) -> tuple[Program, Verdict]:
    """Return the program of a configuration, and the verdict on it, which has the speed if that is known.

    Args:
        job: says for which devices.
        config: of the job, perhaps with further keys.
        with_range: find the range of the speed, too, which takes ten times as long as the speed.
    """
    program = program_of(config, job.ranks, job.caches, job.device.kind)
    speed = speed_of(program, job.device, job.ranks, with_range=with_range)
    return program, judge(program, job.device, job.ranks, job.rules, speed)


def head(job: PlannedJob, config: Config) -> str:
    """Return the lines about a job above its plan."""
    ranks, device, train, parallel = job.ranks, job.device, config.train, config.parallel
    parameters = sizes_of(config.model.shape()).parameters
    count = train.accumulation_steps(parallel.dims(ranks).data)
    way = parallel.strategy if parallel.facts.has_own_keys else f"engine {parallel.engine}"
    parts = parallel.parts_of("samples")
    where = "rank" if parts == 1 else f"group of {parts} ranks"
    compiled = "" if train.compile == "none" else f", blocks compiled by {train.compile}"
    offload = config.activations.offload
    offloaded = "" if offload == "none" else f", offload {offload!r}"
    return (
        f"{model_in_words(config.model.shape(), config.model.kind)} ({parameters:,} parameters)\n"
        f"{ranks} x {device.name}, {way}, {parallel.param_dtype}, {config.optimizer.name}, "
        f"activations.checkpoint {config.activations.checkpoint!r}{offloaded}{compiled}\n"
        f"global batch {train.global_batch:,} in {counted(count, 'micro-batch', 'micro-batches')} of "
        f"{train.micro_batch} x {train.seq_len:,} tokens on each {where}"
    )


def assumptions(config: Config, assumed: Sequence[str]) -> Iterator[str]:
    """Yield lines on what a plan assumes. ``assumed``: keys whose values nobody gave."""
    if assumed:
        yield "assumed  what config.json does not say; each of these options changes it:"
        words = " ".join(f"--{key}\0{config.value_at(key)}" for key in assumed)
        lines = textwrap.wrap(words, 110, break_on_hyphens=False)
        yield from (" " * 9 + line.replace("\0", " ") for line in lines)
    if config.data.separates:
        yield "assumed  one document in each sample; where a GPU runs flash attention, others change little"
    yield from (
        f"assumed  {axis.assumption}" for axis in AXES if axis.assumption and config.value_at(axis.key) > 1
    )
    if config.run.hooks:
        yield "assumed  hooks of run.hooks take no memory; logits that validation keeps for their metrics count"


def one_line(error: Exception) -> str:
    """Return the error of a plan that should not fail, for a row."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.100}"


def _edits_to_try(config: Config, ranks: int, verdict: Verdict) -> list[Keys]:
    """Edits that may save a part of the memory that is worth a plan, and the host's if it lacks some."""
    groups = verdict.peak.by_group()
    edits = edits_of(config, verdict.device.kind, is_padded(config, ranks, verdict))
    wanted = [
        keys
        for keys, touched in edits
        if sum(groups.get(group, 0) for group in touched) >= LEAST * verdict.unlimited.reserved
    ]
    if verdict.needs_more_host:
        wanted += [
            keys for keys, group in edits_of_host(config) if verdict.host.get(group) and keys not in wanted
        ]
    return wanted


def is_padded(config: Config, ranks: int, verdict: Verdict) -> bool:
    """Return whether this rank has much more of the weights than its part, because a layout cuts few rows for many
    ranks.

    An example are packed experts: 8 rows, one for each expert, on 64 ranks.
    """
    if ranks <= FEW_RANKS:  # and looking up the parameters of a model of transformers takes seconds
        return False
    from shardwright.train.parallel.host_memory import STORED, cuts  # which imports psutil

    parameters = sizes_of(config.model.shape()).parameters
    return verdict.exact["parameters"] > PADDED * STORED * parameters / cuts(config.parallel, ranks)


def _helps(verdict: Verdict, other: Verdict) -> bool:
    """Return whether a changed job needs less of the memory that the job lacks."""
    if verdict.needs_more_host:
        return other.host_need < verdict.host_need
    return other.unlimited.reserved < verdict.unlimited.reserved


def _rows_of_edits(
    verdict: Verdict, edits: Sequence[tuple[str, Verdict]], failed: Mapping[str, str]
) -> Iterator[str]:
    for words, other in edits:
        saved = in_gib(abs(verdict.unlimited.reserved - other.unlimited.reserved))
        sign = "-" if other.unlimited.reserved <= verdict.unlimited.reserved else "+"
        fits = {"yes": "fits", "barely": "fits barely", "no": "does not fit"}[other.answer]
        if other.needs_more_host:
            fits = "does not fit into the host's memory"
        rate = f", {other.speed.tokens_per_second[1]:,.0f} tokens/s" if other.speed is not None else ""
        yield f"{words:50} {sign}{saved} GiB, {fits}{rate}"
    for words, error in failed.items():
        yield f"{words:50} has no plan: {error}"


def _merit(edit: tuple[str, Verdict]) -> tuple[int, float]:
    """Sorts edits: those with which the job fits come first, the fastest first, then those that save most memory."""
    other = edit[1]
    if other.answer == "yes" and other.speed is not None:
        return 0, -other.speed.tokens_per_second[1]
    return ("yes", "barely", "no").index(other.answer), other.unlimited.reserved
