"""Users' stores of checkpoints: each is described, and a class that is no file system is one error that says why."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import shardwright as sw
from shardwright import cli
from shardwright.engine.extend.store_registry import NEEDED
from shardwright.train.commands.extensions import REGISTRIES
from tests.support.registries import forgotten_afterwards
from tests.train.kit.hooks import EXAMPLES, JOB
from tests.train.kit.jobs import config_file

pytest.importorskip("fsspec", reason="needs fsspec")

OWN = '''
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

NEEDED = {needed}


class Nothing:
    """No file system."""


def without(*missing):
    """A class with all methods except for these."""
    methods = {{name: lambda self, *arguments, **options: None for name in NEEDED if name not in missing}}
    return type("Duck", (), methods)


{ducks}
ALL = without()


class Bare(AbstractFileSystem):
    """Only derived."""


class Lists(Bare):
    def ls(self, path, detail=True, **options):
        return []


class Removes(Lists):
    def rm_file(self, path):
        pass


class Whole(Removes):
    """Each method that fsspec asks for."""

    def _open(self, path, mode="rb", **options):
        raise FileNotFoundError(path)


class Local(LocalFileSystem):
    """One of fsspec's own."""


class Memory(MemoryFileSystem):
    pass


class Needy(Whole):
    def __init__(self, bucket):
        super().__init__()


def function():
    return Whole()


INSTANCE = Nothing()
'''
MISSING: dict[str, tuple[str, ...]] = {
    "Nothing": NEEDED, "function": NEEDED, "INSTANCE": NEEDED, "Bare": ("ls", "_open", "_rm"),
    "Lists": ("_open", "_rm"), "Removes": ("_open",), **{f"NO_{name}": (name,) for name in NEEDED},
}  # fmt: skip
WHOLE = ("ALL", "Whole", "Local", "Memory")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    ducks = "\n".join(f"NO_{name} = without({name!r})" for name in NEEDED)
    (tmp_path / "own_stores.py").write_text(OWN.format(needed=NEEDED, ducks=ducks))
    (tmp_path / "my_store.py").write_text(EXAMPLES["my_store.py"])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with forgotten_afterwards(registry for registry, _ in REGISTRIES.values()):
        yield tmp_path
    for name in ("own_stores", "my_store"):
        sys.modules.pop(name, None)
    sys.path[:] = path


@pytest.mark.parametrize("name", MISSING)
def test_what_is_no_file_system_is_one_error(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacks = f" without {', '.join(MISSING[name])}; derive it from fsspec.AbstractFileSystem"
    url = f"own_stores:{name}://place/step-1"
    with pytest.raises(OSError, match=f"no file system for own_stores:{name}://.*{re.escape(lacks)}"):
        sw.save_checkpoint(url, nn.Linear(2, 2))
    job = config_file(folder, JOB)
    assert (
        cli.main(["train", str(job), "--run.dir", "run", "--checkpoint.folder", f"own_stores:{name}://place"])
        != 0
    )
    err = capsys.readouterr().err
    assert err.startswith("error: checkpoint.folder: ") and lacks in err and err.count("\n") == 1
    assert not (folder / "run").exists()
    if name == "function":
        return  # a function may be a loss
    assert cli.main(["extensions", f"own_stores:{name}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: extensions: ") and err.count("\n") == 1
    expected = lacks if MISSING[name] != NEEDED else ", or a file system of fsspec, at own_stores:"
    assert expected in err


@pytest.mark.parametrize("name", [*(f"own_stores:{each}" for each in WHOLE), "my_store:Shelf"])
def test_a_file_system_is_described(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["extensions", name]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "file system, for checkpoint.folder:" and second == f"  {name}"


def test_a_class_that_needs_arguments_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = config_file(folder, JOB)
    assert cli.main(["train", str(job), "--checkpoint.folder", "own_stores:Needy://place"]) != 0
    err = capsys.readouterr().err
    assert "own_stores:Needy" in err and "missing 1 required positional argument: 'bucket'" in err
    assert err.count("\n") == 1


def test_each_kind_of_extension_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The values of all examples of the page, with the key that takes them; and all kinds in the list."""
    keys = set()
    for file, code in EXAMPLES.items():
        (folder / file).write_text(code)
        module = file.removesuffix(".py")
        for value in re.findall(
            r"^(?:class (\w+)\((?:TrainerHook|LocalFileSystem)\)|([A-Z_0-9]+) = \w+\.add|def (focal)\()",
            code,
            re.M,
        ):
            assert cli.main(["extensions", f"{module}:{''.join(value)}"]) == 0
            keys.add(re.match(r".*, for (\S+):", capsys.readouterr().out)[1])  # type: ignore[index]
        sys.modules.pop(module, None)
    expected = {
        "parallel.strategy", "parallel.layout", "parallel.memory", "optimizer.name", "model.kind", "log.sinks",
        "run.hooks", "checkpoint.folder", "train.loss",
    }  # fmt: skip
    assert keys == expected
    assert cli.main(["extensions"]) == 0
    assert {*re.findall(r"^\S.*, for (\S+):$", capsys.readouterr().out, re.M)} == expected
