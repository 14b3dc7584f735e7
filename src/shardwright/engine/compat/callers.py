"""Questions about the code of torch that called: a few methods of the engine's tensors must answer some callers of
torch differently.

Each function looks at the frames of its caller, so it must be called directly by the method that torch has called.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def called_by_compiler() -> bool:
    """Return whether the caller was called by torch.compile's own code, as it runs or traces a graph."""
    caller = str(sys._getframe(2).f_globals.get("__name__"))
    return caller.startswith(("torch._functorch.", "torch._dynamo.", "torch._subclasses."))


def read_by_program(depth: int) -> bool:
    """Return whether a program reads an attribute of a tensor, and neither the engine nor torch.compile does.

    ``depth``: number of calls between the reader and the caller of this function.
    """
    reader = str(sys._getframe(depth + 1).f_globals.get("__name__"))
    return not reader.startswith(
        ("shardwright.", "torch._functorch.", "torch._dynamo.", "torch._subclasses.")
    )


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_DEPTH = 12  #: frames between an operation and the call of the function that it is a part of


def inside_function() -> bool:
    """Return whether the forward of a ``torch.autograd.Function`` runs the caller, a few calls further in."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None or frame.f_code is _APPLY:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


def called_by_parameter() -> bool:
    """Return whether ``nn.Parameter(...)`` called. It expects ``detach`` to return the tensor's own class."""
    return sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__


def called_by_stager() -> bool:
    """Return whether the caller was called by the stager of torch's asynchronous checkpoints.

    If a tensor has an address other than 0, the stager copies the memory there and not that of the tensors inside.
    """
    name = sys._getframe(2).f_globals.get("__name__")
    return name == "torch.distributed.checkpoint._state_dict_stager"


_SPLIT_BACKWARD = "torch.distributed.pipelining._backward"


def called_by_split_backward() -> bool:
    """Return whether the caller was called by a zero-bubble pipeline schedule, or its ``parameters()`` was.

    Such a schedule looks for these parameters in the graph and puts gradients into them.
    """
    frame: Any = sys._getframe(2)
    if frame.f_code is torch.nn.Module.parameters.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _SPLIT_BACKWARD


_PARAMETRIZE = "torch.nn.utils.parametrize"


def refusal(message: str) -> RuntimeError:
    """Return the error for an operation that a sharded tensor does not support, mostly a NotImplementedError.

    Inside ``register_parametrization`` it is a RuntimeError, because that function takes NotImplementedError for a
    missing inverse and goes on without the weight.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _PARAMETRIZE:
        frame = frame.f_back
    return NotImplementedError(message) if frame is None else RuntimeError(message)


def called_by_torchs_fully_shard() -> bool:
    """Return whether torch's own ``fully_shard``, which is about to take a module's parameters, called the caller."""
    return str(sys._getframe(2).f_globals.get("__name__")).endswith("._fully_shard._fsdp_init")
