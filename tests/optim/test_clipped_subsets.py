"""Clipping of some of a model's parameters, in generated crossings: meshes, ways to pass the parameters, norms.

A plain model with the data of all ranks clips the same parameters. If ranks pass different parameters, all ranks raise
one error, and gradients stay as they are.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwright as sw
from tests.engine.kit.models import build, full, loss_of
from tests.engine.kit.tensor_parallel import close, data_mesh, data_rank, mesh_of, parallelize, tokens
from tests.support import multirank, world_mesh

#: Shape of the mesh, plan of tensor parallelism, strategies of the blocks and of the rest, layout.
ARRANGEMENTS: dict[str, tuple[tuple[int, ...], str | None, tuple[str, str], str]] = {
    "tensor alone": ((1, 4), "sequence", ("zero3", "zero3"), "per_parameter"),
    "tensor": ((2, 2), "blocks", ("zero3", "zero3"), "per_parameter"),
    "tensor, ragged": ((2, 2), "sequence", ("zero2", "zero2"), "ragged"),
    "tensor, replicas": ((2, 2), "tensor", ("ddp", "ddp"), "per_parameter"),
    "hsdp": ((2, 2, 1), None, ("hsdp", "hsdp"), "per_parameter"),
    "hsdp, ragged": ((2, 2, 1), None, ("hsdp", "hsdp"), "ragged"),
    "hsdp, tensor": ((2, 1, 2), "blocks", ("hsdp", "hsdp"), "per_parameter"),
    "hfsdp": ((2, 2, 1), None, ("hfsdp", "hfsdp"), "per_parameter"),
    "hfsdp, ragged": ((2, 2, 1), None, ("hfsdp", "hfsdp"), "ragged"),
    "zero1": ((4, 1), None, ("zero1", "zero1"), "per_parameter"),
    "blocks replicated": ((4, 1), None, ("ddp", "zero3"), "per_parameter"),
    "rest replicated": ((4, 1), None, ("zero3", "ddp"), "ragged"),
}
STAY = ("*tensor, ragged*", "*hsdp, tensor*", "*blocks replicated*")

#: Parameters of a model that a call clips.
SUBSETS: dict[str, Callable[[Any], Any]] = {
    "all": lambda m: m.parameters(),
    "head": lambda m: [*m.head.parameters()],
    "one unit": lambda m: m.blocks[1].parameters(),
    "a tensor": lambda m: m.blocks[0].up.weight,
    "the last first": lambda m: [*m.parameters()][::-1],
    "some of each": lambda m: (p for i, p in enumerate(m.parameters()) if i % 2),
    "none": lambda m: [],
}
NORMS = (2.0, math.inf, 1.0)
#: The parameters that some ranks pass, and those that the others pass.
DIFFERENT = (("all", "head"), ("head", "one unit"), ("all", "the last first"), ("a tensor", "some of each"))
#: The ranks that pass other parameters than the rest.
OTHERS = ((0,), (3,), (1, 3), (2, 3))


class Bench:
    """A sharded model and a plain one after a backward, and their gradients before any clipping."""

    def __init__(self, arrangement: str) -> None:
        shape, plan, (blocks, rest), layout = ARRANGEMENTS[arrangement]
        mesh = mesh_of(shape)
        self.plain = build()
        self.model: Any = copy.deepcopy(self.plain)
        if plan is not None:
            parallelize(self.model, mesh, plan)
        data = data_mesh(mesh)
        for block in self.model.blocks:
            sw.fully_shard(block, mesh=data, strategy=blocks, layout=layout)
        for unit in ([self.model.norm, self.model.head], self.model):
            sw.fully_shard(unit, mesh=data, strategy=rest, layout=layout)
        here = tokens(0, 0, data_rank(mesh))
        loss_of(self.model(here), here).backward()
        for batch in (tokens(0, 0, d) for d in range(data.size())):
            (loss_of(self.plain(batch), batch) / data.size()).backward()
        self.before = [[_gradient(p).clone() for p in m.parameters()] for m in (self.model, self.plain)]

    def restore(self) -> None:
        for model, gradients in zip((self.model, self.plain), self.before, strict=True):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                _gradient(p).copy_(gradient)

    def compare(self, what: str) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            close(p.grad, q.grad, 1e-5, f"{what}: {name}")


def _gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad.detach()


@pytest.mark.extensive("each arrangement", but=STAY)
@multirank(4)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_part_of_the_parameters_is_clipped_as_of_a_plain_model(
    rank: int, world_size: int, arrangement: str
) -> None:
    """torch's own function, too, unless its error names ours."""
    bench = Bench(arrangement)
    ways = itertools.cycle((None, True, False))
    for (name, subset), norm_type in zip(SUBSETS.items(), itertools.cycle(NORMS), strict=False):
        for way in ("ours", next(ways)):
            bench.restore()
            what = f"{name}, {norm_type}, {way}"
            wanted = nn.utils.clip_grad_norm_(subset(bench.plain), 0.01, norm_type)
            if way == "ours":
                norm = sw.clip_grad_norm_(subset(bench.model), 0.01, norm_type)
            else:
                try:
                    norm = nn.utils.clip_grad_norm_(subset(bench.model), 0.01, norm_type, foreach=way)  # type: ignore[arg-type]
                except RuntimeError as error:
                    assert "sw.clip_grad_norm_" in str(error), what
                    continue
            torch.testing.assert_close(full(norm), wanted, rtol=1e-5, atol=1e-6, msg=what)
            bench.compare(what)


