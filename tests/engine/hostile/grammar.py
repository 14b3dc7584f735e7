"""Programs as data, and how they are drawn. Every field has a harmless default, so that a program can be made small."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

KINDS = ("linear", "norm", "table", "conv", "mixed", "scale", "nested", "nested unit")
USES = ("once", "once", "once", "twice", "odd steps")
CHECKPOINTS = ("none", "none", "none", "not reentrant", "reentrant")
#: Where a unit keeps a tensor that it does not return.
KEEPS = (
    "no",
    "list",
    "inner hook",
    "dict",
    "closure",
    "attribute",
    "own function",
    "saved by hooks",
    "deque of objects",
)
#: When the kept tensors are read.
READS = (
    "no",
    "together",
    "later",
    "before",
    "alone",
    "inside",
    "after gradient",
    "next step",
    "next step detached",
    "twice",
)
STRATEGIES = (*("zero3",) * 5, "zero2", "zero2", "zero1", "ddp", "ddp", "hsdp", "hfsdp")
LAYOUTS = ("per_parameter", "per_parameter", "ragged", "element", "last dimension")
MEMORIES = ("dynamic", "dynamic", "arena", "max_pool")
#: float64 and not bfloat16, whose rounding would hide differences.
PRECISIONS = ("none", "none", "none", "float64")
CAPTURES = ("no", "parameters", "ids", "detached", "view")
CAPTURED_USES = (
    *("clip", "clip of the library", "decay", "data decay", "average", "freeze", "penalty", "penalty of one"),
    *("forward", "drop gradients", "copy", "read gradients", "set data", "another optimizer"),
)
GRADIENTS = (
    *(
        "no",
        "no",
        "hook scales",
        "hook masks",
        "hook after",
        "in place",
        "halved",
        "tril",
        "flip",
        "whole",
        "none of some",
    ),
    *("clip", "clip of the library", "zeros", "data"),
)
OPTIMIZERS = ("sgd", "adamw")
WRAPPED = ("plain", "wrapped", "in backward")
MICROS = ("one", "one", "two", "two, held", "two, late")
SAVES = ("no", "no", "state dict", "checkpoint", "assign", "deepcopy of state")
INTERRUPTS = (
    "no",
    "no",
    "forward and backward",
    "optimizer",
    "optimizer, retried",
    "boom in forward",
    "boom in backward",
)
PARTS = (
    "/shardwright/",
    "/shardwright/engine/",
    "/shardwright/engine/memory/",
    "/shardwright/engine/comm/",
    "/engine/model/",
    "/engine/gradients/",
)
OPTIMIZER_PARTS = ("/torch/optim/", "/shardwright/optim/", "/shardwright/")


@dataclass(frozen=True)
class UnitSpec:
    """A unit of the trunk. ``unit``: whether ``fully_shard`` is called on it, or the root has its parameters."""

    kind: str = "linear"
    frozen: str = "no"  #: "whole", or "half" of its parameters
    use: str = "once"
    checkpoint: str = "none"
    keeps: str = "no"
    unit: bool = True


@dataclass(frozen=True)
class Program:
    ranks: int = 2
    units: tuple[UnitSpec, ...] = (UnitSpec(), UnitSpec())
    tie: bool = False  #: the first and the last unit of the same kind have the same parameters
    strategy: str = "zero3"
    layout: str = "per_parameter"
    memory: str = "dynamic"
    prefetch: int = 1
    reshard: bool | None = None
    precision: str = "none"
    offload: str = "no"  #: "parameters", "activations"
    transport: str = "pages"
    read: str = "no"
    capture: str = "no"
    captured_before: bool = True  #: before ``fully_shard``
    captured_use: str = "decay"
    gradients: str = "no"
    optimizer: str = "sgd"
    wrapped: str = "plain"
    micros: str = "one"
    save: str = "no"
    interrupt: str = "no"
    part: str = "/shardwright/"
    line: float = 0.5  #: the line that is interrupted, as a part of all lines of the step
    all_ranks: bool = True  #: interrupted, or one alone


STEPS = 5
INTERRUPTED = 2  #: the step that is interrupted
SAVED = 3  #: the step before which the model is saved and loaded


def draw(seed: int) -> Program:
    """Return the program of a seed."""
    r = random.Random(seed)
    hidden, captured, edited = r.random() < 0.5, r.random() < 0.4, r.random() < 0.4
    interrupted = r.random() < 0.4
    keeps = r.sample(KEEPS[1:], 2) if hidden else []

    def unit() -> UnitSpec:
        return UnitSpec(
            kind=r.choice(KINDS),
            frozen=r.choice(("no", "no", "no", "whole", "half")),
            use=r.choice(USES),
            checkpoint=r.choice(CHECKPOINTS),
            keeps=r.choice(keeps) if keeps and r.random() < 0.7 else "no",
            unit=r.random() < 0.85,
        )

    program = Program(
        ranks=r.choice((2, 2, 2, 2, 4)),
        units=tuple(unit() for _ in range(r.randint(1, 4))),
        tie=r.random() < 0.2,
        strategy=r.choice(STRATEGIES),
        layout=r.choice(LAYOUTS),
        memory=r.choice(MEMORIES),
        prefetch=r.choice((0, 1, 1, 2)),
        reshard=r.choice((None, None, None, True, False)),
        precision=r.choice(PRECISIONS),
        offload=r.choice(("no", "no", "no", "parameters", "activations")),
        transport=r.choice(("pages", "pages", "gloo")),
        read=r.choice(READS[1:]) if hidden else "no",
        capture=r.choice(CAPTURES[1:]) if captured else "no",
        captured_before=r.random() < 0.6,
        captured_use=r.choice(CAPTURED_USES),
        gradients=r.choice(GRADIENTS) if edited else "no",
        optimizer=r.choice(OPTIMIZERS),
        wrapped=r.choice(WRAPPED),
        micros=r.choice(MICROS),
        save=r.choice(SAVES),
        interrupt=r.choice(INTERRUPTS[2:]) if interrupted else "no",
        part=r.choice(PARTS),
        line=r.random(),
        all_ranks=r.random() < 0.5,
    )
    if program.interrupt.startswith("optimizer"):
        program = replace(program, part=r.choice(OPTIMIZER_PARTS))
    return legal(program)


def legal(program: Program) -> Program:
    """Replace what the documents refuse or do not promise, so that programs get further than that."""
    change: dict[str, Any] = {}
    if program.strategy in ("hsdp", "hfsdp"):
        change["ranks"] = 4
    keeps_full = program.strategy in ("zero1", "zero2")
    if keeps_full and program.reshard is not None:
        change["reshard"] = None
    gives = [u for u in program.units if u.unit]
    if program.memory == "max_pool" and (
        keeps_full or program.strategy == "ddp" or program.reshard is False or not gives
    ):
        change["memory"] = "arena"
    if program.wrapped == "in backward":  # pages say that these do not go together
        if program.gradients.startswith("clip") or program.captured_use.startswith("clip"):
            change |= {"gradients": "no", "capture": "no"}
        if program.micros == "two":
            change["micros"] = "two, held"
    # Such hooks run once for each reduction; those of a plain model run once for each backward of each rank.
    late = program.micros == "two, late" and program.strategy in ("ddp", "zero1", "hsdp", "hfsdp")
    penalty = program.capture != "no" and program.captured_use.startswith(
        "penalty"
    )  # its gradient comes apart
    backwards_inside = any(u.use == "twice" and u.checkpoint == "reentrant" for u in program.units)
    if program.gradients == "hook after" and (
        late
        or backwards_inside
        or penalty
        or program.read in ("later", "before", "twice", "inside", "after gradient")
    ):
        change["gradients"] = "hook scales"
    if program.capture == "ids" and program.captured_use == "forward":
        change["capture"] = "parameters"  # modules show other objects then
    if program.capture in ("detached", "view"):
        # From before, they keep the old values, as docs/engine.md says.
        uses = (
            ("decay", "average", "copy")
            if program.capture == "detached"
            else ("penalty", "penalty of one", "decay")
        )
        if program.captured_use not in uses:
            change["captured_use"] = uses[len(program.units) % len(uses)]
        if program.capture == "detached":
            change["captured_before"] = False
        elif program.captured_before:
            change["captured_use"] = "penalty"
    return replace(program, **change) if change else program


def smaller(program: Program) -> list[Program]:
    """Programs that differ from this one by one harmless field, or by a unit less."""
    found = []
    default = Program()
    for field in fields(Program):
        if field.name != "units" and getattr(program, field.name) != getattr(default, field.name):
            found.append(replace(program, **{field.name: getattr(default, field.name)}))
    for i, unit in enumerate(program.units):
        if len(program.units) > 1:
            found.append(replace(program, units=program.units[:i] + program.units[i + 1 :]))
        for field in fields(UnitSpec):
            if getattr(unit, field.name) != getattr(UnitSpec(), field.name):
                less = replace(unit, **{field.name: getattr(UnitSpec(), field.name)})
                found.append(replace(program, units=(*program.units[:i], less, *program.units[i + 1 :])))
    return [legal(each) for each in found if legal(each) != program]


def show(value: Any) -> str:
    """Return a program as Python, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return "(" + ", ".join(map(show, value)) + ("," if len(value) == 1 else "") + ")"
    if not hasattr(type(value), "__dataclass_fields__"):
        return repr(value)
    default = type(value)()
    given = [f for f in fields(value) if getattr(value, f.name) != getattr(default, f.name)]
    return f"{type(value).__name__}({', '.join(f'{f.name}={show(getattr(value, f.name))}' for f in given)})"
