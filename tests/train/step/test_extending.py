"""Values of users' own: the examples of docs/extending.md train, and wrong values are refused in a line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.extend import (
    NamedLayout,
    NamedMemory,
    NamedStrategy,
    Registry,
    layouts,
    memories,
    strategies,
)
from shardwright.train.config import Config
from shardwright.train.config.keys import keys
from shardwright.train.errors import UserError
from shardwright.train.extend import NamedOptimizer, hooks, kinds, losses as losses_by_name, optimizers, sinks
from shardwright.train.models.build import build_model
from shardwright.train.parallel.checks import check_ranks
from shardwright.train.run.same_job import differences
from tests.support.registries import forgotten_afterwards
from tests.train.kit.jobs import TINY, config_file, losses, ranks, train_here

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
EXAMPLES = {name: code for code, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE, re.DOTALL)}
HOOKS = [name for name, code in EXAMPLES.items() if "TrainerHook" in code]
COMMANDS = [shlex.split(command) for command in re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)]
COMMANDS = [command for command in COMMANDS if "--train.epochs" not in command]  # which needs no file
REGISTRIES: list[Registry[Any]] = [
    strategies,
    layouts,
    memories,
    optimizers,
    kinds,
    losses_by_name,
    sinks,
    hooks,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the files of the page. What they register and import is forgotten afterwards."""
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    kind = EXAMPLES["my_models.py"].splitlines()[-1]
    two = [
        kind.replace("MEANS", name.upper()).replace('"means"', f'"{name}"') for name in ("first", "second")
    ]
    imports = [
        "from my_models import *",
        "from shardwright.train.extend import *",
        "from tests.support.registries import forget",
        "forget(kinds, 'means')",
    ]
    (tmp_path / "two_kinds.py").write_text("\n".join([*imports, *two]))
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with forgotten_afterwards(REGISTRIES):
        yield tmp_path
    for name in (*EXAMPLES, "two_kinds.py", "headless.py"):
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path[:] = path


def test_the_page_has_one_short_example_of_each() -> None:
    stores = 1  # which have no registry, since fsspec has one
    assert len(EXAMPLES) - len(HOOKS) + 1 == len(REGISTRIES) + stores == len(COMMANDS)
    for name, code in EXAMPLES.items():
        assert sum(bool(line.strip()) for line in code.splitlines()) < 30, name


@pytest.mark.extensive("every example of the page trains")
def test_the_examples_train(folder: Path) -> None:
    """Each beside the job without it: the losses are the same where the value changes none."""
    job = config_file(folder, TINY.replace('engine = "none"', "").replace("steps = 8", "steps = 2"))
    without_shape = re.sub(r"\[model\].*?\[train\]", "[train]", job.read_text(), flags=re.DOTALL)
    other = config_file(folder / "other", without_shape)

    def losses_of(options: list[str], where: str) -> list[float]:
        arguments = ["train", str(other if "--model.kind" in options else job), "--run.dir", where, *options]
        assert [status for status, _ in ranks(2, *arguments, folders=[folder, folder])] == [0, 0], options
        return losses(folder / where)

    options = {command[3]: command[3:] for command in COMMANDS}
    assert all(command[:2] == ["shardwright", "train"] for command in COMMANDS)
    plain = losses_of([], "plain")
    learns = [options.pop(key) for key in ("--model.kind", "--optimizer.name")]
    assert losses_of([word for command in options.values() for word in command], "same") == pytest.approx(
        plain, rel=1e-6
    )
    lines = (folder / "same" / "losses.csv").read_text().splitlines()
    assert [float(line.partition(",")[2]) for line in lines] == losses(folder / "same")
    assert losses_of([word for command in learns for word in command], "another") != pytest.approx(
        plain, rel=1e-2
    )


