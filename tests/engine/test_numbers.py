"""Numbers of sharded tensors (norms, sums, extremes) are those of the whole tensor in every layout, on every rank.

Everything is compared with plain tensors on all ranks' data. Some shapes leave ranks without any part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from shardwright.engine.tensors.numbers import reading
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh

pytestmark = pytest.mark.skipif(not subclasses_dispatch, reason="torch asks no subclass of DTensor")

Tensor = torch.Tensor
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm().item(),
    "norm of order 1": lambda t: t.norm(1).item(),
    "norm of order 0": lambda t: t.norm(0).item(),
    "norm of order 3": lambda t: torch.linalg.vector_norm(t, 3).item(),
    "largest norm": lambda t: t.norm(math.inf).item(),
    "smallest norm": lambda t: t.norm(-math.inf).item(),
    "sum": lambda t: t.sum().item(),
    "mean": lambda t: t.mean().item(),
    "deviation": lambda t: t.std(unbiased=False).item(),
    "variance": lambda t: t.var(correction=0).item(),
    "counted": lambda t: (t > 0).count_nonzero().item(),
    "float of max": lambda t: float(t.detach().abs().max()),
    "min": lambda t: t.min().item(),
    "amax": lambda t: t.amax().item(),
    "count": lambda t: int((t > 0).to(torch.int32).sum()),
    "any": lambda t: bool((t > 0.3).any()),
    "all": lambda t: bool((t < 0.3).all()),
    "not a number": lambda t: bool(t.isnan().any()),
    "compared": lambda t: bool(t.norm() > 0.5),
    "list": lambda t: t.norm().tolist(),
    "text": lambda t: f"{t.norm():.3f}",
    "ratio": lambda t: (t.norm() / (t.abs().sum() + 1e-6)).item(),
    "twice": lambda t: (2 * t.norm()).item(),
    "of a difference": lambda t: (t - 0.5 * t).norm().item(),
    "of many": lambda t: [n.item() for n in torch._foreach_norm([t, t * 2])],
    "of norms": lambda t: torch.stack([t.norm(), t.norm()]).norm().item(),
    "sum of norms": lambda t: torch.stack([t.norm(), 2 * t.norm()]).sum().item(),
    "sum of norms and more": lambda t: torch.stack([t.norm(), t.norm(1)])[:2].sum(0).item(),
    "sum of largest": lambda t: torch.stack([t.max(), t.max()]).nansum().item(),
    "of unlike ones": lambda t: torch.stack([t.norm(), t.max(), t.min(), t.sum()]).tolist(),
    "mean of smallest": lambda t: torch.stack([t.min(), t.min()]).mean().item(),
    "sum of many": lambda t: torch.stack(torch._foreach_norm([t, t * 2])).sum().item(),
    "complex": lambda t: complex(t.detach().sum()).real,
}
FEW = {name: NUMBERS[name] for name in ("norm", "largest norm", "mean", "any", "of many")}
#: Ragged tensors refuse them.
BY_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda t: t.prod().item(),
    "sum of products": lambda t: torch.stack([t.prod(), t.prod()]).sum().item(),
    "sum of norms of columns": lambda t: t.norm(dim=0).sum().item(),
    "sum of largest of columns": lambda t: t.amax(0).sum().item(),
    "place of the largest": lambda t: t.argmax().item(),
    "element": lambda t: t[0].sum().item(),
    "of a copy": lambda t: copy.deepcopy(t.detach()).norm().item(),
    "placed otherwise": lambda t: placed(t).norm().item(),
}


def placed(t: Tensor) -> Tensor:
    return t.redistribute(placements=[Shard(t.dim() - 1)]) if isinstance(t, DTensor) else t


class Shapes(nn.Module):
    """Parameters that divide evenly, unevenly, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(s) for s in ((8, 6), (5, 3), (2, 4), (1,), (7,)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x).square().sum() for p in self.parts]).sum()


