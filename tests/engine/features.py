"""The features of `fully_shard` as axes of a matrix, and a training by the settings of one row of it.

One axis is one feature; a row chooses a value of each. `train` is checked step by step against the plain model on every
rank's data. What may not stand together is told in `REFUSED`, with the words that refuse it, and in `NOT_A_CASE`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwright as sw
from shardwright.comm_hooks import Cast, Compressed, PowerSGD
from tests.engine.custom import Gathers, Scatters
from tests.engine.kit.hooks import Exact
from tests.engine.kit.models import full, loss_of
from tests.engine.kit.tensor_parallel import data_mesh, data_rank, mesh_of, parallelize, tokens
from tests.support import world_mesh
from tests.support.stand_in import stand_in_device

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Block(nn.Module):
    """Computes in the dtypes of its weights, which may differ."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        return x + self.down(nn.functional.gelu(self.up(h.to(self.up.weight.dtype))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7, 12) for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)

    uses = "calls"  #: or "parts": no call reaches a unit's hooks

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        h = self.embed(batch)
        for block in self.blocks:
            h = block(h) if self.uses == "calls" else block.forward(h)
        h = self.norm(h.to(self.norm.weight.dtype))
        h = h.to(self.head.weight.dtype)
        if self.uses == "calls":
            return self.head(h)
        return nn.functional.linear(h, self.head.weight, self.head.bias)


class Place(NamedTuple):
    """A strategy on data-parallel axes."""

    strategy: str
    shape: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)


class Row(NamedTuple):
    place: Place
    tensor: str
    layout: str
    memory: str
    prefetch: int
    precision: str
    micros: str
    recompute: str
    compiled: bool
    optimizer: str
    in_backward: bool
    hook: str
    collectives: str
    offload: str
    frozen: str
    ignored: bool
    init: str
    units: str
    reshard: bool | int | None
    clip: str
    between: str
    uses: str

    def __str__(self) -> str:
        values = (self.place.strategy, "x".join(map(str, self.place.shape)))
        rest = (
            f"{name}={value}"
            for name, value in self._asdict().items()
            if name != "place" and value not in ("", False, None, "calls")
        )
        return "-".join((*values, *rest))

    @property
    def ranks(self) -> int:
        return self.place.ranks * (2 if self.tensor else 1)


AXES: dict[str, list[Any]] = {
    "place": [
        Place("zero3", (2,)),
        Place("zero3", (1,)),
        Place("zero3", (3,)),
        Place("zero3", (4,)),
        Place("zero2", (2,)),
        Place("zero1", (2,)),
        Place("ddp", (2,)),
        Place("hsdp", (2, 2)),
        Place("hfsdp", (2, 2)),
        Place("hsdp", (2, 1)),
        Place("hfsdp", (1, 2)),
    ],
    "tensor": ["", "tensor", "sequence"],
    "layout": ["per_parameter", "row", "element"],
    "memory": ["dynamic", "double_buffer", "max_pool", "arena"],
    "prefetch": [1, 2],
    "precision": ["fp32", "bf16", "norms", "fp16", "low gradients"],
    "micros": ["single", "reduced", "held", "last", "in flight"],
    "recompute": ["", "full", "ops", "reentrant"],
    "compiled": [False, True],
    "optimizer": ["sgd", "adamw", "muon"],
    "in_backward": [False, True],
    "hook": ["", "cast", "own", "powersgd"],
    "collectives": ["", "gathers", "scatters", "codec"],
    "offload": ["", "all", "state"],
    "frozen": ["", "block", "embed"],
    "ignored": [False, True],
    "init": ["built", "deferred", "meta"],
    "units": ["blocks", "policy", "one"],
    "reshard": [None, True, False, 2],
    "clip": ["", "ours", "torch's"],
    "between": ["", "evaluation", "unsharded", "edit", "reload", "failure"],
    "uses": ["calls", "parts"],
}  # fmt: skip
LAYOUTS: dict[str, Any] = {"per_parameter": "per_parameter", "row": "ragged", "element": sw.Ragged("element")}
HOOKS: dict[str, Callable[[], Any]] = {
    "cast": lambda: Compressed(Cast(FP32)),
    "own": Exact,
    "powersgd": lambda: PowerSGD(64),  # of more than the rank of any gradient here, so that nothing is lost
}
#: What computes, and how far results may be from the plain model's: sums in float32 differ in their order only.
COMPUTE = {"fp32": FP32, "bf16": BF16, "norms": BF16, "fp16": FP16, "low gradients": BF16}
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-5, "norms": 2e-5, "fp16": 1e-2, "low gradients": 2e-2}


