"""Files with code in them: what an attacker would put into a checkpoint. The code makes a file, by which it is seen."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Makes ``evidence`` when it is unpickled by Python's own unpickler, and stands for ``instead`` then."""

    def __init__(self, evidence: Path, instead: Any = None) -> None:
        self.evidence, self.instead = evidence, instead

    def __reduce__(self) -> Any:
        return _run, (str(self.evidence), self.instead)


def _run(evidence: str, instead: Any) -> Any:
    Path(evidence).touch()
    return instead


def code_of_the_system(evidence: Path) -> bytes:
    """A pickle that needs no module but Python's own."""
    return b"cos\nsystem\n(S'touch " + os.fsencode(evidence) + b"'\ntR."


def plant_beside(metadata: Path, evidence: Path) -> None:
    """Into a ``.metadata`` file, which stays readable by torch: one more field, of a class that runs."""
    with open(metadata, "rb") as stream:
        content = pickle.load(stream)
    content.planner_data = Payload(evidence, content.planner_data)
    metadata.write_bytes(pickle.dumps(content))


def saved_with(value: Any) -> bytes:
    """The bytes that torch.save makes of it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def runs(action: Any, evidence: Path) -> bool:
    """Whether ``action`` makes the evidence: attacks are tried on torch's own reader first, to see that they work."""
    evidence.unlink(missing_ok=True)
    action()
    found = evidence.exists()
    evidence.unlink(missing_ok=True)
    return found
