"""A note on an error of a forward: the unit that was called, and the tensors it got.

torch's own errors, such as those of wrong shapes, name no module. Nothing here changes an error's message or class.
"""

from __future__ import annotations

from typing import Any

import torch


def note_inputs(error: BaseException, unit: str, kind: str, args: Any, kwargs: Any) -> None:
    """Add the note, unless a unit further inside has added one. The exception with which a checkpoint ends a forward
    that it computes again gets no note."""
    of_checkpoint = type(error).__module__ == "torch.utils.checkpoint"
    if isinstance(error, Exception) and not of_checkpoint and not getattr(error, "__notes__", None):
        inputs = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
        error.add_note(f"In the forward of unit {unit!r} ({kind}), called with ({', '.join(inputs)}).")


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float) or value is None else type(value).__name__