class Rule(NamedTuple):
    """Values of two axes that may not stand together."""

    axes: tuple[str, str]
    applies: Callable[[Any, Any], bool]
    told: str = ""  #: by which words they are refused


#: Refused by name, as tests show.
REFUSED = [
    Rule(
        ("place", "reshard"),
        lambda place, reshard: place.strategy in ("zero1", "zero2") and reshard in (True, 2),
        "releases full parameters, but strategy '.*' keeps them until the optimizer's step",
    ),
    Rule(
        ("place", "reshard"),
        lambda place, reshard: reshard == 2 and place.strategy == "zero3" and place.ranks % 2 == 1,
        "must divide the . ranks over which parameters are gathered",
    ),
    Rule(("in_backward", "optimizer"), lambda b, o: b and o == "muon", "Muon needs whole tensors"),
    Rule(
        ("in_backward", "clip"), lambda b, clip: b and clip != "", "steps in backward|has stepped in backward"
    ),
    Rule(("in_backward", "precision"), lambda b, p: b and p == "fp16", "GradScaler"),
    Rule(
        ("hook", "collectives"),
        lambda hook, c: hook != "" and c == "scatters",
        "has a gradient hook and a custom reduce-scatter",
    ),
    Rule(
        ("precision", "optimizer"),
        lambda precision, o: precision == "low gradients" and o != "sgd",
        "cannot step a torch.float32 parameter of shape .* with a torch.bfloat16 gradient",
    ),
    Rule(
        ("tensor", "optimizer"), lambda t, o: t != "" and o == "muon", "No rank can step parameter .* whole"
    ),
    Rule(
        ("place", "memory"),
        lambda place, memory: (
            place.strategy in ("zero1", "zero2") and memory in ("double_buffer", "max_pool")
        ),
        "keeps the full parameters of unit .* until the optimizer's step, so no slot ever becomes free",
    ),
    Rule(
        ("reshard", "memory"),
        lambda reshard, memory: reshard is False and memory in ("double_buffer", "max_pool"),
        "keeps the full parameters of unit .*, so no slot ever becomes free",
    ),
    Rule(
        ("units", "memory"),
        lambda units, memory: units == "one" and memory in ("double_buffer", "max_pool"),
        "the root is the only unit with parameters.*, so no slot ever becomes free",
    ),
]
#: What tests here do not do, or what torch itself does not.
NOT_A_CASE = [
    Rule(("place", "tensor"), lambda place, tensor: tensor != "" and place.ranks > 2),
    Rule(("place", "reshard"), lambda place, reshard: reshard == 2 and place.strategy != "zero3"),
    # Its gradient is a partial sum, which who ignores it has to reduce.
    Rule(("tensor", "ignored"), lambda tensor, ignored: tensor == "sequence" and ignored),
    # torch puts plain tensors and DTensors into one call that takes either.
    Rule(("ignored", "clip"), lambda ignored, clip: ignored and clip == "torch's"),
    Rule(("ignored", "precision"), lambda ignored, precision: ignored and precision == "fp16"),
    # Decided when units are known: the size of the last one may be that of the blocks.
    Rule(("memory", "units"), lambda memory, units: memory == "double_buffer" and units == "blocks"),
    # Graphs with DTensors take long to make: those of one plan are enough.
    Rule(("tensor", "compiled"), lambda tensor, compiled: tensor == "tensor" and compiled),
    # Of the plan "tensor" norms lie on another mesh, and torch's clipping wants one; ours takes several.
    Rule(("tensor", "clip"), lambda tensor, clip: tensor == "tensor" and clip == "torch's"),
    # Compiled code reads stored dtypes, by which these blocks cast: see Limits in docs/engine.md.
    Rule(("compiled", "uses"), lambda compiled, uses: compiled and uses == "parts"),
    # torch's plan of tensor parallelism has hooks on the head, which its weight alone does not run.
    Rule(("tensor", "uses"), lambda tensor, uses: tensor != "" and uses == "parts"),
    # Reentrant checkpointing has no gradients at all where no input needs one.
    Rule(("recompute", "frozen"), lambda recompute, frozen: recompute == "reentrant" and frozen == "embed"),
]


