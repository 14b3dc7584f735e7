"""The surface of torch's ``fully_shard``, method by method, and torch's own tools around a sharded model.

What holds for torch's ``fully_shard`` is the specification: ``SHARDWRIGHT_MATRIX=all`` runs most tests with it as well,
which proves them. Tests of ours alone say where plain PyTorch, not FSDP2, is what we follow.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

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
from tests.support import multirank, world_mesh
from tests.support.matrix import everything

both = pytest.mark.parametrize("library", sorted(LIBRARIES) if everything() else ["shardwright"])
ours = pytest.mark.parametrize("library", ["shardwright"])
Policy = torch_fsdp.MixedPrecisionPolicy


# -- a model whose units all have another size, so that a collective tells which unit it serves ----------------------


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks of 8, 16 and 24 hidden units, and a head of 3 rows, which are uneven over 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8 * i) for i in (1, 2, 3))
        self.head = nn.Linear(6, 3)
        self.unused: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(library: str, model: nn.Module, **options: Any) -> Any:
    """Each block a unit, and the rest."""
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(dist.get_world_size())
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def averaged(
    model: nn.Module,
    world_size: int,
    micros: int = 1,
    loss: Callable[[nn.Module, int, int], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The plain model's gradients, averaged over ranks and summed over micro-batches; without those it lacks."""
    loss = loss or (lambda m, rank, micro: loss_of(m(data(rank, micro))))
    model = copy.deepcopy(model)
    with torch.enable_grad():
        for micro in range(micros):
            for rank in range(world_size):
                (loss(model, rank, micro) / world_size).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def sharded(module: nn.Module) -> bool:
    """Whether the module's own parameters are sharded now."""
    kinds = {isinstance(p, DTensor) for p in module.parameters()}
    assert len(kinds) == 1
    return kinds.pop()


class Collectives(TorchDispatchMode):
    """Every collective in order: ("gather" or "reduce", bytes that it moves out of this rank)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket._qualified_op_name
        if name.startswith("c10d::") and "barrier" not in name:
            tensors: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, args)
            kind = "gather" if "allgather" in name else "reduce"
            self.seen.append((kind, max(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen

    def count(self, kind: str) -> int:
        return sum(k == kind for k, _ in self.take())


def unit_sizes(model: Net) -> dict[int, str]:
    """The size of each unit's gather, which tells it from the others."""
    sizes: dict[int, str] = {}
    for name, module in {"root": model, **{f"b{i}": b for i, b in enumerate(model.blocks)}}.items():
        with Collectives() as seen:
            module.unshard()
        module.reshard()
        [(_, size)] = seen.seen
        sizes[size] = name
    assert len(sizes) == 4
    return sizes


def need(library: str, *methods: str) -> None:
    """Skip where this torch's FSDP2 lacks a method; ours has them with every torch."""
    missing = [m for m in methods if not hasattr(LIBRARIES[library].FSDPModule, m)]
    if missing and library == "torch":
        pytest.skip(f"FSDP2 of torch {torch.__version__} has no {', '.join(missing)}")


# -- names and signatures --------------------------------------------------------------------------------------------

METHODS = [
    "unshard",
    "reshard",
    "reset_iter_state",
    "set_is_last_backward",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_post_optim_event",
]


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_torchs_signatures(name: str) -> None:
    theirs = getattr(torch_fsdp.FSDPModule, name, None)
    if theirs is None:
        pytest.skip(f"this torch has no {name}")
    assert parameters_of(getattr(sw.FSDPModule, name)) == parameters_of(theirs)


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_functions_have_torchs_signatures(name: str) -> None:
    assert parameters_of(getattr(sw, name)) == parameters_of(getattr(torch_fsdp, name))
    assert name in sw.__all__


@multirank(2)
@both
def test_setters_return_nothing_and_can_be_called_before_the_first_forward(
    rank: int, world_size: int, library: str
) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build())
    block = model.blocks[0]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("set_is_last_backward", (True,)),
        ("set_requires_gradient_sync", (True,)),
        ("set_reshard_after_forward", (True,)),
        ("set_reshard_after_backward", (True,)),
        ("set_unshard_in_backward", (True,)),
        ("set_modules_to_forward_prefetch", ([],)),
        ("set_modules_to_backward_prefetch", ([],)),
        ("set_gradient_divide_factor", (float(world_size),)),
        ("set_force_sum_reduction_for_comms", (False,)),
        ("set_reduce_scatter_unused_params", (False,)),
        ("reshard", ()),
        ("unshard", ()),
    ]
    for name, arguments in calls:
        if library == "torch" and not hasattr(model, name):
            continue  # torch 2.11 has fewer
        for module in (model, block):
            assert getattr(module, name)(*arguments) is None
    model.reshard()
    block.reshard()
    backward(model, rank)
    check(gradients(model), expected)


# -- unshard and reshard ---------------------------------------------------------------------------------------------


