"""Parameters on the whole mesh with named data-parallel dimensions, and expert parallelism."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from tests.engine.kit.tensor_parallel import LAYOUTS, close
from tests.support import multirank, world_mesh

DIMS = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "inside": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "replicas": ((2, 2), ("dp", "tp"), {"replicate": "dp"}),
    "both": ((2, 1, 2), ("replicate", "dp", "tp"), {"shard": "dp", "replicate": "replicate"}),
    "several": ((2, 2, 1), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
}


class Spmd(nn.Module):
    """Two matrices that are DTensors on the whole mesh, and a norm that is replicated on it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(1)
        names = mesh.mesh_dim_names if mesh is not None else None
        for name, shape, placement in (
            ("up", (6, 5), Shard(0)),
            ("down", (5, 6), Shard(1)),
            ("scale", (5,), Replicate()),
        ):
            value: Any = torch.randn(shape, generator=generator)
            if mesh is not None and names is not None:
                value = distribute_tensor(
                    value, mesh, [placement if n == "tp" else Replicate() for n in names]
                )
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = x
        if self.mesh is not None and isinstance(self.up, DTensor):
            assert self.up.device_mesh == self.mesh
            # Every rank's own data, said to be the same everywhere, as FSDP's users do.
            h = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        out = torch.relu((h * self.scale) @ self.up.T) @ self.down.T
        return out.full_tensor() if isinstance(out, DTensor) else out


