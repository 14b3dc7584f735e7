"""``index.json``: all that a checkpoint holds, as data. Written last, read first.

It lists each tensor with its parts (the box, the file, the bytes, a SHA-256), each value that is no tensor, and each
file. Its last line is the SHA-256 of the lines before it. A reader checks that a save can have written it: every
element of every tensor is in exactly one part, and the parts cover their files without a gap.

A file of parts is digested by the digests of its parts, so every byte is digested once: SHA-256 of the parts' 32-byte
SHA-256 digests in their order.
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

from shardwright.checkpoint.format.names import INDEX
from shardwright.checkpoint.format.values import DEEPEST, decoded, encoded
from shardwright.errors import Damaged

FORMAT = "shardwright checkpoint"
VERSION = 1
LARGEST = 1 << 31  #: bytes of an index that is read
_SEAL = '"sha256": "'  #: begins the last line, in every version of the format
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.qint", "torch.quint"))
}


class UnknownVersion(ValueError):
    """A checkpoint is of a later version of the format. It may be whole, so it is not :class:`Damaged`."""


#: Keys of a nested state: a string for a dict's key, an integer for a place in a list, and a tuple of one integer for a
#: dict's key that is an integer.
Path: TypeAlias = "tuple[str | int | tuple[int], ...]"


def name_of(path: Path) -> str:
    """The keys joined by dots, as torch's distributed checkpoint names them."""
    return ".".join(str(step[0]) if isinstance(step, tuple) else str(step) for step in path)


class Part(NamedTuple):
    """A box of a tensor, and the bytes where it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  #: of the part's container in the file
    length: int  #: bytes of the container
    data: int  #: the first byte of the box in the file; its elements are contiguous, little-endian
    sha256: str  #: of the container


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    path: Path  #: its keys in the nested state
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredFile:
    nbytes: int
    sha256: str
    has_parts: bool  #: the digest is of the digests of its parts


@dataclass(frozen=True)
class StoredValue:
    """A value that is no tensor."""

    path: Path
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

    def parts_of_files(self) -> dict[str, list[Part]]:
        """The parts of each file in their order."""
        by_file: dict[str, list[Part]] = {name: [] for name, file in self.files.items() if file.has_parts}
        for tensor in self.tensors.values():
            for part in tensor.parts:
                by_file[part.file].append(part)
        return {name: sorted(parts, key=lambda part: part.start) for name, parts in by_file.items()}


def digest_of_parts(digests: Iterable[str]) -> str:
    """The digest of a file from the digests of its parts."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


# -- writing -----------------------------------------------------------------------------------------------------------


def index_text(index: Index) -> str:
    """The content of ``index.json``. Raises ValueError for a value that JSON cannot hold; it names the value."""
    names = sorted(index.files)
    numbers = {name: number for number, name in enumerate(names)}
    lines = ["{", f'"format": {_json(FORMAT)}, "version": {VERSION},']
    lines.append(f'"attempt": {_json(index.attempt)}, "ranks": {index.ranks}, "about": {_json(index.about)},')
    files = [
        f"{_json(name)}: {_json([file.nbytes, file.sha256, file.has_parts])}"
        for name, file in ((name, index.files[name]) for name in names)
    ]
    tensors = [
        f"{_json(name)}: "
        + _json(
            [each.path, str(each.dtype).removeprefix("torch."), each.shape]
            + [[p.offsets, p.sizes, numbers[p.file], p.start, p.length, p.data, p.sha256] for p in each.parts]
        )
        for name, each in index.tensors.items()  # in the state's order, which a load gives back
    ]
    values = [
        f"{_json(name)}: {_json([each.path, encoded(each.value, name)])}"
        for name, each in index.values.items()
    ]
    for key, entries in (("files", files), ("tensors", tensors), ("values", values)):
        lines += [f'"{key}": {{', ",\n".join(entries), "},"]
    body = "\n".join(lines) + "\n"
    return f'{body}{_SEAL}{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_index(text: bytes) -> Index:
    """The content of an ``index.json``.

    Raises:
        Damaged: it is not what a save has written, or contradicts itself.
        UnknownVersion: it is of a later version of the format.
    """
    content = _unsealed(text)
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


