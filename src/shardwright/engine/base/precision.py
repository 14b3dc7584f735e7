"""The dtypes of a unit: a policy with more fields than torch's, and the dtypes of single parameters and buffers.

``model/full_precision.py`` has gathers in the storage dtypes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwright.engine.layout import GradientDtypes

PerParameter = Callable[[str, nn.Parameter], MixedPrecisionPolicy | None] | Mapping[str, MixedPrecisionPolicy]

#: The attribute under which a module stores the earlier dtypes of its cast buffers.
BUFFER_DTYPES = "_shardwright_buffer_dtypes"


@dataclass(frozen=True)
class PrecisionPolicy(MixedPrecisionPolicy):
    """torch's ``MixedPrecisionPolicy`` for ``mp_policy`` of :func:`fully_shard`, with more fields.

    Each dtype is a floating-point ``torch.dtype``, or None for its default. Parameters keep their dtype in storage.

    Attributes:
        param_dtype: dtype of gathered weights and of the computation. Default: as stored.
        reduce_dtype: dtype in which gradients are sent and summed over the ranks. Default: ``param_dtype``.
        output_dtype: dtype to which floating-point outputs of the unit's modules are cast. Default: no cast.
        cast_forward_inputs: whether floating-point inputs of the unit's modules are cast to ``param_dtype``.
        grad_dtype: dtype of ``.grad``. Default: as the parameter is stored. With bfloat16 gradients of float32
            parameters (``keep_low_precision_grads`` of FSDP1) gradients need half the memory, and the optimizer must
            support them.
        accumulate_dtype: dtype of the sums that are held between micro-batches: whole gradients without communication,
            or sums that wait for the replicas. Default: ``reduce_dtype``. If each micro-batch is reduced, gradients add
            up in ``.grad``, in its dtype.
        buffer_dtype: dtype to which floating-point buffers are cast before the first forward. Default: no cast. Buffers
            of ``ignored_modules``, and of modules whose parameters are all in ``ignored_params``, are never cast. State
            dicts have the original dtypes with the rounded values.
        per_parameter: policies of single parameters. Either a function of the name in the unit and the parameter, which
            returns a policy or None; or a mapping from patterns such as ``"*norm*"`` to policies, where the first match
            counts. Only the dtypes of the weight and its gradient apply; the other fields come from the unit's policy.
        full_precision_in_eval: in eval mode without gradients, gather and compute with weights as they are stored, and
            cast neither inputs nor outputs. It applies to a whole model, so every call must have the same value.

    Raises:
        ValueError: a dtype that is not floating-point, or fields that cannot be combined.
    """

    grad_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    per_parameter: PerParameter | None = field(default=None, hash=False)
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        after = getattr(super(), "__post_init__", None)
        if after is not None:
            after()
        for name in _DTYPES:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"{name} must be a floating-point torch.dtype or None, got {value!r}")
        if not isinstance(self.full_precision_in_eval, bool):
            raise ValueError(
                f"full_precision_in_eval must be True or False, got {self.full_precision_in_eval!r}"
            )
        if not (
            self.per_parameter is None
            or callable(self.per_parameter)
            or isinstance(self.per_parameter, Mapping)
        ):
            raise ValueError(
                f"per_parameter must be a function (name, parameter) or a mapping from patterns of names to policies, "
                f"got {self.per_parameter!r}"
            )
        if isinstance(self.per_parameter, Mapping):
            for pattern, policy in self.per_parameter.items():
                _check_single(policy, f"pattern {pattern!r}")
        if None not in (self.grad_dtype, self.accumulate_dtype) and self.grad_dtype != self.accumulate_dtype:
            raise ValueError(
                f"grad_dtype is {self.grad_dtype} and accumulate_dtype {self.accumulate_dtype}, but reduced "
                "micro-batches add up in .grad, which has grad_dtype. Set only one of the two, or the same dtype for "
                "both."
            )
        if self.full_precision_in_eval and self.buffer_dtype is not None:
            raise ValueError(
                "full_precision_in_eval needs buffers in their original precision, but "
                f"buffer_dtype={self.buffer_dtype} rounds them. Leave buffer_dtype at None."
            )


_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "grad_dtype", "accumulate_dtype", "buffer_dtype")
#: Fields that the policy of one parameter may set.
_SINGLE = {"param_dtype", "reduce_dtype", "grad_dtype", "accumulate_dtype"}
_PLAIN = PrecisionPolicy()


def as_precision(policy: MixedPrecisionPolicy) -> PrecisionPolicy:
    """torch's policy as one of ours."""
    if isinstance(policy, PrecisionPolicy):
        return policy
    return PrecisionPolicy(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})


