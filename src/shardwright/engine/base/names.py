"""Names of parameters and buffers as in the plain model, without the parts that wrappers add."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

FSDP1 = "_fsdp_wrapped_module."  #: in names of torch's FSDP1, whose parameters are plain tensors, and shards
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  #: of activation checkpointing and torch.compile


def plain_name(name: str, model: nn.Module) -> str:
    """The name in the plain model of what ``model`` calls ``name``. A module of its own may be called ``module``: only
    that of DistributedDataParallel is left out."""
    while isinstance(model, DistributedDataParallel) or isinstance(
        getattr(model, "_orig_mod", None), nn.Module
    ):
        inside = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        name, model = name.removeprefix(f"{inside}."), getattr(model, inside)
    return without_wrappers(name.replace(FSDP1, ""))


def without_wrappers(name: str) -> str:
    """The name without modules that hold one other module and no parameters: they are not in a model's structure."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
