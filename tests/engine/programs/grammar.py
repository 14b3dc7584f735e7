"""Programs as data: a module tree, how it is sharded and over which mesh, and what a user does with it.

All are frozen dataclasses: they are printed, pickled, and shrunk by hypothesis. Nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import shardwright as sw

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

    @property
    def keeps(self) -> bool:
        """Whether some units may keep full parameters until the optimizer's step, so that pools are refused."""
        # Whatever the mesh: an axis may have one rank, or not be there.
        return any(3 not in stages or not {1, 2}.isdisjoint(stages) for stages in self.stages)

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
    zeros: bool = False  #: ``set_reduce_scatter_unused_params(True)``


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
class Penalty:
    """A penalty of some parameters (numbers modulo how many are trained); see ``penalties.py`` for the words."""

    which: tuple[int, ...] = (0,)
    term: str = "L2"
    sum: str = "python"
    weight: str = "equal"


@dataclass(frozen=True)
class Micro:
    forward: Forward = Forward()
    pattern: str = "plain"
    between: str = "nothing"  #: what happens between forward and backward
    unshard: bool = False  #: by hand, before
    penalty: Penalty | None = None


@dataclass(frozen=True)
class Train:
    micros: tuple[Micro, ...] = (Micro(),)
    #: Which micro-batches leave reductions undone. "yes", "late", "no all-reduce", "one holds", "mixed": all but the
    #: last; "open", "late open" and "one waits": the last, too. See `Interpreter.switch`.
    hold: str = "no"


@dataclass(frozen=True)
class Evaluate:
    forward: Forward = Forward()
    inference: bool = False
    times: int = 1


@dataclass(frozen=True)
class Transform:
    """The loss as a function of the input, under a transform of ``torch.func``; no gradient of a parameter changes."""

    how: str
    forward: Forward = Forward()


@dataclass(frozen=True)
class Read:
    """Numbers of a parameter or, where there is one, of its gradient, as logs and hand-written optimizers read them."""

    which: int
    how: str
    gradient: bool = False


@dataclass(frozen=True)
class Uneven:
    """A rank takes another micro-batch where the others step: an error that names both; then all weights are loaded."""

    rank: int


@dataclass(frozen=True)
class Freeze:
    """Freeze some parameters (numbers modulo how many there are), or the whole block if ``block``."""

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
    compiled: bool = False


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


Instruction = (
    Train
    | Evaluate
    | Transform
    | Read
    | Uneven
    | Freeze
    | Edit
    | Fail
    | Update
    | ZeroGrad
    | Load
    | Copy
    | Setting
)


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


def has_newer_operations(program: Program) -> bool:
    """Whether it does what programs did not do at first.

    Aliases, writes by position, chosen gradients, zeros of unused parameters, transforms, numbers that are read,
    compiled steps of optimizers, penalties.
    """
    return program.model.zeros or any(
        isinstance(step, Transform | Read | Uneven)
        or (isinstance(step, Edit) and step.how in (*ALIASES, *WRITES))
        or (isinstance(step, Load) and step.how == "assign own")
        or (isinstance(step, Update) and step.compiled)
        or (isinstance(step, Train) and any(m.pattern in CHOSEN or m.penalty for m in step.micros))
        for step in program.steps
    )


#: Edits that make a parameter of what another gives, and patterns of a backward to chosen parameters.
ALIASES = ("parameter of .data", "parameter of detach", "parameter of state dict", "parameter of parameter")
WRITES = (
    "a row",
    "rows",
    "every second",
    "item",
    "index_fill",
    "orthogonal",
)  #: edits of a part, by position
TRANSFORMS = ("grad", "jvp", "vmap", "grad of rows")
READINGS = ("norm", "sum", "mean", "largest", "bool", "list")
CHOSEN = ("inputs", "all inputs", "grad")


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
