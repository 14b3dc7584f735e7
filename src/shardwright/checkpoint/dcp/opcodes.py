"""Limits for pickles that others have written: what an unpickler, even one that calls nothing, could not survive.

A few bytes can ask for gigabytes (a place in the memo, the length of a string), for a hash that takes for ever (tuples
of shared tuples) or one deeper than the stack. The operations are counted here before anything is unpickled.
"""

from __future__ import annotations

import pickle
import pickletools
import re

from shardwright.common.errors import Damaged

LARGEST_KEY = 1000  #: values in a tuple, those of inner tuples included
MOST_MARKS = 1000  #: lists, dicts and tuples that are open inside one another
_REFUSED = frozenset(
    ("EXT1", "EXT2", "EXT4", "INST", "OBJ", "FROZENSET", "EMPTY_SET", "ADDITEMS", "BYTEARRAY8", "NEXT_BUFFER")
    + ("READONLY_BUFFER", "LONG4", "DUP", "NEWOBJ_EX")
)
_NOTHING = frozenset(("PROTO", "FRAME", "STOP"))
_PUTS = frozenset(("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"))
_GETS = frozenset(("BINGET", "LONG_BINGET", "GET"))
_POPS = {"POP": 1, "APPEND": 1, "BUILD": 1, "SETITEM": 2}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2, "BINPERSID": 1}
_TO_MARK = frozenset(("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "POP_MARK"))
_MARK = -1
#: Operations that push one value which is no tuple: all that have no other part in a rule here.
_PUSHES = frozenset(code.name for code in pickletools.opcodes) - _REFUSED - _NOTHING - _PUTS - _GETS - _TO_MARK - {
    "MARK", *_POPS, *_TUPLES, *_CALLS
}  # fmt: skip


def check_operations(data: bytes, name: str) -> set[str]:
    """Go through the operations of a pickle. Returns the classes and functions that GLOBAL operations name.

    Raises:
        Damaged: the bytes are no pickle, or one that takes more memory or stack than its length.
    """
    names: set[str] = set()
    try:
        _follow(data, name, names)
    except Damaged:
        raise
    except Exception as error:  # genops raises several kinds, and an empty stack IndexError or KeyError
        raise Damaged(f"{name} is no readable pickle ({type(error).__name__})") from None
    return names


def _follow(data: bytes, name: str, names: set[str]) -> None:
    """Keep a stack of sizes: of a tuple the number of values in it, of others 1. The most frequent come first: a
    description has millions of operations."""
    stack: list[int] = []
    memo: dict[int, int] = {}
    marks = 0
    for code, argument, _ in pickletools.genops(data):
        kind = code.name
        if kind in _PUTS:
            place = len(memo) if kind == "MEMOIZE" else int(argument or 0)
            if not 0 <= place <= len(data):
                raise ValueError("a place in the memo beyond the pickle")
            memo[place] = stack[-1]
        elif kind in _PUSHES:
            stack.append(1)
            if kind == "GLOBAL":
                names.add(str(argument))
        elif kind in _GETS:
            stack.append(memo[int(argument or 0)])
        elif kind in _POPS or kind in _CALLS:
            count = _POPS.get(kind) or _CALLS[kind]
            if len(stack) < count:
                raise IndexError
            del stack[-count:]
            if kind in _CALLS:
                stack.append(1)
        elif kind == "MARK":
            stack.append(_MARK)
            marks += 1
            if marks > MOST_MARKS:
                raise Damaged(f"{name} is more than {MOST_MARKS:,} values deep, which no checkpoint is")
        elif kind in _TUPLES:
            inner = stack[-_TUPLES[kind] :]
            if len(inner) < _TUPLES[kind] or _MARK in inner:
                raise ValueError("a tuple of too few values")
            stack[-len(inner) :] = [_bounded(sum(inner) + 1, name)]
        elif kind in _TO_MARK:
            total = 1
            while (size := stack.pop()) != _MARK:
                total += size
            marks -= 1
            if kind in ("TUPLE", "LIST", "DICT"):
                stack.append(_bounded(total, name) if kind == "TUPLE" else 1)
        elif kind in _REFUSED:
            raise Damaged(f"{name} has the operation {kind}, which no checkpoint uses")


def name_of_callable(module: str, name: str) -> str:
    """Return the name of a callable that a pickle names, for a message: one line of printable characters,
    at most 200."""
    text = f"{module}.{name}"
    return (text if text.isprintable() else ascii(text))[:200]


def _bounded(size: int, name: str) -> int:
    if size > LARGEST_KEY:
        raise Damaged(f"{name} has a tuple of more than {LARGEST_KEY:,} values, which no checkpoint has")
    return size


def not_plain(error: pickle.UnpicklingError) -> str:
    """Return the reason why ``torch.load(weights_only=True)`` did not load a value, in one line."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None:
        return "is damaged: torch.load cannot read it"
    return (
        f"names {named[1]}, which is not a tensor or plain value; it was not called. If you trust the file, allow "
        "the class with torch.serialization.safe_globals"
    )
