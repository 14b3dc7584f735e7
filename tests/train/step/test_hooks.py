"""Hooks of `[run] hooks`: the examples of docs/extending.md, metrics over ranks, votes, early ends, and wrong hooks."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.config import Config
from shardwright.train.extend import Job, StepInProgress
from tests.train.kit.damage import DAMAGES
from tests.train.kit.hooks import EXAMPLES, JOB, PAGE, documents
from tests.train.kit.jobs import config_file, ranks, steps_in, train_here

OWN = '''
import torch
from my_average import MovingAverage
from shardwright.train.extend import Fault, TrainerHook


class Ranks(TrainerHook):
    """Sums that differ by rank."""

    step_metrics = ("mean", "absent")
    validation_metrics = ("rows",)

    def setup(self, job):
        self.job = job

    def metrics(self, step):
        return {"mean": (torch.tensor(float(step * (self.job.rank + 1))), self.job.rank + 1)}

    def validate(self, logits, targets):
        assert logits.shape[:2] == targets.shape and logits.shape[2] == 256
        return {"rows": (len(targets), 1)}


class Votes(TrainerHook):
    """The last rank asks for something at step 4, once."""

    action = "skip"

    def setup(self, job):
        self.job, self.asked = job, False

    def before_optimizer(self, step):
        assert step.norm.dim() == step.loss.dim() == 0
        if step.step == 4 and self.job.rank == self.job.ranks - 1 and not self.asked:
            self.asked = True
            return Fault(self.action, "as I say")


class Stops(Votes):
    action = "stop"


class Rewinds(Votes):
    action = "rewind"


class Ends(TrainerHook):
    """The last rank ends the run after step 3."""

    def setup(self, job):
        self.job = job

    def after_step(self, record):
        if record.step == 3 and self.job.rank == self.job.ranks - 1:
            self.job.stop("enough is\\nenough")


class EndsAtOnce(TrainerHook):
    def setup(self, job):
        job.stop("at once")


class Log(TrainerHook):
    """Every call, in order."""

    def __init__(self):
        self.calls = []

    def setup(self, job):
        self.job = job
        self.calls.append("setup")

    def before_step(self, step):
        self.calls.append(f"before {step}")

    def after_step(self, record):
        self.calls.append(f"after {record.step}")

    def saved(self, step):
        self.calls.append(f"saved {step}")

    def end(self, end):
        with open(f"calls-{self.job.rank}", "a") as stream:
            print(*self.calls, f"end {end.status}", sep=";", file=stream)


class Distance(TrainerHook):
    """The steps to step 4, which no rounding changes."""

    validation_metrics = ("distance",)

    def before_step(self, step):
        self.step = step

    def validate(self, logits, targets):
        return {"distance": (abs(self.step - 4), 1)}


class Fails(TrainerHook):
    def before_step(self, step):
        if step == 2:
            raise ValueError("not on a Thursday")


class Silent(TrainerHook):
    def validate(self, logits, targets):
        return {"one": (1, 1)}


class Typo(TrainerHook):
    after = before = end_of_all = None

    def helper(self):
        return 1

    def after_steps(self, record):
        pass


class Singular(TrainerHook):
    validation_metric = ("one",)


class Higher(TrainerHook):
    step_metrics = ("one",)
    higher_is_better = ("odd",)

    def metrics(self, step):
        return {"one": (1, 1)}


class Wrong(TrainerHook):
    step_metrics = ("one",)

    def metrics(self, step):
        return {"two": (1, 1)}


class Watched(MovingAverage):
    """Writes the average and a count of steps."""

    def setup(self, job):
        super().setup(job)
        self.job, self.steps = job, 0

    def after_step(self, record):
        super().after_step(record)
        self.steps += 1
        whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in self.average.values()]
        if self.job.rank == 0:
            with open("averages", "a") as stream:
                print(record.step, self.steps, sum(float(each.double().abs().sum()) for each in whole), file=stream)

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps, "more": {"nested": [1, "two"]}}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.steps = state["steps"]
        assert state["more"] == {"nested": [1, "two"]}


class ListOfTensors(TrainerHook):
    def state_dict(self):
        return {"all": [torch.ones(2)]}


class NoPair(Wrong):
    def metrics(self, step):
        return {"one": 3.0}


class Taken(TrainerHook):
    step_metrics = ("loss",)


class NoFault(TrainerHook):
    def before_optimizer(self, step):
        return "skip"


class NeedsArguments(TrainerHook):
    def __init__(self, x):
        pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in {**EXAMPLES, "own.py": OWN}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    for name in (*EXAMPLES, "own.py"):
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path[:] = path


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(
    folder: Path, count: int, *options: str, hooks: list[str], run: str = "run"
) -> list[tuple[int | None, str]]:
    job = config_file(folder, JOB)
    arguments = [str(job), "--run.dir", run, "--run.hooks", json.dumps(hooks), *options]
    if count == 1:
        return [(train_here(job, *arguments[1:]), "")]
    return ranks(count, "train", *arguments, folders=[folder] * count)


ALL = [
    "my_accuracy:Accuracy", "my_stopping:EarlyStopping", "my_average:MovingAverage", "my_schedule:Steps",
    "my_gradients:Gradients",
]  # fmt: skip


@pytest.mark.extensive("every example of the page")
def test_the_examples_of_the_page_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, on two ranks; a run that goes on from the middle on one rank has the same numbers."""
    assert [status for status, _ in train(folder, 2, hooks=ALL)] == [0, 0]
    whole = records(folder / "run")
    assert all(0 <= each["validation_metrics"]["accuracy"] <= 1 for each in whole if each["step"] % 2 == 0)
    assert all(0 <= each["metrics"]["zeros"] <= 1 for each in whole)
    assert {each["lr"] for each in whole} == {0.003}  # the hook's rate, without the trainer's warm-up
    results = json.loads((folder / "run" / "run.json").read_text())["results"]
    assert results["metrics"]["validation accuracy"] == whole[-1]["validation_metrics"]["accuracy"]
    train(folder, 2, "--train.steps", "4", hooks=ALL, run="parts")
    assert cli.main(["train", "--resume", "parts", "--train.steps", "8"]) == 0
    parts = records(folder / "parts")
    assert [each["loss"] for each in parts] == pytest.approx([each["loss"] for each in whole], rel=1e-4)
    accuracies = [
        [each["validation_metrics"]["accuracy"] for each in run if each["step"] % 2 == 0]
        for run in (parts, whole)
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)