def _unsealed(text: bytes) -> dict[str, Any]:
    if len(text) > LARGEST:
        raise Damaged(f"{INDEX} holds {len(text):,} bytes, at most {LARGEST:,} are read")
    body, seal, rest = text.rpartition(_SEAL.encode())
    match = re.fullmatch(rb'([0-9a-f]{64})"}\n', rest)
    if not seal or match is None:
        raise Damaged(f"no readable {INDEX}")
    if hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise Damaged(f"{INDEX} is not the file that was saved: its SHA-256 differs")
    try:
        # As UTF-8; json would guess other encodings.
        content = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Damaged(f"no readable {INDEX}") from None
    if not isinstance(content, dict):
        raise Damaged(f"no readable {INDEX}")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands there twice")
    return members


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _of(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise Damaged(f"expected {what} as {kind.__name__}, found {type(value).__name__}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Damaged(f"expected {what} as an integer from 0 to 2**63 - 1")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple([_count(each, what) for each in _of(value, list, what)])


def _path(value: Any) -> Path:
    path = tuple([tuple(step) if type(step) is list else step for step in _of(value, list, "keys")])
    if not path or not all(type(step) in (str, int) or [*map(type, step)] == [int] for step in path):
        raise Damaged("expected keys that are names and numbers")
    if len(path) > DEEPEST:
        raise Damaged(f"expected at most {DEEPEST} keys inside one another, found {len(path)}")
    return path


def _sha256(value: Any) -> str:
    if type(value) is not str or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise Damaged("expected a SHA-256 of 64 digits")
    return value


def check_file_name(name: str) -> str:
    """Raise Damaged unless the name is of a file in the checkpoint's folder: no path, no link to elsewhere."""
    if not re.fullmatch(r"[\w.+-]{1,200}", name, re.ASCII) or name in (".", "..", INDEX):
        raise Damaged(f"expected the name of a file in the checkpoint, found {name!r}")
    return name


def _built(content: dict[str, Any]) -> Index:
    files: dict[str, StoredFile] = {}
    for name, (nbytes, sha256, has_parts) in _of(content["files"], dict, "files").items():
        files[check_file_name(name)] = StoredFile(
            _count(nbytes, "a length"), _sha256(sha256), _of(has_parts, bool, "a mark")
        )
    names = sorted(files)
    tensors = {
        name: _tensor(name, each, names) for name, each in _of(content["tensors"], dict, "tensors").items()
    }
    values = {}
    for name, (path, value) in _of(content["values"], dict, "values").items():
        values[name] = StoredValue(_path(path), decoded(value))
    _check_names(tensors, values)
    about = _of(content["about"], dict, "versions")
    index = Index(
        _of(content["attempt"], str, "the attempt"),
        _count(content["ranks"], "the ranks"),
        tensors,
        values,
        files,
        {key: _of(value, str, "a version") for key, value in about.items()},
    )
    _check_files(index)
    return index


def _tensor(name: str, entry: Any, files: Sequence[str]) -> StoredTensor:
    path, dtype, shape, *parts = _of(entry, list, "a tensor")
    if dtype not in _DTYPES:
        raise Damaged(f"{name!r} has the unknown dtype {str(dtype)[:40]!r}")
    tensor = StoredTensor(
        _path(path), _DTYPES[dtype], _counts(shape, "a shape"), tuple(_part(each, files) for each in parts)
    )
    for part in tensor.parts:
        end, nbytes = part.start + part.length, prod(part.sizes) * tensor.dtype.itemsize
        if not part.start <= part.data <= part.data + nbytes <= end:
            raise Damaged(f"{name!r} has a part whose bytes are outside it")
    check_coverage(name, tensor.shape, [(part.offsets, part.sizes) for part in tensor.parts])
    return tensor


def _part(entry: Any, files: Sequence[str]) -> Part:
    offsets, sizes, number, start, length, data, sha256 = _of(entry, list, "a part")
    return Part(
        _counts(offsets, "offsets"),
        _counts(sizes, "sizes"),
        files[_count(number, "a file's number")],
        _count(start, "a start"),
        _count(length, "a length"),
        _count(data, "a start"),
        _sha256(sha256),
    )


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
    """The parts of a file follow one another from its first byte to its last, and give its digest."""
    for tensor in index.tensors.values():
        for part in tensor.parts:
            if not index.files[part.file].has_parts:
                raise Damaged(f"{part.file} holds no parts of tensors")
    for name, parts in index.parts_of_files().items():
        end = 0
        for part in parts:
            if part.start != end:
                raise Damaged(f"the parts of {name} overlap or leave a gap at byte {end:,}")
            end += part.length
        file = index.files[name]
        if file.nbytes != end or file.sha256 != digest_of_parts(part.sha256 for part in parts):
            raise Damaged(f"{name} and its parts disagree")


Bounds = tuple[Sequence[int], Sequence[int]]  #: offsets and sizes


def check_coverage(name: str, shape: Sequence[int], boxes: Sequence[Bounds]) -> None:
    """Raise Damaged unless every element of a tensor of that shape is in exactly one of the boxes."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise Damaged(f"{name!r} has a part outside its shape {tuple(shape)}")
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape) or _any_overlap(boxes):
        raise Damaged(f"{name!r} of shape {tuple(shape)} has parts that are missing or stored twice")


def _any_overlap(boxes: Sequence[Bounds]) -> bool:
    """Whether two boxes share an element. Compares boxes that meet along the dimension with the most starts."""
    full = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes if prod(sizes)]
    if len(full) < 2:
        return False
    dims = range(len(full[0][0]))
    if not dims:
        return True
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in full}))
    full.sort(key=lambda box: box[0][sweep])
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in full:
        open_boxes = [each for each in open_boxes if each[0][sweep] + each[1][sweep] > box[0][sweep]]
        if any(
            all(a < b + n and b < a + m for a, m, b, n in zip(*box, *each, strict=True))
            for each in open_boxes
        ):
            return True
        open_boxes.append(box)
    return False
