"""`[model] kind = "python"`: a user's own model in ten lines, and what is said of wrong ones."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright import cli
from shardwright.train.config import Config
from shardwright.train.config.shapes.foreign import PythonShape
from shardwright.train.data.samples.batch import Batch
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.models.foreign.python import _summed
from shardwright.train.parallel.checks import check_ranks
from shardwright.train.step import loading
from tests.train.kit.jobs import config_file, losses, ranks, run, run_config, train_here
from tests.train.models.kit.architectures import ARCHITECTURES
from tests.train.models.kit.foreign import JOB

MODEL = """
import torch
from torch import nn

class Means(nn.Module):
    def __init__(self, vocab_size, width=32, depth=2):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.cumsum(1) / x.new_ones(x.shape[1], 1).cumsum(0)))
        return self.out(x)

def build(vocab_size, width=32, depth=2):
    return Means(vocab_size, width, depth)
"""
TEN_LINES = """
from torch import nn
class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size)
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.out(self.layers[1](self.layers[0](x).relu()))
"""
OWN = ("--model.kind", "python", "--model.target")
#: With a loss of its own, the square of the cross-entropy.
LOSS = """
    def loss(self, batch):
        logits, targets = self(batch.inputs).flatten(0, 1), batch.targets.flatten()
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none").square()
        return losses.view_as(batch.targets)"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder. Imports from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def config(target: str, **model: object) -> Config:
    return Config.model_validate({"model": {"kind": "python", "target": target, **model}})


@pytest.mark.extensive("a job of processes of its own")
def test_ten_lines_train_under_nproc(folder: Path) -> None:
    """The module is in the current folder, which ranks of the launcher do not search first."""
    assert len([line for line in TEN_LINES.splitlines() if line]) <= 10
    (folder / "my_ten.py").write_text(TEN_LINES)
    job = config_file(folder, JOB)
    status, out, error = run(
        "train", job, *OWN, "my_ten:Model", "--run.dir", "two", "--nproc", "2", cwd=folder
    )
    assert status == 0 and error == "", error
    assert "done: 3 steps" in out
    assert train_here(job, *OWN, "my_ten:Model", "--run.dir", "one", "--parallel.engine", "none") == 0
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)


@pytest.mark.extensive("runs for each command")
def test_arguments_layouts_checkpoints_and_the_other_commands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_means.py").write_text(MODEL)
    job = config_file(folder, JOB)
    options = (*OWN, "my_means:build", "--model.arguments.depth", "3", "--activations.checkpoint", "full")
    plain = ("--parallel.engine", "none")
    assert train_here(job, *options, *plain, "--run.dir", "one", "--activations.checkpoint", "none") == 0
    sharded = ("--parallel.layout", "ragged", "--parallel.memory", "arena")
    arguments = ["train", job, "--run.dir", "two", *options, *sharded]
    assert [status for status, _ in ranks(2, *arguments, folders=[folder, folder])] == [0, 0]
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-5)
    assert "depth = 3" in (folder / "two" / "config.toml").read_text()
    capsys.readouterr()
    assert cli.main(["train", "--resume", "two", "--train.steps", "4", "--parallel.memory", "dynamic"]) == 0
    assert len(losses(folder / "two")) == 4
    assert cli.main(["generate", "two", "--prompt", "The", "--tokens", "2"]) == 0
    assert cli.main(["compare", "one", "two"]) == 0
    capsys.readouterr()
    assert cli.main(["layout", str(job), *options, "--world-size", "2"]) == 0
    assert "model.layers.0..2 (3 units)" in capsys.readouterr().out


METRIC = """
from shardwright.train.extend import TrainerHook

class Rows(TrainerHook):
    validation_metrics = ("rows",)

    def validate(self, logits, targets):
        return {"rows": (len(targets), 1)}
"""


def test_metrics_of_logits_are_refused_before_a_model_with_its_own_loss_trains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_loss.py").write_text(MODEL.replace("\ndef build", f"{LOSS}\n\ndef build") + METRIC)
    job = config_file(folder, JOB)
    options = (*OWN, "my_loss:build", "--parallel.engine", "none", "--run.hooks", '["my_loss:Rows"]')
    assert train_here(job, "--run.dir", "one", *options, "--validation.every", "2") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no logits, found 'rows'; remove them, or set validation.every" in error
    assert "run.hooks: expected hooks without validation_metrics with the model of 'my_loss:build'" in error
    assert not (folder / "one" / "metrics.jsonl").exists()
    assert train_here(job, "--run.dir", "two", *options, "--validation.every", "0") == 0


