"""The chunked cross-entropy beside the plain loss of all logits: losses, gradients, gathers and memory."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.activations import chunked_loss, held_gradients
from tests.activations.models import LossModel, Plain, batch, built, plain_loss
from tests.engine.kit.models import full
from tests.engine.kit.tensor_parallel import data_mesh, mesh_of, on_meshes, parallelize
from tests.support import multirank
from tests.support.matrix import select, together

BF16, FP32 = torch.bfloat16, torch.float32
FACTOR = 1 / 7
#: Sums in another order. In bfloat16 a gradient rounds to 8 bits before the ranks add it and after the loss's factor.
TOLERANCE = {FP32: 2e-6, BF16: 3e-2}
UNITS = ("head", "norm and head", "root", "root alone")


# -- one device --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("chunks", [1, 3, 100, "auto"])
def test_losses_are_equal_and_gradients_round(dtype: torch.dtype, chunks: int | str) -> None:
    model = built(chunks=chunks, cap=3.0).to(dtype)
    plain = Plain(model, dtype, FACTOR)
    loss_sum, losses = model(*batch(1, ignores=True))
    # The CPU has another kernel for products of one row.
    torch.testing.assert_close(
        losses, plain.losses(1, ignores=True), rtol=0, atol=1e-6 if chunks == 100 and dtype == FP32 else 0
    )
    assert loss_sum.dtype == FP32
    assert not losses.requires_grad
    (loss_sum * FACTOR).backward()
    _compare(model, plain.gradients([1], 1, ignores=True), dtype)


def test_a_weight_is_no_head() -> None:
    head = nn.Linear(5, 9)
    with pytest.raises(TypeError, match=r"head: expected the module .* got a Parameter; a module gathers"):
        sw.chunked_cross_entropy(torch.randn(3, 5), head.weight, torch.arange(3))  # type: ignore[arg-type]


def test_weights_are_factors_of_the_losses() -> None:
    torch.manual_seed(0)
    head, hidden, targets = (
        nn.Linear(5, 9),
        torch.randn(2, 6, 5, requires_grad=True),
        torch.randint(0, 9, (2, 6)),
    )
    weights = torch.rand(2, 6)
    losses = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="none")
    expected = torch.autograd.grad((losses * weights.flatten()).sum(), [hidden, head.weight, head.bias])
    loss_sum, found = sw.chunked_cross_entropy(hidden, head, targets, chunks=4, weights=weights)
    assert torch.equal(found.flatten(), losses)
    assert torch.equal(loss_sum, (losses * weights.flatten()).sum())
    torch.testing.assert_close(torch.autograd.grad(loss_sum, [hidden, head.weight, head.bias]), expected)


def test_without_gradients_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "HeldGradients", None)
    model = built(chunks=3)
    with torch.no_grad():
        loss_sum, losses = model(*batch(1, ignores=False))
    assert not loss_sum.requires_grad
    assert torch.equal(losses, Plain(model, FP32, 1).losses(1, ignores=False))
    head = model.head.requires_grad_(False)
    assert not sw.chunked_cross_entropy(torch.randn(4, 7), head, torch.zeros(4, dtype=torch.int64))[
        0
    ].requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_needed_gradients_are_made(frozen: str) -> None:
    head, hidden = nn.Linear(5, 9, bias=False), torch.randn(6, 5, requires_grad=frozen != "hidden")
    head.weight.requires_grad_(frozen != "weight")
    expected = torch.autograd.grad(
        F.cross_entropy(head(hidden), torch.arange(6), reduction="sum"),
        head.weight if frozen == "hidden" else hidden,
    )
    loss_sum, _ = sw.chunked_cross_entropy(hidden, head, torch.arange(6), chunks=2)
    loss_sum.backward()
    found, missing = (head.weight, hidden) if frozen == "hidden" else (hidden, head.weight)
    torch.testing.assert_close(found.grad, *expected)
    assert missing.grad is None


class Head(nn.Linear):
    """Uses its matrix in one product, in two, in a product and elsewhere, or in a product of autocast."""

    use = "once"

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=self.use == "autocast"):
            logits = super().forward(x)
        if self.use == "twice":
            logits = logits + F.linear(x * 2, self.weight)
        return logits + self.weight.sum(1) if self.use == "elsewhere, too" else logits


class Products(TorchDispatchMode):
    """The largest result of a product of two matrices, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("use", ["once", "twice", "elsewhere, too", "autocast"])