def data(step: int, rank: int) -> Tensor:
    return torch.rand((), generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(plain: nn.Module, ranks: int, step: int = 0) -> None:
    """Averages over all ranks' data."""
    for rank in range(ranks):
        (plain(data(step, rank)) / ranks).backward()


def check_numbers(
    sharded: Tensor, plain: Tensor, numbers: dict[str, Callable[[Tensor], Any]], what: str
) -> None:
    for name, number in numbers.items():
        expected, value = number(plain), number(sharded)
        assert type(value) is type(expected), (what, name)
        if not isinstance(expected, str):
            expected, value = torch.tensor(expected), torch.tensor(value)
            assert torch.allclose(value, expected, rtol=1e-4, atol=1e-6), (what, name, value, expected)
        else:
            assert value == expected, (what, name)


@pytest.mark.extensive("each layout", but=("per_parameter-*", "ragged-1*"))
@multirank(1, 2, 3)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged", "element"])
def test_numbers_are_global(rank: int, world_size: int, layout: str) -> None:
    kind = sw.Ragged("element") if layout == "element" else layout
    numbers = NUMBERS | (BY_ROWS if layout == "per_parameter" else {})
    for strategy in ("zero3", "zero1", "ddp") if world_size == 2 else ("zero3",):
        plain = Shapes()
        model = sw.fully_shard(copy.deepcopy(plain), layout=kind, strategy=strategy)
        gradients(plain, world_size)
        model(data(0, rank)).backward()
        optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in (plain, model)]
        optimizers[1] = sw.fully_shard_optimizer(optimizers[1]) if strategy == "zero1" else optimizers[1]
        for optimizer in optimizers:
            optimizer.step()
        used = numbers if strategy == "zero3" else FEW
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            what = f"{layout}, {strategy}, {tuple(q.shape)}"
            check_numbers(p.detach(), q.detach(), used, what)
            check_numbers(p, q, FEW, f"parameter, {what}")
            check_numbers(p.grad, q.grad, FEW, f"gradient, {what}")
            states = [o.state[r] for o, r in zip(optimizers, (q, p), strict=True)]
            check_numbers(states[1]["exp_avg"], states[0]["exp_avg"], FEW, f"state, {what}")


