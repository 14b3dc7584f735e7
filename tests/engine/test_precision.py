"""Dtypes chosen separately: per parameter, in eval mode, of gradients, held sums and buffers; float16 with a scaler.

Against a plain model in which parameters are cast as the policies say, on every rank's data. Of generated rows those
run that tests/support/matrix.py selects.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.engine import unit_of
from tests.engine.kit.models import loss_of, tokens
from tests.engine.kit.training import local_of, units_of
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LAYOUTS = ("per_parameter", "ragged")
PLANNED = ["double_buffer", "max_pool", "arena"]
PLACES: list[tuple[str, tuple[int, ...]]] = [
    ("zero3", (1,)),
    ("zero3", (3,)),
    ("zero1", (2,)),
    ("zero2", (2,)),
    ("ddp", (2,)),
    ("hsdp", (2, 2)),
    ("hfsdp", (2, 2)),
]


class Mixed(nn.Module):
    """A block whose norm and router compute in the dtype of their own weights."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, 3)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.register_buffer("scale", torch.full((dim,), 1.0 / 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        gate = self.router(h.to(self.router.weight.dtype)).softmax(-1).amax(-1, keepdim=True)
        h = nn.functional.gelu(self.up(h.to(self.up.weight.dtype)))
        return x + self.down(h) * gate.to(x.dtype) * self.scale.to(x.dtype)


