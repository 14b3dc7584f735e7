"""How well the code can be lived in: import circles, the largest classes and files, and the slowest tests.

``python tools/house.py`` reads ``src/`` and ``tests/``. Imports that are for type checkers alone count, too: they show
who knows whom. ``--times FILE`` adds the times of a test run (``make test ARGS=--junitxml=FILE``). ``--check`` ends
with status 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
#: Limits: lines and attributes of a class with state, lines of a test file.
CLASS_LINES, CLASS_ATTRIBUTES, TEST_LINES = 250, 15, 600

Graph = dict[str, set[str]]


class Class(NamedTuple):
    """A class; its attributes are its own and those of base classes in the package."""

    name: str
    file: str
    lines: int
    attributes: int


def module_name(path: Path, source: Path = SOURCE) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str], source: Path = SOURCE) -> set[str]:
    """Modules of the package that a file imports, those inside functions and for type checkers among them."""
    own = module_name(path, source)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    result: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            base = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                result.add(full if full in modules else base)
    return (result & modules) - {own}


def imports_of_package(source: Path = SOURCE) -> Graph:
    """By module below a folder, the modules there that it imports."""
    paths = sorted(source.rglob("*.py"))
    modules = {module_name(path, source) for path in paths}
    return {module_name(path, source): imports_of(path, modules, source) for path in paths}


def circles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, the largest first (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def assigned_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that instances have: fields in the class's body, and what methods assign to ``self``."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).startswith(
            "ClassVar"
        ):
            yield ast.unparse(statement.target)
    for each in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(each, ast.Assign):
            targets = each.targets
        elif isinstance(each, ast.AnnAssign | ast.AugAssign):
            targets = [each.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    yield part.attr


def classes(paths: list[Path], graph: Graph) -> list[Class]:
    tables = {
        path: {n.name: n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)}
        for path in paths
    }
    files = {module_name(path): path for path in paths}

    def attributes(node: ast.ClassDef, path: Path) -> set[str]:
        result = set(assigned_attributes(node))
        visible = [path, *(files[name] for name in graph[module_name(path)])]
        for base in node.bases:
            name = ast.unparse(base).rpartition(".")[2]
            place = next((p for p in visible if name in tables[p] and tables[p][name] is not node), None)
            if place is not None:
                result |= attributes(tables[place][name], place)
        return result

    return [
        Class(
            node.name,
            str(path.relative_to(ROOT)),
            (node.end_lineno or 0) - node.lineno + 1,
            len(attributes(node, path)),
        )
        for path, table in tables.items()
        for node in table.values()
    ]


def borrowed_helpers(paths: list[Path]) -> Counter[str]:
    """Test modules that other files import from, and how many files do."""
    counts: Counter[str] = Counter()
    for path in paths:
        names = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        counts.update(name for name in names if name.rpartition(".")[2].startswith("test_"))
    return counts


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def test_times(report: Path) -> Counter[str]:
    """Seconds of each test file in a JUnit report."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        seconds[case.get("classname", "?")] += float(case.get("time", 0))
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=Path, metavar="FILE", help="JUnit report of a test run")
    parser.add_argument("--rows", type=int, default=12, help="rows of each table (default: 12)")
    parser.add_argument("--check", action="store_true", help="status 1 where a limit is passed")
    options = parser.parse_args()
    rows: int = options.rows

    source = sorted(SOURCE.rglob("*.py"))
    tests = sorted(TESTS.rglob("*.py"))
    graph = imports_of_package()
    rings = circles(graph)
    print(f"circles of imports: {len(rings)}")
    for ring in rings:
        print(f"  {len(ring):3} {', '.join(ring)}")

    every = classes(source, graph)
    large = [c for c in every if c.attributes and (c.lines > CLASS_LINES or c.attributes > CLASS_ATTRIBUTES)]
    print(f"\nclasses over {CLASS_LINES} lines or {CLASS_ATTRIBUTES} attributes: {len(large)}")
    for c in sorted(large, key=lambda c: (-c.attributes, -c.lines))[:rows]:
        print(f"  {c.attributes:3} attributes {c.lines:5} lines  {c.name} in {c.file}")

    print(f"\nlargest of {len(source)} source files, {sum(map(lines_of, source)):,} lines")
    for path in sorted(source, key=lines_of, reverse=True)[:rows]:
        print(f"  {lines_of(path):5}  {path.relative_to(ROOT)}")

    long = [path for path in tests if lines_of(path) > TEST_LINES]
    print(f"\ntest files over {TEST_LINES} lines: {len(long)} of {len(tests)}")
    for path in sorted(long, key=lines_of, reverse=True)[:rows]:
        print(f"  {lines_of(path):5}  {path.relative_to(ROOT)}")

    borrowed = borrowed_helpers(tests)
    print(f"\nimports from test_* files: {sum(borrowed.values())}")
    for name, count in borrowed.most_common(rows):
        print(f"  {count:3} files import from {name}")

    if options.times is not None:
        seconds = test_times(options.times)
        print(f"\ntest time: {sum(seconds.values()):,.0f} s in {len(seconds)} files")
        for name, total in seconds.most_common(rows):
            print(f"  {total:6.1f} s  {name}")
    return 1 if options.check and (rings or large or long or borrowed) else 0


if __name__ == "__main__":
    sys.exit(main())