@pytest.mark.extensive("runs on several numbers of ranks")
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_states_of_hooks_go_on_in_another_sharding(folder: Path, layout: str) -> None:
    """Four steps on two ranks and four on one are as eight on two. A hook that the checkpoint does not know begins."""
    hook = ["own:Watched"]
    assert [status for status, _ in train(folder, 2, "--parallel.layout", layout, hooks=hook)] == [0, 0]
    whole = (folder / "averages").read_text().split("\n")
    (folder / "averages").unlink()
    background = ["--train.steps", "4", "--checkpoint.asynchronous", "true"]
    assert [status for status, _ in train(folder, 2, *background, hooks=hook, run="parts")] == [0, 0]
    hooks = json.dumps([*hook, "own:Log"])
    assert cli.main(["train", "--resume", "parts", "--train.steps", "8", "--run.hooks", hooks]) == 0
    parts = (folder / "averages").read_text().split("\n")
    for one, other in zip(whole[:-1], parts[:-1], strict=True):
        assert one.split()[:2] == other.split()[:2] and len({*one.split()[:2]}) == 1
        assert float(one.split()[2]) == pytest.approx(float(other.split()[2]), rel=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_metrics_are_those_of_all_ranks(folder: Path, count: int) -> None:
    assert [status for status, _ in train(folder, count, hooks=["own:Ranks"])] == [0] * count
    for each in records(folder / "run"):
        assert each["metrics"] == {
            "mean": pytest.approx(each["step"])
        }  # a metric without a count is left out
        rows = {"rows": 2.0} if each["step"] % 2 == 0 else {}
        assert each["validation_metrics"] == rows
    summary = (folder / "run" / "summary.txt").read_text()
    assert re.search(r"validation rows +2\.0000\n", summary) and re.search(r"mean +8\.0000\n", summary)


def test_any_rank_may_skip_a_step(folder: Path) -> None:
    assert [status for status, _ in train(folder, 2, hooks=["own:Votes"])] == [0, 0]
    lines = records(folder / "run")
    incidents = [each["incident"] for each in lines if "incident" in each]
    assert incidents == [{"action": "skip", "reason": "step 4: as I say (rank 1)", "samples": [12, 16]}]
    assert [each["step"] for each in lines if "incident" not in each] == list(range(1, 9))


@pytest.mark.extensive("test_a_rewind_takes_hooks_along has a vote to rewind")
def test_any_rank_may_stop_and_rewind(folder: Path) -> None:
    found = train(folder, 2, hooks=["own:Stops"], run="stops")
    assert [status for status, _ in found] == [1, 1]
    assert "step 4: as I say (rank 1). Nothing was updated; the state after step 3 is saved" in found[0][1]
    found = train(folder, 2, "--fault.rewind_steps", "1", hooks=["own:Rewinds"], run="rewinds")
    assert [status for status, _ in found] == [0, 0]
    incidents = [each["incident"] for each in records(folder / "rewinds") if "incident" in each]
    assert incidents == [
        {"action": "rewind", "reason": "step 4: as I say (rank 1)", "samples": [8, 16], "from_step": 3}
    ]


def test_any_rank_may_end_the_run(folder: Path) -> None:
    assert [status for status, _ in train(folder, 2, hooks=["own:Ends"])] == [0, 0]
    content = json.loads((folder / "run" / "run.json").read_text())
    assert content["status"] == "finished" and content["results"]["ended_early"] == "enough is enough"
    assert records(folder / "run")[-1]["step"] == 4 and (folder / "run" / "checkpoints" / "step-4").is_dir()
    assert json.loads((folder / "run" / "exit.json").read_text())["status"] == 0


def test_calls_come_in_order(folder: Path) -> None:
    assert [status for status, _ in train(folder, 2, "--train.steps", "3", hooks=["own:Log"])] == [0, 0]
    expected = "setup;before 1;after 1;before 2;after 2;saved 2;before 3;after 3;saved 3;end finished\n"
    assert [(folder / f"calls-{rank}").read_text() for rank in range(2)] == [expected] * 2
    assert train(folder, 1, hooks=["own:Log", "own:Fails"], run="fails")[0][0] == 2
    assert (folder / "calls-0").read_text().splitlines()[1] == "setup;before 1;after 1;before 2;end failed"


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            "own:Fails",
            "The method before_step of hook 'Fails' raised ValueError: not on a Thursday (own.py, line",
        ),
        ("own:Wrong", "hook 'Wrong' returned {'two': (1, 1)}; expected a dict with the keys one"),
        ("own:NoPair", "returned 3.0 for 'one'; expected a sum and a count"),
        ("own:Taken", "run.hooks: expected another name for the metric 'loss', which each step has"),
        ("own:NoFault", "hook 'NoFault' returned 'skip'; expected None or a Fault"),
        ("own:NeedsArguments", "Hook 'NeedsArguments' raised TypeError"),
        ("own:ListOfTensors", "expected a dict of plain values, and of tensors and dicts of them"),
        ("own:Silent", "run.hooks: hook 'Silent' has the method validate and no names in validation_metrics"),
        (
            "own:Typo",
            "run.hooks: hook 'Typo' has 'after_steps', which nobody reads; did you mean 'after_step'?",
        ),
        ("own:Singular", "hook 'Singular' has 'validation_metric', which nobody reads"),
        ("own:Higher", "expected names of its metrics in higher_is_better, found 'odd'; it has one"),
        ("own:OWN", "AttributeError"),
        ("own:torch", "expected a TrainerHook at own:torch, found module"),
        ("nowhere:X", "No module named 'nowhere'"),
    ],
)
def test_a_wrong_hook_is_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str], hook: str, message: str
) -> None:
    assert train(folder, 1, hooks=[hook])[0][0] == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error, error


