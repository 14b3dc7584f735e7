"""Compares runs: whether their losses agree, and the time and memory of each.

Runs must be of the same job: the same model, text, order of samples and global batch. Engines, ranks and precisions may
differ.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shardwright.train.commands.hugging_face import tables
from shardwright.train.config import Config
from shardwright.train.config.catalog.engines import ENGINES, engines_that
from shardwright.train.config.catalog.figures import gib
from shardwright.train.errors import UserError
from shardwright.train.report import jsonl, plots
from shardwright.train.run.evaluations import evaluations_of
from shardwright.train.run.folder import RunFolder, open_for_writing
from shardwright.train.run.same_job import differences, value_in_words
from shardwright.train.run.writing import write_json, writing

MOST_IN_PAIRS = 4
"""Up to this number of runs the terminal shows every pair. With more runs only compare.json has the pairs."""
WIDE = 10_000
"""A width, in columns, that is enough for any table."""
PIPED_WIDTH = 140
"""The width, in columns, of tables that go to a file or a pipe. These have no width of their own."""


@dataclass(frozen=True)
class ComparedRun:
    """The data of a run that a comparison reads."""

    folder: RunFolder
    config: Config
    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        return {step["step"]: step["loss"] for step in self.steps}

    def described(self, key: str) -> str:
        """Return a value of its sessions. If a resume changed it, all values in order."""
        return ", then ".join(dict.fromkeys(str(session[key]) for session in self.record["sessions"]))

    @property
    def settings(self) -> dict[str, str]:
        """The settings that may differ between runs, in words; "-" if the run's engine lacks a setting."""
        ranks = self.described("ranks")
        main = {
            "engine": self.described("engine"),
            "ranks": f"{ranks} {'rank' if ranks == '1' else 'ranks'}",
            "dtypes": self.dtypes,
            "strategy": self._planned("strategy"),
            "layout": self._planned("layout"),
            "memory": self._planned("memory"),
        }
        return main | self._others

    def _planned(self, key: str) -> str:
        """One of the options of an engine that has keys of its own."""
        values = []
        for session in self.record["sessions"]:
            # Older runs have one value in their configuration, from the last session.
            value = session.get(key) or str(getattr(self.config.parallel, key))
            engine = ENGINES.get(session["engine"])
            values.append(value if engine is not None and engine.has_own_keys else "-")
        return ", then ".join(dict.fromkeys(values))

    @property
    def _others(self) -> dict[str, str]:
        """Other keys of the configuration that change speed, memory or bits, with their names."""
        config = self.config.resolved()
        sections = {
            "parallel": config.parallel, "train": config.train, "activations": config.activations,
            "optimizer": config.optimizer,
        }  # fmt: skip
        return {
            f"{name}.{key}": str(value)
            for name, section in sections.items()
            for key, value in section
            if f"{name}.{key}" not in ELSEWHERE
        } | {"device": self.described("device_name"), "threads": self.described("threads")}

    @property
    def dtypes(self) -> str:
        """Compute and reduce precision in short: fp32, or bf16/fp32."""
        compute, reduce = (
            self.described(key).replace("bfloat16", "bf16").replace("float32", "fp32")
            for key in ("param_dtype", "reduce_dtype")
        )
        return compute if compute == reduce else f"{compute}/{reduce}"


ANY_RUNS = "shardwright report draws runs of different jobs"
"""The way out for runs that cannot be compared."""
MAIN = ("engine", "ranks", "dtypes", "strategy", "layout", "memory")
"""Settings that every comparison shows. It shows other settings only if runs differ in them."""

ELSEWHERE = {
    "parallel.engine", "parallel.param_dtype", "parallel.reduce_dtype", "parallel.strategy", "parallel.layout",
    "parallel.memory", "train.seq_len", "train.global_batch",
}  # fmt: skip
"""Keys without an entry in `_others`: they have a separate column, or are equal in all runs of one job."""


