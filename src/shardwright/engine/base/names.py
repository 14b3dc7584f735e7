"""Names of parameters and buffers as in the plain model, without the parts that wrappers add."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

FSDP1 = "_fsdp_wrapped_module."  #: in names of torch's FSDP1, whose parameters are plain tensors, and shards
_WRAPPERS = (FSDP1, "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str, model: nn.Module) -> str:
    """The name in the plain model of what ``model`` calls ``name``. A module of its own may be called ``module``: only
    that of DistributedDataParallel is left out."""
    while isinstance(model, DistributedDataParallel) or isinstance(
        getattr(model, "_orig_mod", None), nn.Module
    ):
        inside = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
        name, model = name.removeprefix(f"{inside}."), getattr(model, inside)
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