def test_the_page_and_its_example(folder: Path) -> None:
    """docs/models.md: the command trains the module, and the table has every architecture of the tests."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "models.md").read_text()
    code, command = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "sh"))
    assert code is not None and command is not None
    (folder / "my_model.py").write_text(code[1])
    program, verb, job, *options = shlex.split(command[1])
    assert (program, verb) == ("shardwright", "train")
    small = ["--train.steps", "2", "--run.dir", "run", "--run.sample_tokens", "0", "--validation.every", "0"]
    assert train_here(root / job, *options, *small) == 0
    table = page[page.index("| kind of model |") :].partition("\n\n")[0]
    types = [each for line in table.splitlines()[2:] for each in line.split("|")[2].strip().split(", ")]
    assert sorted(types) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("ending", [".mean()", ""], ids=["mean", "of_each_target"])
def test_a_loss_of_its_own_is_summed(folder: Path, ending: str) -> None:
    (folder / "my_loss.py").write_text(MODEL.replace("\ndef build", f"{LOSS}{ending}\n\ndef build"))
    sys.path.insert(0, str(folder))
    torch.manual_seed(0)
    model = build_model(config("my_loss:build").model, 256)
    inputs = torch.randint(256, (2, 32))
    plain = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten(), reduction="none").square().sum()
    torch.testing.assert_close(model(inputs, batch=Batch(inputs, inputs, None, None)), plain)


@pytest.mark.parametrize("ending", [".sum()", ".mean()"])
def test_a_sum_in_place_of_a_mean_is_noticed(
    folder: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A micro-batch has 2 samples of 32 targets. The run goes on: a loss may be large for other reasons."""
    loss = LOSS.replace(".square()", "").replace(
        "return losses.view_as(batch.targets)", f"return losses{ending}"
    )
    (folder / "my_sum.py").write_text(MODEL.replace("\ndef build", f"{loss}\n\ndef build"))
    small = ("--train.steps", "1", "--validation.every", "0", "--run.sample_tokens", "0")
    assert train_here(config_file(folder, JOB), *OWN, "my_sum:build", "--run.dir", "run", *small) == 0
    out = capsys.readouterr().out
    notice = "loss(batch) of the model of 'my_sum:build' seems to be a sum over the targets"
    assert (notice in out) == (ending == ".sum()"), out
    assert ("= 64 targets of a micro-batch x 5." in out) == (ending == ".sum()")


