"""Says whether the running environment satisfies an extra of pyproject.toml: exit status 0, or 1 and what is missing.

    python tools/environment.py train
    python tools/environment.py --list train --without tensorboard

--list prints what the extra asks for beside torch, one requirement a line, for tools/offline.sh.
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
    """The requirements of the project and of this extra, and the extras that it names."""
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


def listed(extra: str, without: str) -> list[str]:
    """The requirements of an extra except torch and the packages that ``without`` names, separated by commas.

    Raises:
        ValueError: there is no such extra, or it does not ask for a package that ``without`` names.
    """
    try:
        everything = [requirement for requirement in requirements(extra) if requirement.name != "torch"]
    except KeyError:
        raise ValueError(f"pyproject.toml has no extra {extra}") from None
    left_out = {name.strip() for name in without.split(",") if name.strip()}
    if unknown := left_out - {requirement.name for requirement in everything}:
        raise ValueError(f"the extra {extra} does not ask for {', '.join(sorted(unknown))}")
    return sorted({str(each) for each in everything if each.name not in left_out})


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        try:
            print("\n".join(listed(sys.argv[2], sys.argv[4] if len(sys.argv) > 4 else "")))
        except ValueError as error:
            sys.exit(f"offline: {error}")
        sys.exit()
    problems = missing(sys.argv[1])
    print("\n".join(problems), end="\n" if problems else "", file=sys.stderr)
    sys.exit(bool(problems))