@pytest.mark.extensive("each arrangement")
@multirank(4)
@pytest.mark.parametrize(
    ("dims", "layout"), [*((dims, "per_parameter") for dims in DIMS), ("both", "element"), ("several", "row")]
)
def test_named_data_parallel_dimensions(
    rank: int, world_size: int, dims: str, layout: str, tmp_path: Path
) -> None:
    shape, names, given = DIMS[dims]
    mesh = world_mesh(*shape, names=names)
    options = {"mesh": mesh, "dp_mesh_dims": sw.DataParallelMeshDims(**given)}  # type: ignore[arg-type]
    plain, model = Spmd(None), sw.fully_shard(Spmd(mesh), layout=LAYOUTS[layout], **options)
    data = [axis for axis, name in enumerate(names) if name != "tp"]
    here = functools.reduce(lambda n, axis: n * shape[axis] + mesh.get_local_rank(axis), data, 0)
    size = math.prod(shape[axis] for axis in data)
    optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        inputs = [
            torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + d)) for d in range(size)
        ]
        for x in inputs:
            (plain(x).square().mean() / size).backward()
        model(inputs[here]).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, 1e-5, name)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 0.5), wanted)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-5, name)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    loaded = {name: torch.zeros_like(q) for name, q in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(loaded[name], q)
    if layout == "per_parameter" and sw.DataParallelMeshDims.__module__.startswith("torch."):
        theirs = fsdp2(Spmd(mesh), **options)
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert p.placements == q.placements and p.device_mesh == q.device_mesh
            assert p.to_local().shape == q.to_local().shape


class Experts(nn.Module):
    """Experts in two tensors; with expert parallelism each rank of a group has some, and tokens travel to them."""

    def __init__(self, experts: int = 4, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / 2)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / 2)

    def forward(self, x_ED: torch.Tensor) -> torch.Tensor:
        """One row for each expert; with expert parallelism the same of every rank of the group, for this one's."""
        mesh = self.up.device_mesh if isinstance(self.up, DTensor) else None
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        if mesh is not None:  # (experts, dim) of each rank to (own experts, ranks, dim)
            x_ED = Exchange.apply(x_ED, mesh["ep"].get_group())
            if "tp" in mesh.mesh_dim_names:
                x_ED = Copies.apply(x_ED, mesh["tp"].get_group())
        x = x_ED.view(-1, up.shape[0], x_ED.shape[-1]).transpose(0, 1)
        out = torch.relu(x @ up) @ down
        if mesh is not None and "tp" in mesh.mesh_dim_names:
            out = Sum.apply(out, mesh["tp"].get_group())
        y_ED = out.transpose(0, 1).reshape(-1, x_ED.shape[-1])
        return Exchange.apply(y_ED, mesh["ep"].get_group()) if mesh is not None else y_ED


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, a share for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return Exchange.apply(g, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum of the parts that the ranks of a group have computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        result = x.clone()
        torch.distributed.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g, None


class Copies(torch.autograd.Function):
    """The same on all ranks of a group, which each compute a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return Sum.apply(g, ctx.group), None


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.experts = Experts()
        self.outer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.experts(self.inner(x)))


@pytest.mark.extensive("each layout", but=("4-unit-per_parameter-*", "2-result-row-*"))
@multirank(4)
@pytest.mark.parametrize(
    ("experts", "how", "layout"),
    [(2, "unit", "row"), (4, "unit", "per_parameter"), (2, "result", "per_parameter"), (2, "result", "row")],
)
def test_expert_parallelism(
    rank: int, world_size: int, experts: int, how: str, layout: str, tmp_path: Path
) -> None:
    """Experts over their own meshes: parts of them by expert parallelism, then over the ranks that have the same."""
    sizes = world_size // experts, experts
    mesh = world_mesh(*sizes, names=("edp", "ep"))
    whole = world_mesh(world_size, names=("dp",))
    torch.manual_seed(0)
    plain = MoE()
    model = copy.deepcopy(plain)
    for name, p in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh["ep"], [Shard(0)])))
    if how == "unit":
        sw.fully_shard(model.experts, mesh=mesh["edp"], layout=LAYOUTS[layout])
        # Tokens of all ranks of its group reach an expert: their gradients are summed there already.
        model.experts.set_gradient_divide_factor(world_size)
        sw.fully_shard(model, mesh=whole, layout=LAYOUTS[layout])
    else:
        of_experts = set(model.experts.parameters())
        sw.fully_shard(
            model,
            mesh=whole,
            layout=LAYOUTS[layout],
            shard_placement_fn=lambda p: (
                sw.ShardPlacementResult(None, mesh["edp"]) if p in of_experts else None
            ),
        )
        # As for a loss that is divided by the tokens of all ranks.
        model.set_gradient_divide_factor(1.0)
    if how == "result":
        copied = copy.deepcopy(model)
        assert torch.allclose(copied(torch.ones(4, 5)), plain(torch.ones(4, 5)), atol=1e-6)
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(4)]
        for x in inputs:
            (plain(x).square().mean() / world_size).backward()
        (model(inputs[rank]).square().mean() / (world_size if how == "result" else 1)).backward()
        check_step(model, plain, optimizer, expected)
    check_saved(model, plain, tmp_path)


class SpmdMoE(MoE):
    """Its dense parameters are DTensors on one mesh, its experts on another; both meshes are of all ranks."""

    @classmethod
    def of(cls, dense: DeviceMesh, sparse: DeviceMesh, device: str = "cpu") -> SpmdMoE:
        torch.manual_seed(0)
        with torch.device(device):
            model = cls()
        for name, p in list(model.named_parameters()):
            mesh = sparse if name.startswith("experts") else dense
            assert mesh.mesh_dim_names is not None
            placements = [Shard(0) if axis == "ep" else Replicate() for axis in mesh.mesh_dim_names]
            module = model.get_submodule(name.rpartition(".")[0])
            value = distribute_tensor(p.detach(), mesh, placements)
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(value))
        return model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.outer, self.experts(self.dense(self.inner, x)))

    @staticmethod
    def dense(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        mesh = layer.weight.device_mesh
        h = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return layer(h).to_local()


#: Dense parameters: shape of their mesh, its names, those that are data-parallel. Then the same of the experts.
BOTH = {
    "shard": (((4,), ("dp_shard",), {"shard": "dp_shard"}), ((2, 2), ("efsdp", "ep"), {"shard": "efsdp"})),
    "one shard": (
        ((4,), ("dp_shard",), {"shard": "dp_shard"}),
        ((1, 4), ("efsdp", "ep"), {"shard": "efsdp"}),
    ),
    "several": (
        ((2, 2), ("dp", "cp"), {"shard": ("dp", "cp")}),
        ((2, 1, 2), ("edp", "ecp", "ep"), {"shard": ("edp", "ecp")}),
    ),
    "replicas": (
        ((2, 2), ("replicate", "dp_shard"), {"shard": "dp_shard", "replicate": "replicate"}),
        ((2, 1, 2), ("replicate", "efsdp", "ep"), {"shard": "efsdp", "replicate": "replicate"}),
    ),
    "replicas of dense": (
        ((2, 2), ("replicate", "dp_shard"), {"shard": "dp_shard", "replicate": "replicate"}),
        ((2, 2), ("efsdp", "ep"), {"shard": "efsdp"}),
    ),
    "dense replicated": (
        ((4,), ("replicate",), {"replicate": "replicate"}),
        ((2, 2), ("efsdp", "ep"), {"shard": "efsdp"}),
    ),
}


@pytest.mark.extensive("each arrangement", but=("shard-per*", "replicas-*", "dense*"))
@multirank(4)
@pytest.mark.parametrize(
    ("both", "layout"),
    [
        *((both, "per_parameter") for both in BOTH if both != "replicas"),
        ("shard", "row"),
        ("replicas", "element"),
    ],
)
def test_each_parameter_on_a_whole_mesh_of_its_own(
    rank: int, world_size: int, both: str, layout: str, tmp_path: Path
) -> None:
    """As torchtitan's full_dtensor does: each mesh_info has a whole mesh and says which of it is data-parallel."""
    torchs = torch_placements()
    (shape, names, dims), (expert_shape, expert_names, expert_dims) = BOTH[both]
    dense, sparse = world_mesh(*shape, names=names), world_mesh(*expert_shape, names=expert_names)
    options = {"mesh": dense, "dp_mesh_dims": sw.DataParallelMeshDims(**dims)}  # type: ignore[arg-type]
    of_experts = torchs.info(sparse, sw.DataParallelMeshDims(**expert_dims))  # type: ignore[arg-type]
    of_dense = torchs.info(dense, options["dp_mesh_dims"])

    def shard(fully_shard: Any, **more: Any) -> Any:
        model = SpmdMoE.of(dense, sparse)
        infos = {id(p): of_experts for p in model.experts.parameters()}
        where = lambda p: torchs.result(None, infos.get(id(p), of_dense))  # noqa: E731
        fully_shard(model, shard_placement_fn=where, **options, **more)
        # As for a loss that is divided by the tokens of all ranks.
        model.set_gradient_divide_factor(1.0)
        return model

    torch.manual_seed(0)
    plain, model = MoE(), shard(sw.fully_shard, layout=LAYOUTS[layout])
    copied = copy.deepcopy(model)
    assert torch.allclose(copied(torch.ones(4, 5)), plain(torch.ones(4, 5)), atol=1e-6)
    theirs = shard(fsdp2) if layout == "per_parameter" and both != "dense replicated" else None
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(4)]
        for x in inputs:
            (plain(x).square().mean() / world_size).backward()
        (model(inputs[rank]).square().mean() / world_size).backward()
        if theirs is not None and not step:
            theirs.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
            (theirs(inputs[rank]).square().mean() / world_size).backward()
            for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
                assert p.placements == q.placements and p.device_mesh == q.device_mesh
                torch.testing.assert_close(p.grad.to_local(), q.grad.to_local())
        check_step(model, plain, optimizer, expected)
    check_saved(model, plain, tmp_path)
    # The copy loads what was saved, of weights and of the optimizer, and goes on as the plain model does.
    state, other = (
        get_state_dict(model, optimizer),
        sw.fully_shard_optimizer(torch.optim.AdamW(copied.parameters())),
    )
    set_state_dict(copied, other, model_state_dict=state[0], optim_state_dict=state[1])
    (plain(inputs[0]).square().mean()).backward()
    (copied(inputs[0]).square().mean() / world_size).backward()
    check_step(copied, plain, other, expected)
    whole = get_model_state_dict(copied, options=StateDictOptions(full_state_dict=True))
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(whole[name], q, rtol=1e-5, atol=1e-5)


