"""Every message that a user of the package may read, one a line, so that a writer can read them in a row.

``python tools/messages.py`` reads ``src/`` and prints ``file:line: text``, with ``{…}`` for each value that is put in.
``--match WORD`` prints messages that contain the word. Nothing is imported: a message is what the source says.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
#: Calls whose strings are messages, by the last part of their name: exceptions, warnings, options of commands.
CALLS = ("Error", "Warning", "Exit", "warn", "warning", "error", "notice", "Field", "add_argument")
#: From this number of words on, every string that is no docstring counts as a message: it may be raised elsewhere.
WORDS = 5


def text_of(node: ast.expr) -> str | None:
    """The text of a string, an f-string, a sum of these or a format of one; None for everything else."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{…}" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = text_of(left), text_of(right)
            return None if sides == (None, None) else "".join(side or "{…}" for side in sides)
        case ast.BinOp(left=left, op=ast.Mod()):
            return text_of(left)
        case ast.IfExp(body=body, orelse=other):
            sides = text_of(body), text_of(other)
            return None if None in sides else " | ".join(side or "" for side in sides)
        case ast.Call(func=ast.Attribute(value=value, attr="format" | "join")):
            return text_of(value)
    return None


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def texts_of(nodes: list[ast.expr]) -> Iterator[tuple[int, str]]:
    """Texts of the outermost strings below the nodes."""
    for node in nodes:
        text = text_of(node)
        if text is None:
            yield from texts_of(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            )
        else:
            yield node.lineno, text


def messages_of(tree: ast.Module) -> set[tuple[int, str]]:
    """Lines and texts of the messages in a file."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    messages: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        short = isinstance(node, ast.Raise) or (
            isinstance(node, ast.Call) and last_name(node.func).endswith(CALLS)
        )
        for child in ast.iter_child_nodes(node):
            if child in docstrings and not isinstance(child, ast.Call):
                continue
            values = [child.value] if isinstance(child, ast.keyword) else [child]
            for line, text in texts_of([value for value in values if isinstance(value, ast.expr)]):
                words = len(re.findall(r"[A-Za-z]{2,}", text))
                if words >= (2 if short else WORDS):
                    messages.add((line, " ".join(text.split())))
    return _outermost(messages)


def _outermost(messages: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Without pieces of a longer message, which a walk of the tree meets, too."""
    return {m for m in messages if not any(m[1] != other and m[1] in other for line, other in messages)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print every message that a user of the package may read.")
    parser.add_argument("--match", default="", metavar="WORD", help="print messages that contain WORD")
    options = parser.parse_args()
    for path in sorted(SOURCE.rglob("*.py")):
        for line, text in sorted(messages_of(ast.parse(path.read_text()))):
            if options.match in text:
                print(f"{path.relative_to(ROOT)}:{line}: {text}")


if __name__ == "__main__":
    main()
