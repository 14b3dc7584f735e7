"""The one exception that stands for a mistake the user can correct.

Errors of the program itself must never be raised as this class: it is printed without a traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: one line that says what was expected, what was found and what to do.

    The command line prints it as ``error: ...`` and exits with status 2; the traceback appears only with
    ``--debug``.
    """
