"""From a configuration to the program of one rank's steps, without its devices and the other ranks.

The trainer itself runs, on fake tensors (``shardwright.planner.tracing``). So a plan has the model, the engine, the
losses and the optimizer of the run, and no second description of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal, NamedTuple, cast

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardwright.engine.extend import ExtensionError
from shardwright.planner import SAVE, STEP, VALIDATION, Crossing, Program, compose
from shardwright.planner.tracing import (
    CPU,
    SMALL,
    AbsentDeviceError,
    Calls,
    Graphs,
    ProgramRecorder,
    UnknownValueError,
    graphs_of_fakes,
    trace,
    trace_save,
    watch_calls,
    watch_training,
)
from shardwright.train.config import Config
from shardwright.train.config.conflicts.jobs import PLANNED
from shardwright.train.config.conflicts.table import refuse
from shardwright.train.data.dataset import Dataset
from shardwright.train.errors import UserError, as_user_errors
from shardwright.train.launch.signals import StopRequest
from shardwright.train.models.native.styles import even_routing
from shardwright.train.models.offers import offers_of
from shardwright.train.parallel.checks import check_division
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData
from shardwright.train.planning.shorter_jobs import series_of
from shardwright.train.step.evaluation import validate
from shardwright.train.step.hooks import Hooks, hooks_of
from shardwright.train.step.numerics.detect import fault_of_state
from shardwright.train.step.trainer import Trainer

STEPS = 2  #: in the first one the optimizer makes its state
#: Steps with a CUDA graph: three without it, the capture, and a step that only replays.
STEPS_OF_GRAPH = 5


class LogitsAlone(Hooks):
    """The hooks of a run that is planned: their metrics get the logits of a validation, and nothing is called."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.run.hooks and config.validation.every:
            with as_user_errors(ExtensionError):
                self.validation_metrics = hooks_of(config.run.hooks).validation_metrics

    def validate(self, logits: Tensor, targets: Tensor) -> list[float | Tensor]:
        return [0.0] * (2 * len(self.validation_metrics))


def stages_checkpoints(config: Config) -> bool:
    """Return whether a checkpoint is copied to the host's memory and written later. The last one is written at once."""
    checkpoint = config.checkpoint
    return checkpoint.asynchronous and 0 < checkpoint.every < config.train.steps


def program_of(config: Config, ranks: int, kind: Literal["cpu", "cuda"] = "cuda") -> Program:
    """Return the program of rank 0 of ``ranks``: the model is built, then two steps, a validation and a save.

    ``kind``: of the devices. The process must not have joined a process group.

    Raises:
        UserError: the configuration does not fit the number of ranks, or has a setting that no plan covers.
    """
    check_division(config, ranks)
    refuse(PLANNED, config)
    with _graphs_for(config, ranks, kind) as shared:
        program = _program_with(config, ranks, kind, shared)
    if not (shared.is_old and shared.graphs.for_several_shapes):
        return program
    _SEARCH.forget()  # a graph of an earlier plan was no good here, so make all of them again
    with _graphs_for(config, ranks, kind) as shared:
        return _program_with(config, ranks, kind, shared)


def _program_with(config: Config, ranks: int, kind: Literal["cpu", "cuda"], shared: Shared) -> Program:
    return composed_program(config, ranks, kind, shared) or traced_program(config, ranks, kind, shared=shared)


class Shared(NamedTuple):
    """Graphs of torch.compile, and the hooks that they contain. Traces of similar jobs make them once.

    Attributes:
        graphs, calls: see above.
        is_old: whether another plan has made them.
    """

    graphs: Graphs
    calls: Calls
    is_old: bool = False


class _Search:
    """The graphs of the last plan of a search. Plans that differ only in settings that blocks do not see take them
    again, which saves the larger part of the time of a plan with ``train.compile``."""

    def __init__(self) -> None:
        self.is_open = False
        self._key: object = None
        self._shared: Shared | None = None
        self._stack = ExitStack()

    def forget(self) -> None:
        self._stack.close()
        self._key = self._shared = None

    def shared(self, config: Config, ranks: int, kind: str) -> Shared:
        key = _as_blocks_see_it(config), ranks, kind
        if self._shared is None or self._key != key:
            self.forget()
            graphs = self._stack.enter_context(graphs_of_fakes(kind == "cpu"))
            self._key, self._shared = key, Shared(graphs, self._stack.enter_context(watch_calls()))
            return self._shared
        return self._shared._replace(is_old=True)


_SEARCH = _Search()


def open_search() -> None:
    """Let further plans of this process share graphs of torch.compile, until `close_search`. Nothing else may be
    compiled meanwhile."""
    _SEARCH.is_open = True


def close_search() -> None:
    """Forget the graphs of a search."""
    _SEARCH.is_open = False
    _SEARCH.forget()


@contextmanager
def _graphs_for(config: Config, ranks: int, kind: Literal["cpu", "cuda"]) -> Iterator[Shared]:
    if _SEARCH.is_open:
        yield _SEARCH.shared(config, ranks, kind)
        return
    with graphs_of_fakes(kind == "cpu") as graphs, watch_calls() as calls:
        yield Shared(graphs, calls)


