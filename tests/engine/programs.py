"""Random programs: a module tree, how it is sharded and over which mesh, and what a user does with it, all as data.

The interpreter runs a program on the sharded model, with this rank's data, and on a plain model with every rank's
data, and compares all parameters, gradients and outputs after every instruction. Programs are frozen dataclasses:
they are printed, pickled, and shrunk by hypothesis. Run ``python -m tests.engine.programs --count 2000 --ranks 2``
for a long search. What a program may contain is what must be exact; refusals are tested elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import os
import sys
import time
import traceback
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright._torch import memory_can_be_swapped
from shardwright.engine.construct import UNIT
from shardwright.engine.parameter import unit_of
from shardwright.engine.ragged import RaggedTensor
from tests.support import CaseFailed, WorkerPools, world_mesh

# -- programs as data --------------------------------------------------------------------------------------------------

KINDS = (
    *("linear", "bottleneck", "norm", "scale", "conv", "table", "column", "transposed", "normed", "lora"),
    *("double", "brain", "attention", "auxiliary"),
)
OUTPUTS = ("tensor", "tuple", "dict", "dataclass", "named tuple", "object", "view")


@dataclass(frozen=True)
class Piece:
    """A layer of a block: its kind, whether it is a unit of its own, and whether it starts frozen."""

    kind: str = "linear"
    unit: bool = False
    frozen: bool = False


@dataclass(frozen=True)
class BlockSpec:
    pieces: tuple[Piece, ...] = (Piece(),)
    unit: bool = True
    output: str = "tensor"
    inside: str = "none"  #: checkpointing inside the block, around each piece
    reshard: bool | int | None = None


@dataclass(frozen=True)
class Tie:
    """The parameters of two layers of the same kind become the same; the last one's go."""

    one: int
    two: int


@dataclass(frozen=True)
class Sharding:
    """Units take strategies and layouts in turn, in the order in which they are made."""

    mesh: str = "line"  #: or "square", "one by all", "all by one"; a square of 2 or 3 ranks is one by all
    stages: tuple[tuple[int, int], ...] = ((0, 3),)  #: of the outer and the inner axis; on a line the second
    layouts: tuple[str, ...] = ("per_parameter",)

    def shape(self, world_size: int) -> tuple[int, ...]:
        side = round(world_size**0.5)
        if self.mesh == "square" and side * side == world_size:
            return side, side
        return {"line": (world_size,), "all by one": (world_size, 1)}.get(self.mesh, (1, world_size))

    def of_unit(self, number: int) -> tuple[tuple[int, ...], str]:
        stages = self.stages[number % len(self.stages)]
        return stages[1:] if self.mesh == "line" else stages, self.layouts[number % len(self.layouts)]


MESHES = ("line", "square", "one by all", "all by one")
LAYOUTS: dict[str, str | sw.Ragged] = {
    "per_parameter": "per_parameter",
    "row": sw.Ragged("row"),
    "blocks": sw.Ragged(3),
    "element": sw.Ragged("element"),
}


@dataclass(frozen=True)
class Model:
    blocks: tuple[BlockSpec, ...] = (BlockSpec(),)
    ties: tuple[Tie, ...] = ()
    first_unit: bool = False
    head: str = "root"  #: the norm and the output layer: in the root, one list unit, or two units
    reshard: bool | int | None = None
    placement: str = "rows"
    precision: str = "fp32"
    optimizer: str = "sgd"
    wrapped: bool = True  #: by fully_shard_optimizer
    sharding: Sharding = Sharding()
    memory: str = "dynamic"
    prefetch: int = 1


@dataclass(frozen=True)
class Call:
    block: int
    checkpoint: str = "none"
    no_grad: bool = False


@dataclass(frozen=True)
class Forward:
    """One forward. Bit ``i`` of ``unused`` says for the i-th layer (counted over ranks, too) that it is left out."""

    calls: tuple[Call, ...] = (Call(0), Call(1), Call(2))
    unused: int = 0
    input_grad: bool = False
    direct: bool = False  #: the blocks are called without the root
    loss: str = "output"


@dataclass(frozen=True)
class Micro:
    forward: Forward = Forward()
    pattern: str = "plain"
    between: str = "nothing"  #: what happens between forward and backward
    unshard: bool = False  #: by hand, before


@dataclass(frozen=True)
class Train:
    micros: tuple[Micro, ...] = (Micro(),)
    #: Which micro-batches leave reductions undone. "yes", "late", "no all-reduce", "one holds", "mixed": all but the
    #: last; "open", "late open" and "one waits": the last, too. The switches are told in `Interpreter.switch`.
    hold: str = "no"


@dataclass(frozen=True)
class Evaluate:
    forward: Forward = Forward()
    inference: bool = False
    times: int = 1


@dataclass(frozen=True)
class Freeze:
    """Of the parameters (numbers modulo how many there are), or the whole block if ``block``."""

    which: tuple[int, ...]
    requires_grad: bool = False
    block: bool = False


@dataclass(frozen=True)
class Edit:
    which: int
    how: str


@dataclass(frozen=True)
class Fail:
    """An exception in a block of a forward, its backward, or its recomputation; then ``zero_grad``."""

    where: str
    block: int
    forward: Forward = Forward()


@dataclass(frozen=True)
class Update:
    """The optimizer's step, perhaps with clipping before and ``zero_grad`` after."""

    clip: bool = False
    zero: str = "optimizer"


@dataclass(frozen=True)
class ZeroGrad:
    how: str = "model"
    set_to_none: bool = True