@multirank(2)
@both
def test_unshard_and_reshard_concern_one_unit_and_not_those_inside(
    rank: int, world_size: int, library: str
) -> None:
    plain = build()
    model = shard(library, build())
    assert model.unshard() is None
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.head.weight, nn.Parameter)
    torch.testing.assert_close(model.head.weight, plain.head.weight)
    assert all(sharded(block) for block in model.blocks)
    model.blocks[1].unshard()
    torch.testing.assert_close(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    model.reshard()
    assert isinstance(model.head.weight, DTensor) and not sharded(model.blocks[1])
    for _ in range(2):  # twice is once
        model.blocks[1].reshard()
        assert sharded(model.blocks[1])


@multirank(2)
@both
def test_an_asynchronous_unshard_shows_the_parameters_at_wait(
    rank: int, world_size: int, library: str
) -> None:
    block = shard(library, build()).blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(handle, LIBRARIES[library].UnshardHandle)
    assert sharded(block)
    assert handle.wait() is None
    torch.testing.assert_close(block.up.weight, build().blocks[0].up.weight)
    handle.wait()
    assert not sharded(block)
    block.reshard()
    handle.wait()  # of an earlier gather: nothing to wait for
    assert sharded(block)


@multirank(2)
@both
def test_a_second_unshard_gathers_nothing(rank: int, world_size: int, library: str) -> None:
    block = shard(library, build()).blocks[0]
    with Collectives() as seen:
        first, second = block.unshard(async_op=True), block.unshard(async_op=True)
        block.unshard()
        first.wait()
        second.wait()
        block.unshard()
    assert seen.count("gather") == 1
    assert not sharded(block)
    with Collectives() as seen:
        block.reshard()
        block.unshard()
    assert seen.count("gather") == 1


@multirank(2)
@both
def test_forward_uses_what_was_unsharded_by_hand(rank: int, world_size: int, library: str) -> None:
    """The documented recipe for explicit prefetching: unshard ahead, without waiting."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for _ in range(3):
        with Collectives() as seen:
            for module in (model, *model.blocks):
                module.unshard(async_op=True)
            assert seen.count("gather") == 4
            loss = loss_of(model(data(rank)))
            assert seen.count("gather") == 0
        loss.backward()
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_reshard_of_what_is_still_being_gathered(rank: int, world_size: int, library: str) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for module in (model, *model.blocks):
        module.unshard(async_op=True)
        module.reshard()
        assert isinstance(next(module.parameters()), DTensor)
    backward(model, rank)
    check(gradients(model), expected)


@multirank(2)
@both
def test_unshard_follows_the_precision_policy(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build(), mp_policy=Policy(param_dtype=torch.bfloat16))
    assert model.head.weight.dtype == torch.float32
    model.unshard()
    assert model.head.weight.dtype == torch.bfloat16
    torch.testing.assert_close(model.head.weight, build().head.weight.bfloat16(), rtol=0, atol=0)
    model.reshard()
    assert model.head.weight.dtype == torch.float32


@multirank(2)
@both
def test_unshard_of_a_module_without_parameters(rank: int, world_size: int, library: str) -> None:
    fully_shard = LIBRARIES[library].fully_shard
    model = nn.Sequential(nn.ReLU(), nn.Linear(6, 6))
    fully_shard(model[1], mesh=world_mesh(world_size))
    fully_shard(model, mesh=world_mesh(world_size))
    with Collectives() as seen:
        model.unshard(async_op=True).wait()
        assert model.unshard() is None
        model.reshard()
    assert seen.count("gather") == 0


@multirank(2)
@both
def test_requires_grad_set_on_the_sharded_parameter_shows_on_the_full_one(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    for flag in (False, True):
        model.head.weight.requires_grad_(flag)
        model.unshard()
        assert model.head.weight.requires_grad is flag and model.head.bias.requires_grad
        model.reshard()


@multirank(2)
@both
def test_reshard_between_forward_and_backward(rank: int, world_size: int, library: str) -> None:
    expected = averaged(build(), world_size)
    model = shard(library, build(), reshard_after_forward=False)
    with Collectives() as seen:
        loss = loss_of(model(data(rank)))
        assert seen.count("gather") == 4
        for module in (model, *model.blocks):
            module.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        loss.backward()
        assert seen.count("gather") == 4
    check(gradients(model), expected)


@multirank(2)
@both
def test_unsharded_for_a_method_of_ones_own(rank: int, world_size: int, library: str) -> None:
    """Evaluation code that reads weights outside forward: unshard, use, reshard."""
    model, plain = shard(library, build()), build()
    with torch.no_grad():
        model.unshard()
        found = data(rank) @ model.head.weight.T
        model.reshard()
    torch.testing.assert_close(found, data(rank) @ plain.head.weight.T)


@multirank(2)
@ours
def test_weights_that_change_while_unsharded_are_seen(rank: int, world_size: int, library: str) -> None:
    """Where FSDP2 goes on with the weights gathered before the optimizer stepped."""
    model, plain = shard(library, build()), build()
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    for micro in range(3):
        for name, gradient in averaged(
            plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
        ).items():
            plain.get_parameter(name).grad = gradient
        model.unshard()
        backward(model, rank, micro)
        model.unshard()  # held over the step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)


# -- recovery --------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def fail(*_: Any) -> None:
    raise Boom


@multirank(2)
@pytest.mark.parametrize(
    "library, where",
    # FSDP2's leaves the gradients of the failed backward behind, to be added to the next one's.
    [("torch", "forward"), ("shardwright", "forward"), ("shardwright", "backward")],
)
def test_reset_iter_state_after_an_exception(rank: int, world_size: int, library: str, where: str) -> None:
    need(library, "reset_iter_state")
    expected = averaged(build(), world_size)
    model = shard(library, build())
    backward(model, rank)
    model.zero_grad()
    module = model.blocks[1].up
    hook = module.register_forward_hook(fail) if where == "forward" else None
    if where == "backward":
        hook = model.blocks[1].register_forward_hook(lambda m, a, o: o.register_hook(fail) and None)
    assert hook is not None
    with pytest.raises(Boom):
        backward(model, rank, 1)
    hook.remove()
    assert model.reset_iter_state() is None
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_reset_iter_state_at_rest_changes_nothing(rank: int, world_size: int, library: str) -> None:
    """Called on the root, where FSDP2 alone allows it; twice is once."""
    need(library, "reset_iter_state")
    model = shard(library, build())
    for micro in range(2):
        backward(model, rank, micro)
        before = gradients(model)
        model.reset_iter_state()
        model.reset_iter_state()
        check(gradients(model), before, tol=0)
    check(gradients(model), averaged(build(), world_size, micros=2))


@multirank(2)
@ours
def test_reset_iter_state_before_the_first_forward(rank: int, world_size: int, library: str) -> None:
    """Where FSDP2 raises AttributeError."""
    model = shard(library, build())
    model.reset_iter_state()
    backward(model, rank)
    check(gradients(model), averaged(build(), world_size))


@multirank(2)
@ours
def test_reset_iter_state_drops_held_micro_batches(rank: int, world_size: int, library: str) -> None:
    """As FSDP2 documents it; torch 2.13 keeps them."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    model.set_requires_gradient_sync(False)
    backward(model, rank, 1)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    backward(model, rank)
    check(gradients(model), expected)


# -- gradient accumulation -------------------------------------------------------------------------------------------


@multirank(2)
@both
def test_gradients_are_held_without_communication_until_the_last_micro_batch(
    rank: int, world_size: int, library: str
) -> None:
    expected = averaged(build(), world_size, micros=3)
    model = shard(library, build())
    for _ in range(2):
        with Collectives() as seen:
            for micro in range(3):
                last = micro == 2
                model.set_requires_gradient_sync(last)
                backward(model, rank, micro)
                assert all((p.grad is not None) == last for p in model.parameters())
                assert seen.count("reduce") == (4 if last else 0)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_gradient_sync_of_one_module_only(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_requires_gradient_sync(False, recurse=False)
    backward(model, rank)
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"head.weight", "head.bias"}
    model.set_requires_gradient_sync(True)
    backward(model, rank, 1)
    check(gradients(model), averaged(build(), world_size, micros=2))


@multirank(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_held_gradients_have_the_reduce_dtype(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    """bfloat16 gradients of eight micro-batches: the sums agree with FSDP2's to what one rounding of it allows."""
    found = []
    for library in LIBRARIES:
        model = shard(
            library, build(), mp_policy=Policy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        )
        for micro in range(8):
            model.set_requires_gradient_sync(micro == 7)
            backward(model, rank, micro)
        found.append(gradients(model))
    check(found[1], found[0], tol=1e-5 if reduce_dtype else 1e-2)
    assert all(g.dtype == torch.float32 for g in found[1].values())


@multirank(2)
@both
def test_every_gradient_is_there_after_a_backward_that_is_not_the_last(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    for step in range(2):
        for micro in range(3):
            model.set_is_last_backward(micro == 2)
            backward(model, rank, micro)
            check(gradients(model), averaged(build(), world_size, micros=micro + 1))
        if step == 0:
            model.zero_grad()


@multirank(2)
@both
def test_both_flags_of_gradient_accumulation(rank: int, world_size: int, library: str) -> None:
    """The recipe that trades memory for communication: hold gradients and keep weights until the last micro-batch."""
    expected = averaged(build(), world_size, micros=3)
    model = shard(library, build())
    for _ in range(2):
        with Collectives() as seen:
            for micro in range(3):
                last = micro == 2
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                backward(model, rank, micro)
            found = [kind for kind, _ in seen.take()]
            # Four units in the first forward; the blocks, released after each forward, again in each backward.
            assert (found.count("gather"), found.count("reduce")) == (4 + 3 * 3, 4)
        check(gradients(model), expected)
        model.zero_grad()


# -- when units are gathered -----------------------------------------------------------------------------------------


def gathers(model: nn.Module, rank: int) -> list[int]:
    """Gathers in forward, in backward and in an evaluation."""
    counts = []
    with Collectives() as seen:
        loss = loss_of(model(data(rank)))
        counts.append(seen.count("gather"))
        loss.backward()
        counts.append(seen.count("gather"))
        with torch.no_grad():
            model(data(rank))
        counts.append(seen.count("gather"))
    return counts


SETTINGS = {
    "default": lambda model: None,
    "root resharded": lambda model: model.set_reshard_after_forward(True, recurse=False),
    "all kept after forward": lambda model: model.set_reshard_after_forward(False),
    "blocks kept after forward": lambda model: [b.set_reshard_after_forward(False) for b in model.blocks],
    "kept after backward": lambda model: model.set_reshard_after_backward(False),
}


@multirank(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_units_are_gathered_no_more_often_than_by_fsdp2(rank: int, world_size: int, setting: str) -> None:
    """In two steps without an optimizer between them, each with an evaluation after it."""
    expected = averaged(build(), world_size)
    counts: dict[str, list[list[int]]] = {}
    for library in LIBRARIES:
        model = shard(library, build())
        SETTINGS[setting](model)
        # Taken at rest: FSDP2 leaves full parameters in the modules that are kept, and then zero_grad misses these.
        parameters = dict(model.named_parameters())
        counts[library] = []
        for _ in range(2):
            counts[library].append(gathers(model, rank))
            check({n: full(p.grad) for n, p in parameters.items()}, expected)
            for p in parameters.values():
                p.grad = None
    for step, (mine, theirs) in enumerate(zip(counts["shardwright"], counts["torch"], strict=True)):
        # FSDP2 leaves the root gathered after an evaluation, whatever happens to its weights before the next step.
        assert mine[0] <= theirs[0] + (step > 0), counts
        assert mine[1:] == theirs[1:], counts


@multirank(2)
@both
@pytest.mark.parametrize("value", [None, 2, 1, "yes"])
def test_reshard_after_forward_must_be_a_bool(rank: int, world_size: int, library: str, value: Any) -> None:
    model = shard(library, build())
    with pytest.raises(ValueError, match=r"reshard_after_forward .* bool"):
        model.set_reshard_after_forward(value)


@multirank(2)
@both
def test_weights_that_backward_does_not_need(rank: int, world_size: int, library: str) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(tokens))

    torch.manual_seed(0)
    plain = Embedded()
    batches = [
        torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(r)) for r in range(world_size)
    ]
    expected = averaged(plain, world_size, loss=lambda m, r, _: loss_of(m(batches[r])))
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(world_size)
    fully_shard(plain.embed, mesh=mesh)
    fully_shard(plain.out, mesh=mesh)
    model: Any = fully_shard(plain, mesh=mesh)
    model.embed.set_unshard_in_backward(False)
    for _ in range(2):
        with Collectives() as seen:
            loss = loss_of(model(batches[rank]))
            assert seen.count("gather") == 2
            loss.backward()
            assert seen.count("gather") == 1
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_explicit_forward_prefetch(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    sizes = unit_sizes(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    for _ in range(2):
        with Collectives() as seen:
            handle = model.blocks[0].up.register_forward_hook(lambda *_: seen.seen.append(("computed", 0)))
            loss = loss_of(model(data(rank)))
            handle.remove()
        order = [sizes.get(size, kind) for kind, size in seen.take()]
        assert order == ["root", "b0", "b1", "b2", "computed"]
        loss.backward()
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
def test_explicit_backward_prefetch(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    sizes = unit_sizes(model)
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0], model.blocks[1]])
    for _ in range(2):
        loss = loss_of(model(data(rank)))
        with Collectives() as seen:
            loss.backward()
        order = [sizes[size] if kind == "gather" else kind for kind, size in seen.take()]
        assert order[:3] == ["b2", "b0", "b1"]
        assert order.count("reduce") == 4 and len(order) == 7
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
@pytest.mark.parametrize("method", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_only_sharded_modules_can_be_prefetched(
    rank: int, world_size: int, library: str, method: str
) -> None:
    model = shard(library, build())
    with pytest.raises(ValueError, match="Linear"):
        getattr(model, method)([model.blocks[0], model.head])


@multirank(2)
@both
def test_prefetching_again_what_is_there_gathers_nothing(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_reshard_after_forward(True)
    for i, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[i + 1 :]))
        block.set_modules_to_backward_prefetch(list(model.blocks[:i]))
    for _ in range(2):
        with Collectives() as seen:
            backward(model, rank)
            found = [kind for kind, _ in seen.take()]
        assert (found.count("gather"), found.count("reduce")) == (8, 4)
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


# -- how gradients are divided ---------------------------------------------------------------------------------------


@multirank(2)
@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 3.0, 16])
def test_gradient_divide_factor_of_one_unit(
    rank: int, world_size: int, library: str, factor: float, reduce_dtype: torch.dtype | None
) -> None:
    expected = averaged(build(), world_size)
    for name in expected:
        if name.startswith("blocks.1."):
            expected[name] = expected[name] * (world_size / factor)
    model = shard(library, build(), mp_policy=Policy(reduce_dtype=reduce_dtype))
    model.set_force_sum_reduction_for_comms(True)
    model.blocks[1].set_force_sum_reduction_for_comms(True)  # gloo has no other way with FSDP2
    model.blocks[1].set_gradient_divide_factor(factor)
    backward(model, rank)
    check(gradients(model), expected, tol=1e-5 if reduce_dtype is None else 2e-2)


@multirank(1, 2)
@ours
def test_gradient_divide_factor_needs_nothing_else(rank: int, world_size: int, library: str) -> None:
    """FSDP2 asks gloo for a reduction that it does not have and raises; on one rank it divides twice with sums."""
    expected = averaged(build(), world_size)
    model = shard(library, build())
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(8.0)
    backward(model, rank)
    expected = {n: g * (world_size / 8) for n, g in expected.items()}
    check(gradients(model), expected)
    model.zero_grad()
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    backward(model, rank)
    check(gradients(model), expected)


@multirank(2)
@both
def test_the_old_name_of_the_divide_factor_warns(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_force_sum_reduction_for_comms(True)
    with pytest.warns((DeprecationWarning, FutureWarning), match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(1.0)
    backward(model, rank)
    expected = averaged(build(), world_size)
    check(gradients(model), {n: g * (2 if n.startswith("head") else 1) for n, g in expected.items()})


@multirank(2, 3)
@both
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
def test_sums_instead_of_averages_change_nothing(
    rank: int, world_size: int, library: str, reduce_dtype: torch.dtype | None
) -> None:
    model = shard(library, build(), mp_policy=Policy(reduce_dtype=reduce_dtype))
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)
    with CommDebugMode() as comm:
        backward(model, rank)
    assert comm.get_total_counts() == 7 + 4
    check(gradients(model), averaged(build(), world_size), tol=2e-2 if reduce_dtype else 1e-5)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.use = "ab"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.use:
            x = getattr(self, name)(x)
        return x


@multirank(2)
@both
def test_unused_parameters_on_one_rank_count_as_zero(rank: int, world_size: int, library: str) -> None:
    need(library, "set_reduce_scatter_unused_params")

    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        model.use = "ab" if r == 0 else "a"
        return loss_of(model(data(r)))

    torch.manual_seed(0)
    plain = Either()
    expected = averaged(plain, world_size, loss=loss)
    model = shard(library, plain)
    model.set_reduce_scatter_unused_params(True)
    loss(model, rank, 0).backward()
    check(gradients(model), expected)


@multirank(2)
@pytest.mark.parametrize("library", ["torch", "shardwright"])
def test_parameters_unused_on_every_rank(rank: int, world_size: int, library: str) -> None:
    """Zeros, which weight decay acts on."""
    need(library, "set_reduce_scatter_unused_params")
    torch.manual_seed(0)
    model = shard(library, Either())
    model.set_reduce_scatter_unused_params(True)
    model.use = "a"
    backward(model, rank)
    assert not full(model.b.weight.grad).any()


@multirank(2)
@both
def test_an_event_after_the_optimizer(rank: int, world_size: int, library: str) -> None:
    model, plain = shard(library, build()), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    for micro in range(3):
        for name, gradient in averaged(
            plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
        ).items():
            plain.get_parameter(name).grad = gradient
        backward(model, rank, micro)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.set_post_optim_event(
            torch.Event(device="cpu")
        )  # a new one for each step; the CPU has nothing to wait
    check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))


