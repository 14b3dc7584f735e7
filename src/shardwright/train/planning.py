"""From a configuration to the program of one rank's steps, without its devices and the other ranks.

The trainer itself runs, on hollow tensors (``shardwright.tracing``). So a plan has the model, the engine, the losses
and the optimizer of the run, and no second description of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwright.planner.compose import compose
from shardwright.planner.program import Program
from shardwright.tracing.hollow import SMALL, AbsentDeviceError, UnknownValueError
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.trace import CPU, trace
from shardwright.tracing.training import watch_training
from shardwright.train.config import Config
from shardwright.train.config.planned import check_planned
from shardwright.train.config.series import series_of
from shardwright.train.data.dataset import Dataset
from shardwright.train.data.samples.batch import Batch
from shardwright.train.errors import UserError
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.native.styles import even_routing
from shardwright.train.parallel.checks import check_division
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer

STEPS = 2  #: in the first one the optimizer makes its state
STEP = "step"  #: the phase in which each step begins; another one follows at once


@dataclass(frozen=True)
class AbsentStream:
    """Samples of zeros, as many as anyone asks for. `declare` is called with each of their tensors."""

    seq_len: int
    separate: bool
    windows: int = 1 << 40
    declare: Callable[[Tensor], object] = id

    def batch(self, first: int, count: int) -> Batch:
        def zeros(dtype: torch.dtype) -> Tensor:
            tensor = torch.zeros(count, self.seq_len, dtype=dtype)
            self.declare(tensor)
            return tensor

        documents = zeros(torch.int32) if self.separate else None
        positions = zeros(torch.int64) if self.separate else None
        return Batch(zeros(torch.int64), zeros(torch.int64), documents, positions)

    def samples_of(self, epochs: Fraction) -> Fraction:
        return epochs * self.windows

    def trained(self, first: int, count: int) -> int:
        return count * self.seq_len


@dataclass(frozen=True)
class AbsentData:
    """The data of a run that is planned: its samples have one document each."""

    train: AbsentStream
    vocab_size: int
    validation: None = None

    @property
    def windows(self) -> int:
        return self.train.windows


def program_of(config: Config, ranks: int, kind: Literal["cpu", "cuda"] = "cuda") -> Program:
    """The program of rank 0 of ``ranks``: the model is built, then two steps.

    ``kind``: of the devices. The process must not have joined a process group.

    Raises:
        UserError: the configuration does not fit so many ranks, or has a setting that no plan covers.
    """
    check_division(config, ranks)
    check_planned(config)
    return composed_program(config, ranks, kind) or traced_program(config, ranks, kind)


def composed_program(config: Config, ranks: int, kind: Literal["cpu", "cuda"] = "cuda") -> Program | None:
    """The same program, from those of three shorter jobs: with fewer layers or micro-batches.

    None: their traces would not be shorter together, or do not agree on how a program grows.
    """
    if config.train.compile != "none":
        return None  # blocks share their graphs, so that a trace of the whole takes no longer
    for series in series_of(config, ranks):
        if not series.saves:
            continue
        shorter = [series.of(series.least + i) for i in range(3)]
        programs = [
            composed_program(each, ranks, kind) or traced_program(each, ranks, kind) for each in shorter
        ]
        program = compose(programs, series.least, series.parts, SMALL)
        if program is not None:
            return program
    return None


def traced_program(config: Config, ranks: int, kind: Literal["cpu", "cuda"] = "cuda") -> Program:
    """The same program, from a trace of the whole job."""
    _warm_up()
    train = config.train.model_copy(update={"memory_snapshot": False})
    data = config.data.model_copy(update={"workers": 0})
    config = config.model_copy(update={"train": train, "data": data})
    try:
        with trace(ranks, kind) as recorder, even_routing():
            # A model that reads its tokens is refused.
            stream = AbsentStream(config.train.seq_len, False, declare=recorder.note_without_values)
            dataset = AbsentData(stream, config.model.shape().vocab_size)
            return _traced(config, ranks, cast(Dataset, dataset), recorder, kind)
    except (AbsentDeviceError, UnknownValueError) as error:
        raise UserError(str(error)) from error


@functools.cache
def _warm_up() -> None:
    """Make a first mesh, with which torch keeps a few tensors of it until Python looks for cycles."""
    with trace(2):
        init_device_mesh("cpu", (2,))


def _traced(
    config: Config, ranks: int, dataset: Dataset, recorder: Recorder, kind: Literal["cpu", "cuda"]
) -> Program:
    recorder.phase("build")
    world = World.of(config.parallel, 0, ranks, CPU)
    trainer = Trainer(config, world, dataset, reads_weights=False)
    try:
        with watch_training(recorder) as training:
            for _ in range(STEPS):
                recorder.phase(STEP)
                recorder.phase("forward")
                trainer.train_step(StopRequest())
            training.claim()
            program = recorder.program()
            # The weights are drawn in the memory of the host.
            return program.without_passing("build") if kind == "cuda" else program
    finally:
        trainer.close()