class Model(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 7, hidden: int = 12, vocab: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Mixed(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        h = self.embed(batch)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return world_mesh(*shape, names=("replicate", "shard")[-len(shape) :])


def sharded(plain: nn.Module, policy: Any, shape: tuple[int, ...], **options: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    mesh = mesh_of(shape)
    root = {name: options.pop(name) for name in ("memory", "prefetch", "strict") if name in options}
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    return sw.fully_shard(model, mesh=mesh, mp_policy=policy, **options, **root)


FLOAT32 = sw.MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)


def by_function(name: str, parameter: nn.Parameter) -> sw.MixedPrecisionPolicy | None:
    return FLOAT32 if "norm" in name or "router" in name else None


#: Ways of saying the same, and a policy of one reduction only.
PER_PARAMETER = {"function": by_function, "mapping": {"*norm*": FLOAT32, "router.*": FLOAT32}}


def plain_copy(model: nn.Module, compute: torch.dtype) -> Any:
    """In the dtypes that the policies say: norms and routers in float32."""
    work = copy.deepcopy(model)
    for name, p in work.named_parameters():
        p.data = p.data.to(FP32 if "norm" in name or "router" in name else compute)
    return work


def check_gradients(model: nn.Module, work: list[list[nn.Parameter]], micros: int, tolerance: Any) -> None:
    """``work[micro][rank]`` lists parameters of plain copies with their gradients; each micro-batch's is the mean."""
    for i, (name, p) in enumerate(model.named_parameters()):
        wanted = torch.zeros(p.shape)
        for ranks in work:
            wanted += torch.stack([parameters[i].grad.float() for parameters in ranks]).mean(0)
        error = (whole(p.grad).float() - wanted).abs().max().item()
        assert error <= tolerance(name) * max(wanted.abs().max().item(), 1e-3), f"{name}: off by {error:.2e}"


class Row(NamedTuple):
    place: tuple[str, tuple[int, ...]]
    layout: str
    said: str
    reduce: torch.dtype
    grad: torch.dtype | None
    accumulate: torch.dtype | None
    micros: str

    def shows(self, strength: int) -> Iterator[Hashable]:
        yield from together(strength, *self)


ROWS = select(
    [
        Row(*row)
        for row in itertools.product(
            PLACES,
            LAYOUTS,
            PER_PARAMETER,
            (FP32, BF16),
            (None, BF16),
            (None, FP32),
            ("one", "held", "late"),
        )
        if not (row[4] is BF16 and row[5] is FP32)
    ],
    Row.shows,
)


@multirank(1, 2, 3, 4)
def test_dtypes_are_chosen_separately(rank: int, world_size: int) -> None:
    for row in ROWS:
        if math.prod(row.place[1]) == world_size:
            check_row(row, rank, world_size)


def check_row(row: Row, rank: int, world_size: int) -> None:
    strategy, shape = row.place
    policy = sw.PrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=row.reduce,
        cast_forward_inputs=False,
        grad_dtype=row.grad,
        accumulate_dtype=row.accumulate,
        per_parameter=PER_PARAMETER[row.said],
    )
    plain = build()
    model = sharded(plain, policy, shape, strategy=strategy, layout=row.layout)
    seen: dict[str, torch.dtype] = {}
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda m, _: seen.update({n: p.dtype for n, p in m.named_parameters()})
        )
    micros = 1 if row.micros == "one" else 3
    work: list[list[nn.Parameter]] = []
    for micro in range(micros):
        last = micro == micros - 1
        model.set_requires_gradient_sync(last or row.micros != "held")
        model.set_is_last_backward(last)
        ranks = []
        for r in range(world_size):
            copied = plain_copy(plain, BF16)
            batch = tokens(0, micro, r)
            loss = loss_of(copied(batch), batch)
            loss.backward()
            ranks.append(list(copied.parameters()))
            if r == rank:
                found = loss_of(model(batch), batch)
                assert found.item() == pytest.approx(loss.item(), rel=1e-6), row
                found.backward()
        work.append(ranks)
    for name, dtype in seen.items():
        assert dtype is (FP32 if "norm" in name or "router" in name else BF16), name

    def tolerance(name: str) -> float:
        single = ("norm" in name or "router" in name) and name.startswith("blocks.")
        if (row.grad or FP32) is BF16 and not single:
            return 2e-2
        # Rounded once for each addition over ranks and micro-batches; float32 sums leave that of the last reduction.
        return 1e-5 if row.reduce is FP32 or single else 2e-2

    check_gradients(model, work, micros, tolerance)
    for name, p in model.named_parameters():
        single = ("norm" in name or "router" in name) and name.startswith("blocks.")
        assert p.dtype is FP32 and p.grad.dtype is (FP32 if single else row.grad or FP32), name
    sw.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in (torch.optim.SGD(model.parameters(), 0.5), torch.optim.AdamW(model.parameters(), 0.1)):
        optimizer = sw.fully_shard_optimizer(optimizer)
        if row.grad is BF16 and not isinstance(optimizer, torch.optim.SGD):
            with pytest.raises(RuntimeError, match="Leave grad_dtype at None"):
                optimizer.step()
        else:
            before = [local_of(p).clone() for p in model.parameters()]
            optimizer.step()
            assert any(
                not torch.equal(b, local_of(p)) for b, p in zip(before, model.parameters(), strict=True)
            ) or (not any(b.numel() for b in before))


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@multirank(2, 4)
@pytest.mark.parametrize("accumulate", [None, FP32])
def test_held_sums_in_float32_lose_nothing(
    rank: int, world_size: int, accumulate: torch.dtype | None
) -> None:
    """Seven times 1 added to 256: bfloat16 keeps none of them, float32 all; then the sum is rounded once."""
    meshes = [((world_size,), "zero3", "held")] + ([((2, 2), "hsdp", "late")] if world_size == 4 else [])
    for shape, strategy, how in meshes:
        policy = sw.PrecisionPolicy(reduce_dtype=BF16, accumulate_dtype=accumulate)
        model: Any = sw.fully_shard(Dot(), mesh=mesh_of(shape), strategy=strategy, mp_policy=policy)
        for micro in range(9):
            model.set_requires_gradient_sync(how == "late" or micro == 8)
            model.set_is_last_backward(micro == 8)
            model(torch.full((4,), 256.0 if micro == 0 else 1.0)).backward()
        found = local_of(model.weight.grad)
        wanted = 264.0 if accumulate is FP32 else 256.0
        assert torch.equal(found, torch.full_like(found, wanted)), (how, found)


# -- eval mode -------------------------------------------------------------------------------------------------------


