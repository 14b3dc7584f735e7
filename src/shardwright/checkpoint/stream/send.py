"""``stream_weights``: a model's whole tensors under their stored names, in buckets of bounded memory.

The plan of the buckets needs only shapes. Each bucket is gathered when it is asked for, tensor by tensor. Where its
tensors go is decided in ``transport.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.pretrained.files import abbreviated
from shardwright.checkpoint.pretrained.key_maps import KeyMap
from shardwright.checkpoint.pretrained.model import ModelTensor, at_rest, ranks_of
from shardwright.checkpoint.pretrained.stored_model import StoredModel, bytes_of, stored_model_of
from shardwright.checkpoint.stream.transport import BucketSink, Header, Here, ToGroup, ToSharedMemory
from shardwright.engine import (
    OtherRankFailed,
    RaggedTensor,
    RankGroup,
    Unit,
    agree_to_gather,
    cut_dim,
    hash_of,
    ranks_in_words,
    units_of,
    whole_of,
)
from shardwright.engine.compat import in_backward, local_of, storage_key


def stream_weights(
    model: nn.Module,
    *,
    names: Iterable[str] | None = None,
    bucket_bytes: int | str = "256 MiB",
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    to: Literal["all", "first"] | None = None,
    group: dist.ProcessGroup | None = None,
    share: str | None = None,
    consumers: int = 1,
    timeout: float = 300.0,
) -> Iterator[dict[str, Tensor]]:
    """Yield a model's whole parameters and persistent buffers, bucket by bucket, as ``save_pretrained`` stores them.

        for bucket in sw.stream_weights(model, dtype=torch.bfloat16):
            engine.load_weights(bucket.items())

    Keys and values equal those of the files that :func:`save_pretrained` would write: tied weights come once, and a
    key map or the conversions of transformers rename, transpose, cut and join. Each bucket is a dict from keys to whole
    tensors on the device of the parameters. They are copies: changes of them do not reach the model. They may be views
    that are not contiguous. The dict is emptied when the next bucket is asked for, so that its memory is free. A tensor
    that you hold longer stays as it is.

    For a sharded model every rank must call it with the same arguments and must ask for every bucket. Call it between
    steps. The call itself checks everything and plans; each bucket is gathered when it is asked for.

    **Memory.** Beside its shards and the buckets that you hold, a rank has at most ``bucket_bytes``, the memory in
    which tensors are gathered and converted included. A tensor that needs more alone is a bucket by itself; a stored
    tensor has up to three times its own size while it is gathered. Tensors that are stored together, and stored tensors
    that are parts of one parameter (experts), are in one bucket.

    **Between two buckets** you may use the model but not change its weights: a change, say by an optimizer's step,
    raises an error on every rank, because a stream would mix two versions. A stream that you leave early leaves the
    model as it was. Every rank must leave it at the same bucket. If one rank leaves it alone, the next bucket of the
    others raises an error when that rank next communicates or ends. If a variable holds the stream, leave it with its
    method ``close()``.

    **Other processes.** With ``group`` the mesh's first rank broadcasts each bucket to the other ranks of a process
    group, which call ``sw.receive_weights(group)``. With ``share`` this rank puts each bucket into shared memory, and
    processes of the same host call ``sw.receive_weights(share)``. The memory is anonymous: nothing is left of it when
    all processes have ended, also if they are killed. Then every rank of the training job gets empty dicts, each when
    the consumers have its bucket; so iterate to the end: ``for _ in sw.stream_weights(model, group=group): pass``.

    Args:
        model: plain, or sharded by ``fully_shard`` in any layout and strategy.
        names: keys to send, with ``*`` as in file names. Default: all.
        bucket_bytes: the limit, as a number or such as "256 MiB".
        dtype: floating-point tensors are converted to this dtype, before they are gathered. Default: as the model
            stores them.
        key_map: as for :func:`save_pretrained`.
        to: "all" ranks get the tensors (the default), or only the mesh's "first" rank, and the others empty dicts. All
            ranks gather in both cases.
        group: a process group of the mesh's first rank and of the consumers. The other ranks of the training job pass
            what ``new_group`` returned to them.
        share: a name of 1 to 80 bytes, unique on this host. Linux only.
        consumers: with ``share`` the number of processes to wait for.
        timeout: with ``share`` seconds to wait for a consumer, at the start and after each bucket.

    Raises:
        ValueError: a tensor holds no values, the key map does not fit, a name matches no key, the ranks passed
            different arguments, or an argument is wrong.
        RuntimeError: the weights changed between two buckets, a forward or backward is under way, another rank failed,
            or a consumer has ended.
        TimeoutError: too few consumers came.
    """
    units = units_of(model)
    ranks = ranks_of(model)
    _refuse_in_use(units)
    limit = bytes_of(bucket_bytes, "bucket_bytes")
    patterns = [names] if isinstance(names, str) else None if names is None else list(names)
    sends = group is not None or share is not None
    plan = ranks.run_own(
        lambda: _plan(model, patterns, limit, dtype, key_map, share is not None), others_raise=OtherRankFailed
    )
    if not ranks.alone:
        _refuse_different_calls(ranks, (plan.buckets_in_words(), str(dtype), to, group is None, share))
    sink = ranks.run_own(
        lambda: _sink(ranks.is_first, to, group, share, consumers, timeout), others_raise=OtherRankFailed
    )
    return _stream(plan, units, ranks, sink, sends)


def _refuse_different_calls(ranks: RankGroup, call: tuple[object, ...]) -> None:
    """Raise ValueError on every rank if the plans or arguments of two ranks differ."""
    ranks.check_equal(
        ranks.all_gather(hash_of(call), "states"),
        lambda others, *_: ValueError(
            f"The ranks called stream_weights with different models or arguments: {ranks_in_words(others)} with "
            f"others than rank {ranks.numbers[0]} (names, bucket_bytes, dtype, key_map, to, group, share). Pass "
            "the same on every rank."
        ),
    )


def _sink(
    first: bool, to: str | None, group: Any, share: str | None, consumers: int, timeout: float
) -> BucketSink:
    """Return the place for this rank's buckets. ``first``: whether this is the mesh's first rank. Raises ValueError."""
    if to not in (None, "all", "first"):
        raise ValueError(f'to must be "all" or "first", got {to!r}')
    if group is not None and share is not None:
        raise ValueError("pass group or share, not both")
    if group is None and share is None:
        return BucketSink() if to == "first" and not first else Here()
    if to == "all":
        raise ValueError('with group or share the consumers get the tensors; do not pass to="all"')
    _check_group(group, first)
    if not first:
        return BucketSink()
    return ToGroup(group) if group is not None else ToSharedMemory(share or "", consumers, timeout)


def _check_group(group: Any, first: bool) -> None:
    """Raise unless the mesh's first rank is in the group and this rank, if it is another one, is not."""
    if group is None:
        return
    inside = group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) >= 0
    if first and not inside:
        raise ValueError("the mesh's first rank sends the weights, but it is not in the group")
    if first and dist.get_world_size(group) < 2:
        raise ValueError("the group has only the sender; expected at least one consumer in it")
    if inside and not first:
        raise ValueError(
            f"rank {dist.get_rank()} of the training job is in the group; expected only the mesh's first rank and the "
            "consumers. Use to='all' for ranks of the training job."
        )


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass
class _BucketPlan:
    """The buckets of a stream.

    Attributes:
        stored: the stored tensors.
        buckets: for each bucket its groups of the model's tensors.
        keys: the keys to send.
        before: the state of each tensor's memory when the stream was made.
    """

    stored: StoredModel
    buckets: list[list[list[ModelTensor]]]
    keys: set[str]
    before: list[tuple[ModelTensor, tuple[int, int]]]

    def header(self, number: int) -> Header:
        tensors = tuple(
            (key, self.stored.keys[key][1], tuple(self.stored.keys[key][0]))
            for group in self.buckets[number]
            for key in self.stored.keys_of(group)
            if key in self.keys
        )
        return Header(number, len(self.buckets), tensors)

    def buckets_in_words(self) -> list[str]:
        return [repr(self.header(number)) for number in range(len(self.buckets))]


