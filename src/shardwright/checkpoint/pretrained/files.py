"""Files of weights: safetensors and files of ``torch.save``; one file, or several with an index.

Reading maps files into memory. A tensor is a view of its file, so only the pages of copied parts are read. The
safetensors format is small enough to be read and written here
(https://github.com/huggingface/safetensors#format), also in parts, without its library. This file knows no models and
ranks.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.format.archive import host_bytes
from shardwright.checkpoint.storage.local_files import LocalWriter
from shardwright.common.durable import replace_file
from shardwright.common.errors import Damaged

#: The format's names of dtypes.
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
LONGEST_HEADER = 100_000_000  #: bytes; the format's own limit
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. Only its name, shape and dtype were read."""

    key: str
    file: Path
    position: int  #: in the file, to read in its order
    shape: torch.Size
    dtype: torch.dtype
    view: Callable[[], Tensor]  #: the mapped tensor

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def equals(self, other: FileTensor) -> bool:
        """Return whether both have the same bits. Their shapes and dtypes are equal."""
        return same_bits(self.view(), other.view())


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal, NaNs and the signs of zeros included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def open_stored(path: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """Return every tensor of a file, or of a folder with an index or a single file of weights.

    In a folder safetensors are preferred to files of ``torch.save``, and an index to a file. Only headers are read.
    (Files of ``torch.save`` before torch 1.6 are read completely, because they cannot be mapped.)

    Raises:
        FileNotFoundError: there is nothing there, or a file that the index names is missing.
        ValueError: a file is damaged, of an unknown kind, or holds other values than named tensors; or several files
        fit.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file or a folder of weights, found nothing there")
    if path.name.endswith(".index.json"):
        return _open_index(path)
    return _open_file(path)


def _open_folder(folder: Path) -> dict[str, FileTensor]:
    for suffixes, ending in (((".safetensors",), ".safetensors.index.json"), (TORCH_SUFFIXES, ".index.json")):
        indices = sorted(p for p in folder.iterdir() if p.name.endswith(ending))
        files = sorted(p for p in folder.iterdir() if p.suffix in suffixes)
        if len(indices) == 1:
            return _open_index(indices[0])
        if len(indices) > 1 or len(files) > 1:
            several = ", ".join(p.name for p in indices or files)
            raise ValueError(
                f"{folder}: expected one index or one file of weights, found {several}. Pass the path of one of them."
            )
        if files:
            return _open_file(files[0])
    raise FileNotFoundError(
        f"{folder}: expected {SAFETENSORS_INDEX}, or a file of weights (.safetensors, {', '.join(TORCH_SUFFIXES)}), "
        "found none"
    )


def _open_index(index: Path) -> dict[str, FileTensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)[
            "weight_map"
        ]
        names = dict.fromkeys(places.values())
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("file names")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Damaged(
            f'{index}: expected JSON with a "weight_map" from keys to names of files beside it, found something else '
            f"({type(error).__name__}: {error})"
        ) from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index}: the index names files that are missing: {abbreviated(missing)}")
    by_file = {name: _open_file(index.parent / name) for name in names}
    absent = [key for key, name in places.items() if key not in by_file[name]]
    if absent:
        raise Damaged(
            f"{index}: these tensors are not in the file that the index names for them: {abbreviated(absent)}"
        )
    return {key: by_file[name][key] for key, name in places.items()}


def _open_file(file: Path) -> dict[str, FileTensor]:
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    if file.suffix in TORCH_SUFFIXES:
        return _open_torch(file)
    raise ValueError(
        f"{file}: expected a file ending in .safetensors, {', '.join(TORCH_SUFFIXES)} or .index.json"
    )


def abbreviated(names: Sequence[object], limit: int = 12) -> str:
    """Return the names, separated by commas. A long list is cut, with the number of the other names."""
    joined = ", ".join(map(str, names[:limit]))
    return f"{joined} and {len(names) - limit:,} more" if len(names) > limit else joined


# -- safetensors -------------------------------------------------------------------------------------------------------


def _open_safetensors(file: Path) -> dict[str, FileTensor]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise Damaged(
                f"{file}: expected a safetensors file, found {size:,} bytes that do not begin with the length of a "
                "header. It is damaged, or not fully downloaded."
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
        header.pop("__metadata__", None)
        entries = [(key, _entry(value, size - 8 - length)) for key, value in header.items()]
        end = 0
        for begin, stop, key in sorted((begin, stop, key) for key, (_, _, begin, stop) in entries):
            if begin != end:
                raise ValueError(
                    f"{key!r} begins at byte {begin:,}, but the tensors before it end at byte {end:,}"
                )
            end = stop
        if end != size - 8 - length:
            raise ValueError(f"its tensors end at byte {end:,} of {size - 8 - length:,}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file}: the header does not fit a complete safetensors file: {error}") from None
    mapped: list[Tensor] = []

    def bytes_of_file() -> Tensor:
        if not mapped:
            mapped.append(torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8))
        return mapped[0]

    def viewer(shape: torch.Size, dtype: torch.dtype, begin: int, end: int) -> Callable[[], Tensor]:
        def view() -> Tensor:
            if begin == end:
                return torch.empty(shape, dtype=dtype)
            data = bytes_of_file()[8 + length + begin : 8 + length + end]
            if data.data_ptr() % dtype.itemsize:
                # No usual writer makes such a file. It cannot be read in place, so it is read completely.
                data = data.clone()
            return data.view(dtype).view(shape)

        return view

    return {
        key: FileTensor(key, file, begin, shape, dtype, viewer(shape, dtype, begin, end))
        for key, (shape, dtype, begin, end) in entries
    }


def _entry(value: Mapping[str, Any], available: int) -> tuple[torch.Size, torch.dtype, int, int]:
    name = value["dtype"]
    if name not in SAFETENSORS_DTYPES:
        raise ValueError(f"dtype {name!r} is not supported")
    shape, (begin, end) = list(value["shape"]), value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape} and bytes {begin} to {end} are not all whole numbers from 0")
    # Not with torch.Size.numel, which overflows.
    if not begin <= end <= available or end - begin != math.prod(shape) * SAFETENSORS_DTYPES[name].itemsize:
        raise ValueError(f"{tuple(shape)} of {name} at bytes {begin} to {end} of {available:,}")
    return torch.Size(shape), SAFETENSORS_DTYPES[name], begin, end


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        repeated = [repr(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"{abbreviated(repeated)} more than once")
    return members


class SafetensorsFile:
    """A safetensors file under construction: its size and header are written at once, tensors in any order.

    Args:
        file: the path of the new file.
        tensors: shape and dtype by key.

    Raises:
        ValueError: names a dtype that the format does not support.
        OSError: the file cannot be written.
    """

    def __init__(self, file: Path, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        header: dict[str, Any] = {
            "__metadata__": {"format": "pt"}
        }  # without it transformers refuses the file
        self._places: dict[str, int] = {}
        end = 0
        # Wide elements first, so that all of them are aligned.
        for key, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
            self._places[key] = end
            begin, end = end, end + shape.numel() * dtype.itemsize
            header[key] = {
                "dtype": dtype_name(dtype, key),
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._writer = LocalWriter(file)
        os.truncate(file, self._data + end)
        self._writer.write(struct.pack("<Q", len(text)) + text, 0)

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the tensor of this key, with the shape and dtype from the constructor."""
        data, _held = host_bytes(tensor)
        self._writer.write(data, self._data + self._places[key])

    def close(self) -> None:
        """Return when the file is on disk. Raises OSError."""
        try:
            self._writer.finish()
        except BaseException:
            self._writer.discard()
            raise

    def discard(self) -> None:
        """Give up after a failure."""
        self._writer.discard()


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """Return the format's name of a dtype. If there is none, raises a ValueError that names the tensor."""
    if dtype not in _NAMES:
        raise ValueError(
            f"{key!r} has {dtype}, which safetensors cannot store; pass another dtype to save_pretrained"
        )
    return _NAMES[dtype]


# -- torch.save --------------------------------------------------------------------------------------------------------


def _open_torch(file: Path) -> dict[str, FileTensor]:
    content = load_torch(file)
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        others = (
            abbreviated([repr(key) for key, value in content.items() if not isinstance(value, Tensor)])
            if isinstance(content, dict)
            else type(content).__name__
        )
        raise ValueError(
            f"{file}: expected a dict from names to tensors, found other values: {others}. Save only the model's "
            "state dict."
        )
    without = [
        repr(key) for key, value in content.items() if value.is_meta or value.layout is not torch.strided
    ]
    if without:
        raise ValueError(f"{file}: these tensors are sparse, or hold no values: {abbreviated(without)}")
    return {
        str(key): FileTensor(str(key), file, number, value.shape, value.dtype, partial(_itself, value))
        for number, (key, value) in enumerate(content.items())
    }


def load_torch(file: Path) -> Any:
    """Return the content of a file of ``torch.save``. Its tensors are mapped into memory. No code of the file runs.

    Raises:
        Damaged: it cannot be read, or holds more than tensors and plain values.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # damaged bytes can raise nearly any exception
        reason = str(error).strip().splitlines()[:1]
        raise Damaged(
            f"{file}: torch.load cannot read it with weights_only=True, which allows only tensors and plain values "
            f"({type(error).__name__}: {''.join(reason)})"
        ) from error


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by JSON as transformers writes it, also with the numbers that strict readers refuse."""
    replace_file(file, (json.dumps(content, indent=2) + "\n").encode())


def shard_names(count: int) -> Iterable[str]:
    """Return the names of the files of a model, as Hugging Face writes them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def in_memory(tensors: Mapping[str, Tensor]) -> dict[str, FileTensor]:
    """Tensors of this process, as if they were stored."""
    others = [repr(key) for key, value in tensors.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"expected a dict from keys to tensors, found other values for {abbreviated(others)}")
    return {
        key: FileTensor(key, Path(), number, value.shape, value.dtype, partial(_itself, value.detach()))
        for number, (key, value) in enumerate(tensors.items())
    }