# -- methods besides forward, several models -------------------------------------------------------------------------


class Generator(Net):
    def generate(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Reads the root's own weights and calls the inner units."""
        for _ in range(times):
            for block in self.blocks:
                x = block(x)
        return nn.functional.linear(x, self.head.weight, self.head.bias)

    def both_ways(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x) + self(x)


@multirank(2)
@both
def test_a_registered_method_is_a_forward(rank: int, world_size: int, library: str) -> None:
    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        return loss_of(model.generate(data(r), times=2))

    torch.manual_seed(0)
    plain = Generator()
    expected = averaged(plain, world_size, loss=loss)
    outputs = plain.generate(data(rank), times=2)
    model = shard(library, plain)
    assert LIBRARIES[library].register_fsdp_forward_method(model, "generate") is None
    assert model.generate.__doc__ == Generator.generate.__doc__ and model.generate.__name__ == "generate"
    with torch.no_grad():
        torch.testing.assert_close(model.generate(data(rank), times=2), outputs)
    for _ in range(2):
        loss(model, rank, 0).backward()
        check(gradients(model), expected)
        model.zero_grad()
    backward(model, rank)
    check(gradients(model), averaged(build(), world_size))


@multirank(2)
@both
def test_a_registered_method_casts_as_forward_does(rank: int, world_size: int, library: str) -> None:
    torch.manual_seed(0)
    policy = Policy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard = LIBRARIES[library].fully_shard
    model: Any = fully_shard(Generator(), mesh=world_mesh(world_size), mp_policy=policy)
    LIBRARIES[library].register_fsdp_forward_method(model, "generate")
    seen = []
    model.blocks[0].norm.register_forward_pre_hook(lambda m, a: seen.append(a[0].dtype))
    assert model.generate(data(rank)).dtype == torch.float64
    assert seen == [torch.bfloat16]


@multirank(2)
@both
def test_a_registered_method_of_an_inner_unit(rank: int, world_size: int, library: str) -> None:
    class Encoder(Block):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Encoder(8), Block(16)])
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: Any = self.blocks[0]
            return self.head(self.blocks[1](first.encode(x)))

    torch.manual_seed(0)
    plain = Outer()
    expected = averaged(plain, world_size)
    model = shard(library, plain)
    LIBRARIES[library].register_fsdp_forward_method(model.blocks[0], "encode")
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_methods_that_cannot_be_registered(rank: int, world_size: int, library: str) -> None:
    register = LIBRARIES[library].register_fsdp_forward_method
    plain = nn.Linear(2, 2)
    register(plain, "forward")  # not sharded: nothing is done, nor asked
    register(plain, "no_such_method")
    assert "forward" not in vars(plain)
    model = shard(library, build())
    with pytest.raises(ValueError, match="no_such_method"):
        register(model, "no_such_method")


