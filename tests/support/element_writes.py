"""Numbers that are assigned to elements of tensors, in source code and in calls.

``tensor[0] = number`` copies the number from pageable memory on a CUDA device: the host waits for the device, and a
CUDA graph cannot be captured. ``tensor[0].fill_(number)`` does neither, nor does a slice in the place of the index. A
list as an index is copied, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

CONTAINERS = {
    "dict",
    "list",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "sorted",
    "deque",
    "setdefault",
    "vars",
    "globals",
}
ANNOTATIONS = (
    "dict[",
    "list[",
    "Mapping[",
    "Sequence[",
    "Counter[",
    "Dictionary[",
    "deque[",
    "ndarray",
    "mmap",
)
NUMBERS = {"int", "float", "bool", "len", "sum", "min", "max", "round"}


def in_source(source: str) -> list[int]:
    """The lines of a module that may assign a number to an element of a tensor.

    A base that the module makes or annotates as a list, a dictionary or an array of numpy is no tensor. A value is a
    number if it is written as one, computed from such, or a name that the module annotates or assigns so.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    if not any(isinstance(n, ast.Import) and any(a.name == "torch" for a in n.names) for n in nodes):
        return []
    pairs = [pair for node in nodes for pair in _bindings(node)]
    containers = {target for target, value in pairs if _is_container(value)}
    containers |= {
        name for name, text in map(_annotation, nodes) if any(word in text for word in ANNOTATIONS)
    }
    numbers = {name for name, text in map(_annotation, nodes) if text in ("int", "float", "bool")}
    for _ in range(2):  # a number may have passed through another name
        numbers |= {target for target, value in pairs if _is_number(value, numbers)}
    lines = []
    for node in nodes:
        value = getattr(node, "value", None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if (
            not isinstance(node, ast.Assign | ast.AugAssign)
            or value is None
            or not _is_number(value, numbers)
        ):
            continue
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_element(target.slice):
                base = ast.unparse(target.value)
                if (
                    base not in containers
                    and not base.endswith("__dict__")
                    and not _is_container(target.value)
                ):
                    lines.append(node.lineno)
    return lines


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Pairs of a target's text and its value, those of tuples one by one."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.unparse(node.target), node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        value = node.value  # type: ignore[attr-defined]
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            yield from ((ast.unparse(t), v) for t, v in zip(target.elts, value.elts, strict=True))
        else:
            yield ast.unparse(target), value


def _annotation(node: ast.AST) -> tuple[str, str]:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target), ast.unparse(node.annotation)
    if isinstance(node, ast.arg) and node.annotation is not None:
        return node.arg, ast.unparse(node.annotation)
    return "", ""


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_container(value.left) or _is_container(value.right)
    if isinstance(value, ast.Call):
        return _called(value) in CONTAINERS or ast.unparse(value.func).startswith("np.")
    return isinstance(value, ast.Dict | ast.List | ast.DictComp | ast.ListComp)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _is_number(value: ast.expr, numbers: set[str]) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand, numbers)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left, numbers) and _is_number(value.right, numbers)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in NUMBERS
    return ast.unparse(value) in numbers


def _is_element(index: ast.expr) -> bool:
    """Whether the index may choose single elements: it has no slice, or it has a list."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    if any(isinstance(part, ast.List | ast.ListComp) for part in parts):
        return True
    if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
        return False
    return not any(isinstance(part, ast.Slice | ast.JoinedStr) for part in parts)


@contextmanager
def in_calls(package: Path) -> Iterator[list[str]]:
    """Record the lines of the package that assign a number to an element, or anything to a list of elements."""
    seen: list[str] = []
    original = torch.Tensor.__setitem__

    def record(self: torch.Tensor, index: Any, value: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_filename.startswith(str(package)):
            parts = index if isinstance(index, tuple) else (index,)
            is_element = not isinstance(value, torch.Tensor) and self[index].dim() == 0
            if is_element or any(isinstance(part, list) for part in parts):
                seen.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        original(self, index, value)

    torch.Tensor.__setitem__ = record  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        torch.Tensor.__setitem__ = original  # type: ignore[method-assign]
