"""The sharded tensor of ragged layouts: global shape outside, a flat range of its elements on each rank.

The table of ``operations.py`` has the supported operations; all others raise an error. An operation must never return a
result for only the local part. This file knows no units, slabs or optimizers.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwright.engine.comm.notes import noted
from shardwright.engine.compat.callers import refusal
from shardwright.engine.compat.dtensor import dtensor_of, is_traced
from shardwright.engine.compat.modes import disabled_torch_function
from shardwright.engine.compat.tensors import make_wrapper, set_data, tree_leaves, tree_map
from shardwright.engine.tensors.edits.unset import begin_edit, unmark
from shardwright.engine.tensors.gathering import free, full_of
from shardwright.engine.tensors.naming import parameter_of
from shardwright.engine.tensors.numbers.averaging import (
    average_read,
    has_gradient,
    mark_own,
    note_recipe,
    recipe_of,
)
from shardwright.engine.tensors.numbers.hooks import cut_gradient, refuse_loss_in_place, tracked
from shardwright.engine.tensors.numbers.reading import agree_to_read
from shardwright.engine.tensors.ragged.compound import copied, has_other_lengths, part_as
from shardwright.engine.tensors.ragged.numbers import (
    Number,
    agree_on_factors,
    as_number,
    is_sum_of_numbers,
    plain_of,
    read_number,
)
from shardwright.engine.tensors.ragged.spec import RaggedSpec
from shardwright.engine.tensors.sharded import Sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
#: The supported operations, see ``operations.py``.
HANDLERS: dict[Any, Handler] = {}


class RaggedTensor(Sharded):
    """A tensor of global shape. This rank holds a contiguous range of its elements, possibly none or all.

    Element-wise operations among tensors of equal spec, 0-d tensors and numbers run on the local tensors without
    communication. Norms, ``sum``, ``mean``, ``max``, ``min``, ``any``, ``all`` and ``equal`` are global: one
    all-reduce, so every rank must call them. ``copy_`` copies this rank's part of a whole tensor. If its source is
    sharded in another way, every rank must call it. Other operations raise NotImplementedError.
    """

    __slots__ = ("_local_tensor", "spec")
    _kind = "ragged"
    _local_tensor: torch.Tensor
    spec: RaggedSpec

    @staticmethod
    def __new__(cls, local: torch.Tensor, spec: RaggedSpec, requires_grad: bool = False) -> RaggedTensor:
        """Wrap ``local``, of ``spec.local_shape`` for this rank, contiguous and without graph; it is not copied."""
        self = make_wrapper(
            cls, spec.global_shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self._local_tensor = local
        self.spec = spec
        return self  # type: ignore[no-any-return]

    def __init_subclass__(cls) -> None:
        # torch's stager of asynchronous checkpoints copies only attributes in the ``__slots__`` of the class itself.
        # For a subclass without slots it would write uninitialised memory.
        cls.__slots__ = RaggedTensor.__slots__

    __torch_function__ = disabled_torch_function

    def __tensor_flatten__(self) -> tuple[list[str], tuple[RaggedSpec, bool]]:
        """Name the local tensor, with which torch.compile computes."""
        return ["_local_tensor"], (self.spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[RaggedSpec, bool], size: Any, stride: Any
    ) -> RaggedTensor:
        return RaggedTensor(inner["_local_tensor"], *context)

    def _stable_hash_for_caching(self) -> str:
        """Return a hash of the spec for torch.compile's cache of graphs."""
        return f"{self.spec.stable_hash()}{self.requires_grad}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        ragged = [t for t in tensors if isinstance(t, RaggedTensor)]
        run = functools.partial(_run, func, tree_map(plain_of, args), tree_map(plain_of, kwargs))
        if not tracked(ragged) or any(is_traced(t._local_tensor) for t in ragged):
            return run()
        if all(not t.dim() for t in ragged) and not is_sum_of_numbers(func, args, kwargs, RaggedTensor):
            return _read_numbers(func, args, kwargs, tensors, run)
        spec = ragged[0].spec
        if func in HANDLERS:
            agree_on_factors(tensors, spec)
        result = run()
        if isinstance(result, (list, tuple)):
            return [_as_number(each, func, args, kwargs, spec) for each in result]
        return _as_number(result, func, args, kwargs, spec)

    @classmethod
    def from_full(cls, source: torch.Tensor, spec: RaggedSpec) -> RaggedTensor:
        """Return a copy of this rank's part of ``source``, which is whole, a DTensor or a RaggedTensor.

        If ``source`` is sharded, and not as in ``spec``, all ranks communicate.
        """
        return cls(copied(part_of(source, spec)), spec)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.spec.mesh

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements, which are no copy: writes into them change this tensor."""
        return self._local_tensor

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor, with graph, on this one's device. Every rank of the mesh must call it.

        The gradient of the result is averaged over the ranks.
        """
        if not tracked([self]):
            return self._whole()
        local = self._local_tensor
        if type(local) is torch.Tensor and not local.is_meta and not is_traced(local):
            agree_to_read(self.spec.groups, device_of(self.spec, local), str(recipe_of(self)))
        result: torch.Tensor = _Whole.apply(self)
        average_read(result, self, self.spec.mesh)
        return result

    @torch.no_grad()
    def _whole(self) -> torch.Tensor:
        spec = self.spec
        if self._local_tensor.is_meta:
            return self._local_tensor.new_empty(spec.global_shape)
        part = self._gathered()
        return part if spec.parallel is None else full_of(spec.parallel.wrap(part))

    def _gathered(self) -> torch.Tensor:
        """Return the tensor of ``spec.shape``, from the ranks that cut it."""
        local, spec = self._local_tensor.detach(), self.spec
        if spec.world_size == 1:
            return copied(local).view(spec.shape)
        refuse_traced(local)
        if not has_other_lengths(local):
            refuse_to_join(self)
        local = local.reshape(-1)
        width = max(stop - start for start, stop in spec.ranges)
        if type(local) is torch.Tensor and 2 * spec.world_size * width > 3 * spec.numel:
            return _from_owners(local, spec)
        mine = local.new_empty(width, device=device_of(spec, local))
        mine[: local.numel()].copy_(local)
        # As bytes: backends do not know every dtype.
        gathered = mine.new_empty(spec.world_size, width)
        with noted("all-gather of a tensor", spec.group):
            dist.all_gather(
                list(gathered.view(torch.uint8).unbind()), mine.view(torch.uint8), group=spec.group
            )
        by_rank = dict(zip(spec.order, gathered, strict=True))
        pieces = [by_rank[r][: stop - start] for r, (start, stop) in enumerate(spec.ranges) if stop > start]
        if not pieces:
            return mine.view(spec.shape).to(local.device)
        whole = torch.cat(pieces)
        free(gathered, mine)
        return whole.view(spec.shape).to(local.device)

    @torch.no_grad()
    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """Return a DTensor with these values on the same mesh. Every rank must call it.

        Args:
            device_mesh: this tensor's own, as in ``DTensor.redistribute``.
            placements: ``Replicate()`` on every mesh dimension, which gathers (the default), or on all but the last
                and ``Shard(0)`` there, which moves every element to its new owner and no further.

        Raises:
            NotImplementedError: other placements, or another mesh.
        """
        mesh, ndim = self.spec.mesh, self.spec.mesh.ndim
        placements = tuple(placements) if placements is not None else (Replicate(),) * ndim
        if placements == (Replicate(),) * ndim:
            local = self.full_tensor()
        elif placements == (Replicate(),) * (ndim - 1) + (Shard(0),) and self.spec.cuts_last:
            rows, row = _ranges_by_rows(self.spec), self.spec.shape[1:]
            local = _exchange(self._local_tensor, self.spec, self.spec.ranges, rows)
            start, stop = rows[self.spec.rank]
            local = local.view((stop - start) // max(math.prod(row), 1) if self.spec.numel else 0, *row)
        else:
            raise refusal(
                "A ragged tensor redistributes to Replicate() or Shard(0) on the last mesh dimension and Replicate() "
                f"on the other dimensions, not to {placements}. Redistribute the result again."
            )
        if device_mesh is not None and device_mesh != mesh:
            raise refusal(f"A ragged tensor redistributes on its own mesh {mesh}, not on {device_mesh}.")
        return dtensor_of(local, mesh, placements, self.shape, self.stride())

    def as_dtensor(self) -> RaggedDTensor:
        """Return this tensor as a DTensor for a state dict, which torch's functions gather and load. It is no copy."""
        placements = (Replicate(),) * self.spec.mesh.ndim
        with torch.inference_mode(self.is_inference()):  # not an inference tensor, for later loads
            result: Any = dtensor_of(self.detach(), self.spec.mesh, placements, self.shape, self.stride())
        result.__class__ = RaggedDTensor
        return result  # type: ignore[no-any-return]

    def _check_data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RaggedTensor) or value.shape != self.shape:
            raise refusal(
                f".data of {described(self)} accepts only a RaggedTensor of the same shape, got a "
                f"{type(value).__name__} of shape {tuple(value.shape)}. Use copy_ under no_grad."
            )

    def become(self, other: RaggedTensor) -> None:
        set_data(self, other)  # this changes the outside only
        self._local_tensor, self.spec = other._local_tensor, other.spec

    def cut_own_gradient(self) -> None:
        cut_gradient(self, functools.partial(cut_again, self.spec))

    def _copy(self) -> RaggedTensor:
        return RaggedTensor(copied(self._local_tensor.detach()), self.spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        start, stop = self.spec.ranges[self.spec.rank]
        kind = "Parameter containing:\n" if isinstance(self, nn.Parameter) else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"{kind}{type(self).__name__}(shape={tuple(self.shape)}, elements {start}:{stop} of {self.spec.numel} on "
            f"rank {self.spec.rank} of {self.spec.world_size}, local={self._local_tensor}{grad})"
        )

    # -- ways around the dispatcher ------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Mostly only rank 0 calls torch.save, so gathering would hang.
        raise refusal(
            f"pickle and torch.save cannot save {described(self)}: this rank has only a part of it. Save "
            ".full_tensor(), called on every rank, or the state dict with torch.distributed.checkpoint, or shard "
            'with layout="per_parameter".'
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        refuse("numpy", self)

    def __array__(self, dtype: Any = None) -> NoReturn:
        refuse("numpy", self)

    def tolist(self) -> NoReturn:
        refuse("tolist", self)

    def share_memory_(self) -> NoReturn:
        refuse("share_memory_", self)  # the wrapper has no memory, and torch's own version crashes

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("__dlpack__", self)

    # -- torch.distributed.checkpoint: this rank's rectangles ----------------------------------------------------------
    # Imported here, since its 80 modules would otherwise be most of the package's imports.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        parallel = self.spec.parallel
        if parallel is not None and not parallel.is_first_copy:
            return []  # other ranks may have other cuts, so chunks would overlap
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in self.spec.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        local, start = self._local_tensor.detach(), 0
        for offsets, sizes in self.spec.boxes:
            if offsets == index.offset:
                part = part_as(local, start, sizes)
                return part if part is not None else refuse_to_cut(local, self.spec, sizes)
            start += sizes.numel()
        raise ValueError(
            f"Rank {self.spec.rank} has no part of {index.fqn!r} at offset {index.offset}; its parts are "
            f"{self.spec.boxes}."
        )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.spec = tensor.spec
        return tensor._whole()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cut_again(ctx.spec, gradient)


class RaggedDTensor(DTensor):
    """A ragged tensor in a state dict: a replicated DTensor whose local tensor is the ragged one.

    ``torch.distributed.checkpoint.state_dict`` recognises sharded tensors only by ``isinstance(value, DTensor)``. Its
    calls are right here: ``redistribute`` and ``full_tensor`` gather, ``to_local().copy_(whole)`` copies this rank's
    part, and saving and loading use the ragged tensor's rectangles.
    """

    __slots__ = ()

    @property
    def ragged(self) -> RaggedTensor:
        return self._local_tensor  # type: ignore[return-value]

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        return self.ragged

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        self._refuse_on_every_rank()
        return self.ragged.full_tensor()

    def _refuse_on_every_rank(self) -> None:
        """Raise on all ranks if any rank's part cannot be gathered.

        Parts of an optimizer's state may be of different classes.
        """
        ragged = self.ragged
        local, spec = ragged._local_tensor, ragged.spec
        if spec.world_size == 1 or local.is_meta or parameter_of(local) or is_traced(local):
            return  # parameters are of one class on every rank
        own = not has_other_lengths(local)
        any_rank = torch.tensor(float(own), device=device_of(spec, local))
        with noted("all-reduce of a flag", spec.group):
            dist.all_reduce(any_rank, dist.ReduceOp.MAX, group=spec.group)
        if any_rank.item():  # reading it synchronises, as full state dicts do anyway
            refuse_to_join(ragged, "this rank" if own else "another rank")

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        self._refuse_on_every_rank()
        return self.ragged.redistribute(device_mesh, placements)

    # torch's own version would make a plain replicated DTensor, which does not gather.

    def to(self, *args: Any, **kwargs: Any) -> RaggedDTensor:  # type: ignore[override]
        moved = self.ragged.to(*args, **kwargs)
        return self if moved is self.ragged else moved.as_dtensor()  # type: ignore[attr-defined,no-any-return]

    def cpu(self) -> RaggedDTensor:  # type: ignore[override]
        return self.to("cpu")

    def detach(self) -> RaggedDTensor:
        return self.ragged.as_dtensor()

    def clone(self, **kwargs: Any) -> RaggedDTensor:  # type: ignore[override]
        return self.ragged.clone(**kwargs).as_dtensor()  # type: ignore[attr-defined,no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self.ragged, memo).as_dtensor()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.ragged.__reduce_ex__(protocol)
        raise AssertionError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RaggedDTensor({self.ragged!r})"


RaggedDTensor.__slots__ = tuple(DTensor.__slots__)  # type: ignore[assignment]  # for the stager, too; adds no slot


# -- values from elsewhere ---------------------------------------------------------------------------------------------


@torch.no_grad()
def part_of(source: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """Return this rank's part of ``source``, maybe a view, in its local shape. See :meth:`RaggedTensor.from_full`."""
    rank = spec.rank
    if isinstance(source, DTensor) and isinstance(source._local_tensor, RaggedTensor):
        source = source._local_tensor  # from a state dict, or a result of arithmetic with its values
    if source.shape != spec.global_shape:
        source = _expanded(source, spec)
    if isinstance(source, RaggedTensor):
        if source.spec == spec:
            return source._local_tensor.detach()
        like = (source.spec.mesh, source.spec.axes, source.spec.parallel) == (
            spec.mesh,
            spec.axes,
            spec.parallel,
        )
        if like and len(spec.axes) == 1:
            local = _exchange(source._local_tensor, spec, source.spec.ranges, spec.ranges)
            return local.view(spec.local_shape(rank))
        source = source.full_tensor()
    elif isinstance(source, DTensor):
        by_rows = (Replicate(),) * (spec.mesh.ndim - 1) + (Shard(0),)
        if source.device_mesh == spec.mesh and source.placements == by_rows and spec.cuts_last:
            local = _exchange(source.to_local(), spec, _ranges_by_rows(spec), spec.ranges)
            return local.view(spec.local_shape(rank))
        source = full_of(source) if spec.parallel is None else source
    if spec.parallel is not None:
        source = spec.parallel.part_of(source)
    start, _ = spec.ranges[rank]
    if source.numel() and not any(source.stride()):  # one number everywhere; flattening would copy it
        return source.detach().as_strided((), ()).expand(spec.local_shape(rank))
    part = part_as(source.detach(), start, spec.local_shape(rank))
    return part if part is not None else refuse_to_cut(source, spec, spec.local_shape(rank))


def _expanded(source: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    if isinstance(source, (RaggedTensor, DTensor)):
        raise ValueError(
            f"A ragged tensor of shape {tuple(spec.global_shape)} takes values only from a sharded tensor of the "
            f"same shape, found {tuple(source.shape)}."
        )
    return source.expand(spec.global_shape)


def _ranges_by_rows(spec: RaggedSpec) -> list[tuple[int, int]]:
    """Return the flat ranges of ``Shard(0)``, which cuts like torch.chunk."""
    width = -(-spec.shape[0] // spec.world_size) * math.prod(spec.shape[1:])
    return [(min(r * width, spec.numel), min((r + 1) * width, spec.numel)) for r in range(spec.world_size)]


def _exchange(
    local: torch.Tensor, spec: RaggedSpec, have: list[tuple[int, int]], want: list[tuple[int, int]]
) -> torch.Tensor:
    """Move the flat ranges of one cut to those of another over ``spec``'s group, with one all-to-all."""
    refuse_traced(local)
    if not has_other_lengths(local):
        refuse_to_join(RaggedTensor(local, spec))
    size, flat = local.dtype.itemsize, local.detach().reshape(-1)
    mine, target = have[spec.rank], want[spec.rank]
    send = [size * _overlap(mine, other) for other in want]
    receive = [size * _overlap(target, other) for other in have]
    device = device_of(spec, local)
    result = flat.new_empty(target[1] - target[0], device=device)
    source = flat.to(device).view(torch.uint8)  # both cuts contain the whole tensor, so all of it is needed
    with noted("all-to-all of a tensor", spec.group):
        dist.all_to_all_single(result.view(torch.uint8), source, receive, send, group=spec.group)
    return result.to(local.device)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def device_of(spec: RaggedSpec, local: torch.Tensor) -> torch.device:
    """Return the device on which the group communicates. Offloaded tensors move there and back."""
    kind = spec.mesh.device_type
    return local.device if local.device.type == kind else torch.device(kind)


def refuse_traced(local: torch.Tensor) -> None:
    """Raise if torch.compile traces, because the collectives here would run now and not in the graph."""
    if is_traced(local):
        raise refusal(
            "A compiled function gathers a ragged tensor, or copies one to a tensor that is cut differently. "
            "torch.compile cannot record that. Call full_tensor(), and copy_ between tensors that are cut "
            "differently, outside of the compiled function."
        )


def described(tensor: RaggedTensor) -> str:
    """Name the tensor in a message: by its parameter, or by a parameter with the same cut."""
    shape = tuple(tensor.shape)
    if parameter := parameter_of(tensor._local_tensor):
        return f"a ragged tensor (parameter {parameter}, of shape {shape})"
    parameter = parameter_of(tensor.spec)
    return f"a ragged tensor of shape {shape}" + (f" (cut as parameter {parameter})" if parameter else "")


def refuse(name: Any, arguments: Any) -> NoReturn:
    """Raise for an operation on ``arguments``, which contain a ragged tensor."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, RaggedTensor)]
    label = described(tensors[0]) if tensors else "a ragged tensor"
    raise refusal(
        f"{name} is not supported on {label}. Each rank has only a range of its elements, so the result would depend "
        "on this rank's part alone. Use .full_tensor(), called on every rank, or the full parameters inside `with "
        'shardwright.unsharded(model):`, or shard with layout="per_parameter". If a module was called outside the '
        "forward of its unit, call it inside, or apply fully_shard to it before the outer module. To use a weight "
        "after forward, in a loss for example, call unshard() on the module of its unit before each such use."
    )


def refuse_to_join(tensor: RaggedTensor, where: str = "this rank") -> NoReturn:
    """Raise for a tensor whose part has a class that cannot make tensors of other lengths."""
    local = tensor._local_tensor
    kind = "" if has_other_lengths(local) else f" ({type(local).__name__})"
    raise refusal(
        f"{described(tensor)} cannot be gathered or moved to other ranks: in a ragged layout parts have different "
        f"lengths, and the class of its part on {where}{kind} cannot make tensors of another length. Save and load "
        "sharded state dicts with torch.distributed.checkpoint, which stores each rank's part. For full state dicts "
        'shard with layout="per_parameter", or use an optimizer whose state is plain tensors, as sw.AdamW8bit.'
    )


def refuse_to_cut(source: torch.Tensor, spec: RaggedSpec, shape: Sequence[int]) -> NoReturn:
    """Raise for a tensor whose class cannot be cut into this part."""
    parameter = parameter_of(spec)
    raise refusal(
        f"The {type(source).__name__} of shape {tuple(source.shape)}"
        + (f" (cut as parameter {parameter})" if parameter else "")
        + (
            f" cannot be cut to this rank's part of shape {tuple(shape)} in a ragged layout: its class has no such "
            'view. Shard with layout="per_parameter", or use an optimizer whose state is plain tensors, as '
            "sw.AdamW8bit."
        )
    )


def _refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # In inference mode composite operations arrive.
    with torch.no_grad():
        result = func.decompose(*args, **kwargs)
    return result if result is not NotImplemented else refuse(func, (args, kwargs))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    edited = begin_edit(func, args, kwargs) if func._schema.is_mutable else []
    result = HANDLERS.get(func, _refused)(func, args, kwargs)
    for local in edited:
        unmark(local)
    return result


def _as_number(result: Any, func: Any, args: Any, kwargs: Any, spec: RaggedSpec) -> Any:
    """Return the result of an operation that autograd records, where a plain number becomes a :class:`Number`."""
    if type(result) is torch.Tensor and not result.dim() and result.dtype.is_floating_point:
        return as_number(result, func, args, kwargs, spec)
    note_recipe(func, args, kwargs, result)
    return result


def _read_numbers(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], run: Callable[[], Any]
) -> Any:
    """Run an operation on ragged tensors that have no dimensions. With a plain loss among them the result is plain."""
    numbers = [t for t in tensors if isinstance(t, RaggedTensor)]
    plain = [t for t in tensors if not isinstance(t, RaggedTensor)]
    into_plain = func._schema.is_mutable and any(args[0] is t for t in plain)
    losses = [t for t in plain if t.requires_grad or t.dim()]
    if losses and func._schema.is_mutable and not into_plain:
        refuse_loss_in_place(func)
    read = [t for t in tensors if isinstance(t, (RaggedTensor, Number))]
    if not losses and not into_plain:
        result = run()
        for number in read if has_gradient(result) else ():
            read_number(number)
        return mark_own(result)
    for number in read:
        read_number(number)
    for number in numbers:
        number.cut_own_gradient()
    whole = functools.partial(
        tree_map, lambda t: t._local_tensor if isinstance(t, RaggedTensor) else plain_of(t)
    )
    return func(*whole(args), **whole(kwargs))


def cut_again(spec: RaggedSpec, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the gradient of a tensor that was summed or added to a plain loss."""
    if gradient is None or isinstance(gradient, RaggedTensor):
        return gradient
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise refusal(
            f"A gradient of shape {tuple(gradient.shape)} through a sum or mean of a ragged tensor has a graph "
            "itself (create_graph=True), which is not supported. Compute with the full parameters inside `with "
            'shardwright.unsharded(model):`, or shard with layout="per_parameter".'
        )
    return RaggedTensor.from_full(gradient, spec)


def _from_owners(local: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """Return the tensor of ``spec.shape``, which each rank that owns elements of it has sent to all others.

    An all-gather needs memory for the largest part of every rank. If few ranks own elements, that is many times the
    tensor. This needs the tensor's own memory.
    """
    full = local.new_empty(spec.numel, device=device_of(spec, local))
    for number, (start, stop) in enumerate(spec.ranges):
        if stop > start:
            part = full[start:stop]
            if number == spec.rank:
                part.copy_(local)
            with noted("broadcast of a tensor", spec.group):
                dist.broadcast(part.view(torch.uint8), group=spec.group, group_src=spec.order.index(number))
    return full.view(spec.shape).to(local.device)