@multirank(2)
@both
def test_models_that_share_their_streams(rank: int, world_size: int, library: str) -> None:
    share = LIBRARIES[library].share_comm_ctx
    models = [shard(library, build(seed)) for seed in range(2)]
    share([])
    assert share(models) is None
    with pytest.raises(ValueError, match="Linear"):
        share([models[0], nn.Linear(2, 2)])
    for _ in range(3):
        for seed, model in enumerate(models):
            backward(model, rank)
            check(gradients(model), averaged(build(seed), world_size))
            model.zero_grad()


@multirank(2)
@ours
def test_models_that_share_their_streams_interleaved(rank: int, world_size: int, library: str) -> None:
    """As pipeline stages run. FSDP2 raises IndexError in the first of these steps."""
    models = [shard(library, build(seed)) for seed in range(2)]
    sw.share_comm_ctx(models)
    for _ in range(2):
        losses = [loss_of(model(data(rank))) for model in models]
        for loss in losses:
            loss.backward()
        for seed, model in enumerate(models):
            check(gradients(model), averaged(build(seed), world_size))
            model.zero_grad()


# -- tensor subclasses that transform what is gathered ---------------------------------------------------------------


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
    """What travels is what fsdp_pre_all_gather returned: the point of the protocol."""
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


# -- hooks on sharded parameters -------------------------------------------------------------------------------------


