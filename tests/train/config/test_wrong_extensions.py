"""Users' own values that are wrong, fail or are missing: what a run does, and the one error that names them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright import cli
from shardwright.engine.memory import Item, Plan
from shardwright.extend import ExtensionError, NamedLayout, NamedMemory
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.extend import Kind, NamedOptimizer, NamedSink, Offers, kinds, optimizers
from shardwright.train.models.build import build_model
from tests.train.kit.jobs import TINY, config_file, ranks, records, train_here

SHARDED = TINY.replace('engine = "none"', "").replace("steps = 8", "steps = 4")
KINDLESS = re.sub(r"\[model\].*?\[train\]", "[train]", SHARDED, flags=re.DOTALL)

MINE = """
import os

import torch
from shardwright.engine.extend import NamedLayout, NamedMemory
from shardwright.train.extend import NamedOptimizer, NamedSink


class Failing:
    calls = []

    def __init__(self, site):
        self.calls.append("open")

    def step(self, record):
        self.calls.append(record.step)
        if record.step == 2:
            raise OSError("no room")

    def say(self, text):
        pass

    def close(self, end):
        self.calls.append("close")


class Unclosable(Failing):
    calls = []

    def step(self, record):
        self.calls.append(record.step)

    def close(self, end):
        raise OSError("no end")


class Endless(Failing):
    def close(self):
        pass


class Mute:
    def step(self, record):
        pass


class Short:
    def lease(self):
        return None

    def release(self, slab, memory):
        return False


class Wrong:
    def lease(self, slab):
        return 5

    def release(self, slab, memory):
        return False


FAILING = NamedSink("failing", "", Failing)
UNCLOSABLE = NamedSink("unclosable", "", Unclosable)
MUTE = NamedSink("mute", "", lambda site: Mute())
ENDLESS = NamedSink("endless", "", Endless)
CLOSED = NamedSink("closed", "", lambda site: open("nowhere/losses.csv"))
RANKED = NamedLayout("ranked", lambda shape: 1 + 999 * int(os.environ.get("RANK", 0)), "")
BROKEN = NamedLayout("broken", lambda shape: shape[3], "")
NO_PLAN = NamedMemory("no_plan", "", plan=lambda items, units: None)
FAILED_PLAN = NamedMemory("failed_plan", "", plan=lambda items, units: 1 / 0)
NO_ALLOCATOR = NamedMemory("no_allocator", "", allocator=lambda: 3)
SHORT = NamedMemory("short", "", allocator=Short)
WRONG = NamedMemory("wrong", "", allocator=Wrong)
NO_OPTIMIZER = NamedOptimizer("no_optimizer", "", lambda decayed, others, settings: None)
FAILED_OPTIMIZER = NamedOptimizer("failed_optimizer", "", lambda decayed, others, settings: 1 / 0)
"""

MODELS = """
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.train.extend import Decoder, Kind, Offers


@dataclass(frozen=True)
class Shape:
    width: int = 8
    answer: str = "extras"
    vocab_size: int = 256
    max_seq_len: int = 64


class Small(Decoder):
    auxiliary = {"size": 0.01, "rows": 0.0}

    def __init__(self, config):
        super().__init__()
        self.config, width = config, config.width
        self.tok_embeddings, self.norm = nn.Embedding(config.vocab_size, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, width)])
        self.output = nn.Linear(width, config.vocab_size)

    def forward(self, tokens, extras=False):
        x = self.layers[0](self.tok_embeddings(tokens))
        logits = self.output(self.norm(x))
        if self.config.answer == "flat":
            logits = logits.flatten(0, 1)
        if self.config.answer == "alone" or not extras:
            return logits
        return logits, {"x": x, "answer": self.config.answer}

    @staticmethod
    def auxiliary_sums(extras, targets):
        if extras["answer"] == "names":
            return {"size": extras["x"].square().sum()}
        sums = extras["x"].square().sum((0, 2))
        if extras["answer"] == "many":
            return {"size": sums, "rows": sums}
        if extras["answer"] == "failing":
            return {"size": sums.total()}
        return {"size": sums.sum(), "rows": 0.0 * sums.sum() + 3.0 * targets.numel()}


SMALL = Kind("small", "", Shape, {"debug": Shape()}, lambda: Offers(Small))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with mine.py and my_small.py. Imports of them are forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "my_small.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    for name in ("mine", "my_small"):
        sys.modules.pop(name, None)
    sys.path[:] = path


