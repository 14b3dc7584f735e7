"""Tensors and values of a folder by torch's distributed checkpoint: where they are, and that they are what it says.

Every container that a rank needs is examined before any of them is read into a tensor. Nothing here changes a tensor.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shardwright.checkpoint.dcp import containers
from shardwright.checkpoint.format.digests import Damaged, open_regular
from shardwright.checkpoint.format.index import Part, StoredTensor
from shardwright.checkpoint.format.nested import NamedTensor, meet

#: For parts that are not contiguous in their file: the steps between their elements, and the number of elements.
Strides = dict[Part, tuple[tuple[int, ...], int]]


def tensors_of(
    folder: Path, metadata: Metadata, wanted: Mapping[str, NamedTensor], strides: Strides, links: bool = False
) -> dict[str, StoredTensor]:
    """The parts of the wanted tensors that this rank needs. Adds the strides of those that are not contiguous.

    Raises:
        Damaged: a container is damaged, or holds another tensor than ``.metadata`` says.
    """
    stored: dict[str, StoredTensor] = {}
    with _opener(folder, metadata, links) as container_of:
        for name, each in wanted.items():
            entry = metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            boxes, parts = each.boxes_to_load(), []
            for chunk in entry.chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                if not any(meet(offsets, sizes, box) for box in boxes):
                    continue
                container = container_of(MetadataIndex(name, chunk.offsets))
                found = containers.describe(container, name)
                if (found.dtype, found.shape) != (entry.properties.dtype, sizes):
                    raise Damaged(
                        f"{name!r} has {found.dtype} and shape {found.shape} in {container.file.name}, and "
                        f"{entry.properties.dtype} and {sizes} in .metadata"
                    )
                part = Part(
                    offsets, sizes, container.file.name, container.start, container.length, found.data, ""
                )
                parts.append(part)
                if found.strides != _contiguous(sizes):
                    strides[part] = found.strides, found.elements
            path = (metadata.planner_data or {}).get(name) or (name,)
            stored[name] = StoredTensor(path, entry.properties.dtype, each.shape, tuple(parts))
    return stored


def values_of(
    folder: Path, metadata: Metadata, keys: Container[str], weights_only: bool, links: bool = False
) -> dict[Any, Any]:
    """The values below these keys of the saved state, by their paths.

    Raises:
        Damaged: a value is damaged, or none that ``torch.load(weights_only=True)`` reads, if ``weights_only``.
    """
    paths = metadata.planner_data or {}
    values: dict[Any, Any] = {}
    with _opener(folder, metadata, links) as container_of:
        for name, entry in metadata.state_dict_metadata.items():
            path = paths.get(name) or (name,)
            if not isinstance(entry, BytesStorageMetadata) or path[0] not in keys:
                continue
            container = container_of(MetadataIndex(name))
            if weights_only:
                values[path] = containers.value_of(container, name)
            else:
                values[path] = torch.load(io.BytesIO(container.read(0, container.length)), weights_only=False)
    return values


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@contextlib.contextmanager
def _opener(
    folder: Path, metadata: Metadata, links: bool
) -> Iterator[Callable[[MetadataIndex], containers.Container]]:
    """A function that gives the container of an item. The file of the last one stays open."""
    descriptors: dict[str, int] = {}

    def container_of(index: MetadataIndex) -> containers.Container:
        place = metadata.storage_data[index]
        name = place.relative_path
        if name not in descriptors:
            for each in descriptors.values():
                os.close(each)
            descriptors.clear()
            descriptors[name] = open_regular(folder / name, links)
        return containers.Container(descriptors[name], folder / name, place.offset, place.length)

    try:
        yield container_of
    finally:
        for each in descriptors.values():
            os.close(each)