def _plan(
    model: nn.Module,
    patterns: list[str] | None,
    limit: int,
    dtype: torch.dtype | None,
    key_map: KeyMap | None,
    copies: bool,
) -> _BucketPlan:
    stored = stored_model_of(model, key_map, dtype)
    keys = set(stored.keys)
    if patterns is not None:
        unknown = [repr(p) for p in patterns if not any(fnmatchcase(key, p) for key in stored.keys)]
        if unknown or not patterns:
            raise ValueError(
                f"names: expected keys of the model's tensors, found {abbreviated(unknown) or 'none'}; keys are "
                f"{abbreviated(list(stored.keys), 3)}"
            )
        keys = {key for key in stored.keys if any(fnmatchcase(key, p) for p in patterns)}
    buckets: list[list[list[ModelTensor]]] = []
    held = 0
    for group in stored.groups:
        own = stored.keys_of(group)
        if not keys.intersection(own):
            continue
        size = sum(_nbytes(entry, stored) for entry in group)
        copied = sum(map(stored.nbytes, keys.intersection(own))) if copies else 0
        need = sum(_gathering(entry, stored) for entry in group) + copied
        if len(group) > 1:
            need += size  # parts are joined
        if not buckets or held + need > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(group)
        held += copied or size
    before = [(entry, _state(entry)) for bucket in buckets for group in bucket for entry in group]
    return _BucketPlan(stored, buckets, keys, before)


def _nbytes(entry: ModelTensor, stored: StoredModel) -> int:
    return entry.tensor.numel() * stored.stored_dtype(entry.tensor).itemsize