def test_a_run_goes_on_without_a_sink_that_raises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinks = '["mine:FAILING", "mine:UNCLOSABLE"]'
    assert train_here(config_file(folder, SHARDED), "--run.dir", "run", "--log.sinks", sinks) == 0
    out = capsys.readouterr().out
    stop = r"sink 'mine:FAILING' stopped at step 2: it raised OSError: no room \(mine.py, line \d+\)"
    late = (
        r"sink 'mine:UNCLOSABLE' raised OSError: no end \(mine.py, line \d+\) when it was closed after step 4"
    )
    for each in (stop, late):
        assert len(re.findall(rf"^warning: {each}\.", out, re.MULTILINE)) == 1, out
    mine = sys.modules["mine"]
    assert mine.Failing.calls == ["open", 1, 2, "close"] and mine.Unclosable.calls == ["open", 1, 2, 3, 4]
    assert len(records(folder / "run")) == 4
    assert (folder / "run" / "checkpoints" / "step-4").is_dir()
    summary = (folder / "run" / "summary.txt").read_text()
    assert re.search(rf"^  warning  +{stop}$", summary, re.MULTILINE) and summary in out


def test_a_sink_that_raises_on_the_first_of_two_ranks(folder: Path) -> None:
    job = config_file(folder, SHARDED)
    arguments = ["train", job, "--run.dir", "run", "--log.sinks", '["mine:FAILING"]']
    assert [status for status, _ in ranks(2, *arguments, folders=[folder, folder])] == [0, 0]
    assert "stopped at step 2" in (folder / "run" / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("log.sinks", '["mine:MUTE"]', r"open of sink 'mute' returned .*expected an object with the methods step"),
        ("log.sinks", '["mine:ENDLESS"]', r"open of sink 'endless' returned a Endless with close\(\); expected close"),
        ("log.sinks", '["mine:CLOSED"]', r"open of sink 'closed' raised FileNotFoundError: .* \(mine.py, line"),
        ("log.sinks", '["mine:MUTE", "mine:MUTE"]', r"log.sinks: found 'mine:MUTE' twice.* Name each sink once"),
        ("parallel.layout", "mine:BROKEN", r"Layout 'mine:BROKEN', for parameter .* raised IndexError: tuple index"),
        ("parallel.memory", "mine:NO_PLAN", r"plan function of memory 'no_plan' returned None .*expected a .*Plan"),
        ("parallel.memory", "mine:FAILED_PLAN", r"memory 'failed_plan' raised ZeroDivisionError: .* \(mine.py, line"),
        ("parallel.memory", "mine:NO_ALLOCATOR", r"allocator of memory 'no_allocator' returned 3 \(int\)"),
        ("parallel.memory", "mine:SHORT", r"'short' returned a Short .* lease: .*one argument \(slab\), found Short"),
        ("parallel.memory", "mine:WRONG", r"Wrong.lease returned 5 \(int\) .*must return a uint8 tensor, or None"),
        ("optimizer.name", "mine:NO_OPTIMIZER", r"optimizer 'no_optimizer' returned None .*expected a torch.optim"),
        ("optimizer.name", "mine:FAILED_OPTIMIZER", r"make of optimizer 'failed_optimizer' raised ZeroDivisionError"),
    ],
    ids=lambda value: value if ":" in value and len(value) < 40 else "",
)  # fmt: skip
def test_a_wrong_function_is_one_error_that_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, message: str
) -> None:
    status = train_here(config_file(folder, SHARDED), "--run.dir", "run", f"--{key}", value)
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert "Traceback" not in error and status == (1 if "WRONG" in value else 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: NamedMemory("m", "", plan=lambda items: None),  # type: ignore[arg-type,misc,return-value]
            r"NamedMemory 'm': plan: expected a function of 2 arguments \(items, units\), found .*\(items\)",
        ),
        (
            lambda: NamedMemory("m", "", allocator=3),  # type: ignore[arg-type]
            r"NamedMemory 'm': allocator: expected a function without arguments, found 3 \(int\)",
        ),
        (
            lambda: NamedOptimizer("o", "", lambda parameters: None),  # type: ignore[arg-type,misc,return-value]
            r"NamedOptimizer 'o': make: expected a function of 3 arguments \(decayed, others, settings\)",
        ),
        (
            lambda: NamedLayout("l", lambda: 3, ""),
            r"NamedLayout 'l': granule: expected a function of one argument \(shape\)",
        ),
        (lambda: NamedSink("s", "", lambda: None), r"NamedSink 's': open: .*\(site\)"),  # type: ignore[arg-type,misc,return-value]
        (lambda: Kind("k", "", Config, {}, lambda shape: None), r"Kind 'k': load: .*without arguments"),  # type: ignore[arg-type,misc,return-value]
        (lambda: Offers(lambda: None), r"Offers: model: expected a function of one argument \(shape\)"),  # type: ignore[arg-type,misc,return-value]
    ],
    ids=["plan", "allocator", "make", "granule", "open", "load", "model"],
)
def test_signatures_are_checked_when_a_value_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_of_other_items_is_refused() -> None:
    items = [Item("a", "parameters", 512, ((0, 1),)), Item("b", "parameters", 512, ((0, 1),))]
    for plan, message in (
        (Plan(tuple(items[:1]), (0,), 512, 512), "a Plan of 1 items and 1 offsets; expected the 2 items"),
        (Plan(tuple(items), (0, 513), 1025, 1024), "a Plan with the offset 513; expected multiples of 16"),
    ):
        memory = NamedMemory("m", "", plan=lambda items, units, plan=plan: plan)  # type: ignore[misc]
        with pytest.raises(ExtensionError, match=f"The plan function of memory 'm' returned {message}"):
            memory.make_plan(items, 2)


