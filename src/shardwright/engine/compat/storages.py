"""Memory of tensors: addresses, storages, exchanges of their memory, and the device's allocator.

Tensors over the memory are in ``tensors.py``. The function that exchanges memory on torch 2.11 is compiled by
``swap.py``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from shardwright.engine.compat.modes import is_wrapped
from shardwright.engine.compat.probe import probe
from shardwright.engine.compat.swap import (
    MissingCompilerError as MissingCompilerError,
    load as _load_exchange,
)

_use_count = probe(torch._C, "_storage_Use_Count")

#: Unlike ``Tensor.__dlpack__`` it serves devices that were added to torch, and no stream waits for another.
_to_dlpack = probe(torch._C, "_to_dlpack")

#: Whether two storages can exchange their memory without a compiled helper, as torch 2.12 and later can.
SWAPS_MEMORY = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

if SWAPS_MEMORY:
    #: Exchanges the memory and the sizes of two storages. Views of them see it.
    swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], Any]
    swap_memory = torch.UntypedStorage._swap_data_ptr_  # type: ignore[attr-defined]

    def prepare_to_swap_memory() -> None:
        """Compile what :func:`swap_memory` needs, where torch lacks it.

        Raises:
            MissingCompilerError: on torch 2.11, without a C++ compiler.
        """

else:
    probe(torch.UntypedStorage, "_cdata")
    _exchange = functools.cache(_load_exchange)

    def swap_memory(one: torch.UntypedStorage, two: torch.UntypedStorage) -> None:
        if _exchange()(one._cdata, two._cdata):
            raise RuntimeError(
                f"storages of {one.nbytes()} bytes on {one.device} and of {two.nbytes()} bytes on {two.device} cannot "
                "exchange memory: they must be on one device, and of one size or empty"
            )

    def prepare_to_swap_memory() -> None:
        _exchange()


def block_of(memory: torch.Tensor, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over the first bytes of a flat tensor of bytes. It keeps the tensor's memory alive."""
    return torch.from_dlpack(_to_dlpack(memory[:nbytes])).untyped_storage()


def symmetric_pool(device: torch.device, backend: Literal["NCCL"]) -> Any:
    """Return torch's pool of symmetric memory. Raises NotImplementedError if torch has none."""
    from torch.distributed import _symmetric_memory

    if not hasattr(_symmetric_memory, "get_mem_pool"):
        raise NotImplementedError(f"torch {torch.__version__} has no pools of symmetric memory")
    _symmetric_memory.set_backend(backend)
    return _symmetric_memory.get_mem_pool(device)


def make_symmetric(memory: torch.Tensor, group: Any) -> None:
    """Exchange the addresses of this memory among the ranks of the group. All must call it."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(memory, group)


def has_expandable_segments() -> bool:
    """Return whether the environment asks for expandable segments of the device's memory."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, or 0 if it has none of its own (sparse, or wrapped by torch.func)."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not is_wrapped(tensor) else 0


def storage_class(storage: torch.TypedStorage) -> Any:
    """Return the class as which a storage with a dtype is pickled, such as ``torch.FloatStorage``."""
    return getattr(torch, storage._pickle_storage_type())


def storage_key(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a key of a tensor's storage: equal for all tensors over one storage, also if it has no memory.

    Another storage may get the same key after the last of these tensors is gone.
    """
    storage = memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory
    return storage._cdata


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and storage handles that refer to this memory."""
    return _use_count(storage_key(storage))


@contextmanager
def watch_resizes(
    on_resize: Callable[[torch.UntypedStorage], None],
    memory_of: Callable[[int], torch.UntypedStorage],
) -> Iterator[None]:
    """Call ``on_resize`` with each storage to which Python code gives another size inside the context.

    ``memory_of`` returns a storage of a number of bytes. A resized storage gets its memory if this machine refuses to
    allocate that number.
    """
    plain, plain_resizable = torch.UntypedStorage.resize_, torch.UntypedStorage.resizable
    #: For each storage that got such memory the empty one that gave it. Whether they can be resized moved with it.
    lenders: dict[int, torch.UntypedStorage] = {}

    def resizable(storage: torch.UntypedStorage) -> bool:
        return plain_resizable(storage) or storage._cdata in lenders

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if not plain_resizable(storage) and (lender := lenders.pop(storage._cdata, None)) is not None:
            swap_memory(storage, lender)
        try:
            plain(storage, nbytes)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            plain(storage, 0)
            lender = lenders[storage._cdata] = memory_of(nbytes)
            swap_memory(storage, lender)
        on_resize(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resizable = resizable  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
        torch.UntypedStorage.resizable = plain_resizable  # type: ignore[method-assign]