def test_a_loss_without_logits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sample at the end needs logits, so this is an error before the first step, or there is no sample."""
    text = MODEL.replace("return self.out(x)", "return {'hidden': self.out(x)}")
    loss = LOSS.replace("self(batch.inputs)", "self(batch.inputs)['hidden']")
    (folder / "my_dict.py").write_text(text.replace("\ndef build", f"{loss}\n\ndef build"))
    job = config_file(folder, JOB)
    assert train_here(job, *OWN, "my_dict:build", "--run.dir", "run") == 2
    assert re.search(r"returned a dict .* or set run.sample_tokens to 0", capsys.readouterr().err)
    assert train_here(job, *OWN, "my_dict:build", "--run.dir", "run", "--run.sample_tokens", "0") == 0


EXPECTED = (
    r"; expected a function that returns a torch.nn.Module with forward\(tokens\): int64 \[B, S\] to float "
    r"logits \[B, S, V\].*blocks\(\), a list of modules.*head\(\), a list of modules, and loss\(batch\), the mean loss"
)
NO_LIST = MODEL.replace("nn.ModuleList(nn.Linear(width, width) for _ in range(depth))", "nn.Linear(1, 1)")
TWO_LISTS = MODEL.replace(
    "    def forward",
    "        self.more = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))\n\n    def forward",
)
#: What is in the file, the target, and what is said, before anything is allocated.
WRONG = {
    "no module": (
        "def build():\n    return [3]\n", "build", "model.target: found a function that returns list.*" + EXPECTED,
    ),
    "no function": ("build = 3\n", "build", "model.target: found int at 'my_wrong:build'" + EXPECTED),
    "no forward": (
        "from torch import nn\nbuild = lambda: nn.Module()\n", "build", "found Module without a forward.*" + EXPECTED,
    ),
    "another forward": (
        MODEL.replace("forward(self, tokens)", "forward(self, tokens, mask)"), "build",
        r": found Means whose forward\(tokens, mask\) does not take \(tokens\): missing a required argument: 'mask'.*"
        + EXPECTED,
    ),
    "another loss": (
        MODEL.replace("    def forward", "    def loss(self):\n        return 0\n\n    def forward"), "build",
        r"target: found Means whose loss\(\) does not take \(batch\).*" + EXPECTED,
    ),
    "wrong blocks": (
        MODEL.replace("    def forward", "    def blocks(self):\n        return [3]\n\n    def forward"), "build",
        r": found Means whose blocks\(\) returns a list of int, not a list of modules of the model.*" + EXPECTED,
    ),
    "no list": (
        NO_LIST, "build",
        r"model.blocks: expected a model with one list of layers .* found no list in Means; put the layers into such a "
        r"list, or give the model a method blocks\(\) that returns its layers as a list",
    ),
    "two lists": (TWO_LISTS, "build", r"model.blocks: expected one list of layers, found layers \(2 x Linear\), more"),
    "an error": (
        MODEL.replace("    return Means", "    return 1 / 0 + Means"), "build",
        r"model.target: 'my_wrong:build' raised ZeroDivisionError: division by zero \(my_wrong.py, line \d+\)",
    ),
    "no such name": (MODEL, "made", r"model.target 'my_wrong:made' cannot be imported .*has no attribute 'made'"),
    "a path": (MODEL, "..", r"model.target: expected an import path package.module:function, found 'my_wrong:..'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_models_are_one_error(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, function, message = WRONG[name]
    (folder / "my_wrong.py").write_text(text)
    job = config_file(folder, JOB)
    assert train_here(job, "--run.dir", "run", *OWN, f"my_wrong:{function}") == 2
    error = capsys.readouterr().err.strip()
    assert re.search(message, error), error
    assert "\n" not in error and "Traceback" not in error and not (folder / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL.replace("self.out(x)", "self.out(x).flatten(0, 1)"), r"forward of OWN returned a tensor of shape \[8, "),
        (MODEL.replace("x.cumsum(1)", "x.mean(1, keepdim=True)"), "OWN is not causal: another last token"),
    ],
    ids=["flat", "not_causal"],
)  # fmt: skip
def test_what_a_forward_shows_is_refused_before_the_first_step(
    folder: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_seen.py").write_text(text)
    assert train_here(config_file(folder, JOB), "--run.dir", "run", *OWN, "my_seen:build") == 2
    out, error = capsys.readouterr()
    assert re.search(message.replace("OWN", "the model of 'my_seen:build'"), error), error
    assert "Traceback" not in error and "step 1/3" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arguments": {"widht": 3}},
            r"model.arguments: my_model:build\(.*unexpected keyword argument 'widht'; did you mean width\?",
        ),
        ({"vocab_size": 100}, "model.vocab_size: expected at least the tokenizer's 256, found 100"),
        ({"arguments": {"vocab_size": 9}}, "expected no vocab_size here; set the key model.vocab_size"),
        (
            {"blocks": "nowhere"},
            r"model.blocks: expected the name .*\(layers \(2 x Linear\)\), found 'nowhere'",
        ),
        ({"dim": 3}, "dim: kind 'python' has none"),
        ({"preset": "8B"}, "preset: kind 'python' has no presets"),
    ],
)
def test_wrong_keys(folder: Path, options: dict[str, object], message: str) -> None:
    (folder / "my_model.py").write_text(MODEL)
    with pytest.raises((UserError, ValueError), match=message):
        build_model(config("my_model:build", **options).model, 256)


def test_a_function_that_needs_the_longest_sequence_gets_it_if_it_is_set(folder: Path) -> None:
    text = MODEL.replace("def build(vocab_size,", "def build(vocab_size, max_seq_len,")
    (folder / "my_model.py").write_text(text)
    with pytest.raises(UserError, match=r"'max_seq_len'; set model\.max_seq_len, the longest sequence"):
        build_model(config("my_model:build").model, 256)
    build_model(config("my_model:build", max_seq_len=512).model, 256)


def test_no_plans_for_layers_that_are_cut(folder: Path) -> None:
    (folder / "my_model.py").write_text(MODEL)
    for key in ("tensor", "expert"):
        values = {"model": {"kind": "python", "target": "my_model:build"}, "parallel": {key: 2}}
        with pytest.raises(UserError, match=f"parallel.{key}: expected 1 with model.kind 'python', found 2"):
            check_ranks(Config.model_validate(values), 2)


def test_units(folder: Path) -> None:
    """Units that a model offers come first, then units that are found."""
    more = "    def blocks(self):\n        return [*self.layers]\n\n    def head(self):\n        return [self.out]\n\n"
    (folder / "my_units.py").write_text(MODEL.replace("    def forward", f"{more}    def forward"))
    (folder / "my_tied.py").write_text(
        MODEL.replace("    def forward", "        self.out.weight = self.embedding.weight\n\n    def forward")
    )
    for target in ("my_units:build", "my_tied:build"):
        model = build_model(config(target).model, 256)
        inner = model.model
        assert model.blocks() == list(inner.layers)
        assert model.tied == (target == "my_tied:build")
        assert model.head() == ([inner.embedding, inner.out] if model.tied else [inner.out])
        outside = 0 if model.tied else 256 * 32
        assert model.flops_per_token(8) == 6 * (model.num_params() - outside)
    assert isinstance(inner.embedding, nn.Embedding)


#: With tied weights, a buffer, and a frozen parameter, which no checkpoint holds.
TIED = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, vocab_size, width=32):
        super().__init__()
        self.model = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("shift", torch.rand(width))
        self.out = nn.Linear(width, vocab_size, bias=False)
        self.out.weight = self.model.weight

    def forward(self, tokens):
        x = self.model(tokens)
        for layer in self.layers:
            x = x + layer(x * self.scale + self.shift).tanh()
        return self.out(x)
"""