def test_values_are_known_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their short names, too, once they are registered: in help, errors, configurations and run folders."""
    kind, csv = kinds.get("my_models:MEANS"), sinks.get("my_sinks:CSV")
    slices, _ = layouts.get("my_layouts:SLICES"), strategies.get("my_strategies:ZERO2_INSIDE")
    expected = {key.path: key.expected for key in keys()}
    assert "zero2_inside" in expected["parallel.strategy"] and "slices" in expected["parallel.layout"]
    assert "means" in expected["model.kind"] and expected["model.width"] == "an integer"
    config = Config.model_validate(
        {"model": {"kind": "means", "width": 8}, "parallel": {"layout": "slices"}, "log": {"sinks": ["csv"]}}
    )
    assert config.model.shape() == kind.shape(width=8)
    assert "width = 8\n" in config.resolved().to_toml()
    assert layouts.get("slices").layout().elements((3, 4, 5)) == 20
    assert sinks.get("csv") is csv and layouts.get("slices") is slices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--parallel.strategy", "zero4"],
            "parallel.strategy: expected one of ddp, .*found 'zero4'; did you mean",
        ),
        (
            ["--parallel.strategy", "nowhere:X"],
            "strategy 'nowhere:X' cannot be imported .*No module named 'nowhere'",
        ),
        (
            ["--parallel.strategy", "my_strategies:X"],
            "cannot be imported from my_strategies:X: AttributeError",
        ),
        (["--parallel.strategy", "my_layouts:SLICES"], "expected a NamedStrategy at .*, found NamedLayout"),
        (["--parallel.strategy", "my_strategies:ZERO2_INSIDE"], "parallel.replicas: expected at least 2"),
        (
            ["--optimizer.name", "my_optimizers:LION", "--optimizer.options.gamma", "1"],
            "options.gamma: .* beta$",
        ),
        (
            ["--optimizer.name", "my_optimizers:LION", "--optimizer.options.beta", "x"],
            "options.beta: .*like 0.9",
        ),
        (["--optimizer.options.beta", "0.5"], "options.beta: optimizer 'adamw' has no such option"),
        (["--model.kind", "my_models:MEANS", "--model.widht", "3"], "unknown key model.widht"),
        (
            ["--model.kind", "my_models:MEANS", "--model.width", "big"],
            "model.width: expected int, found 'big'",
        ),
        (["--model.kind", "my_models:MEANS", "--model.dim", "3"], "dim: kind 'my_models:MEANS' has none"),
        (
            ["--model.kind", "my_models:MEANS", "--model.preset", "8B"],
            "preset: expected one of debug with kind",
        ),
        (["--log.sinks", '["my_sinks:CVS"]'], "log.sinks: .*AttributeError"),
        (["--parallel.strategy", "my_strategies:"], "expected an import path package.module:NAME, found"),
        (["--parallel.strategy", "my_strategies.py:ZERO2_INSIDE"], "has no .py: my_strategies:ZERO2_INSIDE"),
        (
            ["--model.kind", "two_kinds:SECOND"],
            "kinds 'first' and 'second' have the same class of shapes, Shape",
        ),
    ],
    ids=lambda value: "_".join(value[-1:]) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    job = config_file(folder, "[run]\ndevice = 'cpu'\n")
    assert train_here(job, "--run.dir", folder / "run", *options) == 2
    error = capsys.readouterr().err
    assert re.search(message, error.strip()), error
    assert "Traceback" not in error and not (folder / "run").exists()


def test_values_are_checked_when_they_are_made() -> None:
    for make, message in (
        (lambda: NamedStrategy("five", (5,), ""), r"NamedStrategy 'five': expected stages .* found \(5,\)"),
        (lambda: NamedStrategy("three", (0, 1, 2), ""), "of one axis or two"),
        (lambda: NamedStrategy("number", 2, ""), "found 2"),  # type: ignore[arg-type]
        (lambda: NamedLayout("rows", "rows", ""), "NamedLayout 'rows': expected the granule .* found 'rows'"),
        (
            lambda: NamedOptimizer("whole", "", object, needs="matrix"),
            "expected needs to be .* found 'matrix'",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_model_without_what_the_trainer_needs(folder: Path) -> None:
    (folder / "headless.py").write_text(
        EXAMPLES["my_models.py"].replace("self.output", "self.last").replace('"means"', '"headless"')
    )
    config = Config.model_validate({"model": {"kind": "headless:MEANS"}})
    with pytest.raises(
        UserError, match=r"kind 'headless' to return a LanguageModel .* found a RunningMeans without output"
    ):
        build_model(config.model, 256)


def test_runs_of_different_kinds_differ(folder: Path) -> None:
    one, other = Config(), Config.model_validate({"model": {"kind": "my_models:MEANS"}})
    assert next(iter(differences(one, other))) == ("model.kind", "llama", "my_models:MEANS")
    assert not list(differences(other, Config.model_validate({"model": {"kind": "means"}})))


def test_a_kind_without_a_plan_refuses_tensor_parallelism(folder: Path) -> None:
    config = Config.model_validate({"model": {"kind": "my_models:MEANS"}, "parallel": {"tensor": 2}})
    with pytest.raises(
        UserError, match=r"parallel.tensor: kind 'means' does not support this, since its Offers have no"
    ):
        check_ranks(config, 2)


def test_registries_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(TypeError, match="Only a NamedStrategy can be added as a strategy, got str"):
        strategies.add("zero3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The strategy 'ddp' already exists"):
        strategies.add(NamedStrategy("ddp", (1,), ""))
    with pytest.raises(ValueError, match="a name without a colon"):
        strategies.add(NamedStrategy("a:b", (1,), ""))
    assert strategies.add(strategies.get("ddp")) is strategies.get("ddp")  # a module that is imported twice
    with pytest.raises(ValueError, match="NamedMemory 'both': pass allocator or plan"):
        NamedMemory("both", "", allocator=object, plan=lambda items, units: None)  # type: ignore[arg-type,return-value]


def test_entry_points_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are known without an import, their values when they are asked for."""
    (tmp_path / "theirs.py").write_text(
        "from shardwright.engine.extend import NamedStrategy\n"
        "GOOD = NamedStrategy('theirs', (2,), 'Theirs.')\nMISNAMED = NamedStrategy('other', (2,), '')\n"
    )
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[shardwright.strategies]\ntheirs = theirs:GOOD\nwrong = theirs:MISNAMED\nlost = theirs:LOST\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten_afterwards([strategies]):
        assert {"theirs", "wrong", "lost"} <= set(strategies.names()) and "theirs" not in sys.modules
        assert strategies.get("theirs").stages == (2,)
        with pytest.raises(ValueError, match="strategy 'wrong': the name of theirs:MISNAMED is 'other'"):
            strategies.get("wrong")
        with pytest.raises(
            ValueError, match="strategy 'lost' cannot be imported from theirs:LOST: AttributeError"
        ):
            strategies.get("lost")
    sys.modules.pop("theirs", None)
