"""The model of a program: built plain from its description, and sharded as the description says."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.engine import UNIT
from tests.engine.programs.grammar import LAYOUTS, BlockSpec, Call, Model
from tests.support import world_mesh

DIM = 6
NamedOutput = namedtuple("NamedOutput", ["x", "rest"])


@dataclass
class RecordOutput:
    x: torch.Tensor
    rest: int = 0


class ObjectOutput:
    def __init__(self, x: torch.Tensor) -> None:
        self.inside = [{"x": x}]


PACK: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda o: o),
    "tuple": (lambda x: (x, None), lambda o: o[0]),
    "dict": (lambda x: {"x": [x], "n": 1}, lambda o: o["x"][0]),
    "dataclass": (RecordOutput, lambda o: o.x),
    "named tuple": (lambda x: NamedOutput(x, 0), lambda o: o.x),
    "object": (ObjectOutput, lambda o: o.inside[0]["x"]),
    "view": (lambda x: torch.cat([x, x])[: len(x)], lambda o: o.mul_(0.9)),
}


class Boom(BaseException):
    """Raised where a program says so."""


class Layer(nn.Module):
    """One piece: maps (rows, DIM) to the same shape."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.loss: torch.Tensor | None = None
        if kind in ("linear", "auxiliary"):
            self.main = nn.Linear(DIM, DIM)
        elif kind == "bottleneck":
            self.up, self.down = nn.Linear(DIM, 5), nn.Linear(5, DIM, bias=False)
        elif kind == "norm":
            self.main = nn.LayerNorm(DIM, eps=0.1)  # so that rounding is not amplified
        elif kind == "scale":
            self.scale, self.shift = nn.Parameter(torch.tensor(0.8)), nn.Parameter(torch.linspace(0, 1, DIM))
        elif kind == "conv":
            self.main = nn.Conv2d(2, 2, (1, 2), padding=(0, 1)).to(memory_format=torch.channels_last)
        elif kind == "table":
            self.main = nn.Embedding(7, DIM)
        elif kind == "column":
            self.up, self.down = nn.Linear(DIM, 1), nn.Linear(1, DIM)
        elif kind == "transposed":
            self.weight = nn.Parameter(torch.randn(DIM, DIM).t() / 3)
        elif kind == "normed":
            self.main = parametrizations.weight_norm(nn.Linear(DIM, DIM))
        elif kind == "lora":
            self.main = nn.Linear(DIM, DIM).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, DIM) / 3), nn.Parameter(torch.randn(DIM, 2) / 3)
        elif kind == "double":
            self.main = nn.Linear(DIM, DIM, dtype=torch.float64)
        elif kind == "brain":
            self.main = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        elif kind == "attention":
            self.main = nn.MultiheadAttention(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("bottleneck", "column"):
            return self.down(torch.tanh(self.up(x)))
        if self.kind == "scale":
            return x * self.scale + self.shift
        if self.kind == "conv":
            return self.main(x.view(-1, 2, 1, 3))[..., :3].reshape(-1, DIM)
        if self.kind == "table":
            return x * self.main(torch.arange(len(x), device=x.device) % 4)
        if self.kind == "transposed":
            return x @ self.weight
        if self.kind == "lora":
            return self.main(x) + x @ self.a.t() @ self.b.t()
        if self.kind == "attention":
            return self.main(x, x, x, need_weights=False)[0]
        if self.kind in ("double", "brain"):
            return self.main(x.to(self.main.weight.dtype)).to(x.dtype)
        y = self.main(x)
        if self.kind == "auxiliary":
            self.loss = torch.softmax(y.float(), -1).square().mean()
        return y


class Block(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(Layer(piece.kind) for piece in spec.pieces)
        self.bomb = ""

    def forward(self, x: torch.Tensor, used: tuple[bool, ...]) -> Any:
        for i, (layer, use) in enumerate(zip(self.layers, used, strict=True)):
            if use:
                x = x + 0.5 * torch.tanh(maybe_checkpoint(layer, x, self.spec.inside))
            if i == 0:
                x = self.explode(x)
        return PACK[self.spec.output][0](x)

    def explode(self, x: torch.Tensor) -> torch.Tensor:
        if self.bomb == "forward":
            raise Boom
        if self.bomb == "backward" and x.requires_grad:
            x = x * 1.0
            x.register_hook(fail)
        return x


def fail(gradient: torch.Tensor) -> None:
    raise Boom


def maybe_checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, how: str
) -> torch.Tensor:
    if how == "none" or not torch.is_grad_enabled() or (how == "reentrant" and not x.requires_grad):
        return function(x)
    return checkpoint(function, x, use_reentrant=how == "reentrant")  # type: ignore[no-any-return]


Used = tuple[tuple[bool, ...], ...]  #: by block and layer


class Net(nn.Module):
    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(block) for block in spec.blocks)
        self.norm, self.head = nn.LayerNorm(DIM, eps=0.1), nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor, calls: tuple[Call, ...], used: Used) -> dict[str, Any]:
        x = self.first(x)
        hidden = self.run_blocks(x, calls, used)
        return {"y": self.head(self.norm(hidden[-1] if hidden else x)), "hidden": hidden}

    def run_blocks(self, x: torch.Tensor, calls: tuple[Call, ...], used: Used) -> list[torch.Tensor]:
        hidden = []
        for call in calls:
            number = call.block % len(self.blocks)
            block = self.blocks[number]

            def run(x: torch.Tensor, block: Any = block, number: int = number) -> torch.Tensor:
                return PACK[block.spec.output][1](block(x, used[number]))

            if call.no_grad:
                with torch.no_grad():
                    change = run(x.detach().clone())
                x = x + 0.5 * change
            else:
                x = maybe_checkpoint(run, x, call.checkpoint)
            hidden.append(x)
        return hidden

    def every_layer(self) -> list[Layer]:
        return [layer for block in self.blocks for layer in block.layers]