@pytest.mark.extensive("each arrangement", but=STAY)
@multirank(4, timeout=30)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_that_pass_other_parameters_have_an_error(rank: int, world_size: int, arrangement: str) -> None:
    """Also on an axis that does not cut the gradients: its ranks would scale them differently."""
    bench = Bench(arrangement)
    for others, (one, other) in itertools.product(OTHERS, DIFFERENT):
        with pytest.raises(RuntimeError, match=r"diverged: (they clip|.* left the clipping)"):
            sw.clip_grad_norm_(SUBSETS[other if rank in others else one](bench.model), 0.01)
    sw.clip_grad_norm_(bench.model.parameters(), 0.01)
    nn.utils.clip_grad_norm_(bench.plain.parameters(), 0.01)
    bench.compare("after the errors")


@multirank(2, timeout=30)
def test_a_rank_that_passes_no_parameters_has_an_error_at_the_next_forward(
    rank: int, world_size: int
) -> None:
    model: Any = sw.fully_shard(nn.Linear(4, 4), mesh=world_mesh(world_size))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"The ranks have diverged: .*clips the gradients"):
        sw.clip_grad_norm_(model.parameters() if rank else [], 1.0)
        model(torch.ones(2, 4))


def test_an_exhausted_generator_is_a_warning() -> None:
    generator = (p for p in ())
    with pytest.warns(UserWarning, match="got an empty generator, so it clips nothing"):
        sw.clip_grad_norm_(generator, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.clip_grad_norm_([], 1.0)


# -- experts and stages ------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer of all ranks, and matrices of which each rank of an axis multiplies its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.inner = nn.Module()
        self.inner.matrices = nn.Parameter(torch.randn(4, 5, 5))

    def forward(self, x: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        matrices: Any = self.inner.matrices
        matrices = matrices.to_local() if isinstance(matrices, DTensor) else matrices[part]
        return (self.dense(x) @ matrices).square().mean((1, 2)).sum()


def _experts(mesh: DeviceMesh, strategies: Sequence[str], layout: str) -> tuple[Experts, Any]:
    """A plain model and a sharded one, after a backward with other data on each rank."""
    torch.manual_seed(0)
    plain = Experts()
    model: Any = copy.deepcopy(plain)
    size = mesh["ep"].size()
    parts = tuple(slice(4 * n // size, 4 * (n + 1) // size) for n in range(size))
    matrices: Any = plain.inner.matrices
    model.inner.matrices = nn.Parameter(distribute_tensor(matrices.detach(), mesh["ep"], [Shard(0)]))
    world = world_mesh(4)
    sw.fully_shard(model.inner, mesh=mesh["edp"], strategy=strategies[0], layout=layout)
    model.inner.set_gradient_divide_factor(4)
    sw.fully_shard(model, mesh=world, strategy=strategies[1], layout=layout)
    inputs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    model(inputs[world.get_local_rank()]).backward()
    for r, x in enumerate(inputs):
        (plain(x, parts[r % size]) / 4).backward()
    return plain, model


STRATEGIES = [("zero3", "zero3"), ("ddp", "zero3"), ("zero3", "ddp"), ("zero2", "zero1")]


@pytest.mark.extensive("each pair", but=("*per_parameter-strategies1*", "*ragged-strategies2*"))
@multirank(4, timeout=30)
@pytest.mark.parametrize("strategies", STRATEGIES)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_experts_on_another_mesh_are_clipped_with_the_rest_or_alone(
    rank: int, world_size: int, layout: str, strategies: tuple[str, str]
) -> None:
    mesh = world_mesh(2, 2, names=("edp", "ep"))
    plain, model = _experts(mesh, strategies, layout)
    for part, norm_type in itertools.product(("", "inner", "dense"), NORMS):
        wanted = nn.utils.clip_grad_norm_(plain.get_submodule(part).parameters(), 0.01, norm_type)
        norm = sw.clip_grad_norm_(model.get_submodule(part).parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=1e-6)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, 1e-5, f"{part} {norm_type}: {name}")
    for others in OTHERS:
        for one, other in itertools.permutations(("", "inner", "dense"), 2):
            with pytest.raises(RuntimeError, match=r"diverged: (they clip|.* left the clipping)"):
                sw.clip_grad_norm_(model.get_submodule(other if rank in others else one).parameters(), 0.01)


@multirank(4, timeout=30)
def test_stages_clip_their_own_parameters(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2, names=("pp", "dp"))
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(4, 4, bias=bias) for bias in (True, False))
    stage = plain[mesh.get_local_rank("pp")]
    model: Any = sw.fully_shard(copy.deepcopy(stage), mesh=mesh["dp"])
    for d in range(2):
        (stage(torch.full((2, 4), d + 1.0)).square().sum() / 2).backward()
    model(torch.full((2, 4), mesh.get_local_rank("dp") + 1.0)).square().sum().backward()
    wanted = nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
    torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 0.1), wanted)
    for (name, p), q in zip(model.named_parameters(), stage.parameters(), strict=True):
        close(p.grad, q.grad, 1e-5, name)


@multirank(2, timeout=30)
def test_parameters_of_no_unit_are_compared_too(rank: int, world_size: int) -> None:
    mesh = world_mesh(2)
    model: Any = nn.Linear(4, 4)
    for name in ("one", "other"):
        value = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        model.register_parameter(name, nn.Parameter(value))
    sw.fully_shard(model, mesh=mesh, ignored_params={model.one, model.other})
    model(torch.ones(2, 4)).sum().backward()
    for p in (model.one, model.other):
        p.grad = torch.ones_like(p)
    own = [model.weight, model.bias, model.one]
    sw.clip_grad_norm_([*own, model.other], 1.0)
    with pytest.raises(RuntimeError, match="they clip gradients of different parameters"):
        sw.clip_grad_norm_([*own, model.other] if rank else own, 1.0)
