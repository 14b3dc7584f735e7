"""Runs side by side: do their losses agree, and what did each cost in time and memory.

Only runs of the same job are compared: same model, text, order of samples and global batch. Engines, ranks and
precisions are what a comparison is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.train import metrics, report
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.runs import RunFolder, differences, open_for_writing, write_json, writing

MOST_IN_PAIRS = 4
"""Runs of which every pair has a line; of more, compare.json alone tells all."""
PIPED_WIDTH = 140
"""Columns of tables that go to a file or a pipe, where nothing tells the width."""


@dataclass(frozen=True)
class Run:
    """What a comparison reads of a run."""

    folder: RunFolder
    config: Config
    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        return {step["step"]: step["loss"] for step in self.steps}

    def described(self, key: str) -> str:
        """A fact of its sessions: one value, or all of them in order where a resume changed it."""
        return ", then ".join(dict.fromkeys(str(session[key]) for session in self.record["sessions"]))

    @property
    def label(self) -> str:
        ranks = self.described("ranks")
        return f"{self.described('engine')}, {ranks} {'rank' if ranks == '1' else 'ranks'}, {self.dtypes}"

    @property
    def dtypes(self) -> str:
        """Compute and reduce precision in short: fp32, or bf16/fp32."""
        compute, reduce = (
            self.described(key).replace("bfloat16", "bf16").replace("float32", "fp32")
            for key in ("param_dtype", "reduce_dtype")
        )
        return compute if compute == reduce else f"{compute}/{reduce}"


@dataclass(frozen=True)
class Agreement:
    """How far the losses of two runs are apart at most, relative to the first, and at which step."""

    common_steps: int
    difference: float
    step: int


def read_run(path: Path) -> Run:
    """Raises UserError for a folder that holds no run or one without a single step."""
    folder = RunFolder(path)
    record, config = folder.record(), folder.config()
    steps = metrics.read_records(folder.metrics_file)
    if not steps:
        raise UserError(f"{folder.metrics_file}: expected at least one step, found none")
    return Run(folder, config, record, steps)


def check_comparable(first: Run, other: Run) -> None:
    """Refuse runs of different jobs; names the first key in which they differ."""
    for key, before, after in differences(first.config, other.config):
        # The text counts, not the path it was read from.
        if key != "data.source":
            raise UserError(
                f"compare: expected runs of the same job, found {key} = {before} in {first.folder.path} and {after} in "
                f"{other.folder.path}"
            )
    texts = [run.record["corpus"]["sha256"] for run in (first, other)]
    if texts[0] != texts[1]:
        raise UserError(
            f"compare: expected runs on the same text, found corpus sha256 {texts[0][:12]} in {first.folder.path} and "
            f"{texts[1][:12]} in {other.folder.path}"
        )


def relative_differences(first: Run, other: Run) -> dict[int, float]:
    """|other - first| / |first| of the loss at every step both have; where the first's is 0, without the division."""
    ours, theirs = first.losses, other.losses
    return {
        step: abs(theirs[step] - ours[step]) / (abs(ours[step]) or 1.0) for step in ours if step in theirs
    }


def agreement(first: Run, other: Run) -> Agreement:
    apart = relative_differences(first, other)
    if not apart:
        raise UserError(
            f"compare: expected steps in common, found none in {first.folder.path} and {other.folder.path}"
        )
    worst = max(apart, key=lambda step: apart[step])
    return Agreement(len(apart), apart[worst], worst)