@multirank(2)
@both
def test_post_accumulate_grad_hooks_see_the_reduced_gradient(
    rank: int, world_size: int, library: str
) -> None:
    model, expected = shard(library, build()), averaged(build(), world_size)
    names = {p: n for n, p in model.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    calls: list[str] = []

    def hook(parameter: Any) -> None:
        calls.append(names[parameter])
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        seen[names[parameter]] = parameter.grad._local_tensor.clone()

    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    for _ in range(2):
        backward(model, rank)
    assert sorted(calls) == sorted(2 * list(names.values()))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad._local_tensor, seen[name], rtol=0, atol=0)
        torch.testing.assert_close(full(p.grad), 2 * expected[name], rtol=1e-5, atol=1e-6)
    for handle in handles:
        handle.remove()
    backward(model, rank)
    assert len(calls) == 2 * len(names)


@multirank(2)
@both
def test_the_optimizer_in_backward(rank: int, world_size: int, library: str) -> None:
    """The recipe of the hook: step and forget each gradient as it comes."""
    model, plain = shard(library, build()), build()
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for micro in range(3):
        with torch.no_grad():
            for name, g in averaged(
                plain, world_size, loss=lambda m, r, _, i=micro: loss_of(m(data(r, i)))
            ).items():
                plain.get_parameter(name).sub_(0.5 * g)
        backward(model, rank, micro)
        assert all(p.grad is None for p in model.parameters())
        check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))


