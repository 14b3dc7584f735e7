"""Settings of a model in two runs, one that saves and one that loads, and what is compared between them.

A row says how each of the two shards the model, and what both have in common. The run that saves goes on, so that the
other one can be compared with it: after a step with equal gradients bit for bit, after a step of training closely.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.engine import RaggedTensor
from shardwright.engine.compat import boxes_to_load
from tests.engine.kit.models import full
from tests.engine.kit.tensor_parallel import data_mesh, data_rank, mesh_of
from tests.support import world_mesh
from tests.support.stand_in import stand_in_device

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY, WIDTH, ROWS = 11, 7, 12  #: every number of ranks from 1 to 4 divides the rows of a step


class Block(nn.Module):
    """Parameters of 0 to 3 dimensions, one without elements, one that is never used, one of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.mix = nn.Parameter(torch.randn(3, 2, WIDTH) / 4)
        self.few = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.empty = nn.Parameter(torch.randn(0, WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))
        return x + (x @ torch.cat((self.mix.flatten(0, 1), self.few, self.empty)).t()).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([1.5, torch.rand(()).item()]))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Place(NamedTuple):
    """A strategy on data-parallel axes, and whether an axis of two tensor-parallel ranks follows."""

    strategy: str
    shape: tuple[int, ...]
    tensor: bool = False

    @property
    def ranks(self) -> int:
        return torch.Size(self.shape).numel() * (2 if self.tensor else 1)

    def __str__(self) -> str:
        return f"{self.strategy}-{'x'.join(map(str, self.shape))}{'-tp' if self.tensor else ''}"


PLACES = [
    Place("zero3", (2,)),
    Place("zero3", (1,)),
    Place("zero3", (3,)),
    Place("zero2", (4,)),
    Place("zero1", (3,)),
    Place("ddp", (2,)),
    Place("hsdp", (2, 2)),
    Place("hfsdp", (2, 2)),
    Place("zero3", (2,), tensor=True),
    Place("plain", (1,)),
]
#: The last one leaves the blocks of AdamW8bit whole.
LAYOUTS: dict[str, Any] = {
    "per_parameter": "per_parameter",
    "row": "ragged",
    "element": sw.Ragged("element"),
    "blocks": sw.Ragged(lambda shape: 32),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.02, eps=0.1),
    "sgd": lambda named: torch.optim.SGD([p for _, p in named], lr=0.02, momentum=0.9),
    "muon": lambda named: sw.Muon(named, lr=0.02, adamw={"lr": 0.02, "eps": 0.1}),
    "adamw8bit": lambda named: sw.AdamW8bit(
        [p for _, p in named], lr=0.02, eps=0.1, block_size=32, min_size=40
    ),
}
#: The axes of one run.
RUN: dict[str, list[Any]] = {
    "place": PLACES,
    "layout": list(LAYOUTS),
    "memory": ["dynamic", "max_pool", "arena"],
    "prefetch": [1, 2],
    "precision": ["fp32", "bf16"],
    "units": ["blocks", "one", "halves"],
    "init": ["built", "deferred"],
    "offload": ["", "all", "state"],
    "in_backward": [False, True],
}
#: Those that both runs have in common.
COMMON: dict[str, list[Any]] = {
    "optimizer": list(OPTIMIZERS),
    "steps": [2, 0],
    "tied": [False, True],
    "frozen": [False, True],
}


class Run(NamedTuple):
    """How one run shards the model."""

    place: Place
    layout: str
    memory: str
    prefetch: int
    precision: str
    units: str
    init: str
    offload: str
    in_backward: bool
    optimizer: str
    steps: int
    tied: bool
    frozen: bool


def excluded(one: str, value: Any, other: str, beside: Any) -> bool:
    """Whether two values may not stand together: what is refused, and what would say nothing new."""
    values = {one: value, other: beside}

    def both(**expected: Any) -> bool:
        return all(name in values and values[name] in some for name, some in expected.items())

    place = values.get("place")
    early = place is not None and place.strategy in ("zero1", "zero2")
    plain = place is not None and place.strategy == "plain"
    return (
        (early and values.get("memory") == "max_pool")
        or (
            plain and (values.get("offload") or values.get("in_backward") or values.get("init") == "deferred")
        )
        or both(memory=["max_pool"], units=["one"])
        or both(optimizer=["muon"], in_backward=[True])
        or (place is not None and place.tensor and values.get("optimizer") in ("muon", "adamw8bit"))
        or both(optimizer=["adamw8bit"], layout=["per_parameter", "row", "element"])
    )