def build(spec: Model) -> Net:
    torch.manual_seed(0)
    net = Net(spec)
    layers = net.every_layer()
    pieces = [piece for block in spec.blocks for piece in block.pieces]
    for layer, piece in zip(layers, pieces, strict=True):
        if piece.frozen:
            layer.requires_grad_(False)
    for tie in spec.ties:
        one, two = layers[tie.one % len(layers)], layers[tie.two % len(layers)]
        if one is not two and one.kind == two.kind and one.kind not in ("normed", "lora"):
            for name in dict(one.named_parameters()):
                owner, _, last = name.rpartition(".")
                setattr(two.get_submodule(owner), last, one.get_parameter(name))
    return net


def shard(net: Net, spec: Model, world_size: int) -> Net:
    policy = (
        sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if spec.precision == "bf16"
        else sw.MixedPrecisionPolicy()
    )
    placements: dict[str, Any] = {
        "rows": None,
        "last": lambda p: Shard(p.ndim - 1) if p.ndim else None,
        "mixed": lambda p: Shard(1) if p.ndim == 2 and p.shape[0] == DIM else None,
    }
    shape = spec.sharding.shape(world_size)
    mesh = world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    numbers = itertools.count()

    def share(net: nn.Module) -> bool:
        """Whether a unit gives its full parameters back after its forward, without which pools are refused."""
        units = [getattr(module, UNIT) for module in fsdp_modules(net)]
        gives = [unit.settings.reshard_after_forward is not False for unit in units if unit.parameters]
        return any(gives) and not spec.sharding.keeps

    def unit(module: Any, reshard: bool | int | None = None) -> Any:
        stages, layout = spec.sharding.of_unit(next(numbers))
        # What raises an error, see docs/strategies.md and docs/layouts.md.
        rows_only = layout != "per_parameter" or sum(stage > 0 for stage in stages) > 1
        keeps = 3 not in stages and any(stages)
        gathered = 1 if not any(stages) else [n for n, stage in zip(shape, stages, strict=True) if stage][-1]
        if reshard == 2 and gathered % 2:
            reshard = True
        memory = "arena" if spec.memory == "max_pool" and not share(net) else spec.memory
        options = {"memory": memory, "prefetch": spec.prefetch} if module is net else {}
        return sw.fully_shard(
            module,
            mesh=mesh,
            strategy=sw.Strategy.of_stages(*stages),
            layout=LAYOUTS[layout],
            reshard_after_forward=None if keeps and reshard else reshard,
            mp_policy=policy,
            shard_placement_fn=None if rows_only else placements[spec.placement],
            **options,
        )

    if spec.first_unit:
        unit(net.first)
    for block, wanted in zip(net.blocks, spec.blocks, strict=True):
        for layer, piece in zip(block.layers, wanted.pieces, strict=True):
            if piece.unit:
                unit(layer, wanted.reshard)
        if wanted.unit:
            unit(block, wanted.reshard)
    if spec.head == "list":
        unit([net.norm, net.head])
    elif spec.head == "two":
        unit(net.norm)
        unit(net.head)
    unit(net, spec.reshard)
    net.set_reduce_scatter_unused_params(spec.zeros)  # type: ignore[operator]
    return net


def fsdp_modules(model: nn.Module) -> Iterator[sw.FSDPModule]:
    return (m for m in model.modules() if isinstance(m, sw.FSDPModule))
