"""``index.json``: all that a checkpoint holds, as data. Written last, read first.

It lists each tensor with its chunks (the box, the file, the bytes, a SHA-256), each value that is no tensor, and each
file. Its last line is the SHA-256 of the lines before it. A reader checks that a save can have written it: every
element of every tensor is in exactly one chunk, and the chunks cover their files without a gap.

A file of chunks is digested by the digests of its chunks, so every byte is digested once: SHA-256 of the
chunks' 32-byte SHA-256 digests in their order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwright.checkpoint.format.boxes import check_coverage
from shardwright.checkpoint.format.names import INDEX
from shardwright.checkpoint.format.values import DEEPEST, DTYPES, count_of, decoded, encoded, typed
from shardwright.common.errors import Damaged
from shardwright.common.sealed_json import sealed_lines, unsealed_lines

FORMAT = "shardwright checkpoint"
VERSION = 1
LARGEST = 1 << 31  #: bytes of an index that is read


class UnknownVersion(ValueError):
    """A checkpoint is of a later version of the format. It may be whole, so it is not :class:`Damaged`."""


#: Keys of a nested state: a string for a dict's key, an integer for a place in a list, and a tuple of one integer for a
#: dict's key that is an integer.
Keys: TypeAlias = "tuple[str | int | tuple[int], ...]"


def name_of(path: Keys) -> str:
    """Return the keys joined by dots, as torch's distributed checkpoint names them."""
    return ".".join(str(step[0]) if isinstance(step, tuple) else str(step) for step in path)


class Chunk(NamedTuple):
    """A box of a stored tensor, and the bytes where it is. Messages and docs call it a part of the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  #: of the chunk's container in the file
    length: int  #: bytes of the container
    data: int  #: the first byte of the box in the file; its elements are contiguous, little-endian
    sha256: str  #: of the container
    #: The steps between elements that are not contiguous, and their number; in folders by torch's writer.
    strides: tuple[tuple[int, ...], int] | None = None

    @property
    def range(self) -> tuple[int, int, str]:
        """Start, end and digest of the container."""
        return self.start, self.start + self.length, self.sha256


@dataclass(frozen=True)
class TensorForm:
    """The keys, dtype and shape of a tensor in a nested state, without its values and their place."""

    path: Keys  #: its keys in the nested state
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorForm):
    """A tensor in the files of a checkpoint."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredFile:
    nbytes: int
    sha256: str
    has_chunks: bool  #: the digest is of the digests of its chunks


@dataclass(frozen=True)
class StoredValue:
    """A value that is no tensor."""

    path: Keys
    value: Any


@dataclass(frozen=True)
class Index:
    """The content of ``index.json``: the tensors, values and files of a checkpoint."""

    attempt: str  #: of the save that wrote it
    ranks: int  #: that wrote it
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredValue]
    files: Mapping[str, StoredFile]
    about: Mapping[str, str] = field(
        default_factory=dict
    )  #: versions of the libraries that wrote it, and notes
    version: int = VERSION  #: of the format

    def chunks_of_files(self) -> dict[str, list[Chunk]]:
        """Return the chunks of each file in their order."""
        by_file: dict[str, list[Chunk]] = {name: [] for name, file in self.files.items() if file.has_chunks}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                by_file[chunk.file].append(chunk)
        return {name: sorted(chunks, key=lambda chunk: chunk.start) for name, chunks in by_file.items()}


