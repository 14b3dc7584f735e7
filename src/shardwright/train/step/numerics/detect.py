"""Detects faults of each step: the flag that a rank adds to the step's reduction, and the fault that follows.

A step without a fault has no collective and no wait for the device for this. The fault is named afterwards. These
faults are no `TrainerHook`: hooks vote before the reduction of the step, and only after it a loss is known to be wrong.
As a hook they would need another reduction and another wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.engine import RankGroup, ranks_in_words
from shardwright.engine.comm import noted
from shardwright.train.config import FaultConfig, ParallelConfig, TrainConfig
from shardwright.train.config.catalog.hooks import Action, Fault
from shardwright.train.config.catalog.records import Incident
from shardwright.train.errors import JobError
from shardwright.train.parallel.engines import engine_of
from shardwright.train.parallel.world import World
from shardwright.train.run.position import Position
from shardwright.train.step.numerics.naming import (
    Blame,
    computed_by,
    first_bad,
    hooks_see_gradients,
    is_wrong,
    largest_gradient,
    ranks_with_bad_loss,
)
from shardwright.train.step.numerics.verifying import verify_copies
from shardwright.train.step.reduction import Agreed

ADVICE = "try a lower optimizer.lr or a longer optimizer.warmup_steps"
"""Advice that may help against any fault."""
SHOWN = 3
"""Units that the reason of a fault names."""


@dataclass(frozen=True)
class TrainingState:
    """A model in training between two steps: the values in which a fault is found and from which it is named.

    Attributes:
        fault: what a run does about a fault.
        parallel: the engine.
        train: the global batch, and whether a CUDA graph does a step.
        in_backward: the optimizer steps in backward.
        world: this rank among the others.
        model, optimizer: their values may have gone wrong.
        position: optimizer steps done, the losses of the last ones, and the first sample of the next one.
    """

    fault: FaultConfig
    parallel: ParallelConfig
    train: TrainConfig
    in_backward: bool
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    position: Position

    @property
    def next_step(self) -> int:
        return self.position.step + 1

    @property
    def next_samples(self) -> tuple[int, int]:
        """The samples of the next step, [first, stop)."""
        first = self.position.samples
        return first, first + self.train.global_batch


def flag(norm: Tensor | None, device: torch.device) -> Tensor:
    """1 if the norm of all gradients is not finite, else 0: float64 [1]. It does not wait for the device.

    An optimizer that steps in backward leaves no norm. A pass over the weights in each step would cost too much, so a
    wrong gradient shows in the loss of a later step there, or before a save.
    """
    if norm is None:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return (~norm.isfinite()).to(device, torch.float64, non_blocking=True)[None]


def fault_of_step(
    state: TrainingState, agreed: Agreed, shares: Tensor, work: Callable[[], Tensor]
) -> Fault | None:
    """Return the fault of the numbers of the step whose gradients are here, or None.

    `shares`: this rank's parts of the losses. `work` does forward and backward of the step again, to find the rank that
    computed a wrong gradient. The gradients are lost then.
    """
    if not math.isfinite(agreed.losses[0]) or agreed.flags:
        return _fault_of_values(state, agreed, shares, work)
    return _fault_of_spike(state, agreed)


def repeat_of(state: TrainingState, first: Agreed) -> Incident | None:
    """Return what is recorded of a step without a fault that was done twice, because the device left it out with the
    numbers `first`; None if nothing was wrong with those.

    The device also leaves out a step whose loss is a little below the limit of a spike, see `may_be_spike`.
    """
    loss, losses = first.losses[0], state.position.past.losses
    if not math.isfinite(loss) or first.flags:
        found = f"loss {loss}, norm {first.norm}"
    elif is_spike(loss, losses, state.fault):
        limit = spike_limit(losses, state.fault.spike_sigmas)
        found = f"loss {loss:.4f}, a spike above {limit:.4f}"
    else:
        return None
    text = f"step {state.next_step}: found {found}; done again, its numbers are good, and the run goes on with them"
    return Incident("repeat", state.next_step, text, state.next_samples)


def _fault_of_values(
    state: TrainingState, agreed: Agreed, shares: Tensor, work: Callable[[], Tensor]
) -> Fault:
    """Return the fault of a loss or a gradient norm that is not finite."""
    loss, norm, action = agreed.losses[0], agreed.norm, state.fault.on_non_finite
    norms = _unit_norms(state, agreed)  # before the gradients are lost
    where, kinds = _where(state, loss, shares, work)
    text = (
        f"step {state.next_step}: expected a finite loss and gradient norm, found loss {loss}, norm "
        f"{'not known' if norm is None else norm}; {where}{_units_in_words(norms)}"
    )
    state_is_good = norm is not None and not kinds & {"weight", "optimizer"}
    if action == "skip" and not state_is_good:
        action, text = "stop", f"{text}; a skip does not mend that"
    return replace(_fault(state, action, text, state.next_samples, state_is_good), unit_norms=norms)


def _fault_of_spike(state: TrainingState, agreed: Agreed) -> Fault | None:
    loss, losses, settings = agreed.losses[0], state.position.past.losses, state.fault
    if settings.on_spike == "ignore" or not is_spike(loss, losses, settings):
        return None
    limit, norms = spike_limit(losses, settings.spike_sigmas), _unit_norms(state, agreed)
    text = (
        f"step {state.next_step}: the loss {loss:.4f} is a spike, above {limit:.4f}, the mean of {len(losses)} losses "
        f"and {settings.spike_sigmas:g} standard deviations{_units_in_words(norms)}"
    )
    fault = _fault(state, settings.on_spike, text, state.next_samples, agreed.norm is not None)
    return replace(fault, unit_norms=norms)


def _unit_norms(state: TrainingState, agreed: Agreed) -> Mapping[str, float]:
    """Return the gradient norms of the step by unit, before clipping.

    Empty if the engine reports no unit, or the optimizer has used the gradients already. Called by all ranks together.
    """
    if agreed.unit_norms or agreed.norm is None:
        return agreed.unit_norms
    norms = engine_of(state.parallel).unit_norms(state.model)
    clipped = math.hypot(*norms.values())
    factor = agreed.norm / clipped if 0 < clipped < math.inf else 1.0
    return {unit: factor * norm for unit, norm in norms.items()}


def _units_in_words(norms: Mapping[str, float]) -> str:
    """Return in words the units whose gradient norms are not finite, or else the largest ones, at most `SHOWN`. Empty
    for one unit."""
    if len(norms) < 2:
        return ""
    wrong = [unit for unit, norm in norms.items() if not math.isfinite(norm)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        count = f"{len(wrong)} of {len(norms)} units"
        return f"; gradient norms are not finite in {count}: {', '.join(wrong[:SHOWN])}{more}"
    largest = sorted(norms.items(), key=lambda each: -each[1])[:SHOWN]
    return f"; largest gradient norms by unit: {', '.join(f'{unit} {norm:.3g}' for unit, norm in largest)}"


def _fault(
    state: TrainingState, action: Action, text: str, samples: tuple[int, int], state_is_good: bool
) -> Fault:
    """Return the fault with advice: against such faults, and for a run that ends, the actions that let it go on."""
    advice = ADVICE
    if action == "stop":
        skips = state_is_good and not state.in_backward
        values = "'skip' or 'rewind'" if skips else "'rewind'"
        advice += f"; with fault.on_non_finite = {values} the run leaves such samples out by itself"
    return Fault(action, text, advice, samples, state_is_good)


def fault_of_hooks(state: TrainingState, agreed: Agreed, votes: Sequence[Fault]) -> Fault | None:
    """Return the fault that hooks have asked for, with the words of the first rank whose hook did; None for none.

    `votes`: of this rank's hooks. Called by all ranks together.
    """
    action, state_is_good = agreed.action, agreed.norm is not None
    if action is None:
        return None
    words = next(((vote.reason, vote.advice) for vote in votes if vote.action == action), None)
    rank, shown = next((r, each) for r, each in enumerate(RankGroup().all_gather(words)) if each is not None)
    reason, advice = (" ".join(str(each).split()) for each in shown)
    text = f"step {state.next_step}: {reason}{f' (rank {rank})' if state.world.size > 1 else ''}"
    if action == "skip" and not state_is_good:
        action, text = (
            "stop",
            f"{text}; a skip does not mend that, since optimizer.in_backward has changed weights",
        )
    return Fault(action, text, advice, state.next_samples, state_is_good)


def _where(
    state: TrainingState, loss: float, shares: Tensor, work: Callable[[], Tensor]
) -> tuple[str, set[str]]:
    """Return in words what is not finite, and the kinds of tensors that have such values."""
    model, optimizer, rank, size = state.model, state.optimizer, state.world.rank, state.world.size
    kinds = ("weight", "optimizer", "buffer", "gradient")
    scaled = state.parallel.facts.clips_not_finite
    text, wrong = first_bad(model, optimizer, rank, kinds[:3] if scaled else kinds)
    parts = [text] if text else []
    if not math.isfinite(loss) and not wrong & {"weight", "buffer"}:
        ranks = ranks_with_bad_loss(shares)
        parts.insert(0, f"the loss of {ranks_in_words(ranks)} is not finite, with finite weights")
    elif not wrong - {"gradient"} and not scaled:
        parts = [*parts, largest_gradient(model, rank)][:1]
        if size > 1:
            computed = None
            if hooks_see_gradients(state.parallel, state.train):
                computed = computed_by(model, optimizer, work, rank)
            parts = _with_rank(parts[0], wrong, computed)
    return "; ".join(parts) or "weights and optimizer state are finite", wrong


def _with_rank(text: str, wrong: set[str], computed: Blame | None) -> list[str]:
    """Return lines about gradients after the reduction (`text`) and before it (`computed`, None if not known)."""
    if computed is None:
        return [text, "the rank that computed it is not known"]
    if computed.wrong_ranks or not wrong:
        return [computed.in_words]
    return [text, "computed again, all gradients are finite, so the rank that computed it is not known"]


def fault_of_state(state: TrainingState) -> Fault | None:
    """Return the fault of the weights and the optimizer's state between two steps, before they are saved; or None.

    It costs a pass over them and one reduction of a number. With `verify_every`, copies are compared, too.

    Raises:
        CorruptionError: copies differ.
    """
    settings, model, optimizer = state.fault, state.model, state.optimizer
    if settings.verify_every:
        verify_copies(model, optimizer, state.next_step)
    wrong = is_wrong(model, optimizer).to(state.world.device, torch.float64)
    with noted("all-reduce of a flag"):
        dist.all_reduce(wrong)
    if not wrong.item():
        return None
    where, _ = first_bad(model, optimizer, state.world.rank, ("weight", "optimizer"))
    action: Action = "rewind" if settings.on_non_finite == "rewind" else "stop"
    position = state.position
    text = f"step {position.step}: expected finite weights and optimizer state after it, found otherwise; {where}"
    return _fault(state, action, text, (position.samples, position.samples), state_is_good=False)


class FaultError(JobError):
    """A fault ends the run by its settings: numbers that are not finite, a spike of the loss, or a vote of a hook."""


def is_spike(loss: float, before: Sequence[float], settings: FaultConfig) -> bool:
    """Return whether a loss is far above those of the steps before it. All ranks decide alike, from agreed numbers."""
    if settings.on_spike == "ignore" or len(before) < settings.spike_window // 2:
        return False
    return loss > spike_limit(before, settings.spike_sigmas)


def may_be_spike(loss: Tensor, before: Tensor, settings: FaultConfig) -> Tensor:
    """Return whether `is_spike` may hold, on the device and without a wait of the host: bool, 0-d.

    It holds for all spikes, and for losses just below the limit, because sums are rounded in another order here.
    `before`: float64 [losses].
    """
    if settings.on_spike == "ignore" or len(before) < settings.spike_window // 2:
        return torch.zeros_like(loss, dtype=torch.bool)
    mean = before.mean()
    limit = mean + settings.spike_sigmas * before.std()
    return loss > limit - ROUNDING * (limit.abs() + mean.abs())


ROUNDING = 1e-9
"""The difference of two sums of the same losses in float64, as a part of them: far more than it can be."""


def spike_limit(before: Sequence[float], sigmas: float) -> float:
    """Return the highest loss that is no spike: the mean and `sigmas` standard deviations."""
    mean = math.fsum(before) / len(before)
    variance = math.fsum((each - mean) ** 2 for each in before) / (len(before) - 1)
    return mean + sigmas * math.sqrt(variance)
