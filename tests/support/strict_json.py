"""A reader of JSON that takes no NaN and no infinity, as most readers outside of Python are."""

from __future__ import annotations

import json
import math
from typing import Any

WRONG = (math.nan, math.inf, -math.inf)
"""Numbers for which JSON has no word."""


def strict(text: str) -> Any:
    """The value of a text. Raises AssertionError for a number that JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"no JSON: {word}")

    return json.loads(text, parse_constant=refuse)
