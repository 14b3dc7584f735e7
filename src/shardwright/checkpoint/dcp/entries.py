"""The entries of a folder by torch's distributed checkpoint: its tensors and values, and the files where they are.

Every container that a rank needs is examined before any of them is read into a tensor. Nothing here changes a tensor.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardwright.checkpoint.dcp import containers
from shardwright.checkpoint.format.boxes import meet
from shardwright.checkpoint.format.index import Chunk, StoredTensor
from shardwright.checkpoint.format.nested import StateTensor
from shardwright.checkpoint.storage.stores import Files, Reader
from shardwright.common.errors import Damaged


def sizes_of(metadata: Metadata) -> dict[str, int]:
    """Return the files a checkpoint consists of, apart from ``.metadata``, and the bytes that each must
    hold at least."""
    sizes: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), end)
    return sizes


def position_of(metadata: Metadata, name: str) -> tuple[str, int]:
    """Return the file and the byte where a tensor begins."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    places = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks]
    return min(((place.relative_path, place.offset) for place in places), default=("", 0))


def tensors_of(
    files: Files, metadata: Metadata, wanted: Mapping[str, StateTensor]
) -> dict[str, StoredTensor]:
    """Return the wanted tensors, with the chunks that this rank needs.

    Raises:
        Damaged: a container is damaged, or holds another tensor than ``.metadata`` says.
    """
    stored: dict[str, StoredTensor] = {}
    with _opener(files, metadata) as container_of:
        for name, each in wanted.items():
            entry = metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            boxes, chunks = each.boxes_to_load(), []
            for chunk in entry.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                if not any(meet((offsets, sizes), (box.offsets, box.sizes)) for box in boxes):
                    continue
                container = container_of(MetadataIndex(name, chunk.offsets))
                found = containers.describe(container, name)
                if (found.dtype, found.shape) != (entry.properties.dtype, sizes):
                    raise Damaged(
                        f"{name!r} has {found.dtype} and shape {found.shape} in {container.file}, and "
                        f"{entry.properties.dtype} and {sizes} in .metadata"
                    )
                strides = None if found.strides == _contiguous(sizes) else (found.strides, found.elements)
                file, start, length = container.file, container.start, container.length
                chunks.append(Chunk(offsets, sizes, file, start, length, found.data, "", strides))
            path = (metadata.planner_data or {}).get(name) or (name,)
            stored[name] = StoredTensor(path, entry.properties.dtype, each.shape, tuple(chunks))
    return stored


def values_of(files: Files, metadata: Metadata, names: Iterable[str], weights_only: bool) -> dict[str, Any]:
    """Return the values of these names.

    Raises:
        Damaged: a value is damaged, or none that ``torch.load(weights_only=True)`` reads, if ``weights_only``.
    """
    values: dict[str, Any] = {}
    with _opener(files, metadata) as container_of:
        for name in names:
            container = container_of(MetadataIndex(name))
            if weights_only:
                values[name] = containers.value_of(container, name)
            else:
                values[name] = torch.load(io.BytesIO(container.read(0, container.length)), weights_only=False)
    return values


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@contextlib.contextmanager
def _opener(files: Files, metadata: Metadata) -> Iterator[Callable[[MetadataIndex], containers.Container]]:
    """A function that gives the container of an item. The file of the last one stays open."""
    readers: dict[str, Reader] = {}

    def close() -> None:
        while readers:
            readers.popitem()[1].close()

    def container_of(index: MetadataIndex) -> containers.Container:
        place = metadata.storage_data[index]
        name = place.relative_path
        if name not in readers:
            close()
            readers[name] = files.open(name)
        return containers.Container(readers[name], name, place.offset, place.length)

    try:
        yield container_of
    finally:
        close()