@pytest.mark.parametrize(("code", "target"), [(MODEL, "my_exported:build"), (TIED, "my_tied:Tied")])
def test_export_writes_the_names_of_the_module(
    folder: Path, code: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that the command prints loads the file into the module."""
    module_name, _, name = target.partition(":")
    (folder / f"{module_name}.py").write_text(code)
    job = config_file(folder, JOB)
    assert train_here(job, *OWN, target, "--run.dir", "run", "--parallel.engine", "none") == 0
    capsys.readouterr()
    for out, options in (("out", []), ("small", ["--max-shard-size", "20 KB"])):
        assert cli.main(["export", "run", out, *options]) == 0
        line = capsys.readouterr().out
        assert line.startswith(f"{out}: step 3, ") and line.count("\n") == 1
        one_file = out == "out" and name == "build"
        assert ("module.load_state_dict(safetensors.torch.load_file(" in line) == one_file, line
        own = getattr(__import__(module_name), name)(256)
        needed = "safetensors.torch" if one_file else "shardwright"
        pytest.importorskip(needed, reason="needs safetensors, to read the file")
        exec(f"import {needed}\n{line.strip().partition('load the weights with ')[2]}", {"module": own})
        config = run_config(Path("run"))
        torch.manual_seed(config.run.seed)  # of the frozen parameter
        ours = build_model(config.model, 256)
        loading.load_weights(Path("run/checkpoints/step-3"), ours)
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(own(tokens), ours(tokens))
        files = {path.name for path in Path(out).iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json"} <= files
        assert not files & {"config.json", "generation_config.json"}
        assert ("model.safetensors" in files) == (out == "out")


@pytest.mark.parametrize("each", [False, True])
def test_a_loss_in_bfloat16_is_summed_in_float32(each: bool) -> None:
    """There are 4,093 targets: their number, and the sum of as many values, are no numbers of bfloat16."""
    targets, mean = torch.zeros(1, 4093, dtype=torch.int64), torch.tensor(2.03125, dtype=torch.bfloat16)
    loss = mean.expand(4093) if each else mean
    assert float(_summed(PythonShape(target="my_model:build"), loss, targets)) == 2.03125 * 4093