def pairs(rows: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    """Each row as a run that saves, and another that loads: each of them once or more, in as many pairs as possible.

    Both have the values of :data:`COMMON` of the one that saves.
    """
    shown: set[Any] = set()
    chosen = []
    for saves in rows:
        common = {name: saves[name] for name in COMMON}
        best, most = saves, -1
        for row in rows:
            loads = {**row, **common}
            if any(excluded(a, loads[a], b, loads[b]) for a in RUN for b in COMMON):
                continue
            new = sum(each not in shown for each in _shown(saves, loads))
            if new > most:
                best, most = loads, new
        shown |= _shown(saves, best)
        chosen.append((Run(**saves), Run(**best)))
    return chosen


def _shown(saves: dict[str, Any], loads: dict[str, Any]) -> set[Any]:
    """Pairs of a value of each run, and of two values of the one that loads."""
    across = {(a, str(saves[a]), b, str(loads[b])) for a in RUN for b in RUN}
    return across | {(a, b, str(loads[a]), str(loads[b])) for a in RUN for b in (*RUN, *COMMON) if a != b}


def build(run: Run, seed: int) -> tuple[Any, Any]:
    """The sharded model, and the rank of its data."""
    torch.manual_seed(seed)
    if run.place.strategy == "plain":
        model = Model(run.tied)
        _freeze(model, run)
        return model, 0
    mesh = mesh_of((*run.place.shape, 2)) if run.place.tensor else world_mesh(*run.place.shape)
    with sw.deferred_init() if run.init == "deferred" else nullcontext():
        model = Model(run.tied)
    if run.place.tensor:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan, src_data_rank=None if run.init == "deferred" else 0)
    _freeze(model, run)
    whole = sw.MixedPrecisionPolicy()
    options: dict[str, Any] = {
        "mesh": data_mesh(mesh) if run.place.tensor else mesh,
        "strategy": run.place.strategy,
        "layout": LAYOUTS[run.layout],
        "mp_policy": whole if run.precision == "fp32" else sw.MixedPrecisionPolicy(BF16, FP32),
    }
    if run.offload:
        alone = sw.Offload(parameters=False, gradients=False)
        options["offload_policy"] = sw.CPUOffloadPolicy() if run.offload == "all" else alone
    units: list[Any] = {"blocks": list(model.blocks), "one": [], "halves": [[model.embed, model.blocks[0]]]}[
        run.units
    ]
    if run.tied and run.units == "halves":
        units = [model.blocks[0]]
    for unit in units:
        sw.fully_shard(unit, **options)
    sw.fully_shard(model, memory=run.memory, prefetch=run.prefetch, **options)
    if run.init == "deferred":
        sw.materialize(model)
    return model, data_rank(mesh) if run.place.tensor else torch.distributed.get_rank()


def _freeze(model: Model, run: Run) -> None:
    if run.frozen:
        model.blocks[1].requires_grad_(False)


def optimizer_of(model: nn.Module, run: Run) -> Any:
    made = OPTIMIZERS[run.optimizer]([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    if run.place.strategy == "plain":
        return made
    return sw.optim.in_backward(made) if run.in_backward else sw.fully_shard_optimizer(made)


def train(model: Any, optimizer: Any, run: Run, here: int, step: int) -> torch.Tensor:
    """A step on the rows of all ranks. Returns the outputs."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(0, VOCABULARY, (ROWS, 4), generator=generator)
    data_ranks = torch.Size(run.place.shape).numel()
    mine = batch.chunk(data_ranks)[here] if run.place.strategy != "plain" else batch
    output = model(mine)
    nn.functional.cross_entropy(output.float().flatten(0, 1), mine.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()


def like(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` sharded as ``p`` is."""
    gradient = torch.zeros_like(p)
    shown = gradient.as_dtensor() if isinstance(gradient, RaggedTensor) else gradient
    for offsets, local in boxes_to_load("gradient", shown):
        local.copy_(value[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))])
    return gradient


@torch.no_grad()
def step_with_equal_gradients(model: nn.Module, optimizer: Any, seed: int) -> None:
    """A step whose gradients depend on parameters' names and shapes alone: all but those of unused parameters."""
    for number, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        value = torch.randn(p.shape, generator=generator) / 20
        if p.requires_grad and "unused" not in name:
            p.grad = like(p, value)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def whole(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """All tensors and values by name, tensors whole. Every rank must call it."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None and optimizer.state:
        state["optimizer"] = {
            name: each for name, each in get_optimizer_state_dict(model, optimizer)["state"].items() if each
        }
    return _whole(state)  # type: ignore[no-any-return]


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return dict(enumerate(map(_whole, value)))
    return full(value).detach().clone().cpu() if isinstance(value, torch.Tensor) else value


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, each in expected.items():
            assert_equal(found[key], each, f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def assert_close(found: Any, expected: Any, bound: float, where: str = "") -> None:
    if isinstance(expected, dict):
        for key, each in expected.items():
            assert_close(found[key], each, bound, f"{where}.{key}")
    else:
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound, msg=lambda m: f"{where}: {m}")


def save(rank: int, world_size: int, run: Run, folder: Path) -> None:
    """Train, save, and store what the run that loads is compared with."""
    with stand_in_device() if run.offload else nullcontext():
        model, here = build(run, 0)
        optimizer = optimizer_of(model, run)
        for step in range(run.steps):
            train(model, optimizer, run, here, step)
        optimizer.param_groups[0]["lr"] *= 0.5
        expected = [whole(model, optimizer)]
        sw.save_checkpoint(folder / "c", model, optimizer, extra={"step": run.steps})
        assert_equal(whole(model, optimizer), expected[0])
        step_with_equal_gradients(model, optimizer, 5)
        expected.append(whole(model, optimizer))
        train(model, optimizer, run, here, 7)
        expected.append(whole(model))
    if rank == 0:
        torch.save(expected, folder / "expected")


def load(rank: int, world_size: int, run: Run, folder: Path, bound: float) -> None:
    """Load into a run that has trained from other values, and go on."""
    expected = torch.load(folder / "expected")
    with stand_in_device() if run.offload else nullcontext():
        model, here = build(run, 1)
        optimizer = optimizer_of(model, run)
        if run.prefetch == 2:  # else it has no state yet
            train(model, optimizer, run, here, 3)
        generators = world_size == 1
        extra = sw.load_checkpoint(folder / "c", model, optimizer, generators=False)
        assert extra == {"step": run.steps}, generators
        assert_equal(whole(model, optimizer), expected[0])
        step_with_equal_gradients(model, optimizer, 5)
        assert_equal(whole(model, optimizer), expected[1])
        train(model, optimizer, run, here, 7)
        assert_close(whole(model), expected[2], bound)