def _gathering(entry: ModelTensor, stored: StoredModel) -> int:
    """Return the most bytes that a tensor takes while it is gathered, its result included. Equal on all ranks."""
    tensor, itemsize = entry.tensor, stored.stored_dtype(entry.tensor).itemsize
    size = tensor.numel() * itemsize
    if isinstance(tensor, RaggedTensor):
        spec = tensor.spec
        if spec.parallel is not None:  # this rank's part may differ from others
            return 4 * size
        part = max(stop - start for start, stop in spec.ranges) * itemsize
        from_owners = 2 * spec.world_size * part > 3 * size
        return size + part if from_owners else size + (spec.world_size + 2) * part
    if isinstance(tensor, DTensor):
        shape, axes = list(tensor.shape), 0
        for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if (dim := cut_dim(placement)) is not None:
                shape[dim] = -(-shape[dim] // ranks)
                axes += ranks > 1
        if not axes:
            return size
        part = math.prod(shape) * itemsize
        padded = tensor.device_mesh.size() * part
        by_rows = all(cut_dim(placement) in (None, 0) for placement in tensor.placements)
        return max(size, padded) + (0 if by_rows else size) + 2 * part + (padded if axes > 1 else 0)
    return size


def _state(entry: ModelTensor) -> tuple[int, int]:
    """Return a value that changes with the tensor's values, its memory or its place."""
    module, name = entry.slots[0]
    now = module._parameters.get(name, module._buffers.get(name))
    local = local_of(now) if isinstance(now, (DTensor, RaggedTensor)) else now
    if local is None:
        return 0, 0
    # An edit of a DTensor increases the counter of its local tensor; on torch 2.11 the counter of the DTensor alone.
    counters = [t._version for t in (now, local) if t is not None and not t.is_inference()]
    return sum(counters), storage_key(local)


# -- streaming ---------------------------------------------------------------------------------------------------------


def _refuse_in_use(units: list[Unit]) -> None:
    if in_backward():
        raise RuntimeError("stream_weights was called in a backward: call it between steps")
    at_rest(units, "stream_weights was called")


def _stream(
    plan: _BucketPlan, units: list[Unit], ranks: RankGroup, sink: BucketSink, sends: bool
) -> Iterator[dict[str, Tensor]]:
    count = len(plan.buckets)
    sent, stopped = 0, "the loop over stream_weights ended early"
    try:
        for number in range(count):
            _meet(plan, units, ranks, number)
            bucket, error = _bucket(plan, number, sink)
            if sends or error is not None:
                (ranks if sends else RankGroup(alone=True)).stop_after(error)
            sent += 1
            yield bucket
            bucket.clear()
        _meet(plan, units, ranks, count)
        stopped = ""
    except Exception as failure:
        stopped = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        if stopped:
            with contextlib.suppress(Exception):  # the consumers may have ended
                sink.close(Header(sent, count, stopped=stopped))
        else:
            sink.close(Header(count, count))


def _meet(plan: _BucketPlan, units: list[Unit], ranks: RankGroup, number: int) -> None:
    """Raise on every rank if a rank has changed weights or uses the model."""
    agree_to_gather(units)

    def check() -> None:
        _refuse_in_use(units)
        changed = [entry.name for entry, state in plan.before if _state(entry) != state]
        if changed:
            raise RuntimeError(
                f"Weights changed after {number} of {len(plan.buckets)} buckets of stream_weights, so the stream would "
                f"mix two versions: {abbreviated([repr(name) for name in changed], 4)}. Change them before the "
                "stream or after it."
            )

    ranks.run_own(check, others_raise=OtherRankFailed)


@torch.inference_mode(False)
@torch.no_grad()
def _bucket(plan: _BucketPlan, number: int, sink: BucketSink) -> tuple[dict[str, Tensor], Exception | None]:
    """Gather a bucket into the sink. If the sink fails, this rank goes on gathering, since the others need it."""
    error: Exception | None = None
    try:
        sink.begin(plan.header(number))
    except Exception as failure:
        error = failure
    for group in plan.buckets[number]:
        whole = {entry.name: _whole(entry, plan.stored) for entry in group}
        if error is None:
            try:
                for key, tensor in plan.stored.stored_tensors(group, whole):
                    if key in plan.keys:
                        sink.put(key, tensor)
            except Exception as failure:
                error = failure
        del whole
    if error is None:
        try:
            return sink.end(), None
        except Exception as failure:
            error = failure
    return {}, error


def _whole(entry: ModelTensor, stored: StoredModel) -> Tensor:
    """Return a whole tensor in memory of its own and in its stored dtype. Every rank must call it."""
    tensor = entry.tensor.detach()
    own = local_of(tensor) if isinstance(tensor, (DTensor, RaggedTensor)) else tensor
    if type(own) is Tensor:
        tensor = tensor.to(stored.stored_dtype(tensor))  # before it is gathered, so that less is sent
    whole = whole_of(tensor)
    if whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
        whole = whole.clone(memory_format=torch.contiguous_format)
    return whole
