"""Parallel styles beside torch's own, for what a hybrid has and torch knows nothing of.

A rank's part of a layer is a layer of the same kind, with fewer heads or hidden units: it computes as the whole one
does, with the rank's own part of the parameters. `plans` has the style of each layer. Shapes in names
as in `hybrid`; R rows, each a token on its way to one of its experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call

from shardwright.context import RowExchange
from shardwright.engine.comm import noted
from shardwright.train.config.shapes.presets import HybridConfig
from shardwright.train.models.native.hybrid import MixtureOfExperts, NextButOne, through_experts
from shardwright.train.models.native.mamba import Mamba2
from shardwright.train.models.packed import Documents

#: Rows of a matrix one below another: how many, and of how many heads or groups they are.
Sections = Sequence[tuple[int, int]]
Take = Callable[[Tensor], Tensor]
"""A function from a parameter to the tensor that this rank computes with."""


def rows_of(sections: Sections, rank: int, ranks: int) -> list[int]:
    """Return the rows that a rank computes with, ascending: of every section its part, or a whole group that ranks
    share."""
    rows: list[int] = []
    first = 0
    for size, pieces in sections:
        parts = min(pieces, ranks)
        part = size // parts
        start = first + rank * parts // ranks * part
        rows += range(start, start + part)
        first += size
    return rows


class SummedParts(ParallelStyle):
    """Each rank runs its part of a module on the whole sequence; the results are summed.

    The module takes one DTensor cut along the sequence, and its result, a plain tensor, is cut so. A second result,
    such as that of `MixtureOfExperts`, is the same on every rank.

    Args:
        part: the part, made on the meta device.
        placements: of the parameters, by name, except those that are on another mesh already.
        sections: of parameters of which a rank's rows are not next to one another. Where such a one is cut, the rows
            travel to the ranks that compute with them.
        left_out: tokens at the end of the sequence that the module is not to see; its results there are zero.
    """

    def __init__(
        self,
        part: Callable[[DeviceMesh], nn.Module],
        placements: Mapping[str, Placement],
        sections: Mapping[str, Sections] | None = None,
        left_out: int = 0,
    ) -> None:
        self.part, self.placements, self.sections, self.left_out = part, placements, sections or {}, left_out

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        takes: dict[str, Take] = {}
        for name, placement in self.placements.items():
            parameter = distribute_parameter(module, name, device_mesh, [placement], self.src_data_rank)
            if name in self.sections:
                takes[name] = _take_rows(self.sections[name], parameter, device_mesh)
        part = functools.partial(_run_part, self.part(device_mesh), module, takes)
        module.forward = functools.partial(_run_on_whole_sequence, part, device_mesh, self.left_out)
        return module


class NextToken(ParallelStyle):
    """Aligns what `NextButOne` takes where the sequence is cut: as many tokens, the last one of all with a filler."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, NextButOne)
        module.aligned = functools.partial(_aligned, device_mesh)  # type: ignore[method-assign]
        return module


def spread_experts(module: MixtureOfExperts, mesh: DeviceMesh, source: int | None = 0) -> None:
    """Give each rank of the first dimension of `mesh` some of the experts; tokens travel to them and back.

    The second dimension, if there is one, is the tensor-parallel one, which divides their hidden units; then
    `mixture_part` computes. `source` is the rank whose values all take, None for each rank's own.
    """
    placements = {"up": [Shard(0), Shard(2)], "down": [Shard(0), Shard(1)]}
    for name, both in placements.items():
        distribute_parameter(module, name, mesh, both[: mesh.ndim], source)
    if mesh.ndim == 1:
        module.chosen = functools.partial(_chosen_elsewhere, module, mesh)  # type: ignore[method-assign]


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None
) -> nn.Parameter:
    """Replace a parameter, of a submodule where `name` has dots, by one on `mesh`; returns it."""
    owner_name, _, own_name = name.rpartition(".")
    owner, parameter = module.get_submodule(owner_name), module.get_parameter(name)
    value = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
    distributed = nn.Parameter(value, requires_grad=parameter.requires_grad)
    owner.register_parameter(own_name, distributed)
    return distributed


