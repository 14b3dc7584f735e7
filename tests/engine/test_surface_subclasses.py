"""Tensor subclasses that transform what is gathered, as with torch's ``fully_shard``."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.kit.subclasses import (
    KINDS,
    LIBRARIES,
    Gathered,
    HalfGathered,
    IntGathered,
    Stored,
    TensorScaled,
    Wrapped,
    backward,
    check,
    data,
    full,
    gradients,
    local,
    loss_of,
    straight_through,
    whole,
    wrapped,
)
from tests.engine.kit.surface import Boom, Collectives, Policy, averaged, both, fail, ours, shard
from tests.support import multirank, world_mesh


@pytest.mark.extensive("both ways", but=("True-*",))
@multirank(2)
@both
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reshard", [True, False])
def test_subclasses_train(
    rank: int, world_size: int, library: str, kind: type[Stored], reshard: bool
) -> None:
    """Forward and backward see what the subclass makes of the gathered pieces; the optimizer sees float32 shards."""
    model, plain = wrapped(library, kind, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for micro in range(4):
        expected = straight_through(kind, plain, world_size, micro)
        for p in model.parameters():
            assert isinstance(p, DTensor)
        assert isinstance(local(model.first.weight), kind) and isinstance(local(model.last.weight), kind)
        with torch.no_grad():
            seen = {
                n: kind.seen(p) if n in ("first.weight", "last.weight") else p
                for n, p in plain.named_parameters()
            }
            torch.testing.assert_close(
                model(data(rank, micro)),
                torch.func.functional_call(plain, seen, (data(rank, micro),)),
                rtol=1e-5,
                atol=1e-6,
            )
        model.reshard()  # FSDP2 leaves the root gathered, with the weights of now
        backward(model, rank, micro)
        check(gradients(model), expected, tol=2e-5)
        for name, p in plain.named_parameters():
            p.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check({n: whole(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()), tol=1e-4)


@multirank(1)
@ours
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_on_one_rank(rank: int, world_size: int, library: str, kind: type[Stored]) -> None:
    """FSDP2 gathers nothing then, and hands only the first of several tensors over."""
    model, plain = wrapped(library, kind)
    for micro in range(2):
        backward(model, rank, micro)
        check(gradients(model), straight_through(kind, plain, world_size, micro), tol=2e-5)
        model.zero_grad()


@multirank(2)
@both
def test_what_subclasses_are_told(rank: int, world_size: int, library: str) -> None:
    policy = Policy(param_dtype=torch.float64)
    mesh = world_mesh(world_size)
    model, _ = wrapped(library, HalfGathered, mp_policy=policy)
    first = model.first
    first.unshard()
    (pre, post) = model.log
    assert pre == ("pre", mesh, torch.Size((6, 6)), (6, 1), first, policy, torch.Size((3, 6)))
    assert post == ("post", ((torch.Size((6, 6)), torch.bfloat16),), "metadata", torch.float64, None)
    unsharded = first.weight
    assert unsharded.dtype == torch.float64 and isinstance(unsharded, nn.Parameter)
    torch.testing.assert_close(unsharded, HalfGathered.seen(whole_of_seed(3)).double(), rtol=0, atol=0)
    first.reshard()
    assert isinstance(first.weight, DTensor)
    first.unshard()
    assert model.log[2] == pre
    assert model.log[3][:4] == post[:4]
    assert (
        model.log[3][4] is first.weight is unsharded
    )  # the second gather fills the first one's tensor again
    assert len(model.log) == 4


def whole_of_seed(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return Wrapped(None).first.weight.detach()


@multirank(2)
@both
def test_param_dtype_without_a_policy_is_the_stored_dtype(rank: int, world_size: int, library: str) -> None:
    model, _ = wrapped(library, HalfGathered)
    model.first.unshard()
    assert model.log[1][3] == torch.float32


@multirank(2, 3)
@pytest.mark.parametrize(
    "library, kind",
    # FSDP2 asks for inputs of exactly the padded shard's shape, which scales do not have.
    [
        ("torch", HalfGathered),
        ("torch", TensorScaled),
        ("shardwright", HalfGathered),
        ("shardwright", TensorScaled),
        ("shardwright", IntGathered),
    ],
)
@pytest.mark.parametrize("rows", [5, 1])
def test_subclasses_with_uneven_rows(
    rank: int, world_size: int, library: str, kind: type[Stored], rows: int
) -> None:
    """The subclass pads; the engine must not let the padding be seen. With one row, only rank 0 has any."""
    model, plain = wrapped(library, kind, rows)
    each = math.ceil(rows / world_size)
    assert local(model.first.weight).shape == (max(0, min(each, rows - rank * each)), 6)
    for micro in range(2):
        backward(model, rank, micro)
        check(gradients(model), straight_through(kind, plain, world_size, micro), tol=2e-5)
        model.zero_grad()
    model.first.unshard()
    assert model.first.weight.shape == (rows, 6)


@multirank(2)
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_under_a_precision_policy(rank: int, world_size: int, kind: type[Stored]) -> None:
    """The same bfloat16 operations in the same order as with FSDP2; only the float32 reduction may round otherwise."""
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for library in LIBRARIES:
        model, _ = wrapped(library, kind, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            backward(model, rank, micro)
        found.append(gradients(model))
        optimizer.step()
        found.append({n: whole(p) for n, p in model.named_parameters()})
    for theirs, mine in zip(found[:2], found[2:], strict=True):
        check(mine, theirs, tol=1e-5)
        assert all(t.dtype == torch.float32 for t in mine.values())


@multirank(2)
@both
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered])
@pytest.mark.parametrize("reentrant", [False, True])
def test_subclasses_in_checkpointed_units(
    rank: int, world_size: int, library: str, kind: type[Stored], reentrant: bool
) -> None:
    model, plain = wrapped(library, kind)
    forward = model.first.forward
    model.first.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)
    for micro in range(2):
        x = data(rank, micro).requires_grad_()  # else reentrant checkpointing gives no gradients
        loss_of(model(x)).backward()
        check(gradients(model), straight_through(kind, plain, world_size, micro), tol=2e-5)
        model.zero_grad()


@multirank(2)
@both
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered, TensorScaled])
@pytest.mark.parametrize("after_backward", [True, False])
def test_subclasses_over_several_forwards(
    rank: int, world_size: int, library: str, kind: type[Stored], after_backward: bool
) -> None:
    """Two forwards before a backward, evaluations, and weights kept after backward."""
    model, plain = wrapped(library, kind)
    parameters = dict(model.named_parameters())
    model.set_reshard_after_backward(after_backward)
    model.first.set_modules_to_forward_prefetch([model])
    model.set_modules_to_backward_prefetch([model.first])
    expected = [straight_through(kind, plain, world_size, micro) for micro in range(3)]
    for _ in range(2):
        with torch.no_grad():
            model(data(rank))
        losses = [loss_of(model(data(rank, micro))) for micro in range(2)]
        (losses[0] + losses[1]).backward()
        with torch.no_grad():
            model(data(rank))
        backward(model, rank, 2)
        total = {n: expected[0][n] + expected[1][n] + expected[2][n] for n in expected[0]}
        check({n: full(p.grad) for n, p in parameters.items()}, total, tol=2e-5)
        for p in parameters.values():
            p.grad = None


@multirank(2)
@ours
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered, TensorScaled])
def test_subclasses_through_mishaps(rank: int, world_size: int, library: str, kind: type[Stored]) -> None:
    """Exceptions, weights changed while kept, and a copy: where FSDP2 is undefined, stale, or refuses."""
    model, plain = wrapped(library, kind)
    for where in ("forward", "backward"):
        hook = model.plain.register_forward_hook(
            fail if where == "forward" else lambda m, a, o: o.register_hook(fail) and None
        )
        with pytest.raises(Boom):
            backward(model, rank, 1)
        hook.remove()
        model.zero_grad()
        backward(model, rank)
        check(gradients(model), straight_through(kind, plain, world_size), tol=2e-5)
        model.zero_grad()
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    model.log.clear()  # it holds modules and meshes, which a copy would copy
    models = {"kept": model, "copied": copy.deepcopy(model)}
    for name, each in models.items():
        reference = copy.deepcopy(plain)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (each, reference)]
        for micro in range(3):
            expected = straight_through(kind, reference, world_size, micro)
            backward(each, rank, micro)
            check(gradients(each), expected, tol=2e-5)
            for n, p in reference.named_parameters():
                p.grad = expected[n]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert isinstance(local(each.first.weight), kind), name
        with torch.no_grad():
            each.first.weight.mul_(0.5)
            reference.first.weight.mul_(0.5)
        backward(each, rank)
        check(gradients(each), straight_through(kind, reference, world_size), tol=2e-5)


@multirank(2)
@ours
def test_subclasses_tied_inside_a_unit(rank: int, world_size: int, library: str) -> None:
    class Tied(nn.Module):
        def __init__(self, kind: type[Stored] | None) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            if kind is not None:
                self.a.weight = nn.Parameter(kind(self.a.weight.detach()))
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(x)))

    for kind in (HalfGathered, IntGathered):
        models = []
        for each in (kind, None):
            torch.manual_seed(0)
            models.append(Tied(each))
        plain = models[1]
        with torch.no_grad():
            plain.a.weight.copy_(kind.seen(plain.a.weight))
        model = shard(library, models[0])
        assert model.a.weight is model.b.weight
        for _ in range(2):
            backward(model, rank)
            check(gradients(model), averaged(plain, world_size), tol=2e-5)
            model.zero_grad()


class Unpadded(HalfGathered):
    def padded(self, mesh: Any, outer_size: torch.Size) -> torch.Tensor:
        return self.data32


@multirank(2)
@ours
def test_a_piece_of_another_size_is_refused_on_every_rank(rank: int, world_size: int, library: str) -> None:
    """FSDP2 raises on the ranks with padding only, and the others wait."""
    model, _ = wrapped(library, Unpadded, 5)
    with pytest.raises((RuntimeError, ValueError, AssertionError), match="fsdp_pre_all_gather"):
        model(data(rank))


class OnlyPre(Stored):
    def fsdp_pre_all_gather(self, mesh: Any) -> Gathered:
        return (self.data32,), None


@multirank(2)
@both
def test_half_a_protocol_is_refused(rank: int, world_size: int, library: str) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError), match="fsdp_post_all_gather"):
        wrapped(library, OnlyPre)


class ThreeArguments(HalfGathered):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, module: Any) -> Gathered:  # type: ignore[override]
        return (self.data32,), None


@multirank(2)
@both
def test_another_signature_is_refused(rank: int, world_size: int, library: str) -> None:
    with pytest.raises((AssertionError, ValueError, TypeError), match="fsdp_pre_all_gather"):
        model, _ = wrapped(library, ThreeArguments)
        model(data(rank))


@multirank(2)
@both
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered])
def test_subclasses_gather_less(rank: int, world_size: int, library: str, kind: type[Stored]) -> None:
    """A gather carries the result of fsdp_pre_all_gather: the point of the protocol."""
    sizes = []
    for each in (kind, None):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        if each is not None:
            model.weight = nn.Parameter(each(model.weight.detach()))
        model = LIBRARIES[library].fully_shard(model, mesh=world_mesh(world_size))
        with Collectives() as seen:
            model.unshard()
        sizes.append(sum(size for _, size in seen.seen))
    assert sizes[0] < sizes[1] * (0.6 if kind is HalfGathered else 0.4)


@multirank(2)
@both
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered])
def test_subclasses_in_gradient_accumulation_and_clipping(
    rank: int, world_size: int, library: str, kind: type[Stored]
) -> None:
    model, plain = wrapped(library, kind)
    total = {n: torch.zeros_like(p) for n, p in plain.named_parameters()}
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        backward(model, rank, micro)
        for name, gradient in straight_through(kind, plain, world_size, micro).items():
            total[name] += gradient
    check(gradients(model), total, tol=2e-5)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = torch.stack([g.norm() for g in total.values()]).norm()
    torch.testing.assert_close(full(norm), expected, rtol=2e-5, atol=1e-6)
    check(gradients(model), {n: g * (0.01 / expected) for n, g in total.items()}, tol=1e-4)


@multirank(2)
@both
def test_state_dicts_of_subclasses(rank: int, world_size: int, library: str) -> None:
    model, plain = wrapped(library, HalfGathered)
    backward(model, rank)
    state = model.state_dict()
    assert all(isinstance(v, DTensor) for v in state.values())
    assert isinstance(local(state["first.weight"]), HalfGathered)
    saved = {n: whole(v).clone() for n, v in state.items()}
    check(saved, {n: p.detach() for n, p in plain.named_parameters()}, tol=0)
    state = {n: v.detach().clone() for n, v in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not whole(model.first.weight).any()
    model.load_state_dict(state)
    check({n: whole(p) for n, p in model.named_parameters()}, saved, tol=0)
    model.zero_grad()
    backward(model, rank)
    check(gradients(model), straight_through(HalfGathered, plain, world_size), tol=2e-5)


@multirank(2)
@both
@pytest.mark.parametrize("kind", [HalfGathered, IntGathered])
def test_full_state_dicts_of_subclasses(rank: int, world_size: int, library: str, kind: type[Stored]) -> None:
    """Full values are the stored ones, in plain tensors, and can be given back as such."""
    model, plain = wrapped(library, kind)
    backward(model, rank)
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    check({n: p.full_tensor().detach() for n, p in model.named_parameters()}, expected, tol=0)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert all(type(v) is torch.Tensor for v in state.values())
    check(state, expected, tol=0)
    for broadcast in (False, True):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, dict(expected) if not broadcast or rank == 0 else {}, options=options)
        assert isinstance(local(model.first.weight), kind)
        model.zero_grad()
        backward(model, rank)
        check(gradients(model), straight_through(kind, plain, world_size), tol=2e-5)


@multirank(2)
@both
def test_frozen_subclasses(rank: int, world_size: int, library: str) -> None:
    """QLoRA: the quantised weights are frozen, the plain ones train."""
    model, plain = wrapped(library, IntGathered)
    for name in ("first.weight", "last.weight"):
        model.get_parameter(name).requires_grad_(False)
    for micro in range(2):
        backward(model, rank, micro)
        expected = straight_through(IntGathered, plain, world_size, micro)
        del expected["first.weight"], expected["last.weight"]
        check(gradients(model), expected, tol=2e-5)
        model.zero_grad()


class Flattened(HalfGathered):
    """It names its parts, as torchao's and torch.compile's subclasses do."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data32"], None


