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
import torch.nn.functional as F
from torch import Tensor

from shardwright.train.config import Config
from shardwright.train.loop import run_steps
from shardwright.train.metrics import JsonLines
from shardwright.train.models.build import build_model
from shardwright.train.reporter import Reporter
from shardwright.train.runs import RunFolder
from shardwright.train.saves import Saves
from shardwright.train.stop import StopRequest
from shardwright.train.trainer import Trainer, learning_rate
from tests.train.jobs import tiny, trainer
from tests.train.kit.text import batch, random_text

G = 12
"""Samples of a step."""
Plant = Callable[[Trainer, Tensor], Tensor]
"""Changes the sums of losses of a micro-batch of this rank."""


def job(parallel: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A small job for 1 to 3 ranks, with two micro-batches or more on each. It saves every third step."""
    values: dict[str, dict[str, Any]] = {
        "train": {"steps": 6, "global_batch": G, "micro_batch": 2, "seq_len": 8},
        "model": {"n_layers": 1, "dim": 16, "ffn_dim": 16},
        "validation": {"every": 0},
        "checkpoint": {"every": 3, "keep": 9},
        "parallel": {"engine": "shardwright", **(parallel or {})},
        "run": {"sample_tokens": 0},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return tiny(**values)


class Killed(BaseException):
    """Ends a run as a signal that cannot be caught: what is not on disk is lost."""


class Run:
    """One session of a run, on one rank."""

    def __init__(
        self, folder: Path, config: Config, rank: int, world_size: int, plant: Plant | None = None
    ) -> None:
        self.folder, self.config = RunFolder(folder), config
        self.trainer = trainer(config, rank, world_size)
        self.is_first = rank == 0
        self.lines: list[str] = []
        if plant is not None:
            plain = self.trainer.losses.sums
            self.trainer.losses.sums = lambda batch: plant(self.trainer, plain(batch))  # type: ignore[method-assign]

    def resume(self) -> Run:
        self.trainer.load(self.folder, Reporter([]))
        return self

    def go(self, kill: int = -1) -> list[int]:
        """Run to the end; returns the first sample of each step that was tried. Raises Killed before try `kill`."""
        tried: list[int] = []
        step = self.trainer.train_step

        def counted(*arguments: Any) -> Any:
            if len(tried) == kill:
                raise Killed
            tried.append(self.trainer.position.samples)
            return step(*arguments)

        self.trainer.train_step = counted  # type: ignore[method-assign]
        reporter = Reporter([Said(self.lines)])
        done = self.trainer.position.step
        if self.is_first:
            self.folder.path.mkdir(exist_ok=True)
            files = JsonLines(self.folder.metrics_file, done, self.folder.dropped_metrics_file)
            reporter = Reporter([files, Said(self.lines)])
        stop = StopRequest()  # not entered: no handlers in the pool's workers
        try:
            # No test here is about power cuts.
            with (
                pytest.MonkeyPatch.context() as patch,
                reporter,
                Saves(self.config.checkpoint, self.folder.checkpoints, reporter, loaded=done) as saves,
            ):
                patch.setattr(os, "fsync", lambda file: None)
                run_steps(self.trainer, self.folder, reporter, saves, stop)
        finally:
            self.trainer.close()
        return tried


class Said:
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
            group["lr"] = learning_rate(step, train.steps, config.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lines_of(run: Run, event: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about steps, or about incidents. Of the first rank."""
    lines = [json.loads(line) for line in run.folder.metrics_file.read_text().splitlines()]
    return [line for line in lines if ("incident" in line) is event]