def test_the_gradient_of_a_matrix_is_made_in_its_sum(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, use: str
) -> None:
    """The gradient of a chunk would have 23 x 50 elements. The products in bfloat16 are in pieces."""
    monkeypatch.setattr(held_gradients, "_PIECE", 4 * 50 * 2)  # four rows of bfloat16
    torch.manual_seed(0)
    head, hidden = Head(50, 23, bias).to(dtype), torch.randn(9, 50, dtype=dtype, requires_grad=True)
    head.use = use
    leaves = [hidden, *head.parameters()]
    logits = head(hidden).float()
    expected = torch.autograd.grad(F.cross_entropy(logits, torch.arange(9), reduction="sum"), leaves)
    with Products() as products:
        loss_sum, _ = sw.chunked_cross_entropy(hidden, head, torch.arange(9), chunks=3)
    if use in ("once", "twice"):
        assert products.largest < 23 * 50
    rounds = dtype == BF16 or use == "autocast"
    for found, wanted in zip(torch.autograd.grad(loss_sum, leaves), expected, strict=True):
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=(2e-2 if rounds else 1e-6) * wanted.abs().max()
        )


def test_an_adapter_on_a_frozen_head_is_trained() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 9)
            self.requires_grad_(False)
            self.low, self.high = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(9, 2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.low.T @ self.high.T

    torch.manual_seed(0)
    head, hidden, targets = Adapted(), torch.randn(6, 5), torch.arange(6)
    losses = F.cross_entropy(head(hidden), targets, reduction="sum")
    expected = torch.autograd.grad(losses, [head.low, head.high])
    sw.chunked_cross_entropy(hidden, head, targets, chunks=3)[0].backward()
    torch.testing.assert_close((head.low.grad, head.high.grad), expected)
    assert head.weight.grad is None


def test_hooks_of_the_weight_see_one_gradient() -> None:
    head, seen = nn.Linear(5, 9), []
    head.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    sw.chunked_cross_entropy(torch.randn(6, 5), head, torch.arange(6), chunks=3)[0].backward()
    assert seen == [(9, 5)]


def test_hooks_of_the_head_prepare_its_input_and_change_its_logits() -> None:
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(5, 9), torch.randn(6, 5), torch.arange(6)
    calls = []
    head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    head.register_forward_hook(lambda _, args, logits: calls.append(len(logits)) or logits / 3)
    expected = F.cross_entropy(head(hidden), targets, reduction="none")
    calls.clear()
    _, losses = sw.chunked_cross_entropy(hidden, head, targets, chunks=3)
    assert torch.equal(losses, expected.detach())
    assert calls == [2, 2, 2]
    assert len(head._forward_pre_hooks) == len(head._forward_hooks) == 1
    assert "forward" not in head.__dict__


def test_a_second_backward_needs_the_graph() -> None:
    head, hidden = nn.Linear(5, 9), torch.randn(6, 5, requires_grad=True)
    loss_sum, _ = sw.chunked_cross_entropy(hidden, head, torch.arange(6))
    first = torch.autograd.grad(loss_sum, [hidden, head.weight], retain_graph=True)
    second = torch.autograd.grad(loss_sum, [hidden, head.weight])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"a second time .* Pass retain_graph=True"):
        loss_sum.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    model = built(chunks=3)
    plain = Plain(model, FP32, 1)
    tokens, targets = batch(1, ignores=False)
    embedded = model.embed(tokens)

    def rest(h: Tensor) -> Tensor:
        for block in model.blocks:
            h = block(h)
        return sw.chunked_cross_entropy(model.norm(h), model.head, targets, chunks=3)[0]

    checkpoint(rest, embedded, use_reentrant=reentrant).backward()
    _compare(model, plain.gradients([1], 1, ignores=False), FP32)


