"""The texts of ``help()`` for the public names: every one is described, with its errors and shapes of tensors.

Public are the names of ``shardwright.__all__``, those of its modules there, and the methods of its classes.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwright

#: Words by which a docstring says of what form a tensor is.
FORM = re.compile(
    r"\b(0-d|[12]-D|flat|matri(x|ces)|scalar|shapes?|dtypes?|uint8|float(ing|32)?|integers?|bytes|elements?)\b"
)


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("shardwright")


def names_of(module: types.ModuleType) -> list[str]:
    given = getattr(module, "__all__", None)
    return (
        list(given)
        if given
        else [name for name, value in vars(module).items() if name[0] != "_" and is_ours(value)]
    )


def public() -> Iterator[tuple[str, Any, type | None]]:
    """Name, object and, of methods, the class that defines them."""
    pending = [(name, getattr(shardwright, name)) for name in shardwright.__all__]
    while pending:
        name, value = pending.pop()
        yield name, value, None
        if isinstance(value, types.ModuleType):
            pending += [(f"{name}.{member}", getattr(value, member)) for member in names_of(value)]
        elif inspect.isclass(value) and is_ours(value):
            for member, raw in vars(value).items():
                function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
                if (
                    not member.startswith("_")
                    and isinstance(function, types.FunctionType)
                    and is_ours(function)
                ):
                    yield f"{name}.{member}", getattr(value, member), value


PUBLIC = {name: (value, owner) for name, value, owner in public()}
FUNCTIONS = {
    name: inspect.unwrap(value.fget if isinstance(value, property) else value)
    for name, (value, _) in PUBLIC.items()
    if isinstance(value, property) or inspect.isroutine(value)
}


def own_raises(function: Any) -> bool:
    """Whether its own body raises an error of its own: not what is caught there, or in a function inside it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    pending: list[ast.AST] = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    return False


def test_the_public_names_are_found() -> None:
    assert {
        "fully_shard",
        "FSDPModule.unshard",
        "comm_hooks.PowerSGD",
        "Ragged",
        "wrap.by_class",
    } <= PUBLIC.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_described(name: str) -> None:
    value, _ = PUBLIC[name]
    text = inspect.getdoc(value)
    assert text, f"{name} has no docstring"
    assert len(text.split()) >= 3, f"{name}: {text!r} says too little"
    if inspect.isclass(value):
        made = f"{value.__name__}("  # what dataclass writes where there is none
        assert not text.startswith(made), f"{name} has no docstring of its own"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if own_raises(FUNCTIONS[name])])
def test_what_it_raises_is_described(name: str) -> None:
    assert "Raises:" in (inspect.getdoc(FUNCTIONS[name]) or ""), (
        f"{name} raises, and its docstring has no Raises:"
    )


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "Tensor" in str(inspect.get_annotations(FUNCTIONS[name]))]
)
def test_the_form_of_its_tensors_is_described(name: str) -> None:
    value, owner = PUBLIC[name]
    texts = [inspect.getdoc(value) or "", inspect.getdoc(owner) or "" if owner is not None else ""]
    assert FORM.search("\n".join(texts)), f"{name} takes or returns tensors: say of what shape and dtype"


SOURCE = sorted(Path(shardwright.__file__).parent.rglob("*.py"))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and behind attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value.strip()


def test_docstrings_open_with_a_subject() -> None:
    root = Path(__file__).parents[1]
    others = [
        path for name in ("tests", "tools", "benchmarks", "examples") for path in root.glob(f"{name}/**/*.py")
    ]
    words = dict.fromkeys(others, r"(What|Of|Which|Whose)\b") | dict.fromkeys(
        SOURCE, r"(What|Of|That|How|Which)\b"
    )
    sources = {path: path.read_text(encoding="utf-8") for path in words}
    wrong = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, word in words.items()
        if re.search(rf"""["']\s*{word}""", sources[path])  # to parse all of them takes seconds
        for line, text in docstrings(ast.parse(sources[path]))
        if re.match(word, text)
    ]
    assert not wrong, "docstrings without a subject:\n" + "\n".join(wrong)
