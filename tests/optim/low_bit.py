"""A stand-in for torchao's low-bit optimizers, whose state is codes and scales in a class with few operations."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 8
aten = torch.ops.aten


def coded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
    return (blocks / scale[:, None]).round().to(torch.int8).view(values.shape), scale


class Codes(torch.Tensor):
    """Has what torchao's ``OptimState8bit`` has, and raises for the rest as it does: ``clone``, ``new_empty``."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Any:
        return cls(parts["codes"], parts["scale"])

    def __repr__(self, **_: Any) -> str:
        return f"Codes({self.codes}, {self.scale})"

    def values(self) -> torch.Tensor:
        return (self.codes.reshape(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *rest = args
        if func is aten.copy_.default:
            source = rest[0]
            if not isinstance(first, Codes):
                return first.copy_(source.values())
            codes, scale = (source.codes, source.scale) if isinstance(source, Codes) else coded(source)
            first.codes.copy_(codes)
            first.scale.copy_(scale)
            return first
        if func in (aten.detach.default, aten._to_copy.default):
            return Codes(first.codes, first.scale)
        if func is aten.view.default:
            return Codes(first.codes.view(*rest), first.scale)
        if func is aten.is_pinned.default:
            return False
        if func is aten.slice.Tensor:
            dim, start, stop = rest
            row = first[0].numel() if first.dim() > 1 else 1
            if dim or start * row % BLOCK or stop * row % BLOCK:
                raise ValueError(f"Codes cannot be cut at {start}:{stop} of dimension {dim}")
            return Codes(first.codes[start:stop], first.scale[start * row // BLOCK : stop * row // BLOCK])
        if func is aten.select.int:
            return first.codes.select(*rest)
        raise NotImplementedError(f"Codes has no {func}")


torch.serialization.add_safe_globals([Codes])


class LowBit(torch.optim.Optimizer):
    """Momentum in codes, where a part has ``least`` elements or more: other ranks' parts are plain."""

    def __init__(self, params: Any, lr: float = 0.1, least: int = 16) -> None:
        super().__init__(params, {"lr": lr})
        self.least = least

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    zeros = torch.zeros_like(p)
                    low = p.numel() >= self.least and p.numel() % BLOCK == 0
                    state["momentum"] = Codes(*coded(zeros)) if low else zeros
                    state["step"] = torch.zeros(())
                state["step"] += 1
                momentum = torch.empty_like(p).copy_(state["momentum"]).mul_(0.9).add_(p.grad)
                state["momentum"].copy_(momentum)
                p.sub_(momentum, alpha=group["lr"])
