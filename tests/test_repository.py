"""The promises of the repository as a whole: its opening words, one version, an engine that needs torch only.

Nothing here starts the trainer; the README's own example is the one thing that runs.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import multirank
from tests.support.scripts import printed_by
from tools.house import circles, imports_of_package

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def test_readme_opens_with_the_two_commands() -> None:
    first_lines = README.splitlines()[:6]
    assert any(line.startswith("make train") for line in first_lines)
    assert any(line.startswith("make test") for line in first_lines)


def readme_example(folder: Path) -> Path:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None, "expected a python block in README.md"
    script = folder / f"shard{os.getpid()}.py"
    script.write_text(code[1])
    return script


def check_that_it_learns(printed: str) -> None:
    losses = [float(value) for value in re.findall(r"loss of rank 0 ([\d.]+)", printed)]
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]


@multirank(2)
def test_readme_example_runs_and_learns(rank: int, world_size: int, tmp_path: Path) -> None:
    printed = printed_by(readme_example(tmp_path), scratch=tmp_path)
    if rank == 0:
        check_that_it_learns(printed)


@pytest.mark.extensive("torchrun starts three processes")
def test_readme_example_runs_under_torchrun(tmp_path: Path) -> None:
    script = readme_example(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check_that_it_learns(done.stdout)


def test_one_version() -> None:
    import shardwright

    assert shardwright.__version__ == PROJECT["project"]["version"]
    assert f"## [{PROJECT['project']['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_engine_imports_torch_and_nothing_else() -> None:
    """In a process where the trainer's dependencies cannot be imported, as on a machine that lacks them."""
    extras = PROJECT["project"]["optional-dependencies"]
    names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for extra in extras.values() for line in extra}
    blocked = names - {"shardwright"} | {"numpy", "pydantic_core", "shardwright.train", "shardwright.cli"}
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {blocked!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
import shardwright as sw
for name in ("fully_shard", "fully_shard_optimizer", "clip_grad_norm_", "FSDPModule", "MixedPrecisionPolicy"):
    getattr(sw, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_torch_bound_is_the_set_up_script_s() -> None:
    """The versions that set-up tries lie within the bound, newest first, from the newest minor release on."""
    versions = re.search(r'TORCH_VERSIONS="([^"]+)"', (ROOT / "tools/setup.sh").read_text())
    assert versions is not None
    tried = [tuple(int(part) for part in version.split(".")) for version in versions[1].split()]
    assert PROJECT["project"]["dependencies"] == ["torch>=2.11,<2.16"]
    assert all((2, 11) <= version < (2, 16) for version in tried)
    assert tried == sorted(tried, reverse=True) and tried[0][:2] == (2, 15)


def test_files_name_no_machine_and_no_package_index() -> None:
    files = _project_files()
    if not files:
        pytest.skip("not a git checkout")
    # Written in pieces, so that this file passes its own test.
    words = ["/wo" + "rk/", "/fa" + "rm/", "/ro" + "ot/", "bash" + "_jobs"]
    words += ["py" + "pi.org", "python" + "hosted"]
    forbidden = re.compile("|".join(map(re.escape, words)))
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_tests_that_the_makefile_tools_and_pages_name_are_there() -> None:
    files = [
        ROOT / "Makefile",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "tools").glob("*"),
        *(ROOT / "docs").glob("*.md"),
    ]
    named = {
        name.rstrip(".")
        for file in files
        if file.is_file()
        for name in re.findall(r"(?<![\w/])tests/[\w./]+", file.read_text(errors="replace"))
    }
    assert len(named) > 30 and sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_module_is_tracked() -> None:
    """A pattern in ``.gitignore`` once kept an ``__init__.py`` of the package out of every clone."""
    files = set(_project_files())
    if not files:
        pytest.skip("not a git checkout")
    modules = [path for room in ("src", "tests") for path in (ROOT / room).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in modules if path not in files] == []


def _project_files() -> list[Path]:
    """Tracked files and those about to be: what git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=90)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_tests_import_no_tests() -> None:
    """Code that several files of tests need is in a ``kit`` or in ``tests/support``."""
    imports = re.compile(
        r"^\s*from tests\.(?:\w+\.)*test_\w+ import|^\s*from tests[\w.]* import .*\btest_", re.M
    )
    tests = (ROOT / "tests").rglob("*.py")
    assert [str(path.relative_to(ROOT)) for path in tests if imports.search(path.read_text())] == []


def test_modules_import_in_one_direction() -> None:
    """Imports for type checkers and imports inside functions count, too: they show which module knows which."""
    graph = imports_of_package()
    assert len(graph) > 200
    assert circles(graph) == []


def test_one_class_records_how_a_job_ended() -> None:
    """exit.json and the end of a session have one owner: our launcher, torchrun, SLURM and Ray go through it."""
    callers: dict[str, list[str]] = {"write_exit": [], "close_session": []}
    sources = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
    for path in [path for path, text in sources.items() if any(f"{name}(" in text for name in callers)]:
        for function in ast.walk(ast.parse(sources[path])):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in callers:
                        callers[name].append(f"{path.name}: {function.name}")
    assert callers == {"write_exit": ["job_end.py: write_exit_file"], "close_session": ["job_end.py: write"]}


def test_circles_are_found(tmp_path: Path) -> None:
    """The search itself: a module that another one imports in a function, and an import for type checkers."""
    files = {
        "first.py": "def late():\n    from shardwright.room import second\n",
        "second.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwright.room.third import A\n",
        "third.py": "from .first import late\n",
        "fourth.py": "import shardwright.room.first\n",
        "__init__.py": "",
    }
    room = tmp_path / "shardwright" / "room"
    room.mkdir(parents=True)
    for name, text in files.items():
        (room / name).write_text(text)
    names = [f"shardwright.room.{name}" for name in ("first", "second", "third")]
    assert circles(imports_of_package(tmp_path)) == [names]


def backquoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_contributing_lists_every_room() -> None:
    """In the order of the contracts: a room of a table imports only rooms below it."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Rooms")[2].partition("## Where to change")[0]
    tables = [
        [name for row in table.splitlines()[2:] for name in backquoted(row.split("|")[1])]
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert tables == [[room.strip() for layer in each for room in layer.split("|")] for each in layers]


def test_rooms_are_small() -> None:
    """At most 14 entries beside ``__init__.py`` in each folder of the trainer, the checkpoints and their tests."""
    roots = [
        ROOT / parent / room for parent in ("src/shardwright", "tests") for room in ("train", "checkpoint")
    ]
    folders = [folder for root in roots for folder in (root, *root.rglob("*")) if folder.is_dir()]
    entries = {
        str(folder.relative_to(ROOT)): len([e for e in folder.iterdir() if not e.name.startswith("__")])
        for folder in folders
        if folder.name != "__pycache__"
    }
    assert {name: count for name, count in entries.items() if count > 14} == {}


def test_contributing_names_places_that_exist() -> None:
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change")[2].partition("## House")[0]
    paths = [word for word in backquoted(rows.partition("|---|---|")[2]) if "/" in word]
    assert len(paths) > 10
    missing = [path for path in paths if not (ROOT / "src/shardwright" / path).exists()]
    assert not missing, missing


def test_readme_lists_every_extra() -> None:
    table = README.partition("| extra | needed for |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() if row for name in backquoted(row.split("|")[1])}
    assert listed == set(PROJECT["project"]["optional-dependencies"])


def private_names(tree: ast.Module) -> set[str]:
    """Names of torch with a part that begins with an underscore: imported, or attributes of imported names."""
    imported = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names = [each for each in node.names if each.name.split(".")[0] == "torch"]
            imported |= {each.asname or each.name: each.name for each in names}
    used = set(imported.values())
    chains = {
        node.value: node for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }  # each value to the attribute that is read from it
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported:
            name, at = imported[node.id], node
            while at in chains:
                at = chains[at]
                name += f".{at.attr}"
            used.add(name)
    return {name for name in used if any(re.match(r"_[^_]", part) for part in name.split("."))}


def test_private_names_of_torch_are_in_one_file() -> None:
    source = ROOT / "src/shardwright"
    sources = {
        path: path.read_text() for path in sorted(source.rglob("*.py")) if path.parent.name != "compat"
    }
    used = {
        str(path.relative_to(source)): names
        for path, text in sources.items()
        if re.search(r"^\s*(import|from) torch\b", text, re.M) and (names := private_names(ast.parse(text)))
    }
    assert not used, f"private names of torch outside of engine/compat: {used}"
