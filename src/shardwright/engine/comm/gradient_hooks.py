"""Gradient communication hooks: one protocol over the rows that ranks exchange.

A hook's methods are generators. They issue a collective, yield its ``Work`` (or another object with ``wait``, or None),
and return the result. On the CPU the computation continues between the yields. On an accelerator all of it is queued on
a separate stream.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.engine.comm.block_codecs import is_block_codec
from shardwright.engine.comm.codecs import Codec
from shardwright.engine.compat.collectives import all_gather_single
from shardwright.engine.compat.dtensor import local_of

Steps = Generator[Any, None, torch.Tensor]


@dataclass(frozen=True)
class Site:
    """One collective of a unit's gradients, the same one in every step.

    Attributes:
        name: equal on every rank and in every run of the same model.
        group: the ranks of the sum.
        mesh: all data-parallel ranks.
        device: of the gradients.
        asynchronous: pass it as ``async_op``. It is False on an accelerator, where the current stream keeps the order.
        matrices: the matrices in a row, in order, as (elements, columns). With n ranks the matrix consists of the n
            rows of such a part, one below the other. A vector has 1 column.
    """

    name: str
    group: dist.ProcessGroup
    mesh: DeviceMesh
    device: torch.device
    asynchronous: bool
    matrices: tuple[tuple[int, int], ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return self  # a copied hook uses the same collectives, and groups cannot be copied

    @property
    def numel(self) -> int:
        """Elements of a row."""
        return sum(numel for numel, _ in self.matrices)


class GradientHook:
    """Reduces gradients. Pass a hook to :meth:`FSDPModule.set_gradient_comm_hook`.

    The hook never gets 0-d parameters or the engine's flags, which are summed exactly. A hook object belongs to one
    model. Use ``site.name`` as the key for state of a collective.
    """

    def prepare(self, site: Site, scatters: bool) -> None:
        """Called once for each site, on every rank. ``scatters``: the site calls :meth:`reduce_scatter`."""

    def reduce_scatter(self, rows: torch.Tensor, site: Site) -> Steps:
        """Reduce-scatter ``rows`` [ranks, numel]. Row i is this rank's summand for rank i.

        Returns the sum of all ranks' rows for this rank: [numel], any floating-point dtype.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method reduce_scatter, but this strategy shards gradients. Define it."
        )

    def all_reduce(self, row: torch.Tensor, site: Site) -> Steps:
        """All-reduce ``row`` [numel]. Returns the sum of all ranks' rows, with the same bits on every rank.

        The result has shape [numel] and any floating-point dtype.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method all_reduce, but this mesh has replicas. Define it."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs for the same results: DTensors over all ranks, for DCP."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, on the same number of ranks."""

    def reset(self) -> None:
        """Forget the state, because the model has got the weights of a checkpoint that has no state for this hook."""


