"""JSON that contains its own SHA-256, so that a reader notices a change: flipped bits, a text that is cut off.

The digest is not a signature. Nothing here knows what the JSON describes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from shardwright.common.errors import Damaged

SEAL = "sha256"  #: the key of a JSON object's digest of its other keys
_LAST_LINE = f'"{SEAL}": "'


def sealed(content: Mapping[str, Any]) -> str:
    """Return JSON text of ``content`` with its digest, so that a change is noticed."""
    return json.dumps({**content, SEAL: _digest_of_content(content)}, indent=1) + "\n"


def unsealed(text: bytes, name: str) -> dict[str, Any]:
    """Return the content of a text from :func:`sealed`.

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
    """Return JSON text that begins with these lines and ends with their digest: for content of any size."""
    return f'{lines}{_LAST_LINE}{hashlib.sha256(lines.encode()).hexdigest()}"}}\n'


def unsealed_lines(text: bytes, name: str) -> dict[str, Any]:
    """Return the content of a text from :func:`sealed_lines`, with the digest. Raises as :func:`unsealed`."""
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
