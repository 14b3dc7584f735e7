"""How well the code can be lived in: code lines by room, import circles, the largest classes and files, slow tests.

``python tools/house.py`` reads ``src/`` and ``tests/``. Imports that are for type checkers alone count, too: they show
who knows whom. So do modules that are imported by a string. A code line is a line with a token that is neither a
comment nor a docstring. ``--since REVISION`` adds the change of each room's code lines since a commit. ``--times FILE``
adds the times of a test run (``make test ARGS=--junitxml=FILE``). ``--check`` ends with status 1 where a limit is
passed.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            module = node.value.partition(":")[0]
            result.update({module} if "." in module else ())  # an import path
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            said = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
            start, brace, _ = said.partition("{")
            if brace and start:  # a name that is put together may be that of each module of the folder
                result.update(m for m in modules if m.startswith(start))
            result.add(said)
    return (result & modules) - {own}


#: Rooms of the engine that have doors of their own and are counted apart.
INNER = ("engine", "planner", "train", "checkpoint", "cli")
BANDS = {"planner": "planner", "train": "trainer", "cli": "", "integrations": ""}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines that have a token which is neither a comment nor a docstring."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in _NO_CODE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def room_of(file: str) -> str:
    """Return the room of a file of the package, such as ``optim`` or ``engine/comm``."""
    first, *rest = file.removeprefix("src/shardwright/").split("/")
    return f"{first}/{rest[0]}" if first in INNER and len(rest) > 1 else first


def lines_by_room(texts: Iterable[tuple[str, str]]) -> Counter[str]:
    """Return the code lines of each room, from pairs of a file's path in the repository and its text."""
    result: Counter[str] = Counter()
    for file, text in texts:
        result[room_of(file)] += code_lines(text)
    return result


def texts_now() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def texts_at(revision: str) -> Iterator[tuple[str, str]]:
    """Yield the package's files at a commit."""
    git = ("git", "-C", str(ROOT))
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", revision, "src"], capture_output=True, text=True, check=True
    )
    for file in listed.stdout.split():
        if file.endswith(".py"):
            shown = subprocess.run(
                [*git, "show", f"{revision}:{file}"], capture_output=True, text=True, check=True
            )
            yield file, shown.stdout


def print_rooms(since: str | None) -> None:
    """Print code lines by band and room, and their change since a commit."""
    now = lines_by_room(texts_now())
    before = lines_by_room(texts_at(since)) if since else None
    total = sum(now.values())
    print(
        f"code lines: {total:,}" + (f" ({total - sum(before.values()):+,} since {since})" if before else "")
    )
    for room in sorted(
        {*now, *(before or ())}, key=lambda room: (BANDS.get(room.split("/")[0], "library"), room)
    ):
        change = f" {now[room] - before[room]:+6,}" if before else ""
        print(f"  {now[room]:6,}{change}  {BANDS.get(room.split('/')[0], 'library'):8} {room}")


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
    parser.add_argument("--since", metavar="REVISION", help="print changes of code lines since this commit")
    parser.add_argument("--rows", type=int, default=12, help="rows of each table (default: 12)")
    parser.add_argument("--check", action="store_true", help="status 1 where a limit is passed")
    options = parser.parse_args()
    rows: int = options.rows

    source = sorted(SOURCE.rglob("*.py"))
    tests = sorted(TESTS.rglob("*.py"))
    graph = imports_of_package()
    rings = circles(graph)
    print_rooms(options.since)
    print(f"\ncircles of imports: {len(rings)}")
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