def digest_of_chunks(digests: Iterable[str]) -> str:
    """Return the digest of a file from the digests of its chunks."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


# -- writing -----------------------------------------------------------------------------------------------------------


def index_text(index: Index) -> str:
    """Return the content of ``index.json``. Raises ValueError for a value that JSON cannot hold; it names the value."""
    names = sorted(index.files)
    numbers = {name: number for number, name in enumerate(names)}
    lines = ["{", f'"format": {_json(FORMAT)}, "version": {index.version},']
    lines.append(f'"attempt": {_json(index.attempt)}, "ranks": {index.ranks}, "about": {_json(index.about)},')
    files = [
        f"{_json(name)}: {_json([file.nbytes, file.sha256, file.has_chunks])}"
        for name, file in ((name, index.files[name]) for name in names)
    ]
    tensors = [
        f"{_json(name)}: "
        + _json(encoded_form(each) + [encoded_chunk(chunk, numbers) for chunk in each.chunks])
        for name, each in index.tensors.items()  # in the state's order, which a load gives back
    ]
    values = [f"{_json(name)}: {_json(encoded_value(each, name))}" for name, each in index.values.items()]
    for key, entries in (("files", files), ("tensors", tensors), ("values", values)):
        lines += [f'"{key}": {{', ",\n".join(entries), "},"]
    return sealed_lines("\n".join(lines) + "\n")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_index(text: bytes) -> Index:
    """Return the content of an ``index.json``.

    Raises:
        Damaged: it is not what a save has written, or contradicts itself.
        UnknownVersion: it is of a later version of the format.
    """
    if len(text) > LARGEST:
        raise Damaged(f"{INDEX} holds {len(text):,} bytes, at most {LARGEST:,} are read")
    content = unsealed_lines(text, INDEX)
    if content.get("format") != FORMAT:
        raise Damaged(f"{INDEX} is not of a checkpoint of shardwright")
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise Damaged(f"{INDEX} has no version of the format")
    if version > VERSION:
        raise UnknownVersion(
            f"{INDEX} has version {version} of the format, and this shardwright reads versions up to {VERSION}; "
            "read it with a newer shardwright"
        )
    try:
        return _built(content)
    except Damaged as error:
        raise Damaged(f"{INDEX}: {error!s:.500}") from None
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"no readable {INDEX} ({type(error).__name__}: {error!s:.500})") from None


def check_file_name(name: str) -> str:
    """Raise Damaged unless the name is of a file in the checkpoint's folder: no path, no link to elsewhere."""
    if not re.fullmatch(r"[\w.+-]{1,200}", name, re.ASCII) or name in (".", "..", INDEX):
        raise Damaged(f"expected the name of a file in the checkpoint, found {name!r}")
    return name


def _built(content: dict[str, Any]) -> Index:
    files: dict[str, StoredFile] = {}
    for name, (nbytes, sha256, has_chunks) in typed(content["files"], dict, "files").items():
        files[check_file_name(name)] = StoredFile(
            count_of(nbytes, "a length"), _sha256(sha256), typed(has_chunks, bool, "a mark")
        )
    names = sorted(files)
    tensors = {
        name: _tensor(name, each, names) for name, each in typed(content["tensors"], dict, "tensors").items()
    }
    values = {name: decoded_value(each) for name, each in typed(content["values"], dict, "values").items()}
    _check_names(tensors, values)
    about = typed(content["about"], dict, "versions")
    index = Index(
        typed(content["attempt"], str, "the attempt"),
        count_of(content["ranks"], "the ranks"),
        tensors,
        values,
        files,
        {key: typed(value, str, "a version") for key, value in about.items()},
        content["version"],
    )
    _check_files(index)
    return index


