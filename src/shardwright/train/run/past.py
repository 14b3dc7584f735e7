"""The past of a run, as far as later decisions about wrong numbers depend on it. It is a part of every checkpoint.

Pure: nothing here reads tensors, files or ranks. With it a resumed run decides as the run that was not disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Range = tuple[int, int]


@dataclass(frozen=True)
class Past:
    """The past of a run at one position.

    Attributes:
        left_out: samples that the weights were not trained on, as ranges [first, stop) in ascending order.
        skips: steps that were skipped.
        skips_in_a_row: those since the last optimizer step.
        rewinds: returns to an earlier checkpoint.
        losses: of the last steps, the newest last; empty unless the run looks for spikes.
        untrained: global batches without a trained token, of which no step was made.
    """

    left_out: tuple[Range, ...] = ()
    skips: int = 0
    skips_in_a_row: int = 0
    rewinds: int = 0
    losses: tuple[float, ...] = ()
    untrained: int = 0

    def after_step(self, loss: float, window: int) -> Past:
        """Return the past after an optimizer step. `window`: losses to keep."""
        losses = (*self.losses, loss)[-window:] if window else ()
        if losses == self.losses and not self.skips_in_a_row:
            return self
        return replace(self, skips_in_a_row=0, losses=losses)

    def after_skip(self, samples: Range) -> Past:
        return replace(
            self,
            left_out=joined(self.left_out, samples),
            skips=self.skips + 1,
            skips_in_a_row=self.skips_in_a_row + 1,
        )

    def after_untrained(self, samples: Range, batches: int) -> Past:
        """Return the past after `batches` global batches without a trained token."""
        return replace(self, left_out=joined(self.left_out, samples), untrained=self.untrained + batches)

    def after_rewind(self, before: Past, samples: Range) -> Past:
        """Return the past after a rewind to this one, that of the loaded checkpoint. `before`: the past before that."""
        return replace(
            self, left_out=joined(self.left_out, samples), skips_in_a_row=0, rewinds=before.rewinds + 1
        )

    @property
    def samples_left_out(self) -> int:
        return sum(stop - first for first, stop in self.left_out)

    def stored(self) -> dict[str, Any]:
        """Return the plain values of a checkpoint. Empty if nothing has happened."""
        if self == Past():
            return {}
        return {
            "left_out": [list(each) for each in self.left_out],
            "skips": self.skips,
            "skips_in_a_row": self.skips_in_a_row,
            "rewinds": self.rewinds,
            "losses": list(self.losses),
            "untrained": self.untrained,
        }

    @classmethod
    def from_stored(cls, content: Any) -> Past:
        """Raises ValueError for what `stored` does not return."""
        if content == {}:
            return cls()
        if isinstance(content, Mapping):
            content = {"untrained": 0, **content}  # checkpoints by commit 8879734 do not have this key
        if not isinstance(content, Mapping) or content.keys() != cls().__dict__.keys():
            raise ValueError("expected the past of a run")
        ranges, losses = content["left_out"], content["losses"]
        numbers = [content[key] for key in ("skips", "skips_in_a_row", "rewinds", "untrained")]
        if not isinstance(ranges, list) or not all(map(_is_range, ranges)):
            raise ValueError(f"expected ranges of samples, found {ranges!r:.100}")
        bounds = [bound for each in ranges for bound in each]
        if bounds != sorted(bounds):
            raise ValueError(f"expected ranges of samples in ascending order, found {ranges!r:.100}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"expected numbers of skips, rewinds and batches >= 0, found {numbers!r:.100}")
        if not isinstance(losses, list) or not all(map(_is_loss, losses)):
            raise ValueError(f"expected finite losses, found {losses!r:.100}")
        skips, in_a_row, rewinds, untrained = numbers
        left_out = tuple((first, stop) for first, stop in ranges)
        return cls(left_out, skips, in_a_row, rewinds, tuple(losses), untrained)


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list) and [type(each) for each in value] == [int, int] and 0 <= value[0] < value[1]
    )


def _is_loss(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


NOTHING = Past()


def joined(ranges: tuple[Range, ...], more: Range) -> tuple[Range, ...]:
    """Return the ranges with another one after them. Ranges that touch become one."""
    if ranges and ranges[-1][1] >= more[0]:
        return (*ranges[:-1], (ranges[-1][0], max(more[1], ranges[-1][1])))
    return (*ranges, more)
