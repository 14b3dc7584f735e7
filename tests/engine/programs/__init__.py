"""Random programs: a module tree, how it is sharded and over which mesh, and what a user does with it, all as data.

``grammar`` says what a program is, ``draw`` how one is drawn; ``interpreter`` runs it on a sharded and a plain model
and compares them after every statement; ``search`` looks for programs that fail, by
``python -m tests.engine.programs --count 2000 --ranks 2``. Refusals are tested elsewhere.
"""

from tests.engine.programs.compare import differences, whole
from tests.engine.programs.draw import programs
from tests.engine.programs.grammar import LAYOUTS, Program, show_program
from tests.engine.programs.search import failure_of, run_plain

__all__ = [
    "LAYOUTS",
    "Program",
    "differences",
    "failure_of",
    "programs",
    "run_plain",
    "show_program",
    "whole",
]