def test_a_layout_that_differs_between_ranks_is_named(folder: Path) -> None:
    arguments = [
        "train",
        config_file(folder, SHARDED),
        "--run.dir",
        "run",
        "--parallel.layout",
        "mine:RANKED",
    ]
    ended = ranks(2, *arguments, folders=[folder, folder])
    assert [status for status, _ in ended] == [2, 2], ended
    error = "".join(text for _, text in ended)
    assert "different results of layout 'mine:RANKED'" in error and "requires_grad" not in error
    assert re.search(r"'weight' of shape \(256, 32\): 1 on rank 0, 1000 on rank 1", error), error


@pytest.mark.extensive("runs of several ranks")
def test_all_losses_of_a_model_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one rank and on two, in other micro-batches, they are the same means over the step's tokens."""
    job = config_file(folder, KINDLESS)
    sinks = ["--log.sinks", '["tensorboard"]']
    assert train_here(job, "--run.dir", "one", "--model.kind", "my_small:SMALL", *sinks) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^  size +further loss of this model; its weight in training is 0.01", out, re.MULTILINE
    )
    assert re.search(r"^step 1/4  loss \d\.\d+  size \d\.\d+  rows 3\.0000", out, re.MULTILINE)
    arguments = [
        "train",
        job,
        "--run.dir",
        "two",
        "--model.kind",
        "my_small:SMALL",
        "--train.micro_batch",
        "1",
    ]
    assert [status for status, _ in ranks(2, *arguments, folders=[folder, folder])] == [0, 0]
    for one, two in zip(records(folder / "one"), records(folder / "two"), strict=True):
        assert set(one["extra_losses"]) == {"size", "rows"} and one["extra_losses"]["rows"] == pytest.approx(
            3.0
        )
        assert one["extra_losses"] == pytest.approx(two["extra_losses"], rel=1e-5)
    events = b"".join(file.read_bytes() for file in (folder / "one" / "tensorboard").iterdir())
    assert b"loss/size" in events and b"loss/rows" in events


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("flat", r"forward of the model of kind .* returned a tensor of shape \[8, 256\] .* of shape \[1, 8, 256\]"),
        ("alone", r"forward\(tokens, extras=True\) of .* returned a tensor .*; expected a tuple of two"),
        ("names", r"auxiliary_sums of .* returned a dict with size; expected a dict .* each of size, rows"),
        ("many", r"returned a tensor of shape \[32\] .* for 'size'; expected a dict with one tensor without"),
        ("failing", r"auxiliary_sums of .* raised AttributeError: 'Tensor' object has no attribute 'total'"),
    ],
)  # fmt: skip
def test_a_wrong_answer_of_a_model_names_its_kind(
    folder: Path, capsys: pytest.CaptureFixture[str], answer: str, message: str
) -> None:
    options = ["--model.kind", "my_small:SMALL", "--model.answer", answer]
    assert train_here(config_file(folder, KINDLESS), "--run.dir", "run", *options) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(message, error) and "'my_small:SMALL'" in error and "Traceback" not in error, error