def test_two_hooks_of_one_name_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, 1, hooks=["own:Ranks", "own:Ranks"])[0][0] == 2
    assert "run.hooks: expected each name once, found the hook 'Ranks' twice" in capsys.readouterr().err


@pytest.mark.extensive("a run for each", but=("zeros-*",))
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "zeros",
            "expected another name for the metric 'zeros' of hook 'Gradients', which is also a loss of the model",
        ),
        ("norm", "expected another name for the loss 'norm' of the model"),
        ("validation_loss", "expected another name for the loss 'validation_loss' of the model"),
    ],
)
def test_a_loss_of_the_model_has_a_name_of_its_own(folder: Path, loss: str, message: str) -> None:
    code = EXAMPLES["my_models.py"].replace("forward(self, tokens)", "forward(self, tokens, extras=False)")
    head = "class RunningMeans(Decoder):\n"
    (folder / "my_models.py").write_text(code.replace(head, f"{head}    auxiliary = {{{loss!r}: 0.1}}\n"))
    job = config_file(folder, re.sub(r"\[model\].*?\[train\]", "[train]", JOB, flags=re.DOTALL))
    kind = ["--model.kind", "my_models:MEANS", "--run.hooks", '["my_gradients:Gradients"]']
    ((status, error),) = ranks(1, "train", job, "--run.dir", "run", *kind, folders=[folder])
    assert status == 2 and message in error and "Traceback" not in error, error


