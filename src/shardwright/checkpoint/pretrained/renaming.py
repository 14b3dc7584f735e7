"""Key maps from rules such as ``blocks.*.wq = h.*.q_proj``, for names that a user writes on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Rule(NamedTuple):
    """A name with any number of stars, which stand for any text, and the new name with as many; "": not stored."""

    old: str
    new: str


def key_map_of(rules: Sequence[Rule], names: Sequence[str]) -> dict[str, str | None]:
    """The key map by the first rule that fits each name. Names that no rule fits stay.

    Raises:
        ValueError: a rule fits no name.
    """
    patterns = [re.compile("(.*?)".join(map(re.escape, rule.old.split("*")))) for rule in rules]
    key_map: dict[str, str | None] = {}
    used: set[int] = set()
    for name in names:
        for number, (rule, pattern) in enumerate(zip(rules, patterns, strict=True)):
            if match := pattern.fullmatch(name):
                used.add(number)
                pieces, texts = rule.new.split("*"), (*match.groups(), "")
                new = (
                    "".join(piece + text for piece, text in zip(pieces, texts, strict=True))
                    if rule.new
                    else None
                )
                key_map.setdefault(name, new)
                break
    for number, rule in enumerate(rules):
        if number not in used:
            raise ValueError(
                f"the rule {rule.old}={rule.new} fits no tensor, or rules before it fit all of them"
            )
    return key_map