@pytest.mark.central("outer gathers need two axes", ranks=4)
@pytest.mark.extensive("each number of ranks", but=("dynamic-1ranks", "dynamic-4ranks"))
@multirank(1, 2, 3, 4)
@pytest.mark.parametrize("memory", ["dynamic", "arena"])
def test_evaluation_in_full_precision(rank: int, world_size: int, memory: str) -> None:
    """The bits of the plain float32 model, between steps that compute in bfloat16 and go on as without evaluations."""
    for i, ((strategy, shape), layout) in enumerate(itertools.product(PLACES, LAYOUTS)):
        # Every two of place, layout and memory meet.
        if math.prod(shape) != world_size or (i + i // len(LAYOUTS)) % 2 == (memory == "arena"):
            continue
        plain = build()
        models = []
        for full in (True, False):
            policy = sw.PrecisionPolicy(
                param_dtype=BF16, reduce_dtype=FP32, output_dtype=BF16, full_precision_in_eval=full
            )
            models.append(
                sharded(plain, policy, shape, strategy=strategy, layout=layout, memory=memory, prefetch=2)
            )
        optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in models]
        model = models[0]
        batch = tokens(0, 5, rank)
        for step in range(3):
            for each, optimizer in zip(models, optimizers, strict=True):
                loss = loss_of(each(tokens(step, 0, rank)), tokens(step, 0, rank))
                if each is model:
                    evaluate(model, plain, batch)  # between forward and backward
                loss.backward()
                if each is model:
                    evaluate(model, plain, batch)
                optimizer.step()
                optimizer.zero_grad()
            states = [m.state_dict() for m in models]
            for name in states[0]:
                assert torch.equal(*(whole(s[name]) for s in states)), name
            plain.load_state_dict({name: whole(value) for name, value in states[0].items()})
            evaluate(model, plain, batch)
            model.blocks[0].unshard()
            assert model.blocks[0].up.weight.dtype is BF16
            model.blocks[0].reshard()
        if memory == "arena":
            report = sw.memory_report(model)
            assert report.leases[0] and not report.leases[1], "evaluations are outside of plans"


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def evaluate(model: Any, plain: nn.Module, batch: torch.Tensor) -> None:
    model.eval()
    for _ in range(2):
        found = model(batch)
        assert found.dtype is FP32 and torch.equal(found, plain(batch))
    edited = [local_of(p) for p in model.parameters()]
    assert all(t.dtype is FP32 for t in edited)
    model.train()


@multirank(2)
@pytest.mark.parametrize("memory", PLANNED)
def test_a_plan_made_while_evaluating_is_that_of_training(rank: int, world_size: int, memory: str) -> None:
    """The first call after the recorded step makes it."""
    policy = sw.PrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, full_precision_in_eval=True)
    model = sharded(build(), policy, (2,), memory=memory, strict=True)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        loss_of(model(tokens(step, 0, rank)), tokens(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(tokens(step, 1, rank))
        model.train()
    assert sw.memory_report(model).leases[0] > 0  # of the plan


@multirank(2)
def test_full_precision_refusals_and_edits(rank: int, world_size: int) -> None:
    policy = sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True)
    plain = build()
    model = sharded(plain, policy, (2,), reshard_after_forward=False).eval()
    batch = tokens(0, 0, rank)
    with pytest.raises(RuntimeError, match="called in eval mode with gradients enabled"):
        model(batch)
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))
        for one in (model, plain):
            for p in one.parameters():
                local_of(p).mul_(1.5)
        assert torch.equal(model(batch), plain(batch))
        model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()}, assign=True)
        plain.load_state_dict({n: v * 2 for n, v in plain.state_dict().items()})
        assert torch.equal(model(batch), plain(batch))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(batch), plain(batch))
    model.train()
    loss = loss_of(model(batch), batch)
    with torch.no_grad():
        model.eval()(batch)
        for p in model.parameters():
            p.mul_(0.5)
        model(batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    other = copy.deepcopy(plain)
    sw.fully_shard(other.blocks[0], mesh=mesh_of((2,)), mp_policy=policy)
    sw.fully_shard(other, mesh=mesh_of((2,)), mp_policy=sw.MixedPrecisionPolicy(param_dtype=BF16))
    with pytest.raises(ValueError, match="applies to a whole model"):
        other(batch)


@multirank(4)
def test_full_precision_beside_tensor_parallelism(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2, names=("data", "tensor"))
    policy = sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    model: Any = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sw.fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank // 2))
    for _ in range(2):
        out = model.train()(x)
        assert out.dtype is BF16
        out.float().square().mean().backward()
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), plain(x), rtol=1e-6, atol=1e-6)