# -- epochs and the best checkpoint ------------------------------------------------------------------------------------


@pytest.mark.extensive("runs of several epochs")
def test_epochs_say_how_many_steps_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    job = config_file(folder, JOB)  # the command line replaces its steps
    data = ["--data.source", "text.txt", "--data.validation_fraction", "0.2", "--run.dir", "run"]
    assert train_here(job, *data, "--train.epochs", "1.5") == 0
    windows = int(re.search(r"text.txt .*?([\d,]+) +0% ", capsys.readouterr().out)[1].replace(",", ""))  # type: ignore[index]
    steps = -(-3 * windows // 8)
    assert records(folder / "run")[-1]["step"] == steps
    train = tomllib.loads((folder / "run" / "config.toml").read_text())["train"]
    assert train["epochs"] == 1.5 and "steps" not in train
    assert cli.main(["train", "--resume", "run", "--train.epochs", "2"]) == 0
    assert records(folder / "run")[-1]["step"] == -(-2 * windows // 4)
    out = capsys.readouterr().out
    assert "the new ones are used:\n  train.epochs  1.5 -> 2.0\n" in out and "train.steps" not in out
    more = windows // 2 + 3
    assert cli.main(["train", "--resume", "run", "--train.steps", str(more)]) == 0
    assert records(folder / "run")[-1]["step"] == more
    assert f"  train.epochs  2.0 -> 0.0\n  train.steps   none -> {more}\n" in capsys.readouterr().out
    assert train_here(job, *data, "--train.epochs", "1", "--train.steps", "3") == 2
    assert "train.epochs: expected 0 with train.steps = 3, found 1" in capsys.readouterr().err


@pytest.mark.extensive("a run of more than 300 steps")
def test_epochs_may_have_more_steps_than_a_run_without_them(folder: Path) -> None:
    """The default of `train.steps` is 300."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    job = config_file(folder, JOB.replace("steps = 8\n", ""))
    data = [
        "--data.source",
        "text.txt",
        "--run.dir",
        "run",
        "--validation.every",
        "0",
        "--checkpoint.every",
        "0",
    ]
    assert (
        train_here(
            job, *data, "--train.epochs", "16", "--train.global_batch", "1", "--train.micro_batch", "1"
        )
        == 0
    )
    assert records(folder / "run")[-1]["step"] > 300


@pytest.mark.extensive("runs whose data grows", but=("1-0.5-2.5",))
@pytest.mark.parametrize("epochs", ["1", "2", "2.5"])
@pytest.mark.parametrize("grows_at", ["0.5", "1", "1.4"])
@pytest.mark.parametrize("count", [1, 2])
def test_epochs_count_appended_documents(
    folder: Path, capsys: pytest.CaptureFixture[str], count: int, grows_at: str, epochs: str
) -> None:
    """The steps are those of a list of epochs, each of the documents that were there by its end. One document is one
    sample. A run that goes on once more has the same steps, rates and losses as one that was not disturbed."""
    data = ["--data.source", str(folder / "some.jsonl"), "--data.packing", "best_fit", "--train.seq_len", "72",
            "--data.validation_fraction", "0.2", "--validation.every", "0", "--optimizer.schedule", "linear",
            "--model.max_seq_len", "72"]  # fmt: skip
    documents(folder / "some.jsonl", 0, 30)  # 24 are trained
    job = config_file(folder, JOB.replace("steps = 8\n", ""))
    resumed = ("train", "--resume", "run", "--data.appended", "true", "--train.epochs")
    assert train_here(job, *data, "--train.epochs", grows_at, "--run.dir", "run") == 0
    seen = -(-Fraction(grows_at) * 24 // 4) * 4
    assert records(folder / "run")[-1]["samples"] == seen
    documents(folder / "some.jsonl", 30, 47)
    sizes = [24 if epoch < seen // 24 else 41 for epoch in range(4)]
    whole = int(float(epochs))
    samples = sum(sizes[:whole]) + (Fraction(epochs) - whole) * sizes[whole]
    steps = -(-samples // 4)
    capsys.readouterr()
    shutil.copytree(folder / "run", folder / "parts")
    if steps * 4 <= seen:
        assert cli.main([*resumed, epochs]) == 2
        message = (
            f"train.epochs: expected more than the {seen // 4} steps that run already has, found {epochs}"
        )
        assert message in capsys.readouterr().err
        return
    assert [status for status, _ in ranks(count, *resumed, epochs, folders=[folder] * count)] == [0] * count
    found = records(folder / "run")
    assert (found[-1]["step"], found[-1]["samples"]) == (steps, steps * 4)
    # Not even an end between the growth and the last step changes the steps and their rates.
    again = ["train", "--resume", "parts", "--data.appended", "true", "--train.epochs", epochs, "--run.hooks"]
    assert cli.main([*again, '["own:EndsAtOnce"]']) == 0
    if records(folder / "parts")[-1]["step"] < steps:
        assert cli.main([*again, "[]"]) == 0
    for key in ("step", "samples", "lr"):
        assert [each[key] for each in records(folder / "parts")] == [each[key] for each in found]
    assert [each["loss"] for each in records(folder / "parts")] == pytest.approx(
        [each["loss"] for each in found], rel=1e-4
    )


@pytest.mark.extensive("a run with many checkpoints")
def test_the_best_checkpoint_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a resume. A rate that is far too high lets the loss rise."""
    options = ["--checkpoint.keep", "1", "--checkpoint.keep_best", "validation_loss", "--optimizer.lr", "0.3",
               "--optimizer.warmup_steps", "0"]  # fmt: skip
    assert train(folder, 1, *options, hooks=[])[0][0] == 0
    again = ["--resume", "run", "--train.steps", "12", "--run.hooks", '["own:Distance"]']
    assert train_here(folder / "tiny.toml", *again, *options) == 0
    losses = {
        each["step"]: each["validation_loss"] for each in records(folder / "run") if each["validation_loss"]
    }
    best = min(losses, key=losses.__getitem__)
    kept = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best}", "step-12"})
    assert f"step-{best} (validation_loss {losses[best]:.4f})" in (folder / "run" / "summary.txt").read_text()


def _without_index(file: Path, other: Path) -> None:
    file.with_name("index.json").unlink()


@pytest.mark.extensive("runs with many checkpoints", but=("False-missing",))
@pytest.mark.parametrize("damage", ["missing", "flipped", "cut off", "without index"])
@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_best_checkpoint_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: str, background: bool
) -> None:
    """A resume reports it in a line, and the next best becomes the best."""
    options = ["--checkpoint.keep", "2", "--checkpoint.keep_best", "validation_distance",
               "--checkpoint.asynchronous", str(background).lower()]  # fmt: skip
    assert train(folder, 1, *options, hooks=["own:Distance"])[0][0] == 0
    checkpoints = folder / "run" / "checkpoints"
    assert steps_in(checkpoints) == [8, 6, 4]
    (file,) = (checkpoints / "step-4").glob("__0_0*")
    {**DAMAGES, "without index": _without_index}[damage](file, file)
    capsys.readouterr()
    again = ["--resume", "run", "--train.steps", "12", "--run.hooks", '["own:Distance"]']
    assert train_here(folder / "tiny.toml", *again, *options) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert "step-4, the best (validation_distance 0.0000), is damaged (" in line
    assert line.endswith("; the best is now step-6 (2.0000)")
    assert steps_in(checkpoints) == [12, 10, 6]
    assert "step-6 (validation_distance 2.0000)" in (folder / "run" / "summary.txt").read_text()


