"""The one exception that stands for a mistake the user can correct, and words for its messages.

Errors of the program itself must never be raised as this class: it is printed without a traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: one line that says what was expected, what was found and what to do.

    The command line prints it as ``error: ...`` and exits with status 2; the traceback appears only with
    ``--debug``.
    """


def counted(number: int, one: str, more: str = "") -> str:
    """ "1 token", "2,000 tokens". `more`: the plural, if it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"