@multirank(2)
@both
def test_hooks_are_silent_while_gradients_are_held(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    calls: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    model.set_requires_gradient_sync(False)
    backward(model, rank)
    assert not calls
    model.set_requires_gradient_sync(True)
    backward(model, rank)
    assert len(calls) == len(list(model.parameters()))


@multirank(2)
@ours
def test_tensor_hooks_see_the_reduced_gradient_before_it_is_added(
    rank: int, world_size: int, library: str
) -> None:
    """As in plain PyTorch. With FSDP2 they never fire."""
    model, expected = shard(library, build()), averaged(build(), world_size)
    seen: list[Any] = []
    weight = model.blocks[1].up.weight
    handle = weight.register_hook(lambda g: seen.append(g) or 3 * g)
    model.head.weight.register_hook(lambda g: seen.append(None))  # returns nothing: changes nothing
    for _ in range(2):
        backward(model, rank)
    kept = [g for g in seen if g is not None]
    assert len(kept) == 2 and len(seen) == 4
    for gradient in kept:  # each backward's own, not the sum
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(full(gradient), expected["blocks.1.up.weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(full(weight.grad), 6 * expected["blocks.1.up.weight"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        full(model.head.weight.grad), 2 * expected["head.weight"], rtol=1e-5, atol=1e-6
    )
    handle.remove()
    model.zero_grad()
    backward(model, rank)
    check(gradients(model), expected)


# -- clipping and loss scaling ---------------------------------------------------------------------------------------


@multirank(2)
@both
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
def test_torchs_clip_grad_norm(
    rank: int, world_size: int, library: str, norm_type: float, foreach: bool | None
) -> None:
    plain = build()
    for name, gradient in averaged(plain, world_size).items():
        plain.get_parameter(name).grad = gradient
    model = shard(library, build())
    backward(model, rank)
    arguments: Any = {"max_norm": 0.05, "norm_type": norm_type, "foreach": foreach}
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), **arguments)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), **arguments)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6)
    check(gradients(model), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


@multirank(2)
@both
def test_torchs_clipping_in_two_parts_and_its_refusal(rank: int, world_size: int, library: str) -> None:
    model, expected = shard(library, build()), averaged(build(), world_size)
    backward(model, rank)
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(norm.full_tensor(), total, rtol=1e-5, atol=1e-6)
    check(gradients(model), {n: g * (0.05 / total) for n, g in expected.items()})
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert max(g.abs().max().item() for g in gradients(model).values()) <= 1.001e-3
    if rank == 1:
        model.head.bias.grad._local_tensor.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@multirank(2)
@both
@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_the_gradient_scaler(rank: int, world_size: int, library: str, overflow: int | None) -> None:
    """An overflow on one rank must skip the step on all, and lower the scale on all."""
    model, plain = shard(library, build()), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(loss_of(model(data(rank)))).backward()
    if overflow == rank:
        model.head.bias.grad._local_tensor.fill_(math.inf)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()
    if overflow is None:
        with torch.no_grad():
            for name, gradient in averaged(plain, world_size).items():
                plain.get_parameter(name).sub_(0.5 * gradient)
    check({n: full(p) for n, p in model.named_parameters()}, dict(plain.named_parameters()))
    assert scaler.get_scale() == (2048.0 if overflow is None else 512.0)


# -- torch's instruments ---------------------------------------------------------------------------------------------


@multirank(2)
@both
def test_comm_debug_mode_sees_operations_on_sharded_parameters(
    rank: int, world_size: int, library: str
) -> None:
    model = shard(library, build())
    backward(model, rank)
    with CommDebugMode() as comm:
        model.head.weight.full_tensor()
        (2 * model.head.weight).sum().full_tensor()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert comm.get_total_counts() == 3


@multirank(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_comm_debug_mode_counts_as_many_as_with_fsdp2(
    rank: int, world_size: int, reshard: bool | None, param_dtype: torch.dtype | None
) -> None:
    """How the reduction is made (reduce-scatter, all-to-all) is the engine's business, how many there are is not."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for library in LIBRARIES:
        model = shard(
            library, build(), reshard_after_forward=reshard, mp_policy=Policy(param_dtype=param_dtype)
        )
        counts[library] = []
        for _ in range(2):
            with CommDebugMode() as comm:
                backward(model, rank)
            found = comm.get_comm_counts()
            gather = sum(n for op, n in found.items() if "allgather" in str(op))
            counts[library].append((gather, comm.get_total_counts() - gather))
    assert counts["shardwright"] == counts["torch"]


@multirank(2)
@both
def test_the_flop_counter_sees_the_plain_models_flops(rank: int, world_size: int, library: str) -> None:
    with FlopCounterMode(display=False) as expected:
        backward(build(), rank)
    model = shard(library, build())
    for _ in range(2):
        with FlopCounterMode(display=False) as found:
            backward(model, rank)
        assert found.get_total_flops() == expected.get_total_flops()
        per_module = {k: sum(v.values()) for k, v in expected.get_flop_counts().items()}
        for name, flops in found.get_flop_counts().items():
            assert sum(flops.values()) == per_module[name.removeprefix("FSDP")]


RANGES = {
    "FSDP::root_pre_forward", "FSDP::root_post_backward_callback", "FSDP::pre_forward", "FSDP::all_gather",
    "FSDP::post_forward", "FSDP::pre_backward", "FSDP::post_backward_reduce",
} | {
    f"FSDP::{what} (blocks.{i})"
    for what in ("pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward_reduce")
    for i in range(3)
}  # fmt: skip


@multirank(2)
@both
def test_the_profiler_shows_named_ranges(rank: int, world_size: int, library: str) -> None:
    """Under FSDP2's names: scripts that read traces look for them."""
    model = shard(library, build())
    backward(model, rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(model, rank)
    found = {event.key for event in profiler.key_averages()}
    assert found >= RANGES, sorted(RANGES - found)


# -- state dicts of torch.distributed.checkpoint ---------------------------------------------------------------------


def trained(library: str, rank: int, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(library, build(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@multirank(2)
@both
def test_sharded_state_dicts(rank: int, world_size: int, library: str) -> None:
    model, optimizer = trained(library, rank)
    state, optimizer_state = get_state_dict(model, optimizer)
    assert list(state) == [n for n, _ in build().named_parameters()]
    for name, value in state.items():
        assert isinstance(value, DTensor) and value.placements == (Shard(0),)
        assert optimizer_state["state"][name]["exp_avg"].placements == (Shard(0),)
    other, other_optimizer = trained(library, rank, seed=1)
    set_model_state_dict(other, {n: v.clone() for n, v in state.items()})
    set_optimizer_state_dict(
        other, other_optimizer, copy.deepcopy(optimizer_state)
    )  # the counters are shared
    check({n: full(p) for n, p in other.named_parameters()}, {n: full(v) for n, v in state.items()}, tol=0)
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    model.reshard()
    other.reshard()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected, tol=0)


@multirank(2)
@both
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_full_state_dicts(rank: int, world_size: int, library: str, cpu_offload: bool) -> None:
    model, optimizer = trained(library, rank)
    values = {n: full(p).detach().clone() for n, p in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if cpu_offload and rank:  # only rank 0 gets it
        assert not state and not optimizer_state
        return
    assert all(type(v) is torch.Tensor for v in state.values())
    check(state, values, tol=0)
    plain = build(seed=5)
    plain.load_state_dict(state)
    assert optimizer_state["state"]["head.weight"]["exp_avg"].shape == (3, 6)


@multirank(2)
@both
@pytest.mark.parametrize("strict", [True, False])
def test_loading_full_state_dicts(rank: int, world_size: int, library: str, strict: bool) -> None:
    """Every rank has the values, or rank 0 alone has them and sends each rank its part."""
    source = build(seed=7).state_dict()
    if not strict:
        del source["head.bias"]
    for broadcast in (False, True):
        model, _ = trained(library, rank)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
        before = {n: full(p).detach().clone() for n, p in model.named_parameters()}
        mine = {n: v.clone() for n, v in source.items()} if not broadcast or rank == 0 else {}
        set_model_state_dict(model, mine, options=options)
        expected = {**before, **source}
        check({n: full(p) for n, p in model.named_parameters()}, expected, tol=0)
        plain = build()
        plain.load_state_dict(expected)
        with torch.no_grad():
            torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)


@multirank(2)
@ours
@pytest.mark.parametrize("evaluated", [True, False])
def test_state_dicts_between_forward_and_backward(
    rank: int, world_size: int, library: str, evaluated: bool
) -> None:
    """FSDP2's root shows full parameters then: these functions raise, or miss it."""
    model, optimizer = trained(library, rank)
    with torch.set_grad_enabled(not evaluated):
        model(data(rank))
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    assert "head.weight" in get_optimizer_state_dict(model, optimizer, options=options)["state"]
    check(state, {n: full(p) for n, p in model.named_parameters()}, tol=0)
    set_model_state_dict(model, build(seed=7).state_dict(), options=options)
    check({n: full(p) for n, p in model.named_parameters()}, build(seed=7).state_dict(), tol=0)


@multirank(2)
@both
def test_loading_a_full_optimizer_state_from_rank_0(rank: int, world_size: int, library: str) -> None:
    model, optimizer = trained(library, rank)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    other, other_optimizer = trained(library, rank, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, other_optimizer, state if rank == 0 else {}, options=options)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            found, expected = other_optimizer.state[q][key], optimizer.state[p][key]
            assert isinstance(found, DTensor)
            torch.testing.assert_close(full(found), full(expected), rtol=0, atol=0)


@multirank(2)
@both
def test_state_dicts_without_frozen_parameters(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.blocks[1].requires_grad_(False)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(state) == [n for n, _ in build().named_parameters() if not n.startswith("blocks.1")]


@multirank(2)
@both
@pytest.mark.parametrize("how", ["weights_only", "pickle", "deepcopy"])
def test_each_rank_keeps_its_own_state_dict(rank: int, world_size: int, library: str, how: str) -> None:
    """The plainest checkpoint: torch.save on every rank, or deepcopy to keep the best weights in memory."""
    model, optimizer = trained(library, rank)
    state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if how == "deepcopy":
        state = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=how == "weights_only")
    other, other_optimizer = trained(library, rank, seed=1)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected, tol=0)


@multirank(2)
@pytest.mark.parametrize("source, target", [("torch", "shardwright"), ("shardwright", "torch")])
def test_checkpoints_of_one_load_into_the_other(rank: int, world_size: int, source: str, target: str) -> None:
    """By the sharded state dicts of torch.distributed.checkpoint, which name and cut everything alike."""
    model, optimizer = trained(source, rank)
    other, other_optimizer = trained(target, rank, seed=1)
    state, optimizer_state = get_state_dict(model, optimizer)
    set_model_state_dict(other, state)
    set_optimizer_state_dict(
        other, other_optimizer, copy.deepcopy(optimizer_state)
    )  # its counters are shared
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        backward(each, rank, 1)
        each_optimizer.step()
    found, expected = ({n: full(p) for n, p in m.named_parameters()} for m in (other, model))
    check(found, expected)


@multirank(2)
@both
def test_loading_distributed_tensors_by_assignment(rank: int, world_size: int, library: str) -> None:
    """FSDP2's own recipe: distribute each full tensor, then load_state_dict(assign=True)."""
    source = build(seed=7).state_dict()
    model = shard(library, build())
    parts = {
        n: nn.Parameter(distribute_tensor(v, p.device_mesh, p.placements))
        for (n, v), p in zip(source.items(), model.parameters(), strict=True)
    }
    model.load_state_dict(parts, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = build(seed=7)
    backward(model, rank)
    check(gradients(model), averaged(plain, world_size))
    optimizer.step()
    with torch.no_grad():
        for name, g in averaged(plain, world_size).items():
            plain.get_parameter(name).sub_(0.5 * g)
        torch.testing.assert_close(model(data(rank)), plain(data(rank)), rtol=1e-5, atol=1e-6)


# -- recipes and habits that FSDP2's documentation does not warn of ----------------------------------------------------


class Chunked(nn.Module):
    """The head is called apart from the model, on pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


@multirank(2)
@both
def test_chunked_loss(rank: int, world_size: int, library: str) -> None:
    """The recipe for list units: the model's forward runs only the norm of [norm, head], the loss runs the head."""
    need(library, "reset_iter_state")  # as old as the recipe: before, torch's process dies

    def loss(model: Any, r: int, _: int) -> torch.Tensor:
        return sum(loss_of(model.head(chunk)) for chunk in model(data(r)).chunk(2))

    torch.manual_seed(0)
    plain = Chunked()
    expected = averaged(plain, world_size, loss=loss)
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(world_size)
    fully_shard(plain.body, mesh=mesh)
    fully_shard([plain.norm, plain.head], mesh=mesh)
    model: Any = fully_shard(plain, mesh=mesh)
    for _ in range(2):
        with Collectives() as seen:
            hidden = model(data(rank))
            cut = hidden.detach().requires_grad_()
            for chunk in cut.chunk(2):
                loss_of(model.head(chunk)).backward()
            hidden.backward(cut.grad)
        assert seen.count("reduce") == 4  # of each chunk, and of the rest
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@ours
def test_the_modules_show_sharded_parameters_after_an_evaluation(
    rank: int, world_size: int, library: str
) -> None:
    """FSDP2's root shows full ones then: zero_grad and clipping miss its gradients, a new optimizer gets the wrong."""
    model, expected = shard(library, build()), averaged(build(), world_size)
    backward(model, rank)
    with torch.no_grad():
        model(data(rank))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    torch.testing.assert_close(full(norm), total, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model(data(rank))
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@multirank(2)
@ours
def test_training_after_a_first_forward_in_inference_mode(rank: int, world_size: int, library: str) -> None:
    """FSDP2's full parameters are inference tensors for ever then."""
    model = shard(library, build())
    with torch.inference_mode():
        model(data(rank))
    for _ in range(2):
        backward(model, rank)
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
@pytest.mark.parametrize("what", ["blocks", "model", "blocks before sharding"])
def test_torch_compile_goes_around_the_hooks(rank: int, world_size: int, library: str, what: str) -> None:
    """Dynamo breaks its graph at each unit and compiles what is between; here with the backend that changes nothing."""
    expected = averaged(build(), world_size)
    plain = build()
    if what == "blocks before sharding":
        for block in plain.blocks:
            block.compile(backend="eager")
    model = shard(library, plain)
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    called = torch.compile(model, backend="eager") if what == "model" else model
    for _ in range(2):
        loss_of(called(data(rank))).backward()
        check(gradients(model), expected)
        model.zero_grad()