def test_the_best_of_a_metric(folder: Path) -> None:
    options = ["--checkpoint.keep", "1", "--checkpoint.keep_best", "validation_accuracy"]
    assert train(folder, 1, *options, hooks=["my_accuracy:Accuracy"])[0][0] == 0
    found = {each["step"]: each["validation_metrics"].get("accuracy") for each in records(folder / "run")}
    values = {step: value for step, value in found.items() if value is not None}
    best = max(values, key=lambda step: (values[step], -step))
    kept = {path.name for path in (folder / "run" / "checkpoints").iterdir()}
    assert kept == {f"step-{best}", "step-8"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--checkpoint.keep_best", "accuracy"],
            "keep_best: expected one of loss, validation_loss, found 'accuracy'",
        ),
        (
            ["--checkpoint.keep_best", "validation_loss", "--validation.every", "3"],
            "a validation at each checkpoint",
        ),
    ],
)
def test_a_figure_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert train(folder, 1, *options, hooks=[])[0][0] == 2
    assert message in capsys.readouterr().err


def test_a_configuration_with_hooks_loads_back(folder: Path) -> None:
    config = Config.model_validate({"run": {"hooks": ["own:Ranks"]}, "train": {"epochs": 2.0}})
    assert 'hooks = ["own:Ranks"]' in config.to_toml()
    assert "steps" not in tomllib.loads(config.to_toml())["train"]


def test_the_page_lists_what_hooks_get() -> None:
    """Attributes and methods of the job, and the fields of a step in progress."""
    rows = dict(re.findall(r"^\| `(job|StepInProgress)` \| (.*) \|$", PAGE, re.M))
    of_job = {*Job.__annotations__, *(name for name in vars(Job) if not name.startswith("_"))}
    assert {*re.findall(r"`(\w+)(?:\(\w+\))?`", rows["job"])} == of_job
    assert {*re.findall(r"`(\w+)`:", rows["StepInProgress"])} == {
        each.name for each in fields(StepInProgress)
    }