@pytest.mark.extensive("a compiled graph")
def test_a_compiled_model() -> None:
    model = built(chunks=3)
    plain = Plain(model, FP32, 1)
    compiled = torch.compile(model, backend="aot_eager")
    loss_sum, losses = compiled(*batch(1, ignores=False))
    torch.testing.assert_close(losses, plain.losses(1, ignores=False))
    loss_sum.backward()
    _compare(model, plain.gradients([1], 1, ignores=False), FP32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 0}, "chunks: expected a number of chunks, 1 or more"),
        ({"chunks": True}, "chunks: expected"),
        ({"chunks": "many"}, "chunks: expected"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets: expected .* \[6, 5\].* got shape \[5\]"),
        ({"targets": torch.zeros(6)}, "dtype float32"),
        ({"weights": torch.zeros(5)}, "weights: expected a factor for each target"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sw.chunked_cross_entropy(
            torch.randn(6, 5), nn.Linear(5, 9), **({"targets": torch.arange(6)} | arguments)
        )


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_that_would_be_lost_are_refused(frozen: bool) -> None:
    head, scale = nn.Linear(5, 9).requires_grad_(not frozen), nn.Parameter(torch.tensor(2.0))
    arguments: dict[str, Any] = {"hidden": torch.randn(6, 5), "head": head, "targets": torch.arange(6)}
    factors = torch.rand(6, requires_grad=True)
    with pytest.raises(ValueError, match=r"weights: expected .* no gradient"):
        sw.chunked_cross_entropy(**arguments, weights=factors)
    for logits in (lambda x: x * scale, lambda x: x * scale.exp()):
        with pytest.raises(ValueError, match=r"logits: a tensor of shape \[\] .* no parameter of the head"):
            sw.chunked_cross_entropy(**arguments, logits=logits)
    with torch.no_grad():
        sw.chunked_cross_entropy(**arguments, weights=factors, logits=lambda x: x * scale)
    sw.chunked_cross_entropy(**arguments, weights=factors.detach(), logits=lambda x: x * scale.detach())


def test_a_parameter_of_the_head_may_be_in_the_function() -> None:
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(5, 9), torch.randn(6, 5), torch.arange(6)
    head.scale = nn.Parameter(torch.tensor(2.0))
    loss = F.cross_entropy(head(hidden) * head.scale, targets, reduction="sum")
    expected = torch.autograd.grad(loss, [head.weight, head.scale])
    loss_sum, _ = sw.chunked_cross_entropy(hidden, head, targets, chunks=3, logits=lambda x: x * head.scale)
    torch.testing.assert_close(torch.autograd.grad(loss_sum, [head.weight, head.scale]), expected)


def test_automatic_chunks_have_256_mib_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "AUTO_BYTES", 4 * 9 * 4)  # four rows
    head, rows = nn.Linear(5, 9), []
    head.register_forward_hook(lambda _, args, logits: rows.append(len(logits)))
    sw.chunked_cross_entropy(torch.randn(10, 5), head, torch.zeros(10, dtype=torch.int64))
    assert rows == [4, 4, 2]


# -- sharded -----------------------------------------------------------------------------------------------------------


def _shard(model: LossModel, units: str, apply: Any = sw.fully_shard, **options: Any) -> Any:
    if units != "root alone":
        for block in model.blocks:
            apply(block, **options)
    if units == "head":
        apply(model.head, **options)
    elif units == "norm and head":
        apply([model.embed, model.norm, model.head], **options)
    return apply(model, **options)


def _cases() -> list[tuple[Any, ...]]:
    rows = itertools.product(
        UNITS,
        ("per_parameter", "ragged"),
        ("zero3", "zero2", "zero1", "ddp"),
        (False, True),  # tied
        (FP32, BF16),
        (1, 4, "auto"),
        (False, True),  # ignored targets
        ("single", "communicate", "hold"),
        (None, True, False),
    )
    legal = [row for row in rows if row[2] not in ("zero1", "zero2") or row[-1] is not True]
    return select(legal, lambda row, strength: together(strength, *row))


NAMES = ("units", "layout", "strategy", "tied", "dtype", "chunks", "ignores", "accumulate", "reshard")


@multirank(2)
@pytest.mark.parametrize(NAMES, _cases())
def test_sharded_training_equals_the_plain_model(
    rank: int,
    world_size: int,
    units: str,
    layout: str,
    strategy: str,
    tied: bool,
    dtype: torch.dtype,
    chunks: int | str,
    ignores: bool,
    accumulate: str,
    reshard: bool | None,
) -> None:
    model = built(tied=tied, chunks=chunks)
    plain = Plain(model, dtype, FACTOR)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
    sharded = _shard(
        model, units, layout=layout, strategy=strategy, mp_policy=policy, reshard_after_forward=reshard
    )
    micros = 1 if accumulate == "single" else 2
    for step in range(2):
        numbers = [[10 * step + 2 * micro + each for each in range(world_size)] for micro in range(micros)]
        for micro, of_ranks in enumerate(numbers):
            last = micro + 1 == micros
            sharded.set_requires_gradient_sync(accumulate != "hold" or last)
            sharded.set_is_last_backward(last)
            with torch.no_grad():
                _, evaluated = sharded(*batch(of_ranks[rank], ignores))
            loss_sum, losses = sharded(*batch(of_ranks[rank], ignores))
            assert torch.equal(losses, plain.losses(of_ranks[rank], ignores))
            assert torch.equal(losses, evaluated)
            (loss_sum * FACTOR).backward()
        expected = plain.gradients([*itertools.chain(*numbers)], world_size, ignores)
        _compare(model, expected, dtype)
        model.zero_grad()


def _compare(model: nn.Module, expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(
            full(p.grad).float(),
            expected[name],
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
            msg=f"{name}: {p.grad} for {expected[name]}",
        )


@multirank(2)
@pytest.mark.parametrize("units", ["head", "norm and head", "root"])
def test_under_torchs_own_engine(rank: int, world_size: int, units: str) -> None:
    model = built(chunks=3)
    plain = Plain(model, FP32, FACTOR)
    _shard(model, units, fsdp2)
    loss_sum, losses = model(*batch(rank, ignores=True))
    assert torch.equal(losses, plain.losses(rank, ignores=True))
    (loss_sum * FACTOR).backward()
    _compare(model, plain.gradients([0, 1], world_size, ignores=True), FP32)


@multirank(2)
@pytest.mark.parametrize("units", ["head", "root"])
def test_a_loop_may_call_it_outside_of_the_model(rank: int, world_size: int, units: str) -> None:
    """Body and head are parts of a model whose forward does not run."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 7)), nn.Linear(7, 11)

    model = Both()
    plain = copy.deepcopy(model)
    tokens, targets = batch(rank, ignores=False)
    _, expected_losses = plain_loss(plain.head(plain.body(tokens)), targets)
    for number in range(world_size):
        tokens_there, targets_there = batch(number, ignores=False)
        (plain_loss(plain.head(plain.body(tokens_there)), targets_there)[0] / world_size).backward()
    sw.fully_shard(model.body)
    if units == "head":
        sw.fully_shard(model.head)
    sw.fully_shard(model)
    for _ in range(2):
        loss_sum, losses = sw.chunked_cross_entropy(model.body(tokens), model.head, targets, chunks=3)
        assert torch.equal(losses, expected_losses)
        loss_sum.backward()
        _compare(model, {name: p.grad for name, p in plain.named_parameters()}, FP32)
        model.zero_grad()


def _tensor_parallel_cases() -> list[tuple[Any, ...]]:
    rows = itertools.product(
        [(1, 2), (2, 1)], ("tensor", "sequence"), (1, 3), ("head", "norm and head", "root")
    )
    return select(rows, lambda row, strength: together(strength, *row))


@on_meshes([(*row[:1], *row[1:]) for row in _tensor_parallel_cases()])
def test_tensor_parallel(
    rank: int, world_size: int, shape: tuple[int, ...], plan: str, chunks: int, units: str
) -> None:
    mesh = mesh_of(shape)
    data = mesh.get_coordinate()[0]
    model = built(chunks=chunks)
    plain = Plain(model, FP32, FACTOR)
    _shard(parallelize(model, mesh, plan), units, mesh=data_mesh(mesh))
    loss_sum, losses = model(*batch(data, ignores=True))
    torch.testing.assert_close(losses, plain.losses(data, ignores=True), rtol=1e-5, atol=1e-5)
    (loss_sum * FACTOR).backward()
    numbers = list(range(shape[0]))
    _compare(model, plain.gradients(numbers, shape[0], ignores=True), FP32)


@multirank(2)
def test_ranks_with_parts_of_the_classes_make_the_same_chunks(
    rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "AUTO_BYTES", 4 * 5 * 4)  # four rows of the rank with five classes
    torch.manual_seed(0)
    head, rows = nn.Linear(5, 9), []
    hidden, targets = torch.randn(10, 5, requires_grad=True), torch.arange(10) % 9
    expected = F.cross_entropy(head(hidden), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, hidden)
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, init_device_mesh("cpu", (2,)), style)
    head.register_forward_hook(lambda _, args, logits: rows.append(len(logits)))
    with loss_parallel():
        loss_sum, _ = sw.chunked_cross_entropy(hidden, head, targets)
    assert rows == [4, 4, 2]
    torch.testing.assert_close(loss_sum.detach(), expected.detach())
    loss_sum.backward()
    torch.testing.assert_close(hidden.grad, gradient)


# -- gathers and memory ------------------------------------------------------------------------------------------------


@multirank(2)
def test_backward_does_not_gather_a_head_of_its_own(rank: int, world_size: int) -> None:
    gathers: dict[Any, int] = {}
    for chunks in (None, 4):
        model = built(chunks=chunks)
        _shard(model, "head", reshard_after_forward=True)
        for _ in range(2):
            loss_sum, _ = model(*batch(rank, ignores=False))
            gathers[chunks] = _count_gathers(model.head, loss_sum)
    assert gathers == {None: 1, 4: 0}


def _count_gathers(head: Any, loss_sum: Tensor) -> int:
    from shardwright.engine import UNIT

    weights = head.__dict__[UNIT].weights
    calls, issue = [], weights.issue
    weights.issue = lambda *args: (calls.append(1), issue(*args))
    try:
        loss_sum.backward()
    finally:
        del weights.issue
    return len(calls)


@multirank(2)
@pytest.mark.parametrize("memory", ["dynamic", "arena"])
def test_the_held_gradient_is_in_the_report(rank: int, world_size: int, memory: str) -> None:
    model = built(chunks=4)
    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model.head)
    sw.fully_shard(model, memory=memory)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    nbytes = 4 * (11 * 7 + 3) + 4 * (11 + 5)  # the weight and the bias, each a multiple of 64 bytes
    for step in range(4):
        loss_sum, _ = model(*batch(rank + step, ignores=False))
        assert sw.memory_report(model).leased["head gradient"] == nbytes
        loss_sum.backward()
        assert "head gradient" not in sw.memory_report(model).leased
        optimizer.step()
        optimizer.zero_grad()
    report = sw.memory_report(model)
    assert not report.deviations
    planned = (
        [] if report.plan is None else [i.nbytes for i in report.plan.items if i.kind == "head gradient"]
    )
    assert planned == ([nbytes] if memory == "arena" else [])


@multirank(2)
def test_an_optimizer_in_backward(rank: int, world_size: int) -> None:
    models = [built(tied=True, chunks=chunks) for chunks in (None, 3)]
    for model in models:
        _shard(model, "root")
        optimizer = sw.optim.in_backward(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(3):
            (model(*batch(2 * step + rank, ignores=False))[0] / 10).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(full(one.detach()), full(other.detach()), rtol=1e-4, atol=1e-5)


@multirank(2)
def test_several_losses_of_one_head(rank: int, world_size: int) -> None:
    """As multi-token prediction has: two losses of a step, whose gradients exist at the same time."""

    class Two(LossModel):
        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            hidden = self.hidden(tokens)
            further = torch.tanh(hidden)
            if self.chunks is None:
                first, second = self.head(hidden), self.head(further)
                return plain_loss(first, targets)[0] + plain_loss(second, targets)[0] * 0.3, None
            first, _ = sw.chunked_cross_entropy(hidden, self.head, targets, chunks=self.chunks)
            second, _ = sw.chunked_cross_entropy(further, self.head, targets, chunks=self.chunks)
            return first + second * 0.3, None

    torch.manual_seed(0)
    model = Two(chunks=2)
    plain = Plain(model, FP32, 1)
    _shard(model, "head")
    for _ in range(2):
        model(*batch(rank, ignores=False))[0].backward()
        _compare(model, plain.gradients([0, 1], world_size, ignores=False), FP32)
        model.zero_grad()