# ---------------------------------------------------------------------------------------------------------------
# Parts


class Mamba2Part(Mamba2):
    """The heads and groups of a Mamba-2 layer that a rank of `mesh` computes, on the meta device.

    Where there are fewer groups than ranks, each is shared: its ranks have a part of its heads, and add up the squares
    that its norm is made of.
    """

    def __init__(self, config: HybridConfig, mesh: DeviceMesh) -> None:
        ranks = mesh.size()
        own = replace(
            config, mamba_heads=config.mamba_heads // ranks, mamba_groups=max(1, config.mamba_groups // ranks)
        )
        with torch.device("meta"):
            super().__init__(own)
        self.mesh, self.groups = mesh, config.mamba_groups

    def normalised(self, y: Tensor) -> Tensor:
        sharing = self.mesh.size() // self.groups
        if sharing < 2:
            return super().normalised(y)
        group = self.mesh.get_local_rank() // sharing
        squares = y.float().square().mean(-1, keepdim=True) / sharing
        of_groups = copied(summed(F.pad(squares, (group, self.groups - 1 - group)), self.mesh), self.mesh)
        scale = (of_groups[..., group : group + 1] + self.config.norm_eps).rsqrt()
        return (y.float() * scale).to(y.dtype) * self.norm_weight


def mixture_part(config: HybridConfig, experts: DeviceMesh | None, mesh: DeviceMesh) -> MixtureOfExperts:
    """Return a mixture whose experts, which may lie on the ranks of `experts`, have the hidden units of one rank of
    `mesh`."""
    ranks = mesh.size()
    own = replace(config, expert_dim=config.expert_dim // ranks, shared_dim=config.shared_dim // ranks)
    with torch.device("meta"):
        part = MixtureOfExperts(own)
    if experts is not None:
        part.chosen = functools.partial(_chosen_elsewhere, part, experts)  # type: ignore[method-assign]
    return part


# ---------------------------------------------------------------------------------------------------------------
# Forward


def _run_part(
    part: nn.Module, module: nn.Module, takes: Mapping[str, Take], *inputs: Tensor, **keywords: Any
) -> Any:
    """Return the part of a module, with what this rank takes of its parameters, which may be gathered at this moment
    only."""
    parameters = {name: takes.get(name, _local)(parameter) for name, parameter in module.named_parameters()}
    return functional_call(part, parameters, inputs, keywords, tie_weights=False)


def _run_on_whole_sequence(
    part: Callable[..., Any], mesh: DeviceMesh, left_out: int, x_BSD: DTensor, **keywords: Any
) -> Any:
    whole_BSD = x_BSD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    result = part(whole_BSD[:, : whole_BSD.shape[1] - left_out], **keywords)
    y_BSD, *others = result if isinstance(result, tuple) else (result,)
    if left_out:
        y_BSD = F.pad(y_BSD, (0, 0, 0, left_out))
    own = DTensor.from_local(y_BSD, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])
    # Every rank adds the same second result to its loss; gradients are summed over the ranks, which it must not be.
    return (own.to_local(), *(averaged(each, mesh) for each in others)) if others else own.to_local()


def _chosen_elsewhere(
    mixture: MixtureOfExperts, mesh: DeviceMesh, rows_RD: Tensor, expert_R: Tensor
) -> Tensor:
    """`MixtureOfExperts.chosen` where each rank of `mesh` has as many of the experts."""
    up_EDF, down_EFD = _local(mixture.up), _local(mixture.down)
    ranks, experts, group = mesh.size(), up_EDF.shape[0], mesh.get_group()
    leaving, coming = _counts(expert_R, ranks, experts, group)
    # The host has to wait here: the sizes of what travels depend on the routing.
    sent, received = torch.stack((leaving, coming)).sum(-1).tolist()
    rows = RowExchange.apply(rows_RD, sent, received, group)
    numbers = torch.arange(experts, device=coming.device).repeat(ranks)
    expert, order = numbers.repeat_interleave(coming.flatten(), output_size=len(rows)).sort(stable=True)
    rows = through_experts(rows.index_select(0, order), expert, up_EDF, down_EFD)
    rows = torch.empty_like(rows).index_copy(0, order, rows)
    return RowExchange.apply(rows, received, sent, group)


