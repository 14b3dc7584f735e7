"""The model of a program: units that keep tensors which they do not return, and how the model is sharded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.hostile.grammar import Program, UnitSpec
from tests.support import world_mesh

DIM = 6


class Keeping(torch.autograd.Function):
    """A product whose backward reads a weight from an attribute, which autograd does not check."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.weight, None


class Held:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Store:
    """Where units put tensors that they do not return, outside of all modules."""

    def __init__(self) -> None:
        self.list: list[torch.Tensor] = []
        self.dict: dict[str, torch.Tensor] = {}
        self.closures: list[Callable[[], torch.Tensor]] = []
        self.objects: deque[Held] = deque(maxlen=8)

    def clear(self) -> None:
        for each in (self.list, self.dict, self.closures, self.objects):
            each.clear()

    def all(self) -> list[torch.Tensor]:
        objects = [each.tensor for each in self.objects]
        return [*self.list, *self.dict.values(), *(read() for read in self.closures), *objects]


class Block(nn.Module):
    def __init__(self, number: int, spec: UnitSpec) -> None:
        super().__init__()
        self.number, self.spec, kind = number, spec, spec.kind
        self.main: nn.Module = nn.Identity()
        if kind in ("linear", "mixed"):
            self.main = nn.Linear(DIM, DIM)
        elif kind == "table":
            self.main = nn.Embedding(7, DIM)
        elif kind == "conv":
            self.main = nn.Conv1d(2, 2, 3, padding=1)
        elif kind.startswith("nested"):
            self.main = nn.Sequential(nn.Linear(DIM, 5), nn.Tanh(), nn.Linear(5, DIM, bias=False))
        if kind in ("norm", "mixed"):
            self.norm = nn.LayerNorm(DIM, eps=0.1)
        if kind == "scale":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.linspace(0, 1, DIM))
        if spec.keeps != "no":
            self.side = nn.Linear(DIM, 3)
        self.last: torch.Tensor | None = None
        self.store = Store()
        self.extra: Callable[[torch.Tensor], torch.Tensor] | None = None
        if spec.keeps == "inner hook":
            self.side.register_forward_hook(lambda module, args, output: self.store.list.append(output))
        for i, p in enumerate(self.parameters()):
            p.requires_grad_(not (spec.frozen == "whole" or (spec.frozen == "half" and i % 2 == 0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, kind = x, self.spec.kind
        if kind == "table":
            y = y * self.main(torch.arange(len(x), device=x.device) % 5)
        elif kind == "conv":
            y = self.main(x.view(-1, 2, 3)).reshape(-1, DIM)
        elif kind == "scale":
            y = y * self.scale + self.shift
        else:
            y = self.main(y)
        if kind in ("norm", "mixed"):
            y = self.norm(y)
        if self.extra is not None:
            y = y + self.extra(y)
        y = torch.tanh(y) + x
        self.keep(y)
        return y

    def keep(self, y: torch.Tensor) -> None:
        keeps, store = self.spec.keeps, self.store
        if keeps == "no":
            return
        if keeps == "own function":
            store.list.append(Keeping.apply(y, self.side.weight.detach()))
            return
        if keeps == "saved by hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                store.list.append(self.side(torch.tanh(y)))
            return
        side = self.side(y)
        if keeps == "list":
            store.list.append(side)
        elif keeps == "dict":
            store.dict[f"{self.number}"] = side
        elif keeps == "closure":
            store.closures.append(lambda: side * 1)
        elif keeps == "attribute":
            self.last = side
        elif keeps == "deque of objects":
            store.objects.append(Held(side))


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)
        self.trunk = nn.ModuleList(Block(i, spec) for i, spec in enumerate(program.units))
        self.store = Store()
        if program.tie:
            tie(list(self.trunk))  # type: ignore[arg-type]

    def use(self, store: Store) -> None:
        """Let units keep tensors here."""
        self.store = store
        for block in self.trunk:
            block.store = store  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        for block in self.trunk:
            spec: UnitSpec = block.spec  # type: ignore[assignment]
            if spec.use == "odd steps" and step % 2 == 0:
                continue
            for _ in range(2 if spec.use == "twice" else 1):
                if spec.checkpoint == "none" or not torch.is_grad_enabled():
                    y = block(y)
                else:
                    y = checkpoint(block, y, use_reentrant=spec.checkpoint == "reentrant")
        return self.head(y), y

    def hidden(self) -> list[torch.Tensor]:
        attributes = [block.last for block in self.trunk if block.last is not None]
        return [*self.store.all(), *attributes]  # type: ignore[list-item]


def tie(blocks: list[Block]) -> None:
    for second in blocks[1:]:
        if second.spec.kind == blocks[0].spec.kind:
            for name, p in list(blocks[0].named_parameters()):
                owner, _, last = name.rpartition(".")
                if not name.startswith("side"):
                    setattr(second.get_submodule(owner), last, p)


def build(program: Program) -> Net:
    torch.manual_seed(0)
    return Net(program)


def shard(net: Net, program: Program) -> Net:
    two_axes = program.strategy in ("hsdp", "hfsdp")
    shape = (2, program.ranks // 2) if two_axes else (program.ranks,)
    mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    dtype = torch.float64 if program.precision == "float64" else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "strategy": program.strategy,
        "reshard_after_forward": program.reshard,
        "mp_policy": sw.MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None
        ),
    }
    if program.layout == "last dimension":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim else None
    elif program.layout != "per_parameter":
        options["layout"] = program.layout
    if program.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    sw.fully_shard(net.first, **options)
    for block, spec in zip(net.trunk, program.units, strict=True):
        if spec.kind == "nested unit":
            sw.fully_shard(block.main[0], **options)  # type: ignore[index]
        if spec.unit:
            sw.fully_shard(block, **options)
    sw.fully_shard(net, memory=program.memory, prefetch=program.prefetch, **options)
    if program.offload == "activations":
        sw.offload_activations(list(net.trunk), min_bytes=0)
    return net
