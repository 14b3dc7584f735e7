"""Tensor subclasses as parameters: what they gather and how they train."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from tests.support import world_mesh

LIBRARIES: dict[str, ModuleType] = {"torch": torch_fsdp, "shardwright": sw}


def data(rank: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(101 * micro + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def backward(model: nn.Module, rank: int, micro: int = 0) -> None:
    loss_of(model(data(rank, micro))).backward()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tol: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=tol, atol=tol / 10, msg=lambda m, n=name: f"{n}: {m}"
        )


Gathered = tuple[tuple[torch.Tensor, ...], Any]


class Stored(torch.Tensor):
    """A weight that stores float32 and says itself what is gathered. ``log`` is shared by all copies and pieces."""

    data32: torch.Tensor
    log: list[tuple[Any, ...]]

    @staticmethod
    def __new__(cls, data32: torch.Tensor, log: list[tuple[Any, ...]] | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data32.shape, strides=data32.stride(), dtype=data32.dtype, device=data32.device
        )

    def __init__(self, data32: torch.Tensor, log: list[tuple[Any, ...]] | None = None) -> None:
        self.data32 = data32
        self.log = [] if log is None else log

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({self.data32})"

    #: What sharding, checkpoints and optimizers do to a local shard, which must stay one of these.
    KEEPS = frozenset(
        getattr(torch.ops.aten, name)
        for name in (
            "detach",
            "empty_like",
            "new_zeros",
            "new_empty",
            "slice",
            "split",
            "split_with_sizes",
            "view",
            "as_strided",
            "clone",
            "copy_",
            "_to_copy",
            "zeros_like",
            "ones_like",
            "alias",
            "narrow",
        )
    )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(
            a for a in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(a, Stored)
        )
        unwrap = lambda t: t.data32  # noqa: E731
        plain_args, plain_kwargs = torch.utils._pytree.tree_map_only(Stored, unwrap, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.name.endswith("_") and func._schema.is_mutable and isinstance(args[0], Stored):
            return args[0]
        if func.overloadpacket not in cls.KEEPS:
            return out
        wrap = lambda t: type(first)(t, first.log)  # noqa: E731
        return torch.utils._pytree.tree_map_only(torch.Tensor, wrap, out)

    @classmethod
    def seen(cls, weight: torch.Tensor) -> torch.Tensor:
        """The values that forward computes with, from the whole float32 weight."""
        raise NotImplementedError

    def padded(self, mesh: Any, outer_size: torch.Size) -> torch.Tensor:
        """The rows of this rank, filled up to as many as rank 0 has: FSDP2 gathers equal pieces only."""
        rows = math.ceil(outer_size[0] / mesh.size())
        if self.data32.size(0) == rows:
            return self.data32
        padded = self.data32.new_zeros(rows, *outer_size[1:])
        padded[: self.data32.size(0)] = self.data32
        return padded


class HalfGathered(Stored):
    """Gathered in bfloat16; forward sees a plain tensor of another memory than the gathered one."""

    @classmethod
    def seen(cls, weight: torch.Tensor) -> torch.Tensor:
        return weight.bfloat16().float()

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Gathered:
        self.log.append(("pre", mesh, outer_size, outer_stride, module, mp_policy, self.shape))
        return (self.padded(mesh, outer_size).bfloat16(),), "metadata"

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        self.log.append(("post", tuple((o.shape, o.dtype) for o in outputs), metadata, param_dtype, out))
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered[: out.size(0)])
            return None
        whole = gathered.to(param_dtype)
        return whole, (whole,)


class OneArgument(HalfGathered):
    """The old signature, which torchao still has."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Gathered:  # type: ignore[override]
        self.log.append(("pre", mesh))
        return (self.data32.bfloat16(),), None


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
    return torch.round(weight / scale).to(torch.int8), scale


class QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: its parts are read again in backward, from the memory they have then
        return x @ weight.dequantised().to(x.dtype).T + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight.dequantised().to(grad.dtype), grad.T @ x, grad.sum(0)