def _check_single(policy: Any, where: str) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"per_parameter must return a MixedPrecisionPolicy, got {policy!r} ({type(policy).__name__}) for {where}"
        )
    for f in dataclasses.fields(policy):
        if f.name not in _SINGLE and getattr(policy, f.name) != getattr(_PLAIN, f.name):
            raise ValueError(
                f"per_parameter returned a policy with {f.name}={getattr(policy, f.name)!r} for {where}. Only the "
                "policy of a whole unit can set this field: set it there."
            )


def policy_for(policy: PrecisionPolicy, name: str, parameter: nn.Parameter) -> PrecisionPolicy:
    """The policy of one parameter: its own if there is one, else the unit's."""
    choose = policy.per_parameter
    own_policy: MixedPrecisionPolicy | None
    if choose is None:
        return policy
    if isinstance(choose, Mapping):
        own_policy = next(
            (own for pattern, own in choose.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    else:
        own_policy = choose(name, parameter)
        if own_policy is not None:
            _check_single(own_policy, f"parameter {name!r}")
    return policy if own_policy is None else as_precision(own_policy)


def gradient_dtypes(policy: PrecisionPolicy, compute: torch.dtype) -> GradientDtypes:
    """The gradient dtypes of a parameter with this compute dtype and policy."""
    if not compute.is_floating_point:
        return GradientDtypes(compute)
    return GradientDtypes(policy.reduce_dtype or compute, policy.grad_dtype, policy.accumulate_dtype)


# -- buffers ---------------------------------------------------------------------------------------------------------


def cast_buffers(
    modules: Iterable[nn.Module],
    ignored: Iterable[nn.Parameter],
    ignored_modules: Iterable[nn.Module],
    policy: PrecisionPolicy,
) -> None:
    """Cast the floating-point buffers of these modules, except modules that are ignored or whose parameters all are."""
    dtype = policy.buffer_dtype
    if dtype is None:
        return
    ignored_ids = {id(p) for p in ignored}
    modules = list(modules)
    spared = {id(m) for top in ignored_modules for m in top.modules()}
    for module in modules if ignored_ids else ():
        parameters = list(module.parameters())
        if parameters and all(id(p) in ignored_ids for p in parameters):
            spared.update(id(m) for m in module.modules())
    for module in modules:
        for name, buffer in module._buffers.items() if id(module) not in spared else ():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                before = module.__dict__.setdefault(BUFFER_DTYPES, {})
                before.setdefault(name, buffer.dtype)
                requires_grad = buffer.requires_grad and buffer.is_leaf
                module._buffers[name] = buffer.detach().to(dtype).requires_grad_(requires_grad)


def restore_buffers(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give the buffers in a state dict the dtypes of the plain model."""
    for name, dtype in module.__dict__.get(BUFFER_DTYPES, {}).items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            state[prefix + name] = value.to(dtype)


# -- optimizers ------------------------------------------------------------------------------------------------------

#: torch's optimizers whose step accepts gradients of another dtype than the parameters.
_TAKES_ANY = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
)
#: Their options with which it does not.
_TAKES_ONE = ("fused", "centered")

#: True on our optimizer classes whose step accepts them, too.
TAKES_ANY_GRADIENT = "takes_any_gradient"
#: Name of an attribute that marks our classes whose ``step`` calls the ``step`` of another class.
CALLS_ANOTHER_STEP = "calls_another_step"


def refuse_gradient_dtypes(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Raise if an optimizer gets a gradient of another dtype than its parameter, and is known not to accept it."""
    options = [name for name in _TAKES_ONE if any(group.get(name) for group in optimizer.param_groups)]
    steps = (c for c in type(optimizer).__mro__ if "step" in vars(c) and CALLS_ANOTHER_STEP not in vars(c))
    is_builtin = next(steps).__module__.startswith(("torch.", "shardwright."))
    takes_any = isinstance(optimizer, _TAKES_ANY) and not options
    if not is_builtin or takes_any or getattr(optimizer, TAKES_ANY_GRADIENT, False):
        return
    for p in parameters:
        dtype = p.grad.dtype if p.grad is not None else p.grad_dtype if p.requires_grad else p.dtype
        if dtype not in (p.dtype, None):
            raise RuntimeError(
                f"{type(optimizer).__name__}{''.join(f' with {name}=True' for name in options)} cannot step a "
                f"{p.dtype} parameter of shape {tuple(p.shape)} with a {dtype} gradient. Leave grad_dtype at None, or "
                f"use one of {', '.join(c.__name__ for c in _TAKES_ANY)} without {' and '.join(_TAKES_ONE)}, "
                "AdamW8bit, or an optimizer that is not torch's."
            )
