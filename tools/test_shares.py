"""Shares of the tests that use the public API or the command line alone, names behind doors, and private names.

``python tools/test_shares.py`` reads ``tests/``. Each test function counts once, by the worst that it does itself or
that functions and fixtures of its file do for it: *private* if it reads an attribute with an underscore that the
package defines, or replaces one of the package, *internal* if it uses a name that it imports from behind a room's door,
and *public* otherwise. ``--files`` lists the files with most private tests.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "src" / "shardwright"
#: Modules that are public beside doors: what users import or run.
PUBLIC = {
    "shardwright",
    "shardwright.comm_hooks",
    "shardwright.extend",
    "shardwright.train.extend",
    "shardwright.cli",
}
#: Names with an underscore of torch, transformers and Python that the package sets or has, too.
FOREIGN = {
    "_local_tensor", "_spec", "_parameters", "_buffers", "_modules", "_version", "_base", "_schema", "_replace",
    "_asdict", "_fields", "_C", "_grad", "_make", "_cdata", "_exit", "_forward_hooks", "_forward_pre_hooks",
    "_fsdp_param_group", "_get_fsdp_state", "_attn_implementation",
    "_fsdp_param_groups", "_fsdp_units", "_is_root", "_lazy_init",
}  # fmt: skip
KINDS = ("public", "internal", "private")


class Test(NamedTuple):
    """A test function and the worst that it does: a number of ``KINDS``."""

    file: Path
    name: str
    kind: int


def doors() -> set[str]:
    """Return the packages that list what others may use."""
    packages = {
        ".".join(("shardwright", *path.parent.relative_to(PACKAGE).parts))
        for path in PACKAGE.rglob("__init__.py")
        if "door(__spec__)" in path.read_text()
    }
    return packages | PUBLIC


def private_names() -> set[str]:
    """Return the names with one underscore in front that the package defines, in whatever class or module."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - FOREIGN


def tests_of(path: Path, public: set[str], private: set[str]) -> Iterator[Test]:
    """Yield the tests of a file with what they do.

    Args:
        path: the file.
        public: modules whose names are public.
        private: names of attributes that are the package's own.
    """
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name.partition(".")[0]: (node.module or "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    ours = {name: module for name, module in imported.items() if module.partition(".")[0] == "shardwright"}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    kinds = {name: _own_kind(node, ours, public, private) for name, node in functions.items()}
    for name in functions:
        if name.startswith("test_"):
            yield Test(path, name, max(kinds[each] for each in _reached(name, functions)))


def _own_kind(function: ast.FunctionDef, ours: dict[str, str], public: set[str], private: set[str]) -> int:
    kind = 0
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            if node.attr in private:
                return 2
        elif isinstance(node, ast.Call) and _replaces_ours(node, ours):
            return 2
        elif isinstance(node, ast.Name) and node.id in ours and ours[node.id] not in public:
            kind = 1
    return kind


def _replaces_ours(call: ast.Call, ours: dict[str, str]) -> bool:
    """Return whether a call is one of ``monkeypatch.setattr`` with something of the package."""
    if (
        not ast.unparse(call.func).endswith(("monkeypatch.setattr", "mock.patch", "patch.object"))
        or not call.args
    ):
        return False
    target = ast.unparse(call.args[0]).strip("'\"").partition(".")[0]
    return target in ours or target == "shardwright"


def _reached(name: str, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Return a function of a file with those of the file that it names, fixtures among them."""
    found, rest = {name}, [name]
    while rest:
        function = functions[rest.pop()]
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        names |= {argument.arg for argument in function.args.args}
        new = (names & set(functions)) - found
        found |= new
        rest += new
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files", type=int, default=0, metavar="N", help="list N files with most private tests"
    )
    options = parser.parse_args()
    public, private = doors(), private_names()
    tests = [test for path in sorted(TESTS.rglob("test_*.py")) for test in tests_of(path, public, private)]
    rooms = sorted({test.file.relative_to(TESTS).parts[0] for test in tests})
    for room in (*rooms, "all"):
        counts = Counter(
            test.kind for test in tests if room in ("all", test.file.relative_to(TESTS).parts[0])
        )
        shares = "  ".join(f"{KINDS[kind]} {counts[kind] / counts.total():4.0%}" for kind in range(3))
        print(f"{counts.total():5} tests  {shares}  {room}")
    files = Counter(test.file for test in tests if test.kind == 2)
    for file, count in files.most_common(options.files):
        print(f"  {count:3} private tests in {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
