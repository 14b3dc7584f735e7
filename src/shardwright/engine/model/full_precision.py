"""Decides which root calls compute with weights in their storage dtypes: calls in eval mode, if the model sets this."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.engine.unit.unit import Unit


def uses_full_precision(model: nn.Module) -> bool:
    """Whether a root call of ``model`` computes with weights in their storage dtypes."""
    if model.training:
        return False
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{type(model).__name__} has full_precision_in_eval and was called in eval mode with gradients enabled; "
            "backward needs the weights in their compute dtype. Call it under torch.no_grad() or inference_mode(), "
            "or call train() first."
        )
    return True


def check_agree(units: list[Unit], names: list[str]) -> bool:
    """Whether the units of a model have full precision in eval mode. Raises if only some of them do."""
    asks = [unit.arguments.policy.full_precision_in_eval for unit in units]
    if len(set(asks)) > 1:
        with_it = names[asks.index(True)]
        without = names[asks.index(False)]
        raise ValueError(
            f"full_precision_in_eval applies to a whole model, but {with_it!r} has it and {without!r} does not. Pass "
            "every fully_shard call a policy with the same value."
        )
    for unit, name in zip(units, names, strict=True) if asks[0] else ():
        if unit.weights.copies.extended_kinds:
            raise NotImplementedError(
                f"full_precision_in_eval: parameters of {name!r} define their own all-gather "
                f"({unit.weights.copies.extended_kinds} has fsdp_pre_all_gather). Leave it at False."
            )
    return asks[0]
