"""A file of ``torch.save`` that is written one tensor after another, so a state is never in memory as a whole."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.checkpoint.format.archive import ALIGNMENT, described, host_bytes, pickled
from shardwright.checkpoint.format.index import Keys, TensorForm
from shardwright.checkpoint.format.nested import nested
from shardwright.common.durable import new_file

_ZIP64 = 1 << 31  #: bytes of a record from which its header has another form


def write_torch_file(
    file: Path,
    forms: Mapping[str, TensorForm],
    values: Mapping[Keys, Any],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a nested state as ``torch.save`` does, and wait until it is on disk.

    Args:
        file: the path of the new file.
        forms: the form of each tensor, by name.
        values: plain values by their keys.
        tensors: the name and values of each tensor, in the order of ``forms``.

    Raises:
        OSError: it cannot be written.
    """
    leaves: dict[Keys, Any] = {
        form.path: described(form.dtype, form.shape, str(number))
        for number, form in enumerate(forms.values())
    }
    content = pickled(nested({**leaves, **values}))
    numbers = {name: number for number, name in enumerate(forms)}
    with new_file(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as records:
        for name, small in (("data.pkl", content), ("byteorder", b"little"), ("version", b"3\n")):
            _add(records, name, memoryview(small))
        for name, tensor in tensors:
            data, held = host_bytes(tensor)
            _add(records, f"data/{numbers[name]}", data)
            del data, held, tensor  # so that the next tensor is not read while this one is in memory


def _add(records: zipfile.ZipFile, name: str, data: memoryview) -> None:
    record = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
    large = len(data) >= _ZIP64
    begin = records.start_dir + 30 + len(record.filename) + 4 + (20 if large else 0)
    filler = -begin % ALIGNMENT
    record.extra = struct.pack("<HH", 0x4246, filler) + b"Z" * filler  # as torch pads
    record.file_size = len(data)
    with records.open(record, "w", force_zip64=large) as target:
        while data:
            target.write(data[: 1 << 24])
            data = data[1 << 24 :]
