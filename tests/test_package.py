"""The built and installed package: the wheel, the sdist, and the command in an environment that has nothing else.

Nothing is fetched: setuptools builds without isolation, and the new environment sees the packages of this one.
"""

from __future__ import annotations

import email
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
SDIST_ROOMS = ("benchmarks", "docs", "examples", "src", "tests", "tools")
SDIST_FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "mkdocs.yml",
    "pyproject.toml",
)
PASSING = ("__pycache__", ".egg-info")  # what running or building leaves behind

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="needs setuptools, which builds the package"
)


def run(*command: str | Path, cwd: Path) -> str:
    # Without the variables of this process, which let Python find the source tree.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, cwd=cwd, env=environment
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist as an index does it, and the sdist, built from a copy of the tree.

    A copy, because setuptools puts into a wheel what an earlier build left in ``build``.
    """
    work = tmp_path_factory.mktemp("package")
    tree = work / "tree"
    tree.mkdir()
    for name in SDIST_ROOMS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in (*SDIST_FILES, ".gitignore"):
        shutil.copy(ROOT / name, tree)
    code = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"
    dist = work / "dist"
    run(sys.executable, "-c", code.format("sdist"), dist, cwd=tree)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    run(sys.executable, "-c", code.format("wheel"), dist, cwd=unpacked)
    (wheel,) = dist.glob("*.whl")
    return wheel, sdist


def files_in(room: str) -> set[str]:
    """Files of the source tree, relative to its root."""
    paths = (path for path in (ROOT / room).rglob("*") if path.is_file())
    names = (str(path.relative_to(ROOT)) for path in paths)
    return {
        name for name in names if not any(part in name for part in PASSING) and not name.endswith(".DS_Store")
    }


@pytest.mark.extensive("a package is built")
def test_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    assert wheel.name == f"shardwright-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"shardwright-{VERSION}.dist-info/"
    package = {name for name in names if not name.startswith(info)}
    assert package == {name.removeprefix("src/") for name in files_in("src")}
    assert "shardwright/py.typed" in package
    assert {info + "licenses/LICENSE", info + "METADATA", info + "entry_points.txt"} <= names


@pytest.mark.extensive("a package is built")
def test_metadata_is_that_of_pyproject(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"shardwright-{VERSION}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata.get_all("Provides-Extra") == list(PROJECT["optional-dependencies"])
    bare = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(bare) == 1 and bare[0].startswith("torch"), "expected torch and nothing else"


@pytest.mark.extensive("it builds the package")
def test_sdist_has_all_that_make_test_reads(built: tuple[Path, Path]) -> None:
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    expected = set(SDIST_FILES).union(*map(files_in, SDIST_ROOMS))
    assert sorted(expected - names) == []
    assert sorted(name for name in names if name.endswith((".pyc", ".so"))) == []


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['lightning'] = None; import shardwright.integrations.lightning"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 1
    assert "needs the extra lightning" in done.stderr.splitlines()[-1]
    assert "pip install -e '.[lightning]' in the checkout" in done.stderr.splitlines()[-1]


@pytest.mark.extensive("a package is built and installed")
def test_installed_wheel_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment that sees torch and the others of this one; the files of this source tree it does not see."""
    wheel, _ = built
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python3*/site-packages")
    # Found after the environment's own packages. Not through site.addsitedir(), which would also obey .pth files there,
    # for example an editable install of this source tree.
    others = [*site.getsitepackages(), site.getusersitepackages()]
    (packages / "others.pth").write_text("\n".join(path for path in others if Path(path).is_dir()))
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"),
        *("--no-warn-script-location", "--ignore-installed", wheel),
        cwd=tmp_path,
    )
    assert run(environment / "bin" / "shardwright", "--version", cwd=tmp_path) == f"shardwright {VERSION}\n"
    assert "train the model" in run(environment / "bin" / "shardwright", "--help", cwd=tmp_path)
    code = "import shardwright as sw; print(sw.__version__, sw.__file__, sw.fully_shard.__name__)"
    version, file, function = run(python, "-c", code, cwd=tmp_path).split()
    assert (version, function) == (VERSION, "fully_shard")
    assert Path(file).is_relative_to(packages)