def split_settings(runs: Sequence[ComparedRun]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the main settings that are equal in all runs, and for each run the settings that differ."""
    settings = [run.settings for run in runs]
    differ = [key for key in settings[0] if len({each[key] for each in settings}) > 1]
    common = {key: settings[0][key] for key in MAIN if key not in differ}
    return common, [{key: each[key] for key in differ} for each in settings]


def settings_in_words(settings: Mapping[str, str]) -> str:
    """Such as "engine shardwright, 2 ranks, strategy zero3"."""
    return ", ".join(
        value if key == "ranks" else f"{key} {value}" for key, value in settings.items() if value != "-"
    )


@dataclass(frozen=True)
class LossDifference:
    """The largest difference of the losses of two runs, relative to the first run, and its step."""

    common_steps: int
    difference: float
    step: int


def read_run(path: Path) -> ComparedRun:
    """Raises UserError if the folder holds no run, or a run without steps."""
    folder = RunFolder(path)
    record, config = folder.record(), folder.config()
    steps = jsonl.read_records(folder.metrics_file)
    if not steps:
        raise UserError(
            f"{folder.metrics_file}: expected at least one step, found none; continue the run, or leave it out"
        )
    return ComparedRun(folder, config, record, steps)


def check_comparable(first: ComparedRun, other: ComparedRun) -> None:
    """Raise if the runs are of different jobs. The error names the first key that differs."""
    for key, before, after in differences(first.config, other.config):
        # The text must be the same; its path may differ.
        if key != "data.source":
            raise UserError(
                f"compare: expected runs of the same job, found {key} = {value_in_words(before)} in "
                f"{first.folder.path} and {value_in_words(after)} in {other.folder.path}; {ANY_RUNS}"
            )
    texts = [run.record["corpus"]["sha256"] for run in (first, other)]
    if texts[0] != texts[1]:
        raise UserError(
            f"compare: expected runs on the same data, found sha256 {texts[0][:12]} in {first.folder.path} and "
            f"{texts[1][:12]} in {other.folder.path}; {ANY_RUNS}"
        )


def relative_differences(first: ComparedRun, other: ComparedRun) -> dict[int, float]:
    """|other - first| / |first| of the loss at every common step. If the first loss is 0, only |other - first|."""
    ours, theirs = first.losses, other.losses
    return {
        step: abs(theirs[step] - ours[step]) / (abs(ours[step]) or 1.0) for step in ours if step in theirs
    }


def agreement(first: ComparedRun, other: ComparedRun) -> LossDifference:
    apart = relative_differences(first, other)
    if not apart:
        raise UserError(
            f"compare: expected steps in common, found none in {first.folder.path} and {other.folder.path}"
        )
    worst = max(apart, key=lambda step: apart[step])
    return LossDifference(len(apart), apart[worst], worst)


def compare(runs: list[Path], out: Path | None) -> int:
    """Print tables of two or more runs, write compare.json and compare.png into `out` (default: the first run's
    folder).

    Returns 0. Raises UserError for runs that cannot be compared and a folder that cannot be written.
    """
    read = [read_run(path) for path in runs]
    for other in read[1:]:
        check_comparable(read[0], other)
    figures = [figures_of(run, read[0]) for run in read]
    pairs = pairs_of(read)
    target = read[0].folder.path if out is None else out
    open_for_writing(target, "--out")
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    names = names_of(read)
    common, special = split_settings(read)
    if common:
        console.print(f"Same in all runs: {settings_in_words(common)}", markup=False, highlight=False)
    if any(special):
        console.print(settings_of_runs(names, special, console))
    console.print(table_of(names, figures))
    console.print(explanation(read), markup=False, highlight=False)
    console.print(memory_table(names, figures))
    console.print(memory_explanation(read, figures), markup=False, highlight=False)
    of_steps = [evaluations_of(run.folder, run.steps[-1]["step"]) for run in read]
    evaluations = [each[-1] if each else None for each in of_steps]
    for figure, evaluation, each in zip(figures, evaluations, of_steps, strict=True):
        figure["evaluation"] = None if evaluation is None else evaluation._asdict()
        figure["evaluations"] = [evaluation._asdict() for evaluation in each]
    if any(evaluations):
        console.print(tables.of_runs(names, evaluations))
        for line in tables.other_conditions(names, evaluations):
            console.print(f" {line}", markup=False, highlight=False)
    if any(len(each) > 1 for each in of_steps):
        console.print(tables.over_steps(names, of_steps))
    if 2 < len(read) <= MOST_IN_PAIRS:
        console.print(pair_table(names, pairs))
    write_json(target / "compare.json", {"runs": figures, "pairs": pairs})
    on_gpu = any(session["device"] == "cuda" for run in read for session in run.record["sessions"])
    by_engine = not on_gpu and all(figure["leased_memory_bytes"] is not None for figure in figures)
    with writing(target, "--out"):
        curves = [
            curve_of(run, read[0], figure, name, settings_in_words(settings), by_engine)
            for run, figure, name, settings in zip(read, figures, names, special, strict=True)
        ]
        panel = BY_ENGINE if by_engine else BY_DEVICE
        picture = plots.comparison_figure(curves, settings_in_words(common), panel)
        picture.savefig(target / "compare.png", dpi=plots.DPI)
    print(f"wrote {target / 'compare.json'} and {target / 'compare.png'}")
    return 0


def figures_of(run: ComparedRun, first: ComparedRun) -> dict[str, Any]:
    """Return the row of a run in compare.json, with plain names and units."""
    results, reference = (plots.results(each.steps, each.record["sessions"]) for each in (run, first))
    ended = run.record.get("results", {})
    distance = None if run is first else agreement(first, run)
    return {
        "run": str(run.folder.path),
        "engine": run.described("engine"),
        "ranks": run.described("ranks"),
        "threads_per_rank": run.described("threads"),
        "device": run.described("device_name"),
        "dtypes": run.dtypes,
        **{key: run.settings[key] for key in ("strategy", "layout", "memory")},
        "steps": run.steps[-1]["step"],
        "train_loss": results["train_loss"],
        "validation_loss": results["validation_loss"],
        "perplexity": results.get("perplexity"),
        "metrics": results.get("metrics", {}),
        "largest_relative_difference": None if distance is None else distance.difference,
        "at_step": None if distance is None else distance.step,
        "common_steps": None if distance is None else distance.common_steps,
        "tokens_per_second": results["tokens_per_second"],
        "step_seconds": results["step_seconds"],
        "step_time_ratio": results["step_seconds"] / reference["step_seconds"],
        "held_memory_bytes": ended.get("held_memory"),
        "leased_memory_bytes": ended.get("leased_memory"),
        # A run that failed has no figure of all ranks, so this is the largest of rank 0.
        "peak_memory_bytes": ended.get("peak_memory") or max(step["memory_reserved"] for step in run.steps),
    }


def pairs_of(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    pairs = []
    for number, first in enumerate(runs):
        for other in runs[number + 1 :]:
            distance = agreement(first, other)
            pairs.append({"first": str(first.folder.path), "second": str(other.folder.path),
                          "largest_relative_difference": distance.difference, "at_step": distance.step,
                          "common_steps": distance.common_steps})  # fmt: skip
    return pairs


def names_of(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the last part of each run's path, or as many parts as are needed to make the names different."""
    parts = [run.folder.path.parts for run in runs]
    depth = next(
        (n for n in range(1, max(map(len, parts)) + 1) if len({p[-n:] for p in parts}) == len(set(parts))), 1
    )
    names = [str(Path(*p[-depth:])) for p in parts]
    numbers = {name: itertools.count(1) for name in names}
    # A run may be compared with itself.
    return [f"{name} ({next(numbers[name])})" if names.count(name) > 1 else name for name in names]


def settings_of_runs(
    names: Sequence[str], settings: Sequence[Mapping[str, str]], console: Console
) -> RenderableType:
    """Return the settings that differ: as a table, or as lines if the table is too wide for the console."""
    table = settings_table(names, settings)
    natural = Measurement.get(console, console.options.update(max_width=WIDE), table).maximum
    if natural <= console.width:
        return table
    lines = [
        textwrap.fill(text, console.width, initial_indent="  ", subsequent_indent="    ")
        for text in (f"{n}: {settings_in_words(each)}" for n, each in zip(names, settings, strict=True))
    ]
    return Text("\n".join(["Settings that differ", "", *lines, ""]))


def _table(title: str, *columns: str, min_width: int | None = 12, **options: Any) -> Table:
    """Return an empty table with columns for names of runs, by default one."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, **options)
    for column in columns or ("run",):
        table.add_column(column, overflow="fold", min_width=min_width)
    return table


def settings_table(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> Table:
    """Return the settings that differ: a column for each main setting, and one column for all others."""
    table = _table("Settings that differ")
    columns = [key for key in MAIN if key in settings[0]]
    others = [key for key in settings[0] if key not in MAIN]
    for key in columns:
        table.add_column(key, overflow="fold", min_width=7)
    if others:
        table.add_column("others", overflow="fold")
    for name, run in zip(names, settings, strict=True):
        rest = ", ".join(f"{key} {run[key]}" for key in others)
        table.add_row(name, *(run[key] for key in columns), *([rest] if others else []))
    return table


def table_of(names: Sequence[str], figures: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Results", padding=(0, 1, 0, 0))
    metrics = list(dict.fromkeys(metric for figure in figures for metric in figure["metrics"]))
    for name in (
        "steps",
        "train\nloss",
        "val\nloss",
        *(metric.replace(" ", "\n") for metric in metrics),
        "max\ndiff",
        "at\nstep",
        "tok/s",
        "step\ntime",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, figure in zip(names, figures, strict=True):
        validation, difference = figure["validation_loss"], figure["largest_relative_difference"]
        table.add_row(
            name, str(figure["steps"]),
            f"{figure['train_loss']:.6f}", "-" if validation is None else f"{validation:.4f}",
            *(f"{figure['metrics'][each]:.4f}" if each in figure["metrics"] else "-" for each in metrics),
            *in_words(difference, figure["at_step"]),
            f"{figure['tokens_per_second']:,.0f}", f"{figure['step_time_ratio']:.2f}x",
        )  # fmt: skip
    return table


def explanation(runs: Sequence[ComparedRun]) -> str:
    """Return the meaning of each column of the results."""
    lines = [
        "max diff    largest |loss - loss of the first run| / loss of the first run",
        f"tok/s       tokens per second of all ranks together, median without the first {plots.WARM_UP} steps",
        "step time   median, relative to the first run",
    ]
    if any(len(run.record["sessions"]) > 1 for run in runs):
        lines += [
            "            of a resumed run: of its last session, and of earlier ones with the same engine, ranks,",
            "            device, dtypes, strategy, layout and memory, without the first",
            f"            {plots.WARM_UP} steps of each session",
        ]
    if any("/" in run.dtypes for run in runs):
        lines.append("dtypes      of the computation / of the reduction of gradients")
    return "\n".join(f" {line}" for line in lines) + "\n"


def memory_table(names: Sequence[str], figures: Sequence[Mapping[str, Any]]) -> Table:
    """Return the memory of each run, on the rank with most of it."""
    table = _table("Memory", padding=(0, 1, 0, 0))
    for name in ("held\nMiB", "leased\nMiB", "peak\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, figure in zip(names, figures, strict=True):
        engine = (figure["held_memory_bytes"], figure["leased_memory_bytes"])
        table.add_row(
            name,
            *("-" if nbytes is None else f"{nbytes / 2**20:,.2f}" for nbytes in engine),
            gib(figure["peak_memory_bytes"]),
        )
    return table


def memory_explanation(runs: Sequence[ComparedRun], figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the meaning of each column of the memory."""
    devices = {session["device"] for run in runs for session in run.record["sessions"]}
    words_of_device = {"cuda": "held by torch's allocator", "cpu": "of the whole process, with its libraries"}
    peak = " or, on a GPU, ".join(words_of_device.get(device, "held") for device in sorted(devices))
    lines = [
        "held        shards of parameters, optimizer state and buffers between steps",
        "leased      most memory that the engine takes for a step beside that; activations do not count",
        f"peak GiB    most memory {peak}",
        "            each on the rank with most",
    ]
    if any(figure["leased_memory_bytes"] is None for figure in figures):
        engines = engines_that(lambda engine: engine.reports_memory)
        lines.append(f"-           not known: another engine than {engines}, or a run that failed")
    return "\n".join(f" {line}" for line in lines) + "\n"


BY_ENGINE = plots.MemoryPanel(
    "Memory of the engine: held, and leased in a step", "MiB on the rank with most, without activations"
)
BY_DEVICE = plots.MemoryPanel(
    "Most memory held by a rank", "GiB, rank with the highest peak (CPU: its process)"
)


def in_words(difference: float | None, step: int | None) -> tuple[str, str]:
    """Return the largest difference and its step, for a table."""
    if difference is None:
        return "-", "-"
    return (f"{difference:.1e}", str(step)) if difference else ("equal", "-")


def pair_table(names: Sequence[str], pairs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of `pairs`, which have the order of `pairs_of`: each run with all later runs."""
    table = _table("Largest relative difference of the loss, by pairs", "first", "second", min_width=None)
    for name in ("max diff", "at step", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for (first, second), pair in zip(itertools.combinations(names, 2), pairs, strict=True):
        difference, step = in_words(pair["largest_relative_difference"], pair["at_step"])
        table.add_row(first, second, difference, step, str(pair["common_steps"]))
    return table


def curve_of(
    run: ComparedRun, first: ComparedRun, figure: Mapping[str, Any], name: str, settings: str, by_engine: bool
) -> plots.Curve:
    engine = (figure["held_memory_bytes"], figure["leased_memory_bytes"])
    return plots.Curve(
        name=name,
        settings=settings,
        records=run.steps,
        difference={} if run is first else relative_differences(first, run),
        tokens_per_second=figure["tokens_per_second"],
        memory=sum(engine) / 2**20 if by_engine else figure["peak_memory_bytes"] / 2**30,
    )
