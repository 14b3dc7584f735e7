"""``tools/offline.sh`` with packages that are made here, so without a network."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
#: The packages of the extra train, and one that a package needs.
PACKAGES: dict[str, list[str]] = {
    "matplotlib": [], "psutil": [], "pydantic": ["pydantic_core"], "pydantic_core": [], "rich": [], "tensorboard": [],
}  # fmt: skip


def make_wheel(folder: Path, name: str, requires: list[str], nbytes: int = 0) -> None:
    info = f"{name}-99.0.dist-info"
    files = {
        f"{name}/__init__.py": b"",
        f"{name}/data": random.Random(0).randbytes(nbytes),
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                "Version: 99.0",
                *[f"Requires-Dist: {r}" for r in requires],
                "",
            ]
        ).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, requires in PACKAGES.items():
        make_wheel(folder, name, requires)
    return folder


def offline(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(source),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHON": sys.executable,
    }
    command = ["sh", str(ROOT / "tools" / "offline.sh"), *arguments]
    return subprocess.run(
        command, cwd=source.parent, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.extensive("a tool: an environment is made")
def test_the_wheels_of_a_run_install_into_a_bare_environment(source: Path) -> None:
    """Twice into the same folder: what it made before goes."""
    for _ in range(2):
        done = offline(source, "wheels", "--python", VERSION)
        assert done.returncode == 0, done.stderr
    wheels = source.parent / "wheels"
    names = {path.name.partition("-")[0] for path in wheels.glob("*.whl")}
    assert names == set(PACKAGES) - {"tensorboard"}
    assert (
        f"5 wheels, 1 MiB, in wheels; they install into a bare environment of Python {VERSION}" in done.stdout
    )
    requirements = (wheels / "requirements.txt").read_text().split()
    assert [line.partition(">")[0] for line in requirements] == ["matplotlib", "psutil", "pydantic", "rich"]


@pytest.mark.extensive("a tool")
def test_all_of_the_extra(source: Path) -> None:
    assert offline(source, "wheels", "--python", VERSION, "--without", "").returncode == 0
    assert len([*(source.parent / "wheels").glob("*.whl")]) == len(PACKAGES)


@pytest.mark.extensive("a tool")
def test_more_than_the_limit(source: Path) -> None:
    make_wheel(source, "pydantic_core", [], 2**21)
    done = offline(source, "wheels", "--python", VERSION, "--limit", "2")
    assert done.returncode == 1 and "3 MiB are more than the limit of 2 MiB" in done.stderr
    assert "2.0 MiB  wheels/pydantic_core" in done.stderr


def test_a_package_that_needs_torch(source: Path) -> None:
    make_wheel(source, "rich", ["torch"])
    make_wheel(source, "torch", [])
    done = offline(source, "wheels", "--python", VERSION)
    assert done.returncode == 1 and "Packages that need torch cannot be carried" in done.stderr


def test_a_package_that_is_missing(source: Path) -> None:
    (source / "pydantic_core-99.0-py3-none-any.whl").unlink()
    done = offline(source, "wheels", "--python", VERSION)
    assert done.returncode == 1 and "pydantic_core" in done.stderr and "cannot collect wheels" in done.stderr


MISTAKES: dict[str, tuple[list[str], int, str]] = {
    "no folder": (["--python", "3.12"], 2, "sh tools/offline.sh wheels --python 3.12"),
    "no version": (["wheels"], 2, "sh tools/offline.sh wheels --python 3.12"),
    "another version": (["wheels", "--python", "3.9"], 2, "sh tools/offline.sh"),
    "no value": (["wheels", "--python"], 2, "sh tools/offline.sh"),
    "a limit in words": (["wheels", "--python", "3.12", "--limit", "few"], 2, "sh tools/offline.sh"),
    "an extra that does not exist": (
        ["wheels", "--python", "3.12", "--extra", "trian"],
        1,
        "has no extra trian",
    ),
    "a package that is not asked for": (
        ["wheels", "--python", "3.12", "--without", "numpi"],
        1,
        "ask for numpi",
    ),
    "a folder of the user's": (
        ["source", "--python", "3.12"],
        1,
        "source has other files; name an empty folder",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, source: Path) -> None:
    arguments, status, message = MISTAKES[name]
    done = offline(source, *arguments)
    assert done.returncode == status and message in done.stderr, done.stderr
    assert len([*source.glob("*.whl")]) == len(PACKAGES)
