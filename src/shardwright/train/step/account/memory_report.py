"""Hooks that report memory: the memory report after some steps, and the history of allocations of chosen steps."""

from __future__ import annotations

import shardwright as sw
from shardwright.engine import heartbeat, in_units
from shardwright.engine.compat import dump_memory_history, record_memory_history
from shardwright.train.config.catalog.hooks import TrainerHook
from shardwright.train.config.catalog.records import RunEnd, StepRecord
from shardwright.train.report import plan_picture
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.folder import RunFolder
from shardwright.train.run.writing import write_json, write_text, writing
from shardwright.train.step.trainer import Trainer

REPORTED = 3
"""The step of a session after which the memory report is written. By then one step has run with the plan."""


class MemorySnapshots(TrainerHook):
    """Records this rank's GPU allocations in the steps of `[train] memory_snapshot`, also in one that fails."""

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self._steps = trainer.config.train.memory_snapshot
        self._folder, self._rank = folder, trainer.world.rank
        self._recorded: int | None = None  #: the step that is recorded now

    def before_step(self, step: int) -> None:
        self._write()
        if step in self._steps:
            self._recorded = step
            record_memory_history(True)

    def after_step(self, record: StepRecord) -> None:
        self._write()

    def end(self, end: RunEnd) -> None:
        self._write()

    def _write(self) -> None:
        if self._recorded is None:
            return
        path, self._recorded = self._folder.memory_history(self._recorded, self._rank), None
        heartbeat.be_patient()
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            dump_memory_history(str(path))
        record_memory_history(False)


class MemoryReporter(TrainerHook):
    """Writes the memory report of the first rank after some steps, and once more if leases outside the plan came."""

    def __init__(self, trainer: Trainer, folder: RunFolder, reporter: Reporter) -> None:
        self._trainer, self._folder, self._reporter = trainer, folder, reporter
        self._applies = trainer.world.is_first and trainer.config.parallel.facts.reports_memory
        self._steps = 0  # of this session
        self.peak = 0  #: bytes that this rank has held at most
        #: Leases outside the memory plan that the report has named; None: there is no report yet.
        self._deviations: tuple[tuple[str, str, str, int], ...] | None = None

    def after_step(self, record: StepRecord) -> None:
        self._steps += 1
        self.peak = max(self.peak, record.memory_reserved)
        if self._steps == REPORTED and self._applies:
            self._reporter.say(self._report())

    def after_last_step(self) -> None:
        """Report once more if there were leases outside the plan since the report."""
        if self._deviations is None:
            return
        if sw.memory_report(self._trainer.model, self._trainer.optimizer).deviations != self._deviations:
            self._reporter.say(self._report())

    def _report(self) -> str:
        """Write the memory report of this rank, and the plan if there is one, into the folder. Returns lines."""
        folder = self._folder
        # The other ranks begin the next step, and to import what draws the picture may take long.
        heartbeat.be_patient()
        memory = sw.memory_report(self._trainer.model, self._trainer.optimizer)
        self._deviations = memory.deviations
        write_text(folder.memory_file, f"{memory}\n")
        parts = {"shards of parameters": memory.shards, "parameters not sharded": memory.rest}
        parts |= {"optimizer state": memory.optimizer, "buffers": memory.buffers}
        lines = [
            f"memory of rank {memory.rank} alone, without activations; all figures in {folder.memory_file}",
            "  held    "
            + ", ".join(f"{name} {in_units(nbytes)}" for name, nbytes in parts.items() if nbytes),
        ]
        if memory.peak is not None and memory.peak_at is not None:
            unit, kind = memory.peak_at
            lines.append(
                f"  leased  up to {in_units(memory.peak)} more during a step; the most when unit {unit} gets its {kind}"
            )
        if memory.plan is not None:
            write_json(folder.plan_file, memory.plan.as_dict())
            outside = plan_picture.outside_in_words(memory.deviations)
            with writing(folder.plan_picture):
                name = self._trainer.config.run.name
                figure = plan_picture.plan_figure(memory.plan, name, memory.memory, memory.rank, outside)
                figure.savefig(folder.plan_picture, dpi=plan_picture.DPI)
            use = "for parameters alone" if memory.plan.slots else "for all leases"
            size = in_units(memory.plan.nbytes)
            lines.append(f"  plan    {memory.memory} of {size} {use}; picture: {folder.plan_picture}")
            lines += [f"  outside {outside}"] if outside else []
        return "\n".join(lines)