def _as_blocks_see_it(config: Config) -> Config:
    """Return the configuration without settings that change no graph of a block: how ranks divide the model, and the
    loss.

    Kinds of checkpoints count only if torch.compile does not tell them apart: it sees their functions, and no budget.
    """
    parallel = config.parallel.model_copy(
        update={"strategy": "zero3", "replicas": 1, "reshard_after_forward": "default"}
    )
    train = config.train.model_copy(update={"loss_chunks": 0, "global_batch": 0})
    activations = config.activations
    if activations.checkpoint in ("ops", "half_ops", "full"):
        activations = activations.model_copy(update={"checkpoint": "none"})
    return config.model_copy(update={"parallel": parallel, "train": train, "activations": activations})


def composed_program(
    config: Config, ranks: int, kind: Literal["cpu", "cuda"] = "cuda", shared: Shared | None = None
) -> Program | None:
    """Return the same program, from those of two or three shorter jobs: with fewer layers or micro-batches.

    None: their traces would not be shorter together, or do not agree on how a program grows. ``shared``: by its traces.
    """
    if shared is None:
        with _graphs_for(config, ranks, kind) as shared:
            return composed_program(config, ranks, kind, shared)
    for series in series_of(config, ranks):
        programs: dict[int, Program] = {}
        # With one part more the ends may differ no longer, or a size has crossed the edge, and with two.
        leasts = [series.least, series.least + 1, series.least + 2]
        while leasts and series.saves(least := leasts.pop(0)):
            of_traces = range(least, least + series.traces)
            for parts in of_traces:
                if parts not in programs:
                    shorter = series.of(parts)
                    programs[parts] = composed_program(shorter, ranks, kind, shared) or traced_program(
                        shorter, ranks, kind, shared=shared
                    )
            try:
                program = compose([programs[parts] for parts in of_traces], least, series.parts, SMALL)
            except Crossing as crossing:
                leasts = [crossing.layers]
                continue
            if program is not None:
                first, second, more = programs[least], programs[least + 1], series.parts - least
                program.tokens = first.tokens + more * (second.tokens - first.tokens)
                program.model_flops = first.model_flops + more * (second.model_flops - first.model_flops)
                return program
    return None


def traced_program(
    config: Config,
    ranks: int,
    kind: Literal["cpu", "cuda"] = "cuda",
    watching: Callable[[ProgramRecorder], AbstractContextManager[object]] = lambda _: nullcontext(),
    shared: Shared | None = None,
) -> Program:
    """Return the same program, from a trace of the whole job.

    Args:
        config, ranks, kind: as for `program_of`.
        watching: makes a context in which it runs.
        shared: by this trace and others; None: nothing is.
    """
    _warm_up()
    shape = config.model.shape()
    if (try_ahead := offers_of(shape).try_ahead) is not None:
        try_ahead(shape, config)
    train = config.train.model_copy(update={"memory_snapshot": ()})
    data = config.data.model_copy(update={"workers": 0})
    config = config.model_copy(update={"train": train, "data": data})
    try:
        graphs, calls = (shared.graphs, shared.calls) if shared is not None else (None, None)
        with trace(ranks, kind, graphs=graphs) as recorder, even_routing(), watching(recorder):
            # A model that reads its tokens is refused.
            dataset = AbsentData.of(config, ranks, recorder.contents.note_unknown)
            return _traced(config, ranks, cast(Dataset, dataset), recorder, kind, calls)
    except (AbsentDeviceError, UnknownValueError) as error:
        raise UserError(str(error)) from error


@functools.cache
def _warm_up() -> None:
    """Make a first mesh, with which torch keeps a few tensors of it until Python looks for cycles."""
    with trace(2):
        init_device_mesh("cpu", (2,))


def _traced(
    config: Config,
    ranks: int,
    dataset: Dataset,
    recorder: ProgramRecorder,
    kind: Literal["cpu", "cuda"],
    calls: Calls | None,
) -> Program:
    recorder.phase("build")
    world = World.of(config.parallel, 0, ranks, CPU)
    trainer = Trainer(config, world, dataset, reads_weights=False, hooks=LogitsAlone(config))
    try:
        with watch_training(recorder, calls) as training:
            for _ in range(STEPS_OF_GRAPH if config.train.cuda_graph else STEPS):
                recorder.phase(STEP)
                recorder.phase("forward")
                trainer.train_step(StopRequest())
            if dataset.validation is not None:
                with training.between_steps(VALIDATION):
                    fault_of_state(trainer.state)
                    validate(trainer)
            with training.between_steps(SAVE):
                fault_of_state(trainer.state)
                position = {"position": trainer.position.stored()}
                stages = stages_checkpoints(trainer.config)
                trace_save(recorder, trainer.model, trainer.optimizer, position, stages=stages)
            training.claim()
            program = recorder.program()
            program.tokens = config.train.global_batch * config.train.seq_len / ranks
            program.model_flops = program.tokens * trainer.facts.flops_per_token
            # The weights are drawn in the memory of the host.
            return program.without_passing("build") if kind == "cuda" else program
    finally:
        trainer.close()
