"""Sharded parameters with the values of a sample, as users meet them: parameters of a module after ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import shardwright as sw
from shardwright.engine import RaggedTensor

#: Arguments of ``fully_shard`` by name; None stands for torch's own FSDP2.
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "per_parameter": {},
    "ragged": {"layout": "ragged"},
    "ddp": {"strategy": "ddp"},
    "FSDP2": None,
}


class Holder(nn.Module):
    def __init__(self, tensors: list[torch.Tensor], gradients: list[bool]) -> None:
        super().__init__()
        for i, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
            setattr(self, f"p{i}", nn.Parameter(tensor.clone(), requires_grad=gradient))


def sharded(
    tensors: list[torch.Tensor], gradients: list[bool], layout: str, mesh: Any
) -> tuple[nn.Module, list[Any]]:
    """The module, which must be kept, and its parameters ``p0``, ``p1`` and so on."""
    holder = Holder(tensors, gradients)
    settings = LAYOUTS[layout]
    if settings is not None:
        sw.fully_shard(holder, mesh=mesh, **settings)
        return holder, [getattr(holder, f"p{i}") for i in range(len(tensors))]
    parameters: list[Any] = []
    for name, parameter in list(holder.named_parameters()):
        if not parameter.dim():  # FSDP2 takes none
            whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            parameters.append(nn.Parameter(whole, requires_grad=parameter.requires_grad))
            delattr(holder, name)
        else:
            parameters.append(name)
    if any(True for _ in holder.parameters()):
        torch_fsdp.fully_shard(holder, mesh=mesh)
    return holder, [getattr(holder, p) if isinstance(p, str) else p for p in parameters]


def like(tensor: torch.Tensor, result: Any) -> Any:
    """``tensor``, the same on every rank, in a form that operations take beside ``result``."""
    if isinstance(result, DTensor):
        return DTensor.from_local(
            tensor, result.device_mesh, [Replicate()] * result.device_mesh.ndim, run_check=False
        )
    if isinstance(result, RaggedTensor):
        return RaggedTensor.from_full(tensor, result.spec)
    return tensor


def cut_alike(gradient: Any, parameter: Any) -> bool:
    """Whether a gradient is sharded as its parameter is."""
    if isinstance(parameter, RaggedTensor):
        return isinstance(gradient, RaggedTensor) and gradient.spec == parameter.spec
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, (DTensor, RaggedTensor)):
        tensor = tensor.full_tensor()
    tensor = tensor.wait() if hasattr(tensor, "wait") and type(tensor) is not torch.Tensor else tensor
    return tensor.detach()
