"""SHA-256 digests of the files of a checkpoint. The rank that writes a file computes its digest; a load compares it.

Digests find damage: flipped bits, files that are cut off or belong to another step. They are not a signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.checkpoint.format.progress import Progress, ignore
from shardwright.errors import Damaged

READ_AT_ONCE = 1 << 22
SEAL = "sha256"  #: the key of a JSON object's digest of its other keys
_LAST_LINE = f'"{SEAL}": "'


class Digest(NamedTuple):
    nbytes: int
    sha256: str


def open_regular(file: Path, links: bool = False) -> int:
    """A descriptor for reading, which the caller closes. Links are followed if ``links``.

    Raises:
        Damaged: there is no such file, or it is a link, a folder, a device or a pipe, which no save writes.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)  # so that pipes do not block
    try:
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        raise Damaged(f"no {file.name} file") from None
    except OSError as error:
        is_link = not links and file.is_symlink()
        problem = (
            "is a symbolic link; a save writes only regular files"
            if is_link
            else f"cannot be read: {error.strerror}"
        )
        raise Damaged(f"{file.name} {problem}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{file.name} is not a regular file")
    return descriptor


def size_of(file: Path, links: bool = False) -> int:
    """Bytes of a file. Raises Damaged as :func:`open_regular` does."""
    descriptor = open_regular(file, links)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_regular(file: Path, links: bool = False) -> bytes:
    """The content of a small file. Raises Damaged as :func:`open_regular` does, or if it cannot be read."""
    with os.fdopen(open_regular(file, links), "rb") as stream:
        try:
            return stream.read()
        except OSError as error:
            raise Damaged(f"{file.name} cannot be read: {error.strerror}") from None
        except MemoryError:
            raise Damaged(f"{file.name} is larger than the memory that is left") from None


def digest_of(file: Path, progress: Progress = ignore, links: bool = False) -> Digest:
    """Read a file and digest it. ``progress`` gets the bytes of each part that was read.

    Raises:
        Damaged: it is no regular file.
        OSError: it cannot be read.
    """
    total, sha, buffer = 0, hashlib.sha256(), bytearray(READ_AT_ONCE)
    view = memoryview(buffer)
    with os.fdopen(open_regular(file, links), "rb", buffering=0) as stream:
        while count := stream.readinto(view):
            sha.update(view[:count])
            total += count
            progress(count)
    return Digest(total, sha.hexdigest())


# -- JSON that knows its own digest ------------------------------------------------------------------------------------


def sealed(content: Mapping[str, Any]) -> str:
    """JSON text of ``content`` with its digest, so that a change is noticed."""
    return json.dumps({**content, SEAL: _digest_of_content(content)}, indent=1) + "\n"


def unsealed(text: bytes, name: str) -> dict[str, Any]:
    """The content of a text from :func:`sealed`.

    Raises:
        Damaged: it is no such text, or it has changed.
    """
    content = _object(text, name)
    if content.pop(SEAL, None) is None:
        raise Damaged(f"no readable {name}")
    if sealed(content).encode() != text:
        raise _changed(name)
    return content


def _digest_of_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sealed_lines(lines: str) -> str:
    """JSON text that begins with these lines, and their digest as its last line: for content of any size."""
    return f'{lines}{_LAST_LINE}{hashlib.sha256(lines.encode()).hexdigest()}"}}\n'


def unsealed_lines(text: bytes, name: str) -> dict[str, Any]:
    """The content of a text from :func:`sealed_lines`, with the digest. Raises Damaged as :func:`unsealed` does."""
    lines, seal, rest = text.rpartition(_LAST_LINE.encode())
    match = re.fullmatch(rb'([0-9a-f]{64})"}\n', rest)
    if not seal or match is None:
        raise Damaged(f"no readable {name}")
    if hashlib.sha256(lines).hexdigest().encode() != match[1]:
        raise _changed(name)
    return _object(text, name)


def _object(text: bytes, name: str) -> dict[str, Any]:
    try:
        # As UTF-8; json would guess other encodings.
        content = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Damaged(f"no readable {name}") from None
    if not isinstance(content, dict):
        raise Damaged(f"no readable {name}")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key stands there twice")
    return members


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _changed(name: str) -> Damaged:
    return Damaged(f"{name} is not the file that was saved: its SHA-256 differs")