def _tensor(name: str, entry: Any, files: Sequence[str]) -> StoredTensor:
    form = decoded_form(typed(entry, list, "a tensor")[:3], name)
    chunks = tuple(decoded_chunk(each, files) for each in entry[3:])
    tensor = StoredTensor(form.path, form.dtype, form.shape, chunks)
    for chunk in tensor.chunks:
        end, nbytes = chunk.start + chunk.length, prod(chunk.sizes) * tensor.dtype.itemsize
        if not chunk.start <= chunk.data <= chunk.data + nbytes <= end:
            raise Damaged(f"{name!r} has a part whose bytes are outside it")
    check_coverage(name, tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
    return tensor


def _check_names(tensors: Mapping[str, StoredTensor], values: Mapping[str, StoredValue]) -> None:
    both = tensors.keys() & values.keys()
    if both:
        raise Damaged(f"{min(both)!r} is a tensor and a value")
    paths = {name: each.path for name, each in tensors.items()} | {
        name: each.path for name, each in values.items()
    }
    for name, path in paths.items():
        if name_of(path) != name:
            raise Damaged(f"{name!r} has other keys than its name")
    whole = set(paths.values())
    for name, path in paths.items():
        if any(path[:length] in whole for length in range(1, len(path))):
            raise Damaged(f"{name!r} is inside a tensor or value")


def _check_files(index: Index) -> None:
    """The chunks of a file follow one another from its first byte to its last, and give its digest."""
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            if not index.files[chunk.file].has_chunks:
                raise Damaged(f"{chunk.file} holds no parts of tensors")
    for name, chunks in index.chunks_of_files().items():
        end = 0
        for chunk in chunks:
            if chunk.start != end:
                raise Damaged(f"the parts of {name} overlap or leave a gap at byte {end:,}")
            end += chunk.length
        file = index.files[name]
        if file.nbytes != end or file.sha256 != digest_of_chunks(chunk.sha256 for chunk in chunks):
            raise Damaged(f"{name} and its parts disagree")


# -- entries, written and read -----------------------------------------------------------------------------------------


def encoded_form(form: TensorForm) -> list[Any]:
    """Return the form of a tensor in JSON's types."""
    return [form.path, str(form.dtype).removeprefix("torch."), form.shape]


def decoded_form(entry: Any, name: str) -> TensorForm:
    """Return the form of the tensor of this name from :func:`encoded_form`. Raises Damaged or ValueError."""
    path, dtype, shape = typed(entry, list, "a tensor")
    if f"torch.{dtype}" not in DTYPES or dtype.startswith(("qint", "quint")):
        raise Damaged(f"{name!r} has the unknown dtype {str(dtype)[:40]!r}")
    return TensorForm(_keys(path), DTYPES[f"torch.{dtype}"], _counts(shape, "a shape"))


def encoded_value(stored: StoredValue, name: str) -> list[Any]:
    """Return a value in JSON's types. Raises ValueError as :func:`encoded`; the message has ``name``."""
    return [stored.path, encoded(stored.value, name)]


def decoded_value(entry: Any) -> StoredValue:
    """Return the value from :func:`encoded_value`. Raises Damaged, TypeError or ValueError."""
    path, value = entry
    return StoredValue(_keys(path), decoded(value))


def encoded_chunk(chunk: Chunk, numbers: Mapping[str, int]) -> list[Any]:
    """Return a chunk of a contiguous tensor in JSON's types, with the number of its file."""
    number = numbers[chunk.file]
    return [chunk.offsets, chunk.sizes, number, chunk.start, chunk.length, chunk.data, chunk.sha256]


def decoded_chunk(entry: Any, files: Sequence[str]) -> Chunk:
    """Return the chunk from :func:`encoded_chunk`. Raises Damaged, ValueError or LookupError."""
    offsets, sizes, number, start, length, data, sha256 = typed(entry, list, "a part")
    return Chunk(
        _counts(offsets, "offsets"),
        _counts(sizes, "sizes"),
        files[count_of(number, "a file's number")],
        count_of(start, "a start"),
        count_of(length, "a length"),
        count_of(data, "a start"),
        _sha256(sha256),
    )


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple([count_of(each, what) for each in typed(value, list, what)])


def _keys(value: Any) -> Keys:
    path = tuple([tuple(step) if type(step) is list else step for step in typed(value, list, "keys")])
    if not path or not all(type(step) in (str, int) or [*map(type, step)] == [int] for step in path):
        raise Damaged("expected keys that are names and numbers")
    if len(path) > DEEPEST:
        raise Damaged(f"expected at most {DEEPEST} keys inside one another, found {len(path)}")
    return path


def _sha256(value: Any) -> str:
    if type(value) is not str or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise Damaged("expected a SHA-256 of 64 digits")
    return value