@multirank(4)
@pytest.mark.parametrize("way", ["materialize", "to_empty"])
def test_whole_meshes_on_the_meta_device(rank: int, world_size: int, way: str) -> None:
    """torchtitan builds there, too: random operations draw what a plain model would."""
    torchs = torch_placements()
    dense, sparse = world_mesh(4, names=("dp_shard",)), world_mesh(2, 2, names=("efsdp", "ep"))
    dims = sw.DataParallelMeshDims(shard="dp_shard")
    info = torchs.info(sparse, sw.DataParallelMeshDims(shard="efsdp"))
    plain, model = MoE(), SpmdMoE.of(dense, sparse, "meta")
    ids = {id(p) for p in model.experts.parameters()}
    where = lambda p: torchs.result(None, info) if id(p) in ids else None  # noqa: E731
    sw.fully_shard(model, mesh=dense, dp_mesh_dims=dims, shard_placement_fn=where)

    def init(model: nn.Module) -> None:
        torch.manual_seed(5)
        for p in model.parameters():
            nn.init.normal_(p)

    init(plain)
    if way == "materialize":
        sw.materialize(model, init=lambda: init(model))
    else:
        model.to_empty(device="cpu")
        init(model)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
    assert torch.allclose(model(torch.ones(4, 5)), plain(torch.ones(4, 5)), atol=1e-6)


