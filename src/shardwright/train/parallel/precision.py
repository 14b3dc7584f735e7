"""`[parallel]`'s precisions as the engine's policy: which parameters are computed with in float32 beside the others."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import cast

import torch
from torch import nn

import shardwright as sw
from shardwright.train.config import ParallelConfig
from shardwright.train.errors import UserError
from shardwright.train.models.language_model import LanguageModel

#: Ends of the names of parameters that models here compute with in float32 whatever their inputs are, beside norms.
WIDE = ("router.weight", "a_log", "dt_bias")


def dtype_of(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))


def engine_policy(model: LanguageModel, config: ParallelConfig) -> sw.PrecisionPolicy:
    """Return the same for every unit of `model`, whose parameters are not cut yet.

    Inputs are not cast: the residual stream has the compute dtype from the embedding on, and the rotary tables, which
    blocks receive as arguments, stay float32. Raises UserError for a pattern that fits no parameter, or one that must
    have the dtype of activations.
    """
    kept = _kept(model, config.keep_float32)
    if config.param_dtype != "float32":
        for name in model.float32_names:
            setattr(model.get_parameter(name), _KEPT, True)
        kept |= bool(model.float32_names)
    policy = sw.PrecisionPolicy(
        param_dtype=torch.float32,
        reduce_dtype=dtype_of(config.reduce_dtype),
        grad_dtype=None if config.grad_dtype == "auto" else dtype_of(config.grad_dtype),
        accumulate_dtype=None if config.accumulate_dtype == "auto" else dtype_of(config.accumulate_dtype),
    )
    return dataclasses.replace(
        policy,
        param_dtype=dtype_of(config.param_dtype),
        cast_forward_inputs=False,
        full_precision_in_eval=config.full_precision_in_eval,
        per_parameter=(lambda name, p: policy if hasattr(p, _KEPT) else None) if kept else None,
    )


#: Set on parameters, which keep their attributes when they are cut.
_KEPT = "keeps_float32"


def _kept(model: nn.Module, patterns: tuple[str, ...]) -> bool:
    """Mark the parameters that fit one of the patterns. Returns whether any does."""
    parameters = dict(model.named_parameters())
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.RMSNorm)}
    for pattern in patterns:
        names = fnmatch.filter(parameters, pattern)
        if not names:
            raise UserError(
                f"parallel.keep_float32: expected patterns of parameter names, found {pattern!r}, which matches none "
                f"of {', '.join(list(parameters)[:8])}, ..."
            )
        for name in names:
            if name not in norms and not name.endswith(WIDE):
                raise UserError(
                    f"parallel.keep_float32: expected patterns of norms and of {', '.join(WIDE)}, found {pattern!r}, "
                    f"which also matches {name!r}; this parameter is multiplied with activations in "
                    "parallel.param_dtype"
                )
            setattr(parameters[name], _KEPT, True)
    return bool(patterns)