@dataclass(frozen=True)
class Load:
    seed: int
    how: str = "copy"


@dataclass(frozen=True)
class Copy:
    """``deepcopy``, and going on with the copy, or with the original after the copy has trained."""

    go_on_with_copy: bool = True


@dataclass(frozen=True)
class Setting:
    """A method of FSDPModule that must not change any number, on one block or (-1) on the root."""

    what: str
    block: int = -1


Instruction = Train | Evaluate | Freeze | Edit | Fail | Update | ZeroGrad | Load | Copy | Setting


@dataclass(frozen=True)
class Program:
    model: Model = Model()
    steps: tuple[Instruction, ...] = ()


#: Runs after every program, so that what an instruction has broken shows.
EPILOGUE: tuple[Instruction, ...] = (
    Train(),
    Update(),
    Train((Micro(), Micro()), hold="yes"),
    Update(clip=True),
    Evaluate(),
)


def show(value: Any) -> str:
    """A program as Python, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return "(" + ", ".join(show(v) for v in value) + ("," if len(value) == 1 else "") + ")"
    if not hasattr(type(value), "__dataclass_fields__"):
        return repr(value)
    fields = type(value).__dataclass_fields__.values()
    given = [
        f"{f.name}={show(getattr(value, f.name))}" for f in fields if getattr(value, f.name) != f.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def show_program(program: Program) -> str:
    steps = "".join(f"\n    {show(step)}," for step in program.steps)
    return f"Program(\n  {show(program.model)},\n  ({steps}\n  ),\n)"


# -- drawing programs --------------------------------------------------------------------------------------------------


def programs(parallel: bool = True) -> st.SearchStrategy[Program]:
    """Without ``parallel`` everything is zero3 on a line, row by row, as it was drawn before there were strategies."""
    boolean = st.booleans()
    reshard = st.sampled_from((None, True, False, *((2,) if parallel else ())))
    piece = st.builds(
        Piece,
        st.sampled_from(KINDS),
        st.integers(0, 5).map(lambda i: i == 5),
        st.integers(0, 7).map(lambda i: i == 7),
    )
    checkpointing = st.sampled_from(("none", "none", "none", "not reentrant", "reentrant"))
    block = st.builds(
        BlockSpec,
        st.lists(piece, min_size=1, max_size=3).map(tuple),
        st.integers(0, 4).map(lambda i: i != 4),
        st.sampled_from(("tensor", *OUTPUTS)),
        checkpointing,
        reshard,
    )
    stages = st.tuples(st.sampled_from((0, 1, 2, 3)), st.sampled_from((3, 0, 1, 2)))
    sharding = st.builds(
        Sharding,
        st.sampled_from(MESHES),
        st.lists(stages, min_size=1, max_size=2).map(tuple),
        st.lists(st.sampled_from(tuple(LAYOUTS)), min_size=1, max_size=2).map(tuple),
    )
    memories = st.sampled_from(("dynamic", "max_pool", "arena") if memory_can_be_swapped else ("dynamic",))
    tie = st.builds(Tie, st.integers(0, 8), st.integers(0, 8))
    model = st.builds(
        Model,
        st.lists(block, min_size=1, max_size=3).map(tuple),
        st.lists(tie, max_size=2).map(tuple),
        boolean,
        st.sampled_from(("root", "list", "two")),
        reshard,
        st.sampled_from(("rows", "last", "mixed")),
        st.sampled_from(("fp32", "fp32", "bf16")),
        st.sampled_from(("sgd", "adamw")),
        boolean,
        *([sharding, memories, st.integers(0, 3)] if parallel else []),
    )
    call = st.builds(Call, st.integers(0, 2), checkpointing, st.integers(0, 9).map(lambda i: i == 9))
    unused = st.just(0) | st.integers(0, 2**12 - 1)
    common = st.just((Call(0), Call(1), Call(2)))
    forward = st.builds(
        Forward,
        common | st.lists(call, max_size=5).map(tuple),
        unused,
        boolean,
        st.integers(0, 5).map(lambda i: i == 5),
        st.sampled_from(("output", "output", "hidden", "both")),
    )
    micro = st.builds(
        Micro,
        forward,
        st.sampled_from(("plain", "plain", "plain", *PATTERNS)),
        st.sampled_from(
            ("nothing", "nothing", "nothing", "evaluate", "freeze", "other forward", "state dict")
        ),
        st.integers(0, 7).map(lambda i: i == 7),
    )
    train = st.builds(
        Train,
        st.lists(micro, min_size=1, max_size=3).map(tuple),
        st.sampled_from(("no", "no", "yes", "yes", "open", *(HOLDS if parallel else ()))),
    )
    number = st.integers(0, 40)
    instruction = st.one_of(
        train,
        train,
        train,
        st.builds(Update, boolean, st.sampled_from(("optimizer", "model", "none", "no"))),
        st.builds(Update, boolean, st.sampled_from(("optimizer", "model", "none", "no"))),
        st.builds(Evaluate, forward, boolean, st.integers(1, 2)),
        st.builds(Freeze, st.lists(number, min_size=1, max_size=3).map(tuple), boolean, boolean),
        st.builds(Edit, number, st.sampled_from(EDITS)),
        st.builds(Fail, st.sampled_from(FAILURES), st.integers(0, 2), forward),
        st.builds(ZeroGrad, st.sampled_from(("model", "optimizer", "none")), boolean),
        st.builds(Load, st.integers(0, 3), st.sampled_from(("copy", "assign", "part", "own"))),
        st.builds(Copy, boolean),
        st.builds(Setting, st.sampled_from((*SETTINGS, *(MORE if parallel else ()))), st.integers(-1, 2)),
    )
    return st.builds(Program, model, st.lists(instruction, min_size=1, max_size=8).map(tuple))


PATTERNS = ("two forwards", "two backwards", "each", "each reversed", "dropped")
EDITS = (
    "in place",
    "copy",
    ".data in place",
    ".data set",
    ".data whole",
    "parameter",
    "half and back",
    "to_empty",
)
HOLDS = ("late", "late", "late open", "mixed", "no all-reduce", "one waits", "one holds")
FAILURES = ("forward", "forward", "backward", "recomputation", "evaluation")
SETTINGS = (
    "keep after backward",
    "reshard after backward",
    "keep after forward",
    "reshard after forward",
    "unshard",
)
MORE = ("two buffers", "separate group", "one group")

# -- the model of a program --------------------------------------------------------------------------------------------

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

    def unit(module: Any, reshard: bool | int | None = None) -> Any:
        stages, layout = spec.sharding.of_unit(next(numbers))
        # What is refused by name, see docs/strategies.md and docs/layouts.md.
        rows_only = layout != "per_parameter" or sum(stage > 0 for stage in stages) > 1
        keeps = 3 not in stages and any(stages)
        gathered = 1 if not any(stages) else [n for n, stage in zip(shape, stages, strict=True) if stage][-1]
        if reshard == 2 and gathered % 2:
            reshard = True
        options = {"memory": spec.memory, "prefetch": spec.prefetch} if module is net else {}
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
    return unit(net, spec.reshard)


# -- the interpreter ---------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """The sharded model is not what the plain one is. Raised on every rank alike."""


@dataclass(frozen=True)
class Place:
    """Where data belongs: no two places have the same."""

    step: int
    micro: int
    rank: int

    def x(self, slot: int = 0) -> torch.Tensor:
        """Values that bfloat16 holds exactly, so that casting early or late makes no difference."""
        seed = ((self.step * 16 + self.micro) * 16 + self.rank) * 16 + slot
        return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


Gradients = list[torch.Tensor | None]


class Reference:
    """The plain model with every rank's data, its gradients averaged, those that are held kept apart."""

    def __init__(self, model: Net, spec: Model, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.compute = torch.bfloat16 if spec.precision == "bf16" else None
        self.held: Gradients = []
        self._work: Net | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def renew(self) -> None:
        """After parameters were replaced by others."""
        self._work = None
        self.held = []

    def work(self) -> Net:
        """A model to compute one rank's micro-batch on, with the weights in the compute dtype and no gradients."""
        if self._work is None:
            self._work = copy.deepcopy(self.model)
        for mine, q in zip(self._work.parameters(), self.model.parameters(), strict=True):
            mine.data = q.data.to(self.compute) if self.compute is not None else q.data
            mine.requires_grad_(q.requires_grad)
            mine.grad = None
        for mine_, theirs in zip(self._work.blocks, self.model.blocks, strict=True):
            mine_.bomb = theirs.bomb
        return self._work

    def x(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.compute is None else x.to(self.compute)

    def take_held(self) -> None:
        """What was held becomes part of the gradients: at the latest when an optimizer steps."""
        for q, g in zip(self.parameters, self.held, strict=bool(self.held)):
            if g is not None:
                q.grad = g if q.grad is None else q.grad + g
        self.held = []

    def add(self, harvests: list[Gradients], shown: list[bool]) -> None:
        """Take over one backward of every rank; of parameters that are not ``shown``, what is held grows by it."""
        parameters = self.parameters
        held = self.held or [None] * len(parameters)
        self.held = []
        for i, q in enumerate(parameters):
            there = [g for harvest in harvests if (g := harvest[i]) is not None]
            mean = sum(g.to(torch.float64) for g in there) / self.world_size if there else None
            total = held[i]
            if mean is not None:
                mean = mean.to(q.dtype)
                total = mean if total is None else total + mean
            if shown[i] and total is not None:
                q.grad = total if q.grad is None else q.grad + total
                total = None
            self.held.append(total)


class Interpreter:
    def __init__(self, program: Program, rank: int, world_size: int, sharded: bool = True) -> None:
        self.spec = program.model if sharded else replace(program.model, precision="fp32")
        self.rank, self.world_size, self.sharded = rank, world_size, sharded
        plain = build(self.spec)
        self.reference = Reference(copy.deepcopy(plain), self.spec, world_size)
        self.model = shard(plain, self.spec, world_size) if sharded else plain
        self.step = 0
        self.wrong: list[str] = []
        self.make_optimizers()

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, steps: Sequence[Instruction]) -> None:
        for self.step, instruction in enumerate(steps):
            getattr(self, f"do_{type(instruction).__name__.lower()}")(instruction)
            self.compare(f"step {self.step}, {show(instruction)}")

    def compare(self, where: str) -> None:
        found = differences(self.model, self.reference.model, self.tolerance, self.wrong, adopt=True)
        self.wrong = []
        if found:
            raise Mismatch(f"after {where}:\n" + "\n".join(found))

    @property
    def has_bfloat16(self) -> bool:
        """Whether some layer is bfloat16: then a last bit of what comes into it may become its last bit."""
        return any(p.dtype is torch.bfloat16 for p in self.reference.parameters)

    @property
    def tolerance(self) -> float:
        """Of gradients. In bfloat16 sums of autograd depend on their order, in which the engine takes part."""
        return 2e-2 if self.spec.precision == "bf16" else 1e-3 if self.has_bfloat16 else 1e-5

    def expect(
        self, mine: list[torch.Tensor], theirs: list[torch.Tensor], what: str, tolerance: float | None = None
    ) -> None:
        if tolerance is None:
            # A kernel may round otherwise where weights lie otherwise in memory, cut along another dimension.
            tolerance = 4e-3 if self.has_bfloat16 or self.spec.precision == "bf16" else 1e-5
        if len(mine) != len(theirs):
            self.wrong.append(f"{what}: {len(mine)} tensors, expected {len(theirs)}")
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            self.wrong += too_far(f"{what} {i}", a.detach().double(), b, 1.0, tolerance)

    def make_optimizers(self) -> None:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            if self.spec.optimizer == "sgd":
                return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            # A large eps: a gradient that is only rounding must not become a step of full size.
            return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2, weight_decay=0.5)

        self.optimizer, self.expected = make(self.model), make(self.reference.model)
        if self.spec.wrapped and self.sharded:
            self.optimizer = sw.fully_shard_optimizer(self.optimizer)

    def both(self, function: Callable[[Net], Any]) -> None:
        function(self.model)
        function(self.reference.model)

    def used(self, forward: Forward, rank: int) -> Used:
        """Which layers run: those that are units on all ranks or on none, others on some.

        Ranks choose differently only where the blocks' inputs need gradients. Otherwise a block of which this rank uses
        nothing has no graph here and has one elsewhere: backward reaches other units on each rank, which is refused.
        """
        first = self.reference.model.first.parameters()
        alike = not forward.input_grad and (forward.direct or not any(p.requires_grad for p in first))
        # A loss that is not made of the output reaches later blocks only through what their layers keep.
        alike |= forward.loss == "hidden" and any(
            p.kind == "auxiliary" for b in self.spec.blocks for p in b.pieces
        )
        rank = 0 if alike else rank
        number = 0
        used = []
        for block in self.spec.blocks:
            bits = [number + i + (0 if piece.unit else 3 * rank) for i, piece in enumerate(block.pieces)]
            used.append(tuple(not forward.unused >> (bit % 12) & 1 for bit in bits))
            number += len(block.pieces)
        return tuple(used)

    # -- forward --------------------------------------------------------------------------------------------------

    def call(
        self, model: Net, forward: Forward, x: torch.Tensor, rank: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of one forward, and what it is made of."""
        for layer in model.every_layer():
            layer.loss = None
        calls, used = forward.calls, self.used(forward, rank)
        if forward.input_grad and torch.is_grad_enabled():
            x = x.requires_grad_()
        if forward.direct:  # only blocks that are units can be called on their own
            calls = tuple(c for c in calls if self.spec.blocks[c.block % len(self.spec.blocks)].unit)
            hidden = model.run_blocks(x, calls, used)
            parts = hidden[-1:]
        else:
            output = model(x, calls, used)
            hidden = output["hidden"]
            parts = {
                "output": [output["y"]],
                "hidden": hidden[:1] or [output["y"]],
                "both": [*hidden[1:2], output["y"]],
            }[forward.loss]
        extra = [layer.loss for layer in model.every_layer() if layer.loss is not None]
        loss = torch.zeros(())
        for part in parts:
            loss = loss + part.float().square().mean() + 0.3 * part.float().mean()
        for part in extra:
            loss = loss + part
        return loss, [*hidden, *parts, *extra]

    def train_micro(
        self,
        model: Net,
        micro: Micro,
        place: Place,
        cast: Callable[[torch.Tensor], torch.Tensor],
        go: Callable[[int, torch.Tensor], bool],
        after: Callable[[], None],
        between: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Forward and backward of one micro-batch; ``go`` says whether a loss has a backward, ``after`` follows it."""
        rank = place.rank
        first, parts = self.call(model, micro.forward, cast(place.x()), rank)
        other = Forward(micro.forward.calls[::-1], micro.forward.unused >> 1, True)
        losses = [first]
        if micro.pattern in ("two forwards", "each", "each reversed", "dropped"):
            second, more = self.call(model, other, cast(place.x(1)), rank)
            parts = parts + more
            if micro.pattern == "two forwards":
                losses = [first + second]
            elif micro.pattern != "dropped":
                losses = [first, second]
        between()
        told = [p.detach().clone() for p in [*parts, *losses]]
        order = list(enumerate(losses))
        for number, loss in reversed(order) if micro.pattern == "each reversed" else order:
            if not go(number, loss):
                continue
            if micro.pattern == "two backwards":
                loss.backward(retain_graph=True)
                after()
            loss.backward()
            after()
        return told

    # -- instructions ---------------------------------------------------------------------------------------------

    def do_train(self, train: Train) -> None:
        for i, micro in enumerate(train.micros):
            switches = self.switches(train, i)
            if switches and micro.forward.direct:
                continue  # before the root's first call its units have other roots
            self.do_micro(micro, i, switches)

    def switches(self, train: Train, number: int) -> dict[str, set[int]]:
        """Which are off in a micro-batch, and for which blocks: -1 means the whole model."""
        ends = number == len(train.micros) - 1
        off: dict[str, set[int]] = {}
        if train.hold == "open" or (train.hold == "yes" and not ends):
            off["sync"] = {-1}
        elif train.hold == "mixed" and not ends:
            off["last" if number else "sync"] = {-1}
        elif train.hold == "late open" or (train.hold == "late" and not ends):
            off["last"] = {-1}
        elif train.hold == "no all-reduce" and not ends:
            off["all-reduce"] = {-1}
        elif train.hold == "one waits":
            off["all-reduce"] = {self.step % len(self.spec.blocks)}
        elif train.hold == "one holds" and not ends:
            off["sync"] = {self.step % len(self.spec.blocks)}
        return off if self.sharded else {}

    def switch(self, off: dict[str, set[int]], on: bool) -> None:
        for what, blocks in off.items():
            for i in blocks:
                module: Any = self.model.blocks[i] if i >= 0 else self.model
                if not isinstance(module, sw.FSDPModule):
                    continue
                if what == "sync":
                    module.set_requires_gradient_sync(on, recurse=i < 0)
                elif what == "all-reduce":
                    module.set_requires_all_reduce(on, recurse=i < 0)
                else:
                    module.set_is_last_backward(on)

    def shown(self, off: dict[str, set[int]]) -> list[bool]:
        """For each parameter whether its gradient is complete after a backward with these switches off."""
        named = {i: block.__dict__.get(UNIT) for i, block in enumerate(self.model.blocks)}
        shape = self.spec.sharding.shape(self.world_size)
        found = []
        for p in self.model.parameters():
            if not off:
                found.append(True)
                continue
            unit = unit_of(p)
            here = {
                what for what, blocks in off.items() if -1 in blocks or any(named[i] is unit for i in blocks)
            }
            stages = unit.ranks.strategy.stages
            waits = any(size > 1 and stage < 2 for size, stage in zip(shape, stages, strict=True))
            found.append("sync" not in here and not (waits and here))
        return found

    def do_micro(self, micro: Micro, number: int, off: dict[str, set[int]]) -> None:
        reference = self.reference
        frozen = [
            p for i, p in enumerate(self.reference.parameters) if i % 3 == self.step % 3 and p.requires_grad
        ]
        names = [n for n, p in reference.model.named_parameters() if any(p is q for q in frozen)]
        backwards: list[list[Gradients]] = []  # by rank and backward
        goes: list[dict[int, bool]] = []
        told: list[torch.Tensor] = []
        for rank in range(self.world_size):
            work = reference.work()
            mine: list[Gradients] = []
            does: dict[int, bool] = {}
            backwards.append(mine)
            goes.append(does)

            def go(number: int, loss: torch.Tensor, does: dict[int, bool] = does) -> bool:
                does[number] = loss.requires_grad
                return loss.requires_grad

            def harvest(work: Net = work, mine: list[Gradients] = mine) -> None:
                mine.append([p.grad for p in work.parameters()])
                for p in work.parameters():
                    p.grad = None

            result = self.train_micro(
                work,
                micro,
                Place(self.step, number, rank),
                reference.x,
                go,
                harvest,
                lambda work=work, rank=rank: self.between(work, micro, names, reference.x, number, rank),
            )
            if rank == self.rank:
                told = result
        if len({tuple(sorted(does.items())) for does in goes}) > 1:
            return  # backward on some ranks only: that is for the ranks to refuse
        self.switch(off, False)
        if micro.unshard:
            for call in micro.forward.calls:
                block = self.model.blocks[call.block % len(self.model.blocks)]
                if isinstance(block, sw.FSDPModule):
                    block.unshard(async_op=call.block == 1)
        result = self.train_micro(
            self.model,
            micro,
            Place(self.step, number, self.rank),
            lambda x: x,
            lambda n, loss: goes[0][n],
            lambda: None,
            lambda: self.between(self.model, micro, names, lambda x: x, number, self.rank),
        )
        self.switch(off, True)
        self.expect(result, told, f"micro-batch {number}: output")
        for harvests in zip(*backwards, strict=True):
            reference.add(list(harvests), self.shown(off))
        if micro.between == "freeze":
            for name in names:
                self.model.get_parameter(name).requires_grad_(True)

    def between(
        self,
        model: Net,
        micro: Micro,
        names: list[str],
        cast: Callable[[torch.Tensor], torch.Tensor],
        number: int,
        rank: int,
    ) -> None:
        place = Place(self.step, number, rank)
        if micro.between == "evaluate":
            with torch.no_grad():
                self.call(model, Forward(micro.forward.calls[::-1]), cast(place.x(2)), rank)
        elif micro.between == "other forward":
            self.call(model, Forward(micro.forward.calls[1:], input_grad=True), cast(place.x(2)), rank)
        elif micro.between == "freeze" and not self.checkpoints(micro.forward):
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        elif micro.between == "state dict":
            model.state_dict()

    def checkpoints(self, forward: Forward) -> bool:
        """Whether anything is recomputed; torch refuses a recomputation that saves other tensors than the forward."""
        return any(c.checkpoint != "none" for c in forward.calls) or any(
            b.inside != "none" for b in self.spec.blocks
        )

    def do_evaluate(self, evaluate: Evaluate) -> None:
        forward = evaluate.forward
        mode = torch.inference_mode if evaluate.inference else torch.no_grad
        for model, cast in ((self.reference.work(), self.reference.x), (self.model, lambda x: x)):
            model.eval()
            told = []
            for time_ in range(evaluate.times):
                with mode():
                    told += self.call(
                        model, forward, cast(Place(self.step, time_, self.rank).x()), self.rank
                    )[1]
            model.train()
            if model is not self.model:
                wanted = told
        with torch.no_grad():
            self.expect([t.clone() for t in told], [t.clone() for t in wanted], "evaluation")

    def do_freeze(self, freeze: Freeze) -> None:
        def apply(model: Net) -> None:
            if freeze.block:
                for i in freeze.which:
                    model.blocks[i % len(model.blocks)].requires_grad_(freeze.requires_grad)
                return
            parameters = list(model.parameters())
            for i in freeze.which:
                parameters[i % len(parameters)].requires_grad_(freeze.requires_grad)

        self.both(apply)

    def do_edit(self, edit: Edit) -> None:
        names = [n for n, _ in self.reference.model.named_parameters()]
        name = names[edit.which % len(names)]
        if edit.how in ("parameter", "half and back", "to_empty"):
            self.clear("model")
            self.both(lambda model: edit_structure(model, name, edit.how))
            self.start_anew()
            return

        def apply(model: Net) -> None:
            p = model.get_parameter(name)
            with torch.no_grad():
                if edit.how == "in place":
                    p.mul_(0.9)
                elif edit.how == "copy":
                    p.copy_(p * 0.5)
                elif edit.how == ".data in place":
                    p.data.mul_(0.9)
                elif edit.how == ".data set":
                    p.data = p.data * 0.9
                elif edit.how == ".data whole":
                    p.data = fresh(p)

        self.both(apply)

    def start_anew(self) -> None:
        """Parameters may be other objects now, as the plain model's are: gradients and optimizers start anew."""
        self.reference.renew()
        for model in (self.model, self.reference.model):
            for p in model.parameters():
                p.grad = None
        self.model.zero_grad()
        self.make_optimizers()

    def do_fail(self, failure: Fail) -> None:
        forward = Forward(failure.forward.calls, 0, failure.forward.input_grad)
        raised = []
        for model, cast in ((self.reference.work(), self.reference.x), (self.model, lambda x: x)):
            block = model.blocks[failure.block % len(model.blocks)]
            block.bomb = {"evaluation": "forward", "recomputation": ""}.get(failure.where, failure.where)
            try:
                if failure.where == "evaluation":
                    with torch.no_grad():
                        self.call(model, forward, cast(Place(self.step, 0, self.rank).x()), self.rank)
                else:
                    loss, _ = self.call(model, forward, cast(Place(self.step, 0, self.rank).x()), self.rank)
                    if failure.where == "recomputation":
                        block.bomb = "forward"
                    if loss.requires_grad:
                        loss.backward()
                raised.append(False)
            except Boom:
                raised.append(True)
            block.bomb = ""
        self.expect([torch.tensor(float(raised[1]))], [torch.tensor(float(raised[0]))], "whether it failed")
        if failure.where in ("forward", "evaluation") and all(raised):
            return  # nothing to clear, as in plain torch
        self.clear("model")

    def clear(self, how: str, set_to_none: bool = True) -> None:
        # Neither torch's own optimizers nor a None by hand can give up what is held, since .grad is None meanwhile.
        if how == "model" or (how == "optimizer" and self.spec.wrapped):
            self.reference.held = []
        pairs = ((self.model, self.optimizer), (self.reference.model, self.expected))
        for model, optimizer in pairs:
            if how == "model":
                model.zero_grad(set_to_none=set_to_none)
            elif how == "optimizer":
                optimizer.zero_grad(set_to_none=set_to_none)
            else:
                for p in model.parameters():
                    p.grad = None

    def do_zerograd(self, zero: ZeroGrad) -> None:
        self.clear(zero.how, zero.set_to_none)

    def do_update(self, update: Update) -> None:
        self.reference.take_held()
        if update.clip:
            mine = sw.clip_grad_norm_(self.model.parameters(), 0.5)
            theirs = torch.nn.utils.clip_grad_norm_(self.reference.model.parameters(), 0.5)
            self.expect([full(mine)], [theirs], "norm", self.tolerance)
        self.optimizer.step()
        self.expected.step()
        if update.zero != "no":
            self.clear(update.zero)

    def do_load(self, load: Load) -> None:
        generator = torch.Generator().manual_seed(load.seed)
        values = {
            name: (torch.randn(value.shape, generator=generator) / 3).to(value.dtype)
            for name, value in self.reference.model.state_dict().items()
        }
        if load.how == "part":
            values = {name: v for i, (name, v) in enumerate(values.items()) if i % 2 == load.seed % 2}
        if load.how == "own":
            self.both(lambda m: m.load_state_dict({k: v.clone() * 0.9 for k, v in m.state_dict().items()}))
        else:
            self.both(
                lambda m: m.load_state_dict(values, strict=load.how != "part", assign=load.how == "assign")
            )
        if load.how == "assign":
            self.start_anew()

    def do_copy(self, instruction: Copy) -> None:
        self.clear(
            "model"
        )  # a plain parameter's copy has no gradient; what a sharded one's has is its own affair
        for model in (self.model, self.reference.model):
            for layer in model.every_layer():
                layer.loss = None  # torch copies no tensor that has a graph
        twin = copy.deepcopy(self.model)
        if instruction.go_on_with_copy:
            twin, self.model = self.model, twin
            self.reference.model = copy.deepcopy(self.reference.model)
            self.start_anew()
        loss, _ = self.call(twin, Forward(), Place(self.step, 0, self.rank).x(), self.rank)
        if loss.requires_grad:
            loss.backward()
        with torch.no_grad():
            for p in twin.parameters():
                p.fill_(float("nan"))

    def do_setting(self, setting: Setting) -> None:
        module: Any = self.model
        if setting.block >= 0:
            module = self.model.blocks[setting.block % len(self.model.blocks)]
        if not isinstance(module, sw.FSDPModule):
            return
        if setting.what == "unshard":
            module.unshard()
            module.reshard()
        elif setting.what == "two buffers":
            module.set_reduce_scatter_max_input_buffers(2)
        elif setting.what.endswith("group"):
            if not self.reference.held:
                module.set_separate_reduce_scatter_group(setting.what.startswith("separate"))
        elif setting.what.endswith("backward"):
            module.set_reshard_after_backward(setting.what.startswith("reshard"))
        else:
            for each in fsdp_modules(module):
                stages = getattr(each, UNIT).ranks.strategy.stages
                if not (setting.what.startswith("reshard") and 3 not in stages and any(stages)):
                    each.set_reshard_after_forward(setting.what.startswith("reshard"), recurse=False)


def fresh(like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on every rank, of a size that keeps layers well-conditioned."""
    generator = torch.Generator().manual_seed(like.numel())
    return (torch.randn(like.shape, generator=generator) / 3).to(like.dtype)


def edit_structure(model: Net, name: str, how: str) -> None:
    if how == "half and back":
        model.half()
        model.float()
    elif how == "to_empty":
        state = {k: fresh(v) for k, v in model.state_dict().items()}
        model.to_empty(device="cpu")
        model.load_state_dict(state)
    else:
        owner, _, last = name.rpartition(".")
        module, old = model.get_submodule(owner), model.get_parameter(name)
        value = fresh(old)
        setattr(module, last, nn.Parameter(value, requires_grad=old.requires_grad))


def fsdp_modules(model: nn.Module) -> Iterator[sw.FSDPModule]:
    return (m for m in model.modules() if isinstance(m, sw.FSDPModule))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_cut(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def run_program(rank: int, world_size: int, program: Program, sharded: bool = True) -> str | None:
    """What went wrong, the same on every rank, or None. Other exceptions are the engine's (or the program's)."""
    if sharded:  # in a worker, where the environment is restored
        os.environ["SHARDWRIGHT_POISON"] = "1"
    try:
        Interpreter(program, rank, world_size, sharded).run((*program.steps, *EPILOGUE))
    except Mismatch as mismatch:
        return str(mismatch)
    return None


# -- comparing a sharded with a plain model ---------------------------------------------------------------------------


@torch.no_grad()  # to_local then costs nothing
def whole(
    model: nn.Module, wrong: Sequence[str] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Every parameter and gradient of a sharded model, whole and in float64, by one collective.

    Each rank adds its part, where torch's chunks say that it belongs, to zeros; the sum, over the number of replicas,
    is the same on all ranks. The last result counts, for each parameter, the ranks that have a gradient; its last item
    the ranks with a complaint in ``wrong``. So every rank comes to the same verdict, and none goes on alone. Where
    ranks hold copies of each other's parts, a second collective tells whether those are equal to the last bit; what is
    not becomes not a number.
    """
    parameters = list(model.parameters())
    parameters_twice = [p for p in parameters for _ in range(2)]
    tensors = [t for p in parameters for t in (p, p.grad)]
    flats = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters_twice]
    sharded = any(is_cut(p) for p in parameters)
    rank = dist.get_rank() if sharded else 0
    for flat, tensor in zip(flats, tensors, strict=True):
        if tensor is not None and (rank == 0 or is_cut(tensor)):
            part = part_of(flat, tensor)
            part.copy_(local_of(tensor).view(part.shape))
    flags = torch.tensor(
        [float(p.grad is not None) for p in parameters] + [float(bool(wrong))], dtype=torch.float64
    )
    everything = torch.cat([flat.reshape(-1) for flat in flats] + [flags])
    if sharded:
        dist.all_reduce(everything)
        flags = everything[-len(flags) :] / dist.get_world_size()
    pieces = everything[: len(everything) - len(flags)].split([flat.numel() for flat in flats])
    means = [piece.view(p.shape) for piece, p in zip(pieces, parameters_twice, strict=True)]
    likes = [p if t is None else t for t, p in zip(tensors, parameters_twice, strict=True)]
    copies = [replicas_of(like) for like in likes]
    for mean, number in zip(means, copies, strict=True):
        mean /= number
    if sharded and max(copies) > 1:
        drifted = torch.zeros(len(tensors))
        for i, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            if tensor is not None and copies[i] > 1:
                mine = part_of(mean, tensor)
                local = local_of(tensor).view(mine.shape).double()
                drifted[i] = not torch.allclose(
                    mine, local, rtol=1e-15, atol=0.0
                )  # a third of thrice a double
        dist.all_reduce(drifted)
        for mean, bad in zip(means, drifted.tolist(), strict=True):
            if bad:
                mean.fill_(float("nan"))
    return means[::2], means[1::2], flags.tolist()


