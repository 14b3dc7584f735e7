"""A table of settings that do not go together, and the error for the first row that a job meets.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.train.errors import UserError

Job = TypeVar("Job")


@dataclass(frozen=True)
class Conflict(Generic[Job]):
    """A row of a table.

    Attributes:
        settings: keys, as SECTION.KEY. The first one has the value that is refused. The message names it and the second
            one, by key or value.
        applies: whether a job has these settings.
        message: what was expected, what was found, why, and the way out; without the key, which comes before it. A
            text is a template with the job's attributes, such as {parallel.engine!r}.
    """

    settings: tuple[str, ...]
    applies: Callable[[Job], bool]
    message: str | Callable[[Job], str]

    @property
    def sections(self) -> set[str]:
        return {key.partition(".")[0] for key in self.settings}

    def text(self, job: Job) -> str:
        """Return the error of a job to which the row applies, in a line."""
        message = self.message.format_map(vars(job)) if isinstance(self.message, str) else self.message(job)
        return f"{self.settings[0]}: {message}"


class ConflictError(ValueError):
    """A job has settings that do not go together.

    Attributes:
        sections: of these settings.
        others: keys with refused values in other sections.
    """

    def __init__(self, message: str, sections: Set[str], others: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.sections, self.others = sections, others


def conflict_in(rows: Sequence[Conflict[Job]], job: Job) -> ConflictError | None:
    """Return the error for the first row that applies to the job; None if they all go together."""
    wrong = [row for row in rows if row.applies(job)]
    if not wrong:
        return None
    first, others = wrong[0], []
    seen = set(first.sections)
    for row in wrong[1:]:
        if seen.isdisjoint(row.sections):
            others.append(row.settings[0])
            seen |= row.sections
    return ConflictError(first.text(job), first.sections, others)


def refuse(rows: Sequence[Conflict[Job]], job: Job) -> None:
    """Raises UserError for the first row that applies to the job."""
    if error := conflict_in(rows, job):
        raise UserError(str(error))
