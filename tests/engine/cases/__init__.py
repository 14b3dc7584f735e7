"""Modules as people write them, to be compared with the plain model under many settings (test_cases.py).

A `Case` is one behaviour: how the model is built, which modules are units, what one micro-batch does (forward and
backward), and what the user does to the model between. The same functions run on the sharded model and on a copy of the
plain model, both with this rank's data; the plain model's gradients are averaged over the ranks.
"""

from __future__ import annotations

from importlib import import_module

from tests.engine.cases.base import CASES

__all__ = ["CASES", "SUBJECTS"]

#: The modules that enter cases, in the order of the table, on which it depends which settings a case meets.
SUBJECTS = (
    "order",
    "containers",
    "outputs",
    "failures",
    "no_gradients",
    "tying",
    "parts",
    "recomputation",
    "parameters",
    "edits",
    "conversion",
    "pairs",
    "hooks",
)
for _subject in SUBJECTS:
    import_module(f"{__name__}.{_subject}")