def _exchanged_counts(
    expert_R: Tensor, ranks: int, experts: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the rows that go from here to each expert, and come from each rank to each one here: [ranks, experts of
    one]."""
    # `torch.bincount` would make the host wait, and rows are sorted by their experts.
    numbers = torch.arange(ranks * experts, device=expert_R.device)
    leaving = torch.searchsorted(expert_R, numbers, right=True).diff(prepend=numbers[:1]).view(ranks, experts)
    coming = torch.empty_like(leaving)
    with noted("all-to-all of counts", group, coming.nbytes):
        dist.all_to_all_single(coming, leaving, group=group)
    return leaving, coming


_counts = _exchanged_counts


@contextmanager
def even_routing() -> Iterator[None]:
    """Inside the context each expert gets as many rows from each rank, whatever the router says: for plans."""
    global _counts

    def even(expert_R: Tensor, ranks: int, experts: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        each, more = divmod(expert_R.numel(), ranks * experts)
        leaving = torch.full((ranks * experts,), each)
        leaving[:more] += 1
        leaving = leaving.view(ranks, experts)
        return leaving, leaving[:1].expand(ranks, -1)

    _counts = even
    try:
        yield
    finally:
        _counts = _exchanged_counts


def _aligned(
    mesh: DeviceMesh, x_BSD: Tensor, embedded_BSD: Tensor, documents: Documents | None = None
) -> tuple[Tensor, Tensor, Documents | None]:
    first = DTensor.from_local(embedded_BSD[:, :1].contiguous(), mesh, [Shard(1)], run_check=False)
    firsts = first.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    behind = (mesh.get_local_rank() + 1) % mesh.size()
    nexts_BSD = torch.cat((embedded_BSD[:, 1:], firsts[:, behind : behind + 1]), dim=1)
    return x_BSD, nexts_BSD, None if documents is None else documents.of_pairs()


# ---------------------------------------------------------------------------------------------------------------
# Parameters


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part. Each rank computes a part of the gradient of replicated parameters."""
    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
    return parameter.to_local(grad_placements=gradients)


def _take_rows(sections: Sections, parameter: nn.Parameter, mesh: DeviceMesh) -> Take:
    rank, ranks, device = mesh.get_local_rank(), mesh.size(), parameter.device
    rows_of_ranks = [rows_of(sections, other, ranks) for other in range(ranks)]
    assert isinstance(parameter, DTensor)
    if isinstance(parameter.placements[0], Replicate):
        own = torch.tensor(rows_of_ranks[rank], device=device)
        return lambda p: _local(p).index_select(0, own)
    chunk = -(-parameter.shape[0] // ranks)  # as torch cuts
    leaving = [[row - rank * chunk for row in rows if row // chunk == rank] for rows in rows_of_ranks]
    sent = [len(rows) for rows in leaving]
    received = [sum(row // chunk == other for row in rows_of_ranks[rank]) for other in range(ranks)]
    order = torch.tensor([row for rows in leaving for row in rows], dtype=torch.int64, device=device)
    group, shared = mesh.get_group(), len(order.unique()) < len(order)

    def take(p: Tensor) -> Tensor:
        # The gradient of a row that several ranks compute with is the sum of theirs: rounded once.
        rows = _local(p).float() if shared else _local(p)
        return RowExchange.apply(rows.index_select(0, order).to(p.dtype), sent, received, group)

    return take


# ---------------------------------------------------------------------------------------------------------------
# Exchanges between ranks


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over the ranks, of which all make the same."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()


def copied(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """``x``, equal on every rank, for ranks that each compute another value from it. Its gradient is their sum."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def averaged(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """``x``, equal on every rank. Each rank has an equal share in its gradient."""
    return x.detach() + (x - x.detach()) / mesh.size()