def is_cut(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor | RaggedTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_cut(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def replicas_of(tensor: torch.Tensor) -> int:
    """How many ranks hold the same part."""
    if isinstance(tensor, RaggedTensor):
        return tensor.device_mesh.size() // tensor.spec.world_size
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def part_of(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Of ``flat``, which is whole and contiguous, a view of what this rank has of ``like``."""
    if isinstance(like, RaggedTensor):
        start, stop = like.spec.range_of(like.spec.rank)
        return flat.view(-1)[start:stop]
    if not isinstance(like, DTensor):
        return flat
    return flat[_part(flat.shape, like.device_mesh, like.placements)]


@functools.cache  # torch's arithmetic takes longer than the comparison
def _part(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[slice, ...]:
    sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def differences(
    model: nn.Module, plain: nn.Module, tolerance: float, wrong: Sequence[str] = (), adopt: bool = False
) -> list[str]:
    """How parameters and gradients of ``model`` differ from those of ``plain``; the same verdict on every rank.

    An error counts relative to the largest element, of a gradient to at least 2e-2: what is smaller came about by
    cancellation of terms of that size. Of one number, which bfloat16 sums over all of a layer's output, to 1e-1.

    With ``adopt`` and no difference ``plain`` takes over the parameters of ``model``. Then rounding does not add up
    over steps, and does not flip the rounding of a bfloat16 copy, so that every step can be compared as strictly as
    the first. The version counters of ``plain`` stay: no edit happened.
    """
    found = list(wrong)
    mine, theirs = list(model.named_parameters()), list(plain.named_parameters())
    if [name for name, _ in mine] != [name for name, _ in theirs]:
        found.append(f"parameters {[n for n, _ in mine]}, expected {[n for n, _ in theirs]}")
        return found
    values, gradients, flags = whole(model, wrong)
    if flags[-1] and not found:
        found.append("another rank found its results wrong")
    for (name, p), (_, q), value, gradient, has in zip(mine, theirs, values, gradients, flags, strict=False):
        for what, is_, expected in (
            ("dtype", p.dtype, q.dtype),
            ("shape", p.shape, q.shape),
            ("requires_grad", p.requires_grad, q.requires_grad),
            ("share of ranks with a gradient", has, float(q.grad is not None)),
        ):
            if is_ != expected:
                found.append(f"{name}: {what} is {is_}, expected {expected}")
        if value.shape == q.shape:
            # Stored in bfloat16, gradients are summed over ranks and micro-batches in it, in another order.
            allowed = max(tolerance, 3e-2) if q.dtype is torch.bfloat16 else tolerance
            found += too_far(name, value, q, 1.0, allowed)
            if q.grad is not None and has == 1.0:
                least = 1e-1 if allowed > 1e-3 and not q.ndim else 2e-2
                found += too_far(f"gradient of {name}", gradient, q.grad, least, allowed)
    if adopt and not found:
        for (_, q), value in zip(theirs, values, strict=True):
            q.data.copy_(value)
    return found


def too_far(
    name: str, found: torch.Tensor, expected: torch.Tensor, least: float, tolerance: float
) -> list[str]:
    if not expected.numel():
        return []
    scale = max(expected.abs().max().item(), least)
    error = (found - expected.detach().double()).abs().max().item() / scale
    return [] if error <= tolerance else [f"{name} is off by {error:.1e} of {scale:.1e}"]


# -- a long search -----------------------------------------------------------------------------------------------------


def failure_of(pools: WorkerPools, program: Program, world_size: int) -> str | None:
    """Run a program on the ranks of a pool."""
    try:
        return next(
            (told for told in pools.run(run_program, world_size, timeout=20.0, program=program) if told), None
        )
    except CaseFailed as failure:
        return str(failure)


def run_plain(program: Program) -> str | None:
    try:
        return run_program(0, 1, program, sharded=False)
    except Exception:
        return traceback.format_exc()


def headline(failure: str) -> str:
    """What failures have in common that are likely to have one cause."""
    lines = [line for line in failure.splitlines() if line and not line[0].isspace()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    if errors:
        return errors[0][:160]
    return next((line for line in lines if not line.startswith("after step")), lines[0])[:100]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random programs and print those that fail.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    parser.add_argument("--shrink", action="store_true", help="stop at the first failure and make it small")
    parser.add_argument("--classic", action="store_true", help="zero3 on one axis, row by row, only")
    parser.add_argument(
        "--plain", action="store_true", help="on a plain model, on one rank: checks the programs"
    )
    arguments = parser.parse_args()
    pools = WorkerPools()
    smallest: dict[str, tuple[str, str]] = {}
    counts: Counter[str] = Counter()
    ran = 0
    started = time.monotonic()

    phases = [hypothesis.Phase.generate] + ([hypothesis.Phase.shrink] if arguments.shrink else [])

    @hypothesis.seed(arguments.seed)
    @hypothesis.settings(
        max_examples=arguments.count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs(parallel=not arguments.classic))
    def search(program: Program) -> None:
        nonlocal ran
        if time.monotonic() - started > arguments.seconds:
            return
        ran += 1
        failure = run_plain(program) if arguments.plain else failure_of(pools, program, arguments.ranks)
        if failure is None:
            return
        name, text = headline(failure), show_program(program)
        counts[name] += 1
        if counts[name] == 1:
            print(f"program {ran} of seed {arguments.seed}: {name}\n{text}", file=sys.stderr, flush=True)
        if name not in smallest or len(text) < len(smallest[name][0]):
            smallest[name] = (text, failure)
        assert not arguments.shrink, failure

    try:
        search()
    except AssertionError:
        pass
    seconds = time.monotonic() - started
    for name, count in counts.most_common():
        program, failure = smallest[name]
        print(f"{'=' * 100}\n{count} x {name}\n{program}\n{failure}\n")
    print(f"{ran} programs on {arguments.ranks} ranks in {seconds:.0f} s, {sum(counts.values())} failed")
    pools.close()
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