def excluded(one: str, value: Any, other: str, beside: Any) -> bool:
    """Whether two values of these axes may not stand together. For `generate`."""
    return any(
        (rule.axes == (one, other) and rule.applies(value, beside))
        or (rule.axes == (other, one) and rule.applies(beside, value))
        for rule in (*REFUSED, *NOT_A_CASE)
    )


# -- the model as the row says -----------------------------------------------------------------------------------------


def compute_dtype(row: Row, name: str) -> torch.dtype:
    """Ignored parameters keep their stored dtype."""
    whole = (row.precision == "norms" and "norm" in name) or (row.ignored and name.startswith("norm."))
    return FP32 if whole else COMPUTE[row.precision]


def policy_of(row: Row) -> sw.PrecisionPolicy:
    compute = COMPUTE[row.precision]
    whole = sw.MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)
    return sw.PrecisionPolicy(
        param_dtype=None if compute is FP32 else compute,
        reduce_dtype=FP32,
        grad_dtype=BF16 if row.precision == "low gradients" else None,
        cast_forward_inputs=not row.tensor and row.precision != "norms",
        # In a unit of several modules names begin with the place of theirs, so "0." is the last norm.
        per_parameter={"*norm*": whole, "0.*": whole} if row.precision == "norms" else None,
        full_precision_in_eval=row.between == "evaluation",
    )


def prepare_blocks(model: Model, row: Row) -> None:
    """As the trainer does: on the instance, before sharding."""
    if row.compiled:
        torch._dynamo.reset()  # which counts what it has compiled, in other tests, too
    for block in model.blocks:
        wraps: list[Callable[[Any], Any]] = []
        if row.compiled:
            wraps.append(lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))
            if row.tensor and row.units == "one":  # see Limits in docs/parallelism.md
                wraps.append(lambda f: lambda x: f(x.clone()))
        if row.recompute:
            options: dict[str, Any] = {
                "use_reentrant": row.recompute == "reentrant",
                "preserve_rng_state": False,
            }
            if row.recompute == "ops":
                options["context_fn"] = functools.partial(
                    create_selective_checkpoint_contexts, _keep_products
                )
            wraps.insert(
                len(wraps) if row.recompute == "reentrant" else 0,
                lambda f, options=options: functools.partial(checkpoint, f, **options),
            )
        for wrap in wraps:
            block.forward = wrap(block.forward)


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def freeze(model: Model, row: Row) -> None:
    if row.frozen:
        (model.blocks[1] if row.frozen == "block" else model.embed).requires_grad_(False)