# -- buffers, refusals -----------------------------------------------------------------------------------------------


@multirank(2)
def test_buffers_are_cast_by_policy(rank: int, world_size: int) -> None:
    plain = build()
    ignored = set(plain.blocks[1].parameters())
    model: Any = plain
    sw.fully_shard(
        model,
        mesh=mesh_of((2,)),
        mp_policy=sw.PrecisionPolicy(buffer_dtype=BF16),
        ignored_params=ignored,
    )
    before = {name: b.clone() for name, b in model.named_buffers()}
    model(tokens(0, 0, rank))
    assert model.blocks[0].scale.dtype is BF16 and model.blocks[1].scale.dtype is FP32
    state = model.state_dict()
    assert all(state[name].dtype is FP32 for name in before)
    assert torch.equal(state["blocks.0.scale"], before["blocks.0.scale"].to(BF16).float())
    assert copy.deepcopy(model).state_dict()["blocks.0.scale"].dtype is FP32
    model.load_state_dict({**state, "blocks.0.scale": torch.full((7,), 2.0)})
    assert model.blocks[0].scale.dtype is BF16 and model.blocks[0].scale[0] == 2.0
    other = sharded(build(), sw.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), (2,))
    assert other.blocks[0].scale.dtype is FP32


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"grad_dtype": torch.int32}, "grad_dtype must be a floating-point torch.dtype or None"),
        ({"grad_dtype": BF16, "accumulate_dtype": FP32}, "reduced micro-batches add up in .grad"),
        ({"buffer_dtype": BF16, "full_precision_in_eval": True}, "Leave buffer_dtype at None"),
        ({"full_precision_in_eval": 1}, "must be True or False"),
        ({"per_parameter": 3}, "a function"),
        ({"per_parameter": {"*": sw.MixedPrecisionPolicy(output_dtype=BF16)}}, "output_dtype"),
        ({"per_parameter": {"*": BF16}}, "must return a MixedPrecisionPolicy"),
    ],
)
def test_policies_that_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sw.PrecisionPolicy(**options)


# -- float16 with a scaler -------------------------------------------------------------------------------------------


@multirank(2, 3, 4)
def test_float16_with_a_scaler(rank: int, world_size: int) -> None:
    """An inf in one shard alone makes every rank skip the step, and the scale falls on all of them."""
    for (strategy, shape), layout in itertools.product(PLACES, LAYOUTS):
        if math.prod(shape) != world_size:
            continue
        plain = build()
        policy = sw.MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32, cast_forward_inputs=False)
        model = sharded(plain, policy, shape, strategy=strategy, layout=layout)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), 0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            before = [local_of(p).clone() for p in model.parameters()]
            loss = loss_of(model(tokens(step, 0, rank)), tokens(step, 0, rank))
            scaler.scale(loss).backward()
            if step == 1:  # in one shard, and in its replicas
                p = model.head.weight
                marker = torch.zeros(p.shape)
                marker[-1, -1] = torch.inf
                local_of(p.grad).add_(unit_of(p).managed(p).cut.part_of(marker))
            scaler.unscale_(optimizer)
            norm = sw.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(b, local_of(p)) for b, p in zip(before, model.parameters(), strict=True))
            assert same == (step == 1 or not any(b.numel() for b in before)), (strategy, layout, step)
            assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
            assert torch.isfinite(norm) == (step != 1)
        assert len({unit.number for unit in units_of(model)}) == 3


# -- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


@multirank(2)
def test_examples_of_the_precision_page_run(rank: int, world_size: int) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    plain, batch = build(), tokens(0, 0, rank)
    names = {
        "sw": sw,
        "torch": torch,
        "mesh": mesh_of((2,)),
        "model": build(),
        "build": build,
        "shard": lambda model, policy: sharded(model, policy, (2,)),
        "loss_of": lambda model: loss_of(model(batch), batch),
    }
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert torch.equal(names["loss"], loss_of(plain(batch), batch))  # type: ignore[arg-type]