def compare(runs: list[Path], out: Path | None) -> int:
    """Print a table of two or more runs, write compare.json and compare.png into `out` (default: the first run's
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
    console.print(table_of(read, figures))
    if 2 < len(read) <= MOST_IN_PAIRS:
        console.print(pair_table(read, pairs))
    write_json(target / "compare.json", {"runs": figures, "pairs": pairs})
    with writing(target):
        report.comparison(
            [
                curve_of(run, read[0], figure, label)
                for run, figure, label in zip(read, figures, labels_of(read), strict=True)
            ],
            target / "compare.png",
        )
    print(f"wrote {target / 'compare.json'} and {target / 'compare.png'}")
    return 0


def figures_of(run: Run, first: Run) -> dict[str, Any]:
    """The row of a run, with plain names and units: what compare.json holds of it."""
    results, reference = report.results(run.steps), report.results(first.steps)
    met = None if run is first else agreement(first, run)
    return {
        "run": str(run.folder.path),
        "engine": run.described("engine"),
        "ranks": run.described("ranks"),
        "threads_per_rank": run.described("threads"),
        "device": run.described("device_name"),
        "dtypes": run.dtypes,
        "steps": run.steps[-1]["step"],
        "train_loss": results["train_loss"],
        "validation_loss": results["validation_loss"],
        "largest_relative_difference": None if met is None else met.difference,
        "at_step": None if met is None else met.step,
        "common_steps": None if met is None else met.common_steps,
        "tokens_per_second": results["tokens_per_second"],
        "step_seconds": results["step_seconds"],
        "step_time_ratio": results["step_seconds"] / reference["step_seconds"],
        # A run that broke off has no figure for all ranks: rank 0's largest then.
        "peak_memory_bytes": run.record.get("results", {}).get("peak_memory")
        or max(step["memory_reserved"] for step in run.steps),
    }


def pairs_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    pairs = []
    for number, first in enumerate(runs):
        for other in runs[number + 1 :]:
            met = agreement(first, other)
            pairs.append({"first": str(first.folder.path), "second": str(other.folder.path),
                          "largest_relative_difference": met.difference, "at_step": met.step,
                          "common_steps": met.common_steps})  # fmt: skip
    return pairs


def table_of(runs: Sequence[Run], figures: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Differences and step times are relative to the first run", title_justify="left")
    table.add_column("run", overflow="fold")
    for name in ("engine", "ranks", "dtypes"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "train loss", "val loss", "max diff", "at", "tok/s", "step time", "peak GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for run, figure in zip(runs, figures, strict=True):
        validation, difference = figure["validation_loss"], figure["largest_relative_difference"]
        table.add_row(
            run.folder.path.name, figure["engine"], figure["ranks"], figure["dtypes"], str(figure["steps"]),
            f"{figure['train_loss']:.6f}", "-" if validation is None else f"{validation:.4f}",
            *in_words(difference, figure["at_step"]),
            f"{figure['tokens_per_second']:,.0f}", f"{figure['step_time_ratio']:.2f}x",
            metrics.gib(figure["peak_memory_bytes"]),
        )  # fmt: skip
    return table


def in_words(difference: float | None, step: int | None) -> tuple[str, str]:
    """The largest difference and its step, for a table."""
    if difference is None:
        return "-", "-"
    return (f"{difference:.1e}", str(step)) if difference else ("equal", "-")


def pair_table(runs: Sequence[Run], pairs: Sequence[Mapping[str, Any]]) -> Table:
    labels = {str(run.folder.path): f"{run.folder.path.name} ({run.label})" for run in runs}
    table = Table(title="Largest relative difference of the loss at any common step", title_justify="left")
    for name in ("first", "second"):
        table.add_column(name, overflow="fold")
    for name in ("max diff", "at", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        difference, step = in_words(pair["largest_relative_difference"], pair["at_step"])
        table.add_row(
            labels[pair["first"]], labels[pair["second"]], difference, step, str(pair["common_steps"])
        )
    return table


def labels_of(runs: Sequence[Run]) -> list[str]:
    """What each run is in the picture: its settings, or its folder where settings do not tell runs apart."""
    labels = [run.label for run in runs]
    return labels if len(set(labels)) == len(labels) else [run.folder.path.name for run in runs]


def curve_of(run: Run, first: Run, figure: Mapping[str, Any], label: str) -> report.Curve:
    return report.Curve(
        label=label,
        records=run.steps,
        difference={} if run is first else relative_differences(first, run),
        tokens_per_second=figure["tokens_per_second"],
        peak_memory=figure["peak_memory_bytes"],
    )