@pytest.mark.extensive("each mesh")
@multirank(4)
def test_numbers_on_two_axes(rank: int, world_size: int) -> None:
    mesh = world_mesh(2, 2, names=("replicate", "shard"))
    for layout, strategy in (("per_parameter", "hsdp"), ("ragged", "hsdp"), ("ragged", "hfsdp")):
        plain = Shapes()
        model = sw.fully_shard(copy.deepcopy(plain), mesh=mesh, layout=layout, strategy=strategy)
        gradients(plain, world_size)
        model(data(0, rank)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            check_numbers(p.detach(), q.detach(), FEW, f"{layout}, {strategy}")
            check_numbers(p.grad, q.grad, FEW, f"gradient, {layout}, {strategy}")
    mesh = world_mesh(2, 2, names=("dp", "tp"))
    for layout in ("per_parameter", "ragged"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        sw.fully_shard(model, mesh=mesh["dp"], layout=layout)
        x = torch.ones(2, 6)
        plain(x).sum().backward()
        model(x).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            check_numbers(p.detach(), q.detach(), FEW, f"{layout} beside tensor parallelism")
            check_numbers(p.grad, q.grad, FEW, f"gradient, {layout} beside tensor parallelism")


@multirank(2)
def test_numbers_stay_partial_until_read(rank: int, world_size: int) -> None:
    model = sw.fully_shard(Shapes())
    model(data(0, rank)).backward()
    with CommDebugMode() as counts:
        norms = [p.norm() for p in model.parameters()]
        norms += [p.grad.norm() for p in model.parameters()]
    assert not counts.get_total_counts()
    assert all(isinstance(n, DTensor) and n.placements[0].is_partial() for n in norms)
    with CommDebugMode() as counts:
        norms[0].item()
    assert counts.get_total_counts() == 1
    with CommDebugMode() as counts:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert counts.get_total_counts() == 1  # for all gradients together


def lars(p: Tensor, grad: Tensor) -> Tensor:
    """You, Gitman and Ginsburg, 2017."""
    norm, grad_norm = p.norm().item(), grad.norm().item()
    return grad * (norm / (grad_norm + 1e-6) if norm > 0 and grad_norm > 0 else 1.0)


def adaptive_clipping(p: Tensor, grad: Tensor) -> Tensor:
    """Brock, De, Smith and Simonyan, 2021, with the norm of the whole parameter."""
    most = max(float(p.norm()), 1e-3) * 0.1
    return grad * (most / float(grad.norm())) if float(grad.norm()) > most else grad


def normalised(p: Tensor, grad: Tensor) -> Tensor:
    return grad / grad.abs().max().item() if bool(grad.abs().max() > 0) else grad


@multirank(2, 3)
def test_optimizers_written_by_hand(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged", sw.Ragged("element")):
        plain = Shapes()
        model = sw.fully_shard(copy.deepcopy(plain), layout=layout)
        for step, rule in enumerate((lars, adaptive_clipping, normalised) * 2):
            gradients(plain, world_size, step)
            model(data(step, rank)).backward()
            for m in (plain, model):
                with torch.no_grad():
                    for p in m.parameters():
                        p.sub_(rule(p, p.grad), alpha=0.05)
                        p.grad = None
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-6)


@multirank(2)
def test_sharpness_aware_steps(rank: int, world_size: int) -> None:
    """Foret, Kleiner, Mobahi and Neyshabur, 2021: a step up along the gradient by its global norm, and back."""
    for layout in ("per_parameter", "ragged"):
        plain = Shapes()
        model = sw.fully_shard(copy.deepcopy(plain), layout=layout)
        for step in range(2):
            moved = []
            for m in (plain, model):
                m.zero_grad()
            for m in (plain, model):
                gradients(m, world_size, step) if m is plain else m(data(step, rank)).backward()
                norm = sum(p.grad.norm().item() ** 2 for p in m.parameters()) ** 0.5
                with torch.no_grad():
                    steps = [p.grad * (0.05 / norm) for p in m.parameters()]
                    for p, s in zip(m.parameters(), steps, strict=True):
                        p.add_(s)
                m.zero_grad()
                gradients(m, world_size, step) if m is plain else m(data(step, rank)).backward()
                with torch.no_grad():
                    for p, s in zip(m.parameters(), steps, strict=True):
                        p.sub_(s).sub_(p.grad, alpha=0.05)
                moved.append([p.detach() for p in m.parameters()])
            for p, q in zip(moved[1], moved[0], strict=True):
                torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-6)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_a_number_read_on_one_rank_alone_is_an_error(rank: int, world_size: int, layout: str) -> None:
    model = sw.fully_shard(Shapes(), layout=layout)
    reads: list[Callable[[Tensor], Any]] = [
        lambda t: t.norm().item(),
        lambda t: bool(t.norm() > 3),
        lambda t: t.mean().item() if layout == "ragged" else float(t.sum()),
    ]
    model(data(0, rank)).backward()
    for read in reads:
        # The other one goes on with the model.
        with pytest.raises(
            RuntimeError, match=r"rank 0 reads a number of a sharded tensor .*; rank 1 gathers unit 0"
        ):
            read(next(model.parameters())) if rank == 0 else model(data(0, rank))
    model(data(0, rank)).backward()
    with pytest.raises(RuntimeError, match="not all the same"):
        model.parts[0].norm().item() if rank == 0 else model.parts[0].max().item()


@multirank(2)
def test_a_number_read_on_one_rank_while_the_other_waits_elsewhere(rank: int, world_size: int) -> None:
    model = sw.fully_shard(Shapes())
    store = dist.PrefixStore("read alone", dist.distributed_c10d._get_default_store())
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "LIMIT", timedelta(milliseconds=200))
            with pytest.raises(RuntimeError, match=r"Rank 0 reads a number .* did not come"):
                model.parts[0].detach().norm().item()
        store.set("failed", "yes")
    else:
        store.wait(["failed"])
        # The other's message is under way still: take it, so that the next case finds the group as it was.
        norm = model.parts[0].detach().norm()
        assert isinstance(norm, DTensor)
        group = norm.device_mesh.get_group(0)
        reading.agree_to_read([group], torch.device("cpu"), f"{norm.placements} {norm.dtype} {norm.shape} 0")
