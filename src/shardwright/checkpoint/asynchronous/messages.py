"""Messages between a trainer, its writer process, and the writers of other ranks: the keys of each, and nothing else.

Commands and reports go through pipes (`pipes`), notes through the place of the save (`notes`). Imports none of them.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, final


class SaveCommand(TypedDict):
    do: Literal["save"]
    at: int
    bytes: int


"""Write the job whose description has its first byte there in the memory, and that length."""


class AbandonCommand(TypedDict):
    """Give the save up: another rank has failed."""

    do: Literal["abandon"]
    attempt: str


class LeaveCommand(TypedDict):
    """End after the save, without the trainers of other ranks."""

    do: Literal["leave"]


Command = SaveCommand | AbandonCommand | LeaveCommand

WrittenReport = TypedDict(
    "WrittenReport",
    {"attempt": str, "is": Literal["written", "committed"], "nbytes": int, "seconds": float},
)
"""This rank's file is on disk; on the first rank the commit follows, which it reports, too."""
FailedReport = TypedDict("FailedReport", {"attempt": str, "is": Literal["failed"], "kind": int, "text": str})
"""The save has failed here: the number of the error's kind, and its text."""
Report = WrittenReport | FailedReport


@final
class WrittenNote(TypedDict):
    """A rank's file is on disk. `chunks` are pairs: the tensor's name, and the chunk as in the index."""

    attempt: str
    file: str
    chunks: list[list[Any]]


@final
class FailedNote(TypedDict):
    """A rank's file could not be written."""

    attempt: str
    kind: int
    text: str


Note = WrittenNote | FailedNote
