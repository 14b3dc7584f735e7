"""Weights used without a call of the unit that owns them: equal to the plain model, which needs no sharding.

`kit/direct.py` has the programs. `features.py` crosses such uses with every feature of the engine.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from tests.engine.kit.direct import DIM, PROGRAMS, Layer, Towers, data, loss_of
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

BF16 = torch.bfloat16
#: Options of all units, and options of the root alone.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero3": ({}, {}),
    "ragged": ({"layout": "ragged"}, {"prefetch": 2}),
    "zero2": ({"strategy": "zero2", "layout": "ragged"}, {}),
    "zero1": ({"strategy": "zero1"}, {"memory": "arena"}),
    "ddp": ({"strategy": "ddp"}, {}),
    "arena": ({}, {"memory": "arena"}),
    "max_pool": ({"layout": "ragged"}, {"memory": "max_pool"}),
    "kept": ({"reshard_after_forward": False}, {}),
}
WAYS = (
    "plain", "bfloat16", "autocast", "reduced", "held", "in backward", "deferred", "frozen in part", "clipped",
    "evaluated", "twice backward",
)  # fmt: skip
#: GRU asks for the stored dtype of its weights in C++; a function of the program has no rule for autocast.
NOT_A_CASE = {
    ("kinds of modules", "bfloat16"), ("own function", "autocast"), ("gradient in a buffer", "autocast"),
    ("gradient in a buffer", "bfloat16"), ("reentrant towers", "twice backward"),
    ("kinds of modules", "evaluated"),  # attention in eval has another kernel for plain tensors
}  # fmt: skip
ROWS = select(
    [row for row in itertools.product(PROGRAMS, PLACES, WAYS) if (row[0], row[2]) not in NOT_A_CASE],
    lambda row, strength: together(strength, *row),
)


def shard(model: Any, options: dict[str, Any], of_root: dict[str, Any]) -> Any:
    for unit in model.units():
        sw.fully_shard(unit, **options)
    return sw.fully_shard(model, **options, **of_root)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)


def plain_backward(name: str, plain: Any, ranks: int, step: int, way: str) -> None:
    """Gradients of every rank's data, averaged, of a copy in the dtype that computes."""
    for rank in range(ranks):
        work = copy.deepcopy(plain).to(BF16) if way == "bfloat16" else plain
        with torch.autocast("cpu", BF16, enabled=way == "autocast"):
            loss = loss_of(name, work, rank, step)
        if work is plain:
            (loss / ranks).backward()
            continue
        loss.backward()
        for p, q in zip(plain.parameters(), work.parameters(), strict=True):
            if q.grad is not None:
                p.grad = q.grad.float() / ranks + (0 if p.grad is None else p.grad)


@multirank(2, 3)
@pytest.mark.parametrize(("name", "place", "way"), ROWS)
def test_programs_train_as_the_plain_model(
    rank: int, world_size: int, name: str, place: str, way: str
) -> None:
    options, of_root = PLACES[place]
    if way == "bfloat16":
        policy = sw.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        options = {**options, "mp_policy": policy}
    torch.manual_seed(0)
    plain = PROGRAMS[name].model()
    model = copy.deepcopy(plain)
    if way == "deferred":
        torch.manual_seed(0)
        with sw.deferred_init():
            model = PROGRAMS[name].model()
    if way == "frozen in part":
        for each in (plain, model):
            for number, p in enumerate(each.parameters()):
                p.requires_grad_(number % 3 != 0)
    shard(model, options, of_root)
    if way == "deferred":
        sw.materialize(model)
    expected = sgd(plain)
    optimizer = sw.optim.in_backward(sgd(model)) if way == "in backward" else sgd(model)
    micros = 2 if way in ("reduced", "held") else 1
    for step in range(3):
        for micro in range(micros):
            plain_backward(name, plain, world_size, 10 * step + micro, way)
            if way == "reduced":
                model.set_is_last_backward(micro == micros - 1)
            if way == "held":
                model.set_requires_gradient_sync(micro == micros - 1)
            with torch.autocast("cpu", BF16, enabled=way == "autocast"):
                loss = loss_of(name, model, rank, 10 * step + micro)
            if way == "twice backward":
                (loss / 2).backward(retain_graph=True)
                loss = loss / 2
            loss.backward()
        if way == "clipped":
            norms = [
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
                sw.clip_grad_norm_(model.parameters(), 0.1),
            ]
            torch.testing.assert_close(full(norms[1]), norms[0])
        if way != "in backward":
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
        for each in (expected, optimizer):
            each.step()
            each.zero_grad()
        if way == "evaluated":
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    torch.testing.assert_close(
                        loss_of(name, model.eval(), rank, step), loss_of(name, plain.eval(), rank, step)
                    )
            plain.train(), model.train()
    tolerance = 2e-3 if way in ("autocast", "bfloat16") else 2e-6
    for (parameter, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p, atol=tolerance, rtol=0, msg=lambda m, n=parameter: f"{n}: {m}")


