"""Programs that were traced before, in files of the user's cache folder.

A program is found by a text that has everything it follows from. Files are written under another name and then renamed,
so that no reader sees half of one. A file that cannot be read is as one that is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.common.durable import replace_file
from shardwright.planner.cycles import without_collections
from shardwright.planner.program import (
    Alloc,
    Event,
    Free,
    HostWait,
    Kernel,
    Mark,
    Owner,
    Phase,
    Program,
    Wait,
    numbering,
)

FORMAT = 3  #: changes with the content of the files
KEPT = 64  #: files; the oldest ones are removed


def folder() -> Path:
    """Return the folder of programs: ``$XDG_CACHE_HOME/shardwright/plans``, by default in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".cache")
    return base / "shardwright" / "plans"


@without_collections()
def load(key: str) -> Program | None:
    """Return the program that was stored for a key, or None if there is none that can be read."""
    path = _path(key)
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest.decode() != _digest(content):
            return None
        program = _decoded(json.loads(content))
        os.utime(path)  # it is among the newest from here on
        return program
    except (OSError, ValueError, TypeError, LookupError):
        return None


@without_collections()
def store(key: str, program: Program) -> None:
    """Store a program. Nothing happens if the folder cannot be written."""
    path = _path(key)
    content = json.dumps(_encoded(program), separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _digest(content).encode() + b"\n" + content)
        _remove_old(path.parent)
    except OSError:
        return


def _remove_old(parent: Path) -> None:
    files = [(each.stat().st_mtime, each.path) for each in os.scandir(parent) if each.is_file()]
    for _, path in sorted(files, reverse=True)[KEPT:]:
        os.unlink(path)


def _path(key: str) -> Path:
    return folder() / f"{_digest(f'{FORMAT} {key}'.encode())}.json"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- the form: for each kind of event a letter, and its fields in one list of numbers


def _encoded(program: Program) -> dict[str, Any]:
    words, kernels = numbering(), numbering()
    letters: list[str] = []
    numbers: list[int] = []
    for event in program.events:
        letters.append(_LETTERS[type(event)])
        if isinstance(event, Alloc):
            numbers += event.block, event.nbytes, words[event.stream], event.owner
        elif isinstance(event, Free):
            numbers.append(event.block)
        elif isinstance(event, Kernel):
            numbers.append(kernels[event])
        elif isinstance(event, Mark):
            numbers += event.number, words[event.stream]
        elif isinstance(event, Wait):
            numbers += words[event.stream], event.mark
        elif isinstance(event, HostWait):
            numbers.append(event.mark)
        else:
            numbers.append(words[event.name])
    return {
        "letters": "".join(letters),
        "numbers": numbers,
        "words": list(words),
        "kernels": list(kernels),
        "owners": program.owners,
        "tokens": program.tokens,
        "model_flops": program.model_flops,
    }


_LETTERS: dict[type, str] = {
    Alloc: "a",
    Free: "f",
    Kernel: "k",
    Mark: "m",
    Wait: "w",
    HostWait: "h",
    Phase: "p",
}


def _decoded(values: dict[str, Any]) -> Program:
    words: Sequence[str] = values["words"]
    kernels = [
        Kernel(name, stream, nbytes, tuple(map(tuple, shapes)), dtype, tuple(group))
        for name, stream, nbytes, shapes, dtype, group in values["kernels"]
    ]
    after = iter(values["numbers"])
    take = after.__next__
    events: list[Event] = []
    for letter in values["letters"]:
        if letter == "k":
            events.append(kernels[take()])
        elif letter == "a":
            events.append(Alloc(take(), take(), words[take()], take()))
        elif letter == "f":
            events.append(Free(take()))
        elif letter == "m":
            events.append(Mark(take(), words[take()]))
        elif letter == "w":
            events.append(Wait(words[take()], take()))
        elif letter == "h":
            events.append(HostWait(take()))
        else:
            events.append(Phase(words[take()]))
    owners = [Owner(*each) for each in values["owners"]]
    return Program(events, owners, float(values["tokens"]), float(values["model_flops"]))
