"""Says whether the running environment satisfies an extra of pyproject.toml: exit status 0, or 1 and what is missing.

    python tools/environment.py train

Only reads; tools/setup.sh decides what to install. The standard library and pip's own copy of `packaging` are
all it may use, because it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tomllib
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def requirements(extra: str) -> list[Requirement]:
    """What the project and this extra ask for, and the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines: list[str] = [*project["dependencies"]]
    extras = [extra]
    for each in extras:  # grows on the way
        for line in project["optional-dependencies"][each]:
            requirement = Requirement(line)
            if requirement.name == project["name"]:
                extras += sorted(requirement.extras - {*extras})
            else:
                lines.append(line)
    return [Requirement(line) for line in lines]


def missing(extra: str) -> list[str]:
    """One line for everything that is absent, out of range or installed from elsewhere."""
    lines = []
    for requirement in requirements(extra):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"expected {requirement}, found none")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lines.append(f"expected {requirement}, found {version}")
    try:
        importlib.metadata.version("shardwright")
        spec = importlib.util.find_spec("shardwright")
    except importlib.metadata.PackageNotFoundError:
        spec = None
    if spec is None or ROOT / "src" not in Path(spec.origin or "").parents:
        lines.append(f"expected shardwright installed from {ROOT}, found {spec.origin if spec else 'none'}")
    return lines


if __name__ == "__main__":
    problems = missing(sys.argv[1])
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    sys.exit(bool(problems))