def float8(weight: torch.Tensor, log: list[Any]) -> torch.Tensor:
    utils = pytest.importorskip("torchao.float8.fsdp_utils", reason="needs torchao")
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    each = ScaledMMConfig(emulate=True)
    made: torch.Tensor = utils.WeightWithDynamicFloat8CastTensor(
        weight, LinearMMConfig(each, each, each), torch.float8_e4m3fn
    )
    return made


#: Functions that make a parameter from a plain weight.
MADE: dict[str, Any] = {
    "plain": lambda weight, log: weight,
    "flattened": Flattened,
    "float8": float8,
    **{kind.__name__: kind for kind in KINDS},
}


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("name", MADE)
def test_no_attribute_keeps_a_whole_parameter(rank: int, world_size: int, layout: str, name: str) -> None:
    if layout == "ragged" and name != "plain":
        return  # such tensors are cut in rows
    layer = nn.Linear(16, 32, bias=False)
    layer.weight = nn.Parameter(MADE[name](layer.weight.detach().clone(), []))
    weight: Any = layer.weight
    weight.tag, weight.small = "kept", [torch.ones(1)]
    weight.alias, weight.nested = weight.detach(), {"a": [weight.detach()]}
    storages = [
        StorageWeakRef(value.untyped_storage())
        for value in (weight, *vars(weight).values())
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() >= 16 * 32 * 4
    ]
    assert storages
    del weight
    sw.fully_shard(layer, mesh=world_mesh(world_size), layout=layout)
    gc.collect()
    assert all(each.expired() for each in storages)
    assert layer.weight.tag == "kept" and layer.weight.small[0].item() == 1
    assert not hasattr(layer.weight, "alias") and not hasattr(layer.weight, "nested")
    if name != "plain":
        return
    with sw.unsharded(layer):
        assert not hasattr(layer.weight, "alias") and layer.weight.tag == "kept"