@multirank(4)
def test_one_data_parallel_mesh_has_one_whole_mesh(rank: int, world_size: int) -> None:
    torchs = torch_placements()
    mesh = world_mesh(2, 2, names=("dp", "ep"))
    dims = sw.DataParallelMeshDims(shard="dp")
    infos = {"with": torchs.info(mesh, dims), "without": torchs.info(mesh["dp"], None)}

    def model() -> Any:
        module = nn.Module()
        for name in ("first", "second"):
            value = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
            module.register_parameter(name, nn.Parameter(value))
        return module

    module = model()
    fn = lambda p: torchs.result(None, infos["with"])  # noqa: E731
    with pytest.raises(
        ValueError, match=r"data-parallel mesh.*call fully_shard separately on the modules that differ"
    ):
        sw.fully_shard(module, mesh=mesh["dp"], shard_placement_fn=fn)
    each = {id(module.first): infos["with"], id(module.second): infos["without"]}
    fn = lambda p: torchs.result(None, each[id(p)])  # noqa: E731
    with pytest.raises(
        ValueError, match=r"data-parallel mesh.*call fully_shard separately on the modules that differ"
    ):
        sw.fully_shard(module, mesh=world_mesh(4, names=("all",)), shard_placement_fn=fn)
    assert not isinstance(module, sw.FSDPModule)
    # The data-parallel mesh alone names the one that all have.
    fn = lambda p: sw.ShardPlacementResult(None, mesh["dp"])  # noqa: E731
    sw.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=fn)
    assert module.first.device_mesh == mesh


def torch_placements() -> Any:
    """torch's own ShardPlacementResult, and what makes a mesh_info, as frameworks call them."""
    if not sw.DataParallelMeshDims.__module__.startswith("torch."):
        pytest.skip("torch has dp_mesh_dims from 2.12 on")
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

    return SimpleNamespace(info=_fsdp_init._get_mesh_info, result=_fsdp_common.ShardPlacementResult)


def check_step(model: nn.Module, plain: nn.Module, optimizer: Any, expected: Any) -> None:
    """Gradients, their norm, and the step that both models make."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, 1e-5, name)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(sw.clip_grad_norm_(model.parameters(), 0.5), wanted)
    for each in (optimizer, expected):
        each.step()
        each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q, 1e-5, name)


def check_saved(model: nn.Module, plain: nn.Module, path: Path) -> None:
    """A plain model reads what was saved of a sharded one."""
    dcp.save(model.state_dict(), checkpoint_id=path)
    loaded = {name: torch.zeros_like(q) for name, q in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=path)
    for name, q in plain.state_dict().items():
        torch.testing.assert_close(loaded[name], q)


@multirank(4)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_expert_with_tensor_parallelism(rank: int, world_size: int, layout: str, tmp_path: Path) -> None:
    """Experts on two other axes, one of which is data-parallel for all else."""
    mesh = world_mesh(1, 2, 2, names=("edp", "ep", "tp"))
    torch.manual_seed(0)
    plain = MoE()
    model = copy.deepcopy(plain)
    for name, placements in (("up", [Shard(0), Shard(2)]), ("down", [Shard(0), Shard(1)])):
        p = distribute_tensor(getattr(model.experts, name).detach(), mesh["ep", "tp"], placements)
        setattr(model.experts, name, nn.Parameter(p))
    sw.fully_shard(model.experts, mesh=mesh["edp"], layout=LAYOUTS[layout])
    model.experts.set_gradient_divide_factor(2)
    sw.fully_shard(model, mesh=mesh["ep"], layout=LAYOUTS[layout])
    optimizer = sw.fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    expected = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(2):
        inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + d)) for d in range(2)]
        for x in inputs:
            (plain(x).square().mean() / 2).backward()
        model(inputs[mesh.get_local_rank("ep")]).square().mean().backward()
        check_step(model, plain, optimizer, expected)
    check_saved(model, plain, tmp_path)