def build(row: Row) -> tuple[Model, Model, Any]:
    """The plain model, the sharded one, and the mesh of all axes."""
    mesh = mesh_of((*row.place.shape, 2)) if row.tensor else mesh_of_data(row)
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    how: dict[str, Callable[[], Any]] = {"deferred": sw.deferred_init, "meta": lambda: torch.device("meta")}
    if row.init == "built":
        model = Model()
    else:
        with how[row.init]():
            model = Model()
    if row.tensor:
        parallelize(model, mesh, row.tensor, 0 if row.init == "built" else None)  # type: ignore[arg-type]
    for each in (plain, model):
        each.uses = row.uses
        freeze(each, row)
    prepare_blocks(model, row)
    options: dict[str, Any] = {
        "mesh": data_mesh(mesh) if row.tensor else mesh,
        "strategy": row.place.strategy,
        "layout": LAYOUTS[row.layout],
        "reshard_after_forward": row.reshard,
        "mp_policy": policy_of(row),
    }
    if row.offload:
        alone = sw.Offload(parameters=False, gradients=False)
        options["offload_policy"] = sw.CPUOffloadPolicy() if row.offload == "all" else alone
    if row.ignored:
        options["ignored_modules"] = {model.norm}
    of_root: dict[str, Any] = {"memory": row.memory, "prefetch": row.prefetch}
    if row.units == "policy":
        sw.wrap.auto_wrap(model, sw.wrap.by_class(Block), **options, **of_root)
    else:
        if row.units == "blocks":
            for block in model.blocks:
                sw.fully_shard(block, **options)
            sw.fully_shard(model.head if row.ignored else [model.norm, model.head], **options)
        sw.fully_shard(model, **options, **of_root)
    if row.init != "built":
        sw.materialize(model)
    sharded = [m for m in model.modules() if isinstance(m, sw.FSDPModule)]
    if row.collectives == "codec":
        model.set_all_gather_codec(Cast(FP32))  # type: ignore[operator]
    for module in sharded:
        if row.collectives == "gathers":
            module.set_custom_all_gather(Gathers())
        if row.collectives == "scatters":
            module.set_custom_reduce_scatter(Scatters())
    if row.hook:
        model.set_gradient_comm_hook(HOOKS[row.hook]())  # type: ignore[operator]
    return plain, model, mesh


def mesh_of_data(row: Row) -> Any:
    return world_mesh(*row.place.shape, names=("replicate", "shard")[-len(row.place.shape) :])


def optimizer_of(model: nn.Module, row: Row, plain: bool) -> torch.optim.Optimizer:
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in trainable]
    made: torch.optim.Optimizer
    if row.optimizer == "sgd":
        made = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    elif row.optimizer == "adamw":
        made = torch.optim.AdamW(parameters, lr=0.02, eps=0.1)  # so large that it does not blow up rounding
    else:
        made = sw.Muon(trainable, lr=0.02)
    if plain:
        return made
    return sw.optim.in_backward(made) if row.in_backward else sw.fully_shard_optimizer(made)


# -- the plain model ---------------------------------------------------------------------------------------------------


class Reference:
    """The plain model on every rank's data: gradients of a copy in the compute dtypes, averaged in float32."""

    def __init__(self, model: Model, row: Row) -> None:
        self.model, self.row = model, row

    def backward(self, batches: list[list[torch.Tensor]], scale: float) -> list[list[float]]:
        """``batches[micro][rank]``. Returns the losses likewise; gradients are left in the model, unscaled."""
        work = copy.deepcopy(self.model)
        for name, p in work.named_parameters():
            p.data = p.data.to(compute_dtype(self.row, name))
        losses = []
        for micro in batches:
            losses.append([])
            for batch in micro:
                work.zero_grad()
                loss = loss_of(work(batch), batch)
                (loss * scale).backward()
                losses[-1].append(loss.item())
                for p, q in zip(self.model.parameters(), work.parameters(), strict=True):
                    if q.grad is not None:
                        part = q.grad.float() / (scale * len(micro))
                        p.grad = part if p.grad is None else p.grad + part
        return losses


# -- training ----------------------------------------------------------------------------------------------------------


def train(row: Row, steps: int = 2) -> None:
    """Offloaded tensors leave a stand-in for an accelerator, since on the CPU there is one memory."""
    with stand_in_device() if row.offload else nullcontext():
        _train(row, steps)


