"""Errors that several rooms know. Nothing is imported here."""


class SharedError(Exception):
    """An error that ranks share as it is, where others arrive as one of a few kinds (``collective``). It is pickled."""


class Damaged(ValueError):
    """A checkpoint does not hold what a save has written. The message says what is wrong, without the folder."""


class OtherOptimizer(ValueError):
    """A checkpoint is of another optimizer than the one that gets its state."""
