"""Runs of a trainer in a test's process group, with numbers that go wrong where a test says so.

What such a run must do is computed by plain PyTorch on the samples that are not left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwright.engine import plain_name
from shardwright.engine.compat import local_of
from shardwright.train.config import Config
from shardwright.train.config.catalog.records import RunSink
from shardwright.train.data.dataset import Dataset
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.build import build_model
from shardwright.train.report.jsonl import JsonLines
from shardwright.train.report.reporter import Reporter
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.account.profile import StepProfile
from shardwright.train.step.loading import LoadedRun
from shardwright.train.step.loop import run_steps
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer
from tests.train.kit.jobs import tiny, trainer
from tests.train.kit.text import batch, random_text

G = 12
"""Samples of a step."""
Plant = Callable[[Trainer, Tensor], Tensor]
"""Changes the sums of losses of a micro-batch of this rank."""


def job(parallel: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A small job for the ranks of this process group, with two micro-batches on each. It saves every second step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    samples = sections.get("train", {}).get("global_batch", G)
    values: dict[str, dict[str, Any]] = {
        "train": {"steps": 4, "global_batch": G, "micro_batch": samples // ranks // 2, "seq_len": 8},
        "model": {"n_layers": 1, "dim": 16, "ffn_dim": 16},
        "validation": {"every": 0},
        "checkpoint": {"every": 2, "keep": 9},
        "parallel": {"engine": "shardwright", **(parallel or {})},
        "run": {"sample_tokens": 0},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return tiny(**values)


class Run:
    """One session of a run, on one rank."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        rank: int,
        world_size: int,
        plant: Plant | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        self.folder, self.config = RunFolder(folder), config
        self.trainer = trainer(config, rank, world_size, dataset)
        self.is_first = rank == 0
        self.loaded: LoadedRun | None = None
        self.lines: list[str] = []
        if plant is not None:
            plain = self.trainer.losses.sums
            self.trainer.losses.sums = lambda batch: plant(self.trainer, plain(batch))  # type: ignore[method-assign]

    def resume(self) -> Run:
        self.loaded = self.trainer.load(self.folder, Reporter([]))
        return self

    def go(self, before: Callable[[], None] = lambda: None) -> list[int]:
        """Run to the end; returns the first sample of each step that was tried. Calls `before` before each of them."""
        tried: list[int] = []
        step = self.trainer.train_step

        def counted(*arguments: Any) -> Any:
            before()
            tried.append(self.trainer.position.samples)
            return step(*arguments)

        self.trainer.train_step = counted  # type: ignore[method-assign]
        reporter = Reporter([Said(self.lines)])
        done = self.trainer.position.step
        if self.is_first:
            self.folder.path.mkdir(exist_ok=True)
            left_out = self.trainer.position.past.left_out
            files = JsonLines(self.folder.metrics_file, done, self.folder.dropped_metrics_file, left_out)
            reporter = Reporter([files, Said(self.lines)])
        stop = StopRequest()  # not entered: no handlers in the pool's workers
        try:
            # No test here is about power cuts.
            with (
                pytest.MonkeyPatch.context() as patch,
                reporter,
                Saves(
                    self.config.checkpoint,
                    self.folder.checkpoints,
                    reporter,
                    loaded=done,
                    rewind_steps=self.config.fault.rewind_steps,
                ) as saves,
            ):
                patch.setattr(os, "fsync", lambda file: None)
                self.trainer.open_hooks(reporter, loaded=self.loaded)
                profile = StepProfile(self.trainer, self.folder, reporter)
                run_steps(self.trainer, reporter, saves, stop, profile)
        finally:
            self.trainer.close()
        return tried


class Said(RunSink):
    """Keeps the lines that a run prints."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def step(self, record: Any) -> None:
        pass

    def say(self, text: str) -> None:
        self.lines.append(text)

    def close(self, end: Any) -> None:
        pass


def on_samples(first: int, factor: float, rank: int | None = None) -> Plant:
    """Multiply the losses of the step that begins with sample `first`, or those of one rank."""

    def plant(trainer: Trainer, sums: Tensor) -> Tensor:
        hit = trainer.position.samples == first and rank in (None, trainer.world.rank)
        return sums * factor if hit else sums

    return plant


def in_gradients(first: int, factor: float, rank: int) -> Plant:
    """Multiply the gradients of one rank in the step that begins with sample `first`. Its loss stays as it is."""

    def plant(trainer: Trainer, sums: Tensor) -> Tensor:
        if trainer.position.samples == first and trainer.world.rank == rank:
            sums = sums * 1.0
            sums.register_hook(lambda gradient: gradient * factor)
        return sums

    return plant


def after_step(job: Trainer, number: int, action: Callable[[], None]) -> None:
    """Call `action` after the optimizer's step `number`, once."""
    step, calls = job.optimizer.step, 0

    def act() -> None:
        nonlocal calls
        step()
        calls += 1
        if calls == number:
            action()

    job.optimizer.step = act  # type: ignore[method-assign, assignment]


def part_of(tensor: Any) -> Tensor:
    """The values on this rank."""
    return local_of(tensor) if hasattr(tensor, "_local_tensor") else tensor


def weight_of(job: Trainer, name: str) -> Any:
    return {plain_name(each, job.model): p for each, p in job.model.named_parameters()}[name]


def plain_losses(config: Config, firsts: Sequence[int]) -> list[float]:
    """The losses of plain steps on the global batches that begin with these samples."""
    torch.manual_seed(config.run.seed)
    model, train = build_model(config.model, 256), config.train
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == m] for m in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, first in enumerate(firsts):
        inputs, targets = batch(random_text(), 0, first, train.global_batch, train.seq_len)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lines_of(run: Run, event: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about steps, or about incidents. Of the first rank."""
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    return [line for line in lines if ("incident" in line) is event]
