"""torch.compile of blocks beside what else a unit can do: the bits, collectives and graphs of each.

The reference is the same model uncompiled; the backend changes no kernel.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.comm_hooks import Compressed, Int8Blocks
from shardwright.engine.compat import compiled_graphs
from tests.engine.kit.counting import counted
from tests.engine.kit.models import full
from tests.engine.kit.tensor_parallel import data_mesh, data_rank, mesh_of, plan_of
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3


class Row(NamedTuple):
    layout: str = "per_parameter"
    memory: str = "dynamic"
    travels: str = "plain"  #: how gradients or weights do
    precision: str = "fp32"
    frozen: bool = False  #: all of a block but some small factors
    checkpointed: bool = False
    optimizer: str = "step"


MEMORY = ("dynamic", "double_buffer", "max_pool", "arena")
#: By default each setting is in some row, and each pair of settings where every three are asked for.
ROWS = select(
    itertools.starmap(
        Row,
        itertools.product(
            ("per_parameter", "ragged", "element"),
            MEMORY,
            ("plain", "gradients", "weights"),
            ("fp32", "bf16", "single", "evaluation"),
            (False, True),
            (False, True),
            ("step", "in_backward", "offloaded"),
        ),
    ),
    lambda row, strength: together(max(strength - 1, 1), *row),
)


class Block(nn.Module):
    """A residual block, with factors of low rank beside its second matrix."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.a = nn.Linear(dim, 2, bias=False)
        self.b = nn.Linear(2, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(nn.functional.gelu(self.up(h))) + self.b(self.a(h))


class Model(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def model_of(row: Row, mesh: DeviceMesh, backend: str | None) -> Any:
    torch.manual_seed(0)
    model: Any = Model()
    if mesh.ndim > 1:  # what it returns is still communicated when the first block gets it
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, mesh["tp"], {"embed": plan})
    for block in model.blocks:
        if row.frozen:
            for name, p in block.named_parameters():
                p.requires_grad_(name.startswith(("a.", "b.")))
        if mesh.ndim > 1:
            factors = {
                "a": ColwiseParallel(input_layouts=Shard(1)),
                "b": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh["tp"], plan_of("sequence")[0] | factors)
        if row.checkpointed:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if backend is not None:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    single = sw.MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32)
    policies = {
        "fp32": sw.MixedPrecisionPolicy(),
        "bf16": sw.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        "single": sw.PrecisionPolicy(param_dtype=BF16, per_parameter={"*norm*": single}),
        "evaluation": sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True),
    }
    options: dict[str, Any] = {
        "mesh": data_mesh(mesh) if mesh.ndim > 1 else mesh,
        "mp_policy": policies[row.precision],
        "layout": sw.Ragged("element") if row.layout == "element" else row.layout,
        "offload_policy": sw.CPUOffloadPolicy() if row.optimizer == "offloaded" else sw.OffloadPolicy(),
    }
    for block in model.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(model, memory=row.memory, **options)
    if row.travels == "gradients":
        model.set_gradient_comm_hook(Compressed(Int8Blocks(16), error_feedback=True))
    elif row.travels == "weights":
        model.set_all_gather_codec(Int8Blocks(16))
    return model


def trained(row: Row, mesh: DeviceMesh, backend: str | None) -> dict[str, Any]:
    """The results of some steps on each data-parallel rank's own data, and their graphs."""
    torch._dynamo.reset()
    model = model_of(row, mesh, backend)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=True)
    if row.optimizer == "in_backward":
        optimizer = sw.optim.in_backward(optimizer)
    here = data_rank(mesh) if mesh.ndim > 1 else mesh.get_local_rank()
    tensors: list[torch.Tensor] = []
    graphs = []
    before = compiled_graphs()
    with counted() as calls:
        for step in range(STEPS):
            x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step * 97 + here))
            loss = model(x).float().square().mean()
            loss.backward()
            tensors.append(loss.detach())
            if row.optimizer != "in_backward":  # which has freed them
                tensors += [full(p.grad).clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            if row.precision == "evaluation":
                model.eval()
                with torch.no_grad():
                    tensors.append(model(x))
                model.train()
            graphs.append(compiled_graphs() - before)
    tensors += [full(p).detach().clone() for p in model.parameters()]
    torch._dynamo.reset()
    return {"tensors": tensors, "calls": dict(calls), "graphs": graphs}


def check_compiled(row: Row, mesh: DeviceMesh, graphs: int) -> None:
    expected, found = trained(row, mesh, None), trained(row, mesh, "aot_eager")
    assert found["calls"] == expected["calls"]
    for ours, theirs in zip(found["tensors"], expected["tensors"], strict=True):
        assert torch.equal(ours, theirs)
    assert found["graphs"] == [graphs] * STEPS


@pytest.mark.extensive("many compiled graphs", but=("per_parameter-*",))
@multirank(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_no_bit_changes(rank: int, world_size: int, row: Row) -> None:
    check_compiled(row, world_mesh(world_size), 2 if row.precision == "evaluation" else 1)


@pytest.mark.extensive("many compiled graphs")
@multirank(4)
def test_tensor_parallel_blocks(rank: int, world_size: int) -> None:
    check_compiled(Row("ragged", MEMORY[-1], checkpointed=True), mesh_of((2, 2)), 1)
