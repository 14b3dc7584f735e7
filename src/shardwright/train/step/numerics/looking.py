"""Looks at the numbers of each step: the flag that a rank adds to the step's reduction, and the fault that follows.

A step without a fault has no collective and no wait for the device for this. The fault is named afterwards. These
faults are no `TrainerHook`: hooks vote before the reduction of the step, and only after it a loss is known to be wrong.
As a hook they would need another reduction and another wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.board import ranks_in_words
from shardwright.collective import RankGroup
from shardwright.comm.noted import noted
from shardwright.train.config.catalog.hooks import Action, Fault
from shardwright.train.parallel.world import World
from shardwright.train.step.numerics.blaming import computed_by, hooks_see_gradients
from shardwright.train.step.numerics.fault import is_spike, spike_limit
from shardwright.train.step.numerics.naming import first_bad, is_wrong, largest_gradient, ranks_with_bad_loss
from shardwright.train.step.numerics.verifying import VerifiedTrainer, verify_copies

ADVICE = "try a lower optimizer.lr or a longer optimizer.warmup_steps"
"""Advice that may help against any fault."""


class CheckedTrainer(VerifiedTrainer, Protocol):
    """Attributes of a trainer that this module reads."""

    world: World


def flag(norm: Tensor | None, device: torch.device) -> Tensor:
    """1 if the norm of all gradients is not finite, else 0: float64 [1]. It does not wait for the device.

    An optimizer that steps in backward leaves no norm. A pass over the weights in each step would cost too much, so a
    wrong gradient shows in the loss of a later step there, or before a save.
    """
    if norm is None:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return (~norm.isfinite()).to(device, torch.float64, non_blocking=True)[None]


def fault_of_step(
    trainer: CheckedTrainer,
    loss: float,
    norm: float | None,
    flags: float,
    shares: Tensor,
    work: Callable[[], Tensor],
) -> Fault | None:
    """The fault of the step whose gradients are here, or None. `flags`: of all ranks. `shares`: of the losses.

    `work` does forward and backward of the step again, to find the rank that computed a wrong gradient. The gradients
    are lost then.
    """
    settings, position = trainer.config.fault, trainer.position
    samples = position.samples, position.samples + trainer.config.train.global_batch
    head = f"step {position.step + 1}"
    if not math.isfinite(loss) or flags:
        shown = "not known" if norm is None else norm
        text = f"{head}: expected a finite loss and gradient norm, found loss {loss}, norm {shown}"
        where, kinds = _where(trainer, loss, shares, work)
        good = norm is not None and not kinds & {"weight", "optimizer"}
        if settings.on_non_finite == "skip" and not good:
            return _fault(trainer, "stop", f"{text}; {where}; a skip does not mend that", samples, good)
        return _fault(trainer, settings.on_non_finite, f"{text}; {where}", samples, good)
    losses = position.past.losses
    if settings.on_spike != "ignore" and is_spike(loss, losses, settings):
        limit = spike_limit(losses, settings.spike_sigmas)
        text = (
            f"{head}: the loss {loss:.4f} is a spike, above {limit:.4f}, the mean of {len(losses)} losses and "
            f"{settings.spike_sigmas:g} standard deviations"
        )
        return _fault(trainer, settings.on_spike, text, samples, norm is not None)
    return None


def _fault(
    trainer: CheckedTrainer, action: Action, text: str, samples: tuple[int, int], state_is_good: bool
) -> Fault:
    """The fault with advice: against such faults, and for a run that ends, the actions that let it go on."""
    advice = ADVICE
    if action == "stop":
        skips = state_is_good and not trainer.config.optimizer.in_backward
        values = "'skip' or 'rewind'" if skips else "'rewind'"
        advice += f"; with fault.on_non_finite = {values} the run leaves such samples out by itself"
    return Fault(action, text, advice, samples, state_is_good)


def fault_of_hooks(
    trainer: CheckedTrainer, own: Sequence[Fault], action: Action, state_is_good: bool
) -> Fault:
    """The fault that hooks have asked for, with the words of the first rank whose hook did.

    `own`: those of this rank. Called by all ranks together.
    """
    words = next(((each.reason, each.advice) for each in own if each.action == action), None)
    rank, shown = next((r, each) for r, each in enumerate(RankGroup().all_gather(words)) if each is not None)
    reason, advice = (" ".join(str(each).split()) for each in shown)
    samples = trainer.position.samples, trainer.position.samples + trainer.config.train.global_batch
    text = f"step {trainer.position.step + 1}: {reason}{f' (rank {rank})' if trainer.world.size > 1 else ''}"
    if action == "skip" and not state_is_good:
        action, text = (
            "stop",
            f"{text}; a skip does not mend that, since optimizer.in_backward has changed weights",
        )
    return Fault(action, text, advice, samples, state_is_good)


def _where(
    trainer: CheckedTrainer, loss: float, shares: Tensor, work: Callable[[], Tensor]
) -> tuple[str, set[str]]:
    """In words what is not finite, and the kinds of tensors that have such values."""
    kinds = ("weight", "optimizer", "buffer", "gradient")
    scaled = trainer.config.parallel.facts.clips_not_finite
    text, wrong = first_bad(
        trainer.model, trainer.optimizer, trainer.world.rank, kinds[:3] if scaled else kinds
    )
    parts = [text] if text else []
    if not math.isfinite(loss) and not wrong & {"weight", "buffer"}:
        ranks = ranks_with_bad_loss(shares)
        parts.insert(0, f"the loss of {ranks_in_words(ranks)} is not finite, with finite weights")
    elif not wrong - {"gradient"} and not scaled:
        parts = [*parts, largest_gradient(trainer.model, trainer.world.rank)][:1]
        if trainer.world.size == 1:
            parts = [parts[0].removeprefix("reduced ")]
        else:
            computed = None
            if hooks_see_gradients(trainer.config):
                computed = computed_by(trainer.model, trainer.optimizer, work, trainer.world.rank)
            parts = _with_rank(parts[0], wrong, computed)
    return "; ".join(parts) or "weights and optimizer state are finite", wrong


def _with_rank(text: str, wrong: set[str], computed: str | None) -> list[str]:
    """Lines about gradients after the reduction (`text`) and before it (`computed`); None if those are not known."""
    if computed is None:
        return [text, "the rank that computed it is not known"]
    if computed.startswith("gradient ") or not wrong:
        return [computed]
    return [text, "computed again, all gradients are finite, so the rank that computed it is not known"]


def fault_of_state(trainer: CheckedTrainer) -> Fault | None:
    """The fault of the weights and the optimizer's state between two steps, before they are saved; or None.

    It costs a pass over them and one reduction of a number. With `verify_every`, copies are compared, too.

    Raises:
        CorruptionError: copies differ.
    """
    if trainer.config.fault.verify_every:
        verify_copies(trainer)
    wrong = is_wrong(trainer.model, trainer.optimizer).to(trainer.world.device, torch.float64)
    with noted("all-reduce of a flag"):
        dist.all_reduce(wrong)
    if not wrong.item():
        return None
    where, _ = first_bad(trainer.model, trainer.optimizer, trainer.world.rank, ("weight", "optimizer"))
    action: Action = "rewind" if trainer.config.fault.on_non_finite == "rewind" else "stop"
    step = trainer.position.step
    text = f"step {step}: expected finite weights and optimizer state after it, found otherwise; {where}"
    return _fault(trainer, action, text, (trainer.position.samples, trainer.position.samples), False)