def _train(row: Row, steps: int) -> None:
    plain, model, mesh = build(row)
    reference = Reference(plain, row)
    optimizer, expected = optimizer_of(model, row, False), optimizer_of(plain, row, True)
    tolerance = TOLERANCE[row.precision]
    if row.tensor and row.precision != "fp32":
        tolerance = 6e-2  # partial sums over the tensor-parallel ranks are rounded
    if row.compiled and row.precision != "fp32":
        tolerance = max(tolerance, 1e-2)  # compiled operators round less often
    if row.hook == "powersgd":
        tolerance = max(tolerance, 2e-4)
    if row.optimizer == "muon" and tolerance < 1e-3:
        tolerance = 1e-3  # Newton-Schulz iterations enlarge what rounding leaves
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=row.precision == "fp16")
    here, count = (data_rank(mesh), row.place.ranks) if row.tensor else (dist.get_rank(), row.place.ranks)
    for step in range(steps):
        if step == 1:
            meanwhile(row, model, optimizer, plain, tolerance)
        micros = 1 if row.micros == "single" else 2
        batches = [[tokens(step, m, d) for d in range(count)] for m in range(micros)]
        losses, waiting = [], []
        for number, micro in enumerate(batches):
            waiting.append(loss_of(model(micro[here]), micro[here]))
            losses.append(waiting[-1].item())
            if row.micros == "in flight" and number < micros - 1:
                continue  # as in a pipeline, all forwards come before the first backward
            while waiting:
                last = number == micros - 1 and len(waiting) == 1
                model.set_requires_gradient_sync(row.micros != "held" or last)  # type: ignore[operator]
                goes_on = row.micros in ("last", "in flight") or (row.micros == "reduced" and row.in_backward)
                model.set_is_last_backward(last or not goes_on)  # type: ignore[operator]
                scaler.scale(waiting.pop(0)).backward()
        wanted = reference.backward(batches, 256.0 if row.precision == "fp16" else 1.0)
        assert losses == pytest.approx([micro[here] for micro in wanted], rel=tolerance, abs=tolerance), (
            step,
            losses,
            [m[here] for m in wanted],
        )
        reduce_ignored(row, model)
        scaler.unscale_(optimizer) if row.precision == "fp16" else None
        if not row.in_backward:
            compare(
                [(n, p.grad) for n, p in model.named_parameters()],
                [p.grad for p in plain.parameters()],
                tolerance,
                f"step {step}, gradient of ",
            )
        if row.clip:
            clip = sw.clip_grad_norm_ if row.clip == "ours" else nn.utils.clip_grad_norm_
            norm = full(clip(model.parameters(), 0.7)).float()
            own = nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
            torch.testing.assert_close(norm, own, rtol=tolerance, atol=tolerance)
        scaler.step(optimizer)
        scaler.update()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        compare(list(model.named_parameters()), list(plain.parameters()), tolerance, f"step {step}, ")


def compare(found: list[tuple[str, Any]], wanted: list[Any], tolerance: float, where: str) -> None:
    for (name, tensor), other in zip(found, wanted, strict=True):
        assert (tensor is None) == (other is None), where + name
        if tensor is not None:
            assert tensor.shape == other.shape, where + name
            torch.testing.assert_close(
                full(tensor).detach(),
                other.detach().to(tensor.dtype),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{where}{n}: {m}",
            )


def reduce_ignored(row: Row, model: Model) -> None:
    """The gradients of ignored parameters are averaged by hand."""
    if row.ignored:
        for p in model.norm.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


@torch.no_grad()
def meanwhile(row: Row, model: Model, optimizer: Any, plain: Model, tolerance: float) -> None:
    """Work of users between two steps."""
    batch = tokens(100, 0, 0)
    if row.between == "evaluation":
        for each in (model, plain):
            each.eval()
        found, wanted = model(batch), plain(batch)
        assert found.dtype == FP32
        torch.testing.assert_close(full(found), wanted, rtol=tolerance, atol=tolerance)
        for each in (model, plain):
            each.train()
    elif row.between == "unsharded":
        with sw.unsharded(model, writeback=True):
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.shape == q.shape
                p.mul_(0.9)
        for q in plain.parameters():
            q.mul_(0.9)
    elif row.between == "edit":
        for each in (model, plain):
            for p in each.parameters():
                p.mul_(0.9)
    elif row.between == "reload":
        state, its = map(copy.deepcopy, get_state_dict(model, optimizer))
        assert set(state) == set(plain.state_dict())
        for tensor in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(7)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=its)
    elif row.between == "failure":
        with interrupted(model), pytest.raises(RuntimeError, match="on purpose"), torch.enable_grad():
            model(batch)


@contextmanager
def interrupted(model: Model) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    block, forward = model.blocks[2], model.blocks[2].forward
    block.forward = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        block.forward = forward  # type: ignore[method-assign]