def test_a_forward_that_takes_no_extras_is_refused(folder: Path) -> None:
    (folder / "my_small.py").write_text(MODELS.replace("tokens, extras=False", "tokens"))
    config = Config.model_validate({"model": {"kind": "my_small:SMALL"}, "train": {"seq_len": 64}})
    with pytest.raises(
        UserError,
        match=r"forward\(tokens\) of the model of kind 'small': .* Expected forward\(tokens, extras",
    ):
        build_model(config.model, 256)


def test_a_run_whose_files_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model.kind", "my_small:SMALL", "--log.sinks", '["mine:UNCLOSABLE"]']
    job = config_file(folder, KINDLESS)
    assert train_here(job, "--run.dir", "run", *options) == 0
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for name in ("mine", "my_small"):
        sys.modules.pop(name)
    sys.path[:] = [path for path in sys.path if Path(path) != folder]
    commands = [
        ["train", "--resume", "../run"],
        ["compare", "../run", "../run"],
        ["generate", "../run", "--prompt", "a"],
    ]
    capsys.readouterr()
    for command in commands:
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: The run ../run uses values that cannot be found here: "), error
        assert "model.kind = 'my_small:SMALL', log.sinks = 'mine:UNCLOSABLE'" in error
        assert "Start in the folder that has my_small and mine, or name that folder in PYTHONPATH" in error
    # What the command line replaces is not needed.
    assert cli.main([*commands[0], "--log.sinks", "[]"]) == 2
    assert "here: model.kind = 'my_small:SMALL'. The run" in capsys.readouterr().err


def test_the_extensions_command_lists_values_with_origin_and_options(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = folder / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[shardwright.optimizers]\nsign = mine:SIGN\nlost = mine:LOST\n[shardwright.models]\nlost = mine:LOST\n"
    )
    with (folder / "mine.py").open("a") as file:
        options = {"beta": 0.9, "word": "x"}
        file.write(f"\nSIGN = NamedOptimizer('sign', 'Signs.', lambda a, b, c: None, options={options})\n")
    monkeypatch.syspath_prepend(str(folder))
    try:
        assert cli.main(["extensions", "optimizers"]) == 0
        out = capsys.readouterr().out
        assert "adamw (built in)\n      AdamW, torch's fused kernel." in out
        assert "sign (mine:SIGN of theirs 1.5)\n      Signs.\n" in out
        assert 'Options, keys of [optimizer.options]: beta = 0.9, word = "x"' in out
        assert "lost (mine:LOST of theirs 1.5)\n      cannot be used: " in out
        assert cli.main(["extensions", "my_small:SMALL"]) == 0
        assert "Presets: debug. Keys of [model]: width, answer, vocab_size" in capsys.readouterr().out
        assert cli.main(["train", "--help"]) == 0  # whatever a package lacks
        assert cli.main(["extensions", "optimizer"]) == 2
        assert "expected strategies, layouts, " in capsys.readouterr().err
        assert cli.main(["extensions", "os:path"]) == 2
        assert "expected a value of one of NamedStrategy, " in capsys.readouterr().err
    finally:
        optimizers._values.pop("sign", None)
        kinds._values.pop("lost", None)


@pytest.mark.parametrize("name", ["blocks", "head", "forward"])
def test_a_language_model_without_a_method_is_refused(folder: Path, name: str) -> None:
    """LanguageModel declares these methods and has no default for them."""
    methods = {
        "blocks": "    def blocks(self):\n        return [self.layer]\n",
        "head": "    def head(self):\n        return [self.layer]\n",
        "forward": "    def forward(self, tokens):\n        return self.layer(tokens)\n",
    }
    (folder / "my_small.py").write_text(
        "from dataclasses import dataclass\nfrom torch import nn\n"
        "from shardwright.train.extend import Kind, LanguageModel, Offers\n\n"
        "@dataclass(frozen=True)\nclass Shape:\n    vocab_size: int = 256\n    max_seq_len: int = 64\n\n"
        "class Part(LanguageModel):\n    def __init__(self, shape):\n        super().__init__()\n"
        "        self.layer = nn.Embedding(256, 256)\n"
        + "".join(text for method, text in methods.items() if method != name)
        + '\nPART = Kind("part", "", Shape, {"debug": Shape()}, lambda: Offers(Part))\n'
    )
    config = Config.model_validate({"model": {"kind": "my_small:PART"}, "train": {"seq_len": 64}})
    with pytest.raises(
        UserError, match=f"kind 'part' to return a LanguageModel .* found a Part without {name}$"
    ):
        build_model(config.model, 256)