class Quantised(torch.Tensor):
    """The form of :class:`IntGathered` in forward: int8 rows and their scales, over the gathered memory itself."""

    rows: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, size: torch.Size) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=rows.device)

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, size: torch.Size) -> None:
        self.rows, self.scale = rows, scale

    def dequantised(self) -> torch.Tensor:
        return (self.rows * self.scale)[: self.size(0)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return QuantisedLinear.apply(*args)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.detach, aten.alias, aten.as_strided, aten.view):
            (self, *rest) = args
            assert func.overloadpacket is not aten.as_strided or tuple(rest[0]) == tuple(self.shape)
            return cls(self.rows, self.scale, self.dtype, self.shape)
        raise NotImplementedError(f"{func} on {cls.__name__}")


class IntGathered(Stored):
    """Two tensors of different dtypes: int8 rows and float32 scales."""

    @classmethod
    def seen(cls, weight: torch.Tensor) -> torch.Tensor:
        rows, scale = quantised(weight)
        return rows * scale

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Gathered:
        self.log.append(("pre", mesh, outer_size, outer_stride, module, mp_policy, self.shape))
        return quantised(self.padded(mesh, outer_size)), outer_size

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        self.log.append(("post", tuple((o.shape, o.dtype) for o in outputs), metadata, param_dtype, out))
        rows, scale = outputs
        if out is not None:  # its parts view the memory that was gathered into, so there is nothing to copy
            assert isinstance(out, Quantised)
            assert out.rows.data_ptr() == rows.data_ptr() and out.scale.data_ptr() == scale.data_ptr()
            return None
        return Quantised(rows, scale, param_dtype, metadata), ()


class TensorScaled(Stored):
    """As torchao's float8 weights: one scale for the whole tensor, found by a collective before each gather.

    The scale is not gathered but handed over as metadata, and the gathered memory itself is what forward sees.
    """

    @classmethod
    def seen(cls, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.abs().max() / 127
        return torch.round(weight / scale).to(torch.int8) * scale

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Gathered:
        data32 = self.padded(mesh, outer_size)
        scale = data32.abs().max() / 127
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return (torch.round(data32 / scale).to(torch.int8),), (scale, outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (rows,) = outputs
        scale, outer_size = metadata
        if out is not None:
            assert isinstance(out, Quantised)
            out.scale = scale
            return None
        return Quantised(rows, scale, param_dtype, outer_size), (rows,)


class Wrapped(nn.Module):
    """Two linear layers as units, a plain one between them. The weights of the first and last are ``kind``."""

    def __init__(self, kind: type[Stored] | None, rows: int = 6) -> None:
        super().__init__()
        self.first, self.plain, self.last = nn.Linear(6, rows), nn.Linear(rows, 6), nn.Linear(6, 4)
        self.log: list[tuple[Any, ...]] = []
        if kind is not None:
            for layer in (self.first, self.last):
                layer.weight = nn.Parameter(kind(layer.weight.detach(), self.log))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.plain(torch.relu(self.first(x)))))


def wrapped(library: str, kind: type[Stored] | None, rows: int = 6, **options: Any) -> tuple[Any, Wrapped]:
    """The sharded model with such weights, and the plain one with ordinary weights."""
    models = []
    for each in (kind, None):
        torch.manual_seed(3)
        models.append(Wrapped(each, rows))
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(dist.get_world_size())
    fully_shard(models[0].first, mesh=mesh, **options)
    return fully_shard(models[0], mesh=mesh, **options), models[1]


def straight_through(
    kind: type[Stored], plain: Wrapped, world_size: int, micro: int = 0
) -> dict[str, torch.Tensor]:
    """Gradients with regard to the weights that forward saw, averaged over ranks: what the shards must receive."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        weights = {
            n: (kind.seen(p) if n in ("first.weight", "last.weight") else p).detach().requires_grad_()
            for n, p in plain.named_parameters()
        }
        loss_of(torch.func.functional_call(plain, weights, (data(rank, micro),))).backward()
        for name, weight in weights.items():
            assert weight.grad is not None
            total[name] = total.get(name, 0) + weight.grad / world_size
    return total


def local(parameter: Any) -> Any:
    return parameter._local_tensor


def whole(parameter: Any) -> torch.Tensor:
    """The full float32 value, gathered by way of a plain DTensor."""
    if not isinstance(local(parameter), Stored):
        return parameter.full_tensor()
    plain = DTensor.from_local(
        local(parameter).data32,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return plain.full_tensor()


KINDS: list[type[Stored]] = [HalfGathered, OneArgument, IntGathered, TensorScaled]