class _WithErrors(GradientHook):
    """Adds the rounding error of one step to the gradients of the next, on each rank separately.

    For each collective this takes the memory of this rank's whole gradients in float32.
    """

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self._errors: dict[str, torch.Tensor] = {}
        self._sites: dict[str, Site] = {}

    def prepare(self, site: Site, scatters: bool) -> None:
        if self.error_feedback and site.name not in self._errors:
            rows = dist.get_world_size(site.group) if scatters else 1
            self._errors[site.name] = torch.zeros(rows, site.numel, device=site.device)
        self._sites[site.name] = site

    def with_error(self, rows: torch.Tensor, site: Site) -> torch.Tensor:
        """The rows in float32, plus the earlier error."""
        rows = rows.float()
        return rows + self._errors[site.name] if self.error_feedback else rows

    def lose(self, rows: torch.Tensor, sent: torch.Tensor, site: Site) -> None:
        """Store the error ``rows - sent``. Errors that are not finite are dropped, since they would stay for ever."""
        if self.error_feedback:
            self._errors[site.name].copy_((rows - sent).nan_to_num_(0, 0, 0))

    def reset(self) -> None:
        for error in self._errors.values():
            error.zero_()

    def _per_rank(self) -> dict[str, tuple[torch.Tensor, Site]]:
        return {f"error.{name}": (error, self._sites[name]) for name, error in self._errors.items()}

    def state_dict(self) -> dict[str, Any]:
        return {key: _spread(tensor, site.mesh) for key, (tensor, site) in self._per_rank().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        of_model = self._per_rank()
        if of_model.keys() != state.keys():
            odd = sorted(of_model.keys() ^ state.keys())
            raise ValueError(
                f"the hook's state has {len(state)} tensors, but this model needs {len(of_model)}; these are in only "
                f"one of the two: {', '.join(odd[:4])}. Load the state into the same model, sharded in the same way"
            )
        for key, (tensor, site) in of_model.items():
            loaded, here = state[key], _spread(tensor, site.mesh)
            if tuple(loaded.shape) != tuple(here.shape):
                raise ValueError(
                    f"{key} has shape {tuple(loaded.shape)}, expected {tuple(here.shape)}: the state holds the "
                    "rounding errors of each rank. Load it on the same number of ranks, or start without it"
                )
        for key, (tensor, _) in of_model.items():
            local = local_of(state[key]) if isinstance(state[key], DTensor) else state[key]
            tensor.copy_(local[0])


def _spread(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """One DTensor [ranks, ...] with every rank's tensor as a part."""
    return DTensor.from_local(tensor.unsqueeze(0), mesh, [Shard(0)] * mesh.ndim, run_check=False)


class Compressed(_WithErrors):
    """Sends encoded gradients. The receiving rank sums them in float32.

    An all-reduce also encodes the sums and gathers them.

    Args:
        codec: :class:`Cast` or :class:`Int8Blocks`, or another :class:`Codec`.
        error_feedback: add the rounding error of one step to the gradients of the next.

    Raises:
        TypeError: a codec of blocks, such as :class:`MXFP8`.
    """

    def __init__(self, codec: Codec, *, error_feedback: bool = False) -> None:
        super().__init__(error_feedback)
        if is_block_codec(codec):
            raise TypeError(
                f"{codec!r} encodes matrices of weights, but gradients travel as flat rows without shapes. Use Cast or "
                "Int8Blocks, or another codec of rows."
            )
        self.codec = codec

    def __repr__(self) -> str:
        return f"Compressed({self.codec!r}, error_feedback={self.error_feedback})"

    def reduce_scatter(self, rows: torch.Tensor, site: Site) -> Steps:
        rows = self.with_error(rows, site)
        sent = self.codec.encode(rows)
        if self.error_feedback:
            self.lose(rows, self.codec.decode(sent, rows.shape[1]), site)
        return (yield from self._exchange(sent, rows.shape[1], site))

    def _exchange(self, sent: torch.Tensor, numel: int, site: Site) -> Steps:
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=site.group, async_op=site.asynchronous)
        return self.codec.decode(received, numel).sum(0)

    def all_reduce(self, row: torch.Tensor, site: Site) -> Steps:
        ranks, numel = dist.get_world_size(site.group), row.numel()
        whole = self.with_error(row.unsqueeze(0), site)
        part = -(-numel // ranks)
        rows = torch.zeros(ranks, part, device=row.device)
        rows.view(-1)[:numel] = whole[0]
        sent = self.codec.encode(rows)
        if self.error_feedback:
            decoded = self.codec.decode(sent, part).reshape(1, -1)[:, :numel]
            self.lose(whole, decoded, site)
        total = yield from self._exchange(sent, part, site)
        mine = self.codec.encode(total.unsqueeze(0))
        if self.error_feedback:
            first = dist.get_rank(site.group) * part
            kept = self._errors[site.name][0, first : first + part]
            lost = total - self.codec.decode(mine, part)[0]
            kept.add_(lost[: kept.numel()].nan_to_num_(0, 0, 0))
        everyone = mine.new_empty(ranks, mine.shape[1])
        yield all_gather_single(everyone, mine, group=site.group, async_op=site.asynchronous)
        return self.codec.decode(everyone, part).reshape(-1)[:numel]


class PowerSGD(_WithErrors):
    """Sends matrices as products of two thin ones ("PowerSGD", Vogels et al., 2019, https://arxiv.org/abs/1905.13727).

    For a matrix [m, w] it sends ``rank`` (m + w) elements in float32 instead of m w. Parameters that this does not make
    smaller, such as vectors, are summed exactly. The layout defines the columns: all dimensions of a parameter except
    the one that is cut, or the rows of a segment in ragged layouts. ``Ragged("element")`` has no rows, so everything is
    summed exactly there.

    Args:
        rank: columns of the thin matrices.
        error_feedback: as in :class:`Compressed`. On by default, since PowerSGD does not converge without it.
    """

    def __init__(self, rank: int = 4, *, error_feedback: bool = True) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be an integer of at least 1, got {rank!r}")
        super().__init__(error_feedback)
        self.rank = rank
        self._right: dict[
            str, list[torch.Tensor | None]
        ] = {}  #: of each matrix; None if it is sent without compression

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank}, error_feedback={self.error_feedback})"

    def prepare(self, site: Site, scatters: bool) -> None:
        super().prepare(site, scatters)
        if site.name in self._right:
            return
        rows = dist.get_world_size(site.group) if scatters else 1
        self._right[site.name] = [
            torch.empty(width, self.rank, device=site.device)
            if self.rank * (rows * numel // width + width) < rows * numel
            else None
            for numel, width in site.matrices
        ]
        self._draw(site.name)

    def _draw(self, name: str) -> None:
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for right in self._right[name]:
            if right is not None:
                right.copy_(torch.randn(right.shape, generator=generator, device="cpu"))

    def reset(self) -> None:
        super().reset()
        for name in self._right:
            self._draw(name)

    def _per_rank(self) -> dict[str, tuple[torch.Tensor, Site]]:
        thin = {
            f"right.{name}.{i}": (right, self._sites[name])
            for name, rights in self._right.items()
            for i, right in enumerate(rights)
            if right is not None
        }
        return {**super()._per_rank(), **thin}

    def reduce_scatter(self, rows: torch.Tensor, site: Site) -> Steps:
        me = dist.get_rank(site.group)
        return (yield from self._reduce(rows, site, slice(me, me + 1)))

    def all_reduce(self, row: torch.Tensor, site: Site) -> Steps:
        return (yield from self._reduce(row.unsqueeze(0), site, slice(0, 1)))

    def _reduce(self, gradients: torch.Tensor, site: Site, kept_rows: slice) -> Steps:
        """Sum the rows of all ranks. Returns the ``wanted`` rows."""
        rows = self.with_error(gradients, site)
        rights, sizes = self._right[site.name], [numel for numel, _ in site.matrices]
        pieces = list(rows.split(sizes, dim=1))
        matrices = [
            piece.reshape(-1, width) if right is not None else None
            for piece, (_, width), right in zip(pieces, site.matrices, rights, strict=True)
        ]
        exact = [p.reshape(-1) for p, right in zip(pieces, rights, strict=True) if right is None]
        lefts = [m @ q for m, q in zip(matrices, rights, strict=True) if m is not None and q is not None]
        # One flat sum for the left factors and the uncompressed elements, one for the right factors.
        flat = torch.cat([t.reshape(-1) for t in (*lefts, *exact)])
        yield dist.all_reduce(flat, group=site.group, async_op=site.asynchronous)
        parts = flat.split([t.numel() for t in (*lefts, *exact)])
        lefts = [torch.linalg.qr(p.view_as(left))[0] for p, left in zip(parts, lefts, strict=False)]
        summed = iter(parts[len(lefts) :])
        thin = [m.mT @ left for m, left in zip((m for m in matrices if m is not None), lefts, strict=True)]
        if thin:
            self._lose_matrices(rows, matrices, lefts, thin, site)
            flat = torch.cat([t.reshape(-1) for t in thin])
            yield dist.all_reduce(flat, group=site.group, async_op=site.asynchronous)
            thin = [t.view_as(q) for t, q in zip(flat.split([q.numel() for q in thin]), thin, strict=True)]
        pairs, results = iter(zip(lefts, thin, strict=True)), []
        for i, (piece, right) in enumerate(zip(pieces, rights, strict=True)):
            if right is None:
                results.append(next(summed).view_as(piece)[kept_rows].reshape(-1))
                continue
            left, new = next(pairs)
            right.copy_(new.nan_to_num(0, 0, 0))
            height = piece.shape[1] // site.matrices[i][1]
            results.append((left[kept_rows.start * height : kept_rows.stop * height] @ new.mT).reshape(-1))
        return torch.cat(results)

    def _lose_matrices(
        self,
        rows: torch.Tensor,
        matrices: Sequence[torch.Tensor | None],
        lefts: Sequence[torch.Tensor],
        thin: Sequence[torch.Tensor],
        site: Site,
    ) -> None:
        if not self.error_feedback:
            return
        pairs = iter(zip(lefts, thin, strict=True))
        sent = []
        for matrix, piece in zip(matrices, rows.split([n for n, _ in site.matrices], dim=1), strict=True):
            if matrix is None:
                sent.append(piece)
                continue
            left, mine = next(pairs)
            sent.append((left @ mine.mT).view(piece.shape))
        self.lose(rows, torch.cat(sent, dim=1), site)
