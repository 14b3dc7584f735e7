"""``receive_weights``: the buckets that ``stream_weights`` of another process sends. It needs no model and no mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.stream.transport import FromGroup, FromSharedMemory


def receive_weights(
    source: dist.ProcessGroup | str, *, group_src: int = 0, timeout: float = 300.0
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights that another process sends with :func:`stream_weights`, bucket by bucket.

        for bucket in sw.receive_weights(group):
            sw.load_pretrained(model, bucket, allow_missing=True)

    Each bucket is a dict from keys to whole tensors, of the shapes and dtypes that the sender has: with a process group
    on its device, with shared memory on the CPU. Each tensor belongs to this process, and no other process sees changes
    of it. The dict is emptied when the next bucket is asked for. A tensor that you hold longer stays as it is and keeps
    its memory; in shared memory it keeps the memory of its whole bucket.

    If you leave the loop early, also by an exception, the rest of the stream is received and dropped first. So the
    sender and other consumers go on. If a variable holds the stream, call its method ``close()`` for this.

    Args:
        source: the process group that the sender passes as ``group``, or the name that it passes as ``share``.
        group_src: the sender's rank in the group.
        timeout: seconds to wait for the sender's next message through shared memory, and for its start. A process group
            has a timeout of its own.

    Raises:
        RuntimeError: the sender stopped early. Weights of earlier buckets are new, the others are not.
        TimeoutError: no process sends under this name.
        ConnectionError: the sender's process has ended.
    """
    if isinstance(source, str):
        return _received(FromSharedMemory(source, timeout))
    if dist.get_rank(source) == group_src:
        raise ValueError(f"rank {group_src} of the group sends the weights, so it cannot receive them")
    return _received(FromGroup(source, group_src))


def _received(source: FromGroup | FromSharedMemory) -> Iterator[dict[str, Tensor]]:
    ended = False
    try:
        while True:
            try:
                header = source.header()
                if not header.tensors:
                    ended = True
                    break
                bucket = source.bucket(header)
            except BaseException:
                ended = True
                raise
            if bucket:
                yield bucket
                bucket.clear()
            source.done()
        if header.stopped:
            raise RuntimeError(
                f"The sender stopped after {header.number} of {header.count} buckets of weights: {header.stopped}"
            )
    finally:
        if not ended and not sys.is_finalizing():
            _drop_rest(source)
        source.close()


def _drop_rest(source: FromGroup | FromSharedMemory) -> None:
    """Receive the rest of the stream, so that the sender does not wait for this process."""
    try:
        source.done()
        while (header := source.header()).tensors:
            source.skip(header)
            source.done()
    except (OSError, RuntimeError):
        pass  # The sender has ended. The caller's own exception counts.
