"""Errors whose message says all that the user needs, and words for messages.

They are printed as one line without a traceback. Errors of the program itself must never be raised as these classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from shardwright.common.errors import SharedError


class JobError(SharedError):
    """An error that all ranks of a job meet alike, with the job's exit `status`."""

    status = 1


class UserError(JobError):
    """A mistake in what the user gave: one line that says what was expected, what was found and what to do.

    The command line prints it as ``error: ...`` and exits with its ``status``; the traceback appears only with
    ``--debug``. If the error ``passes``, the user may have nothing to correct: another start may do better, as after a
    store that did not answer.
    """

    MISTAKE, PASSING = 2, 75  #: values of ``status``

    def __init__(self, message: str, passes: bool = False) -> None:
        super().__init__(message)
        self.status = self.PASSING if passes else self.MISTAKE


@contextmanager
def as_user_errors(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Raise errors of these kinds as a :class:`UserError` with the same text, after a prefix."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{prefix}{error}") from error


def note_steps_done(error: BaseException, steps: int) -> None:
    """Let an error carry the steps that this rank had done when it was raised."""
    vars(error)["steps_done"] = steps


def steps_done(error: BaseException) -> int | None:
    """Return the steps that the rank of this error had done; None if the error came outside the loop over steps."""
    return vars(error).get("steps_done")


def counted(number: int, one: str, more: str = "") -> str:
    """ "1 token", "2,000 tokens". `more`: the plural, if it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"


def listed(names: Iterable[object], most: int = 5) -> str:
    """ "a, b", and for more than `most` names "a, b and 7 more"."""
    first, rest = (names := [str(name) for name in names])[:most], names[most:]
    return ", ".join(first) + (f" and {len(rest):,} more" if rest else "")


def did_you_mean(name: str, names: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """ "; did you mean a or b?" with at most `most` of the names that are nearly `name`. Empty: none of them is.

    `names`: a mapping has the words for each name.
    """
    words = names if isinstance(names, Mapping) else {each: each for each in names}
    near = difflib.get_close_matches(name, words, most, cutoff=cutoff)
    return f"; did you mean {' or '.join(str(words[each]) for each in near)}?" if near else ""


def printable(text: str, keeps: str = "") -> str:
    """Return the text without control characters, which would change the terminal, except those in `keeps`."""
    return "".join(c if c.isprintable() or c in keeps else "\N{REPLACEMENT CHARACTER}" for c in text)
