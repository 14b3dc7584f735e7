"""Limits for pickles that others have written: what an unpickler, even one that calls nothing, could not survive.

A few bytes can ask for gigabytes (a place in the memo, the length of a string), for a hash that takes for ever (tuples
of shared tuples) or one deeper than the stack. The operations are counted here before anything is unpickled.
"""

from __future__ import annotations

import pickletools
from typing import Any

from shardwright.checkpoint.digests import Damaged

LARGEST_KEY = 1000  #: values in a tuple, those of inner tuples included
_REFUSED = frozenset(
    ("EXT1", "EXT2", "EXT4", "INST", "OBJ", "FROZENSET", "EMPTY_SET", "ADDITEMS", "BYTEARRAY8", "NEXT_BUFFER")
    + ("READONLY_BUFFER", "LONG4", "DUP", "NEWOBJ_EX")
)
_MARK = -1


def check_operations(data: bytes, name: str) -> set[str]:
    """Go through the operations of a pickle. Returns the classes and functions that GLOBAL operations name.

    Raises:
        Damaged: the bytes are no pickle, or one that takes more memory or stack than its length.
    """
    stack: list[int] = []
    memo: dict[int, int] = {}
    names: set[str] = set()
    try:
        for code, argument, _ in pickletools.genops(data):
            if code.name in _REFUSED:
                raise Damaged(f"{name} has the operation {code.name}, which no checkpoint uses")
            if code.name == "GLOBAL":
                names.add(str(argument))
            _follow(code.name, argument, stack, memo, len(data))
            if stack and stack[-1] > LARGEST_KEY:
                raise Damaged(
                    f"{name} has a tuple of more than {LARGEST_KEY:,} values, which no checkpoint has"
                )
    except Damaged:
        raise
    except Exception as error:  # genops raises several kinds, and an empty stack IndexError or KeyError
        raise Damaged(f"{name} is no readable pickle ({type(error).__name__})") from None
    return names


_PUSHES_NOTHING = frozenset(("PROTO", "FRAME", "STOP"))
_POPS = {"POP": 1, "APPEND": 1, "BUILD": 1, "SETITEM": 2}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2, "BINPERSID": 1}
_TO_MARK = frozenset(("APPENDS", "SETITEMS", "POP_MARK"))


def _follow(name: str, argument: Any, stack: list[int], memo: dict[int, int], length: int) -> None:
    """What an operation does to the stack of sizes: of tuples the number of values in them, of others 1."""
    if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
        place = len(memo) if name == "MEMOIZE" else argument
        if not 0 <= place <= length:
            raise ValueError("a place in the memo beyond the pickle")
        memo[place] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _TUPLES:
        count = _TUPLES[name]
        inner = stack[-count:]
        if len(inner) < count or _MARK in inner:
            raise ValueError("a tuple of too few values")
        stack[-count:] = [sum(inner) + 1]
    elif name == "TUPLE" or name in ("LIST", "DICT"):
        total = 1
        while (size := stack.pop()) != _MARK:
            total += size
        stack.append(total if name == "TUPLE" else 1)
    elif name in _TO_MARK:
        while stack.pop() != _MARK:
            pass
    elif name in _POPS:
        for _ in range(_POPS[name]):
            stack.pop()
    elif name in _CALLS:
        for _ in range(_CALLS[name]):
            stack.pop()
        stack.append(1)
    elif name not in _PUSHES_NOTHING:
        stack.append(1)