@multirank(4)
@pytest.mark.parametrize("name", ["towers", "checkpointed towers", "inner methods", "captured", "fused loss"])
def test_beside_tensor_parallelism(rank: int, world_size: int, name: str) -> None:
    mesh = world_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    plain = PROGRAMS[name].model()
    model = copy.deepcopy(plain)
    for unit in model.units():
        if isinstance(unit, Layer):
            parallelize_module(unit, mesh["tensor"], {"mlp.1": ColwiseParallel(), "mlp.3": RowwiseParallel()})
        sw.fully_shard(unit, mesh=mesh["data"])
    sw.fully_shard(model, mesh=mesh["data"])
    optimizers = [sgd(plain), sgd(model)]
    for step in range(2):
        plain_backward(name, plain, 2, step, "plain")
        loss_of(name, model, rank // 2, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p, atol=2e-6, rtol=0)


class CompiledParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.compile(lambda x, layer=layer: F.silu(layer.mlp[1](x)), backend="eager")(x)[..., :DIM]
        return x


@multirank(2)
def test_compiled_functions_use_weights(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = CompiledParts()
    model = shard(copy.deepcopy(plain), {}, {})
    for step in range(2):
        gradients = []
        for each, ranks in ((plain, range(world_size)), (model, [rank])):
            each.zero_grad()
            for r in ranks:
                (each(*data(r, step)[:2]).pow(2).mean() / len(ranks)).backward()
            gradients.append([None if p.grad is None else full(p.grad) for p in each.parameters()])
        torch.testing.assert_close(*gradients)


# -- what it costs -----------------------------------------------------------------------------------------------------


@contextmanager
def gathers_of(model: Any) -> Iterator[tuple[list[str], list[int]]]:
    """The names of units as they are gathered, and the number of units that have their weights then."""
    names: list[str] = []
    together: list[int] = []
    units = [m._fsdp_unit() for m in model.modules() if isinstance(m, sw.FSDPModule)]

    def issue(original: Any, weights: Any, *args: Any) -> None:
        original(*args)
        names.append(weights.label)
        together.append(sum(unit.weights.gathered for unit in units))

    for unit in units:
        unit.weights.issue = lambda *args, w=unit.weights, original=unit.weights.issue: issue(
            original, w, *args
        )
    try:
        yield names, together
    finally:
        for unit in units:
            del unit.weights.issue


@multirank(2)
def test_each_unit_is_gathered_once_in_each_direction(rank: int, world_size: int) -> None:
    """With the root, a pair of layers, and the next layer ahead: never more."""
    torch.manual_seed(0)
    model = shard(Towers(), {}, {})
    for step in range(3):
        with gathers_of(model) as (names, most):
            loss_of("towers", model, rank, step).backward()
        assert sorted(names) == sorted(
            [""] + 2 * [f"{tower}.{n}" for tower in ("one", "two") for n in range(3)]
        )
        assert max(most) <= 4


@multirank(2)
def test_the_order_of_uses_is_learnt(rank: int, world_size: int) -> None:
    """In the first step a unit is gathered again where its parts are used between calls; later it stays for them."""
    torch.manual_seed(0)
    model = shard(PROGRAMS["inner methods"].model(), {}, {})
    counts = []
    for step in range(4):
        with gathers_of(model) as (names, _):
            loss_of("inner methods", model, rank, step).backward()
        counts.append(len(names))
    assert counts[0] > counts[1] == counts[2] == counts[3] <= 9


@multirank(2)
def test_metadata_gathers_nothing(rank: int, world_size: int) -> None:
    model = shard(Towers(), {}, {"prefetch": 0})

    def asks(module: Any, args: Any) -> None:
        weight = model.one[0].self_attn.q_proj.weight
        assert weight.shape == (DIM, DIM) and weight.requires_grad and weight.dtype is torch.float32
        assert torch.ones(2).to(weight).dtype is torch.float32
        assert next(model.two.parameters()).dim() == 1

    model.register_forward_pre_hook(asks)
    with gathers_of(model) as (names, _), torch.no_grad():
        model(*data(rank, 0)[:2])
    assert len(names) == 7


@multirank(2)
def test_a_program_sees_the_dtype_that_computes(rank: int, world_size: int) -> None:
    model = shard(Towers(), {"mp_policy": sw.MixedPrecisionPolicy(param_dtype=BF16)}, {})
    seen = []
    weight = model.one[1].self_attn.q_proj.weight
    model.register_forward_pre_hook(lambda module, args: seen.append(weight.dtype))
    loss_of("towers", model, rank, 0).backward()
    assert seen == [BF16] and weight.dtype is torch.float32


# -- failures ----------------------------------------------------------------------------------------------------------


@multirank(2)
def test_a_failed_use_leaves_the_next_step_right(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Towers()
    model = shard(copy.deepcopy(plain), {}, {})
    for step in range(3):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            handle = model.register_forward_hook(
                lambda m, a, o: F.linear(o[..., :2], m.one[2].self_attn.q_proj.weight)
            )
            model(*data(rank, step)[:2])
        handle.remove()
        plain.zero_grad()
        model.zero_grad()
        plain_backward("towers", plain, world_size, step, "plain")
        loss_of("towers", model, rank, step).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(q.grad), p.grad, atol=1e-6, rtol=0)


@multirank(2)
def test_ranks_that_use_other_units_are_named(rank: int, world_size: int) -> None:
    model = shard(Towers(), {}, {"prefetch": 0})
    loss_of("towers", model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"diverged.*'one\.[01]'"):
        F.linear(torch.ones(2, DIM), model.one[rank].self_attn.q_proj.weight)


@pytest.mark.skipif(not subclasses_dispatch, reason="edits are not seen there")
@multirank(2)
def test_an_edit_between_a_part_and_its_use_is_refused(rank: int, world_size: int) -> None:
    model = shard(Towers(), {}, {})
    weight = model.one[0].self_attn.q_proj.weight
    scaled = 2.0 * weight
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="after the parameter had been edited"):
        torch.ones(2, DIM) @ scaled


class Drawing(nn.Module):
    """Uses one draw of a mask twice, and a weight after more steps than are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def units(self) -> list[nn.Module]:
        return [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(self.layer.self_attn.q_proj.weight, 0.5)
        deep = self.layer.self_attn.k_proj.weight
        for _ in range(120):
            deep = deep * 0.99
        return x @ mask - x @ mask + x @ deep


@multirank(2)
def test_random_and_deep_functions_of_weights(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Drawing()
    model = shard(copy.deepcopy(plain), {}, {})
    x = data(rank, 0)[1]
    torch.testing.assert_close(model(x), plain(x))


@multirank(2)
def test_kernels_get_no_part_of_a_weight(rank: int, world_size: int) -> None:
    model = shard(Towers(), {}, {})
    weight = model.one[1].self_attn.q_proj.weight
    handle = model.register_forward_pre_hook(lambda module, args: weight.data_ptr())
    with pytest.raises(RuntimeError, match=r"kernel asked for the memory of a parameter of unit 'one\.1'"):
        loss_of("towers", model, rank, 0)
    handle.remove()
    loss_of("towers", model, rank, 0).backward()


@multirank(2)
def test_inside_a_transform_it_is_refused(rank: int, world_size: int) -> None:
    model = shard(Towers(), {}, {})
    with pytest.raises(NotImplementedError, match=r"unit 'Layer' .* inside a transform"):
        torch.func.vmap(lambda x: F.linear(x, model.one[0].self_attn.q_proj.weight))(torch.ones(2, DIM))
