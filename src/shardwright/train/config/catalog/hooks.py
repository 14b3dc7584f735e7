"""Hooks into training, for `[run] hooks`: the class to derive from, and the registry. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from shardwright.engine.extend import Registry
from shardwright.train.config.catalog.records import RunEnd, StepRecord

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Action = Literal["stop", "skip", "rewind"]
Sums = Mapping[str, "tuple[float | Tensor, float | Tensor]"]
"""By name of a metric, a sum and the count by which the sums of all ranks are divided. Tensors have no dimensions."""


@dataclass(frozen=True)
class Fault:
    """A reason not to make a step, on all ranks alike.

    Attributes:
        action: "stop": the state before the step is saved, and the run ends as failed. "skip": the samples of the step
            are left out. "rewind": the run goes back by `[fault] rewind_steps`, and leaves the samples out.
        reason: what was found, in one line without a full stop.
        advice: what may help, in one line without a full stop, for a run that ends by this fault.
        samples: of the step, [first, stop); the trainer fills them in.
        state_is_good: weights and optimizer state are those before the step, and finite; the trainer fills this in.
        unit_norms: gradient norms of the step by unit, if the trainer knows them; it fills them in.
    """

    action: Action
    reason: str
    advice: str = ""
    samples: tuple[int, int] = (0, 0)
    state_is_good: bool = True
    unit_norms: Mapping[str, float] = field(default_factory=dict)


class Job(Protocol):
    """The job that a hook belongs to, on one rank.

    Attributes:
        config: the configuration, a ``shardwright.train.config.Config``.
        model: the sharded model. Its parameters are those of the optimizer.
        optimizer: the optimizer. The trainer sets the rate of its groups before each step.
        device: the device of this rank.
        rank: the number of this process, from 0.
        ranks: the number of processes.
        steps_done: optimizer steps done.
    """

    config: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def steps_done(self) -> int: ...

    def say(self, text: str) -> None:
        """Print lines, and send them to the sinks; on the first rank only."""

    def stop(self, reason: str) -> None:
        """End the run early: all ranks make one more step, save and end, also if only one rank calls this. The run
        counts as finished."""


@dataclass(frozen=True)
class StepInProgress:
    """A step before its optimizer step.

    Attributes:
        step: the number of the optimizer step, from 1.
        norm: the gradient norm over all ranks before clipping, 0-d, on the device. None with an optimizer in backward.
        loss: this rank's part of the loss: its sum by the trained tokens of all ranks, float64 0-d, on the device.
            With tensor parallelism the ranks with the same tokens have the same part.
    """

    step: int
    norm: Tensor | None
    loss: Tensor


class TrainerHook:
    """Base class of hooks. Every method may be left out; all ranks call all of them at the same moments.

    A hook of `[run] hooks` is made without arguments. The number of its collectives must be the same on all ranks.

    Attributes:
        name: by which errors and checkpoints know it; the name of the class if it is empty.
        summary: one sentence on what it does; the first line of the docstring if it is empty.
        step_metrics: the names of what `metrics` returns.
        validation_metrics: the names of what `validate` returns.
        higher_is_better: those of the names of which a higher value is better, for `[checkpoint] keep_best`.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    step_metrics: Sequence[str] = ()
    validation_metrics: Sequence[str] = ()
    higher_is_better: Collection[str] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name") or cls.__name__
        cls.summary = cls.__dict__.get("summary") or (cls.__doc__ or "").strip().partition("\n")[0]

    def setup(self, job: Job) -> None:
        """Called once, when the model is sharded and a checkpoint is loaded, before the first step."""

    def before_step(self, step: int) -> None:
        """Called before forward of optimizer step `step`, from 1. The rates of the optimizer are set."""

    def before_optimizer(self, step: StepInProgress) -> Fault | None:
        """Called between the gradient norm and the optimizer step. If a rank returns a fault, all ranks act on it: the
        strongest one, "stop" before "rewind" before "skip". Reading a tensor here makes the host wait. An optimizer in
        backward has stepped by then: "skip" and "stop" end the run without saving."""
        return None

    def metrics(self, step: int) -> Sums:
        """Called after backward of step `step`: this rank's sums and counts, which travel in the step's reduction.
        Gradients are reduced and clipped; an optimizer in backward has used and freed them."""
        return {}

    def after_step(self, record: StepRecord) -> None:
        """Called after an optimizer step and its validation. Losses and metrics are those of all ranks; times and
        memory are those of this rank."""

    def validate(self, logits: Tensor, targets: Tensor) -> Sums:
        """Called for each micro-batch of a validation that counts: sums and counts of this rank. A rank may have fewer
        micro-batches than others, or none, so no collective here, and no forward of the model.

        Args:
            logits: of the model in eval mode, [B, S, V].
            targets: the next tokens, int64 [B, S]; -100 where no token is to be predicted.
        """
        return {}

    def saved(self, step: int) -> None:
        """Called when the checkpoint of `step` is written."""

    def end(self, end: RunEnd) -> None:
        """Called when the run ends, also by an error. Then the ranks may be at different places: no collective here."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hook for a checkpoint: dicts of plain values, of which the first rank's are saved,
        and of tensors, whole or with the sharding of parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called after `setup` of a run that goes on from a checkpoint with a state of this hook, and when a run goes
        back to one. A tensor has the sharding of the present state's at the same place, if their shapes are equal;
        otherwise it is whole, on the CPU."""


class HookRegistry(Registry[type[TrainerHook]]):
    """The registry of classes of hooks."""

    def is_value(self, value: object) -> bool:
        return isinstance(value, type) and issubclass(value, TrainerHook)


hooks: Registry[type[TrainerHook]] = HookRegistry("hook", "hooks", TrainerHook)  # type: ignore[arg-type]
