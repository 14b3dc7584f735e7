"""Hooks of `[run] hooks` with other features of the trainer: each is compared with a plain computation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright import cli
from shardwright.engine.comm import use_streams
from shardwright.train.commands import train as train_command
from shardwright.train.config.catalog.figures import RunFacts
from shardwright.train.parallel import world
from shardwright.train.report.console import explain_figures
from tests.checkpoint.kit.fake_store import known_to_children
from tests.support.replay import CpuGraphs
from tests.train.kit.hooks import EXAMPLES, JOB, documents
from tests.train.kit.jobs import config_file, ranks, records, run, steps_in, train_here

OWN = '''
import torch
import torch.nn.functional as F
from shardwright.train.extend import Fault, TrainerHook


class Again(TrainerHook):
    """Computes the losses again, and counts the tokens of forward."""

    step_metrics = ("cross_entropy", "tokens", "first_rank")
    validation_metrics = ("cross_entropy_again", "accuracy")

    def setup(self, job):
        self.job, self.tokens = job, 0
        job.model.register_forward_pre_hook(self.count)

    def count(self, module, arguments):
        if module.training:
            self.tokens += arguments[0].numel()

    def before_optimizer(self, step):
        self.loss = step.loss

    def metrics(self, step):
        tokens, self.tokens = self.tokens, 0
        first = {"first_rank": (step, 1.0)} if self.job.rank == 0 else {}
        return {"tokens": (tokens, 1), **first}

    def validate(self, logits, targets):
        trained = targets != -100
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        right = ((logits.argmax(-1) == targets) & trained).sum()
        count = trained.sum()
        return {"cross_entropy_again": (losses, count), "accuracy": (right, count)}


class Goes(TrainerHook):
    """A state of every kind. Loading one compares it with the copy of that step."""

    def setup(self, job):
        self.job, self.copies, self.rewound = job, {}, False
        self.weight = next(p for p in job.model.parameters() if p.requires_grad)
        self.steps, self.history = [], torch.zeros(0, dtype=torch.int64)
        self.total = torch.zeros_like(self.weight).detach()

    def after_step(self, record):
        self.steps.append(record.step)
        self.history = torch.cat([self.history, torch.tensor([record.step])])
        with torch.no_grad():
            self.total += self.weight
        self.copies[record.step] = self.whole()

    def whole(self):
        return getattr(self.total, "full_tensor", lambda: self.total)().clone()

    def before_optimizer(self, step):
        if step.step == 6 and not self.rewound and self.job.rank == self.job.ranks - 1:
            self.rewound = True
            return Fault("rewind", "again")
        self.rewound = self.rewound or step.step == 6

    def state_dict(self):
        return {"steps": self.steps, "deeper": {"history": self.history, 7: {"total": self.total}}}

    def load_state_dict(self, state):
        self.steps, self.history = list(state["steps"]), state["deeper"]["history"]
        self.total = state["deeper"][7]["total"]
        assert self.steps == self.history.tolist(), (self.steps, self.history)
        if self.copies:
            torch.testing.assert_close(self.whole(), self.copies[self.steps[-1]], rtol=0, atol=0)

    def end(self, end):
        if self.job.rank == 0:
            with open("steps", "a") as stream:
                print(self.job.ranks, self.steps, self.history.tolist(), file=stream)


class EmptyAtFirst(TrainerHook):
    """Has nothing to save until step 5."""

    def setup(self, job):
        self.steps, self.number = [], 0

    def after_step(self, record):
        self.steps.append(record.step)

    def state_dict(self):
        return {"steps": self.steps} if len(self.steps) > 4 else {}

    def load_state_dict(self, state):
        self.steps = state.get("steps", self.steps[:4])

    def end(self, end):
        assert self.steps == list(range(1, end.step + 1))


class Later(Goes):
    """Is added later."""


class Votes(TrainerHook):
    action = "skip"

    def setup(self, job):
        self.job, self.asked = job, False

    def before_optimizer(self, step):
        assert (step.norm is None) == self.job.config.optimizer.in_backward
        if step.step == 4 and self.job.rank == self.job.ranks - 1 and not self.asked:
            self.asked = True
            return Fault(self.action, "as I say")


class Stops(Votes):
    action = "stop"


class Rewinds(Votes):
    action = "rewind"


class Read(TrainerHook):
    """Looks at the gradients after backward."""

    step_metrics = ("zeros",)

    def setup(self, job):
        self.parameters = [p for p in job.model.parameters() if p.requires_grad]

    def metrics(self, step):
        gradients = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in self.parameters]
        return {"zeros": (sum((each == 0).sum() for each in gradients), sum(each.numel() for each in gradients))}


class Calls(TrainerHook):
    """Counts calls of gradient hooks and of a module."""

    step_metrics = ("gradients", "forwards")

    def setup(self, job):
        self.calls = self.forwards = 0
        self.parameters = [p for p in job.model.parameters() if p.requires_grad]
        for each in self.parameters:
            each.register_post_accumulate_grad_hook(self.gradient)
        job.model.register_forward_pre_hook(self.forward)

    def gradient(self, parameter):
        self.calls += 1

    def forward(self, module, arguments):
        self.forwards += module.training

    def metrics(self, step):
        found = {"gradients": (self.calls, len(self.parameters)), "forwards": (self.forwards, 1)}
        self.calls = self.forwards = 0
        return found
'''
METHODS = [
    "setup",
    "before_step",
    "metrics",
    "before_optimizer",
    "after_step",
    "validate",
    "saved",
    "state_dict",
    "end",
]
STATE = """
    def state_dict(self):
        return {"step": 1}
"""
OWN += "".join(
    f"""

class Fails_{method}(TrainerHook):
    step_metrics = ("one",) if {method == "metrics"} else ()
    validation_metrics = ("one",) if {method == "validate"} else ()
    only = None

    def __init__(self):
        import os
        self.fails = self.only is None or int(os.environ.get("RANK", 0)) == self.only

    def {method}(self, *arguments):
        if self.fails:
            raise ValueError("not\\n on a Thursday")
        return super().{method}(*arguments)
{STATE if method == "load_state_dict" else ""}


class Last_{method}(Fails_{method}):
    only = 1
"""
    for method in (*METHODS, "load_state_dict")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, code in {**EXAMPLES, "crossing.py": OWN}.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    for name in (*EXAMPLES, "crossing.py"):
        sys.modules.pop(name.removesuffix(".py"), None)
    sys.path[:] = path


def train(
    folder: Path, count: int, *options: str, hooks: list[str], run: str = "run", job: str = JOB
) -> list[tuple[int | None, str]]:
    """On one rank, that is this process, or on several."""
    file = config_file(folder, job)
    arguments = ["--run.dir", run, "--run.hooks", json.dumps(hooks), *options]
    if count == 1:
        return [(train_here(file, *arguments), "")]
    return ranks(count, "train", file, *arguments, folders=[folder] * count)


ENGINES = {
    "tensor": ("--parallel.tensor", "2"),
    "hold": ("--parallel.tensor", "2", "--train.accumulate", "hold"),
    "ragged": ("--parallel.layout", "ragged"),
    "fsdp2": ("--parallel.engine", "fsdp2"),
    "in_backward": ("--optimizer.in_backward", "true"),
}


@pytest.mark.extensive("many engines", but=("3-ragged",))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_metrics_are_those_of_one_plain_rank(folder: Path, count: int, engine: str) -> None:
    """Each token counts once. Of the 5 samples of a validation the last of three ranks has none."""
    tensor = 2 if engine in ("tensor", "hold") else 1
    if count % tensor:
        return
    (folder / "text.txt").write_text("".join(chr(97 + n * n % 23) for n in range(450)))
    options = ["--model.n_kv_heads", "2", "--train.steps", "4", "--train.global_batch", "12", "--train.max_norm", "0",
               "--data.source", str(folder / "text.txt"), "--data.validation_fraction", "0.2"]  # fmt: skip
    own = [*options, *ENGINES[engine], "--train.micro_batch", str({2: 2, 3: 4, 4: 1}[count])]
    hooks = ["crossing:Again"]
    assert train(folder, 1, *options, "--parallel.engine", "none", hooks=hooks, run="plain")[0][0] == 0
    found = train(folder, count, *own, hooks=hooks)
    assert [status for status, _ in found] == [0] * count, found
    for mine, plain in zip(records(folder / "run"), records(folder / "plain"), strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert mine["metrics"] == {"tokens": 12 * 16 * tensor / count, "first_rank": mine["step"]}
        assert mine["validation_metrics"] == pytest.approx(plain["validation_metrics"], rel=1e-3)
        if plain["validation_metrics"]:
            assert mine["validation_metrics"]["cross_entropy_again"] == pytest.approx(mine["validation_loss"])


@pytest.mark.extensive("a run on each number of ranks", but=("1-true",))
@pytest.mark.parametrize("background", ["false", "true"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_rewind_takes_hooks_along(folder: Path, count: int, background: str) -> None:
    options = ["--fault.rewind_steps", "1", "--checkpoint.asynchronous", background]
    found = train(folder, count, *options, hooks=["crossing:Goes", "crossing:EmptyAtFirst"])
    assert [status for status, _ in found] == [0] * count, found
    steps = list(range(1, 9))
    assert (folder / "steps").read_text() == f"{count} {steps} {steps}\n"
    assert cli.main(["train", "--resume", "run", "--train.steps", "9"]) == 0
    steps.append(9)
    assert (folder / "steps").read_text().splitlines()[1] == f"1 {steps} {steps}"


@pytest.mark.extensive("a run on each number of ranks", but=("1-*", "2-Stops"))
@pytest.mark.parametrize("hook", ["Votes", "Stops", "Rewinds"])
@pytest.mark.parametrize("count", [1, 2])
def test_votes_where_the_optimizer_steps_in_backward(
    folder: Path, capsys: Any, count: int, hook: str
) -> None:
    options = ["--optimizer.in_backward", "true", "--train.max_norm", "0"]
    found = train(folder, count, *options, hooks=[f"crossing:{hook}"])
    error = capsys.readouterr().err + "".join(text for _, text in found)
    lines = records(folder / "run")
    if hook == "Rewinds":
        assert [status for status, _ in found] == [0] * count and not error
        assert [each["incident"]["samples"] for each in lines if "incident" in each] == [[8, 16]]
        return
    assert [status for status, _ in found] == [1] * count
    where = f" (rank {count - 1})" if count > 1 else ""
    why = (
        "; a skip does not mend that, since optimizer.in_backward has changed weights"
        if hook == "Votes"
        else ""
    )
    assert error == (
        f"error: step 4: as I say{where}{why}. The state is not saved, since it is no longer the one before the fault; "
        "the newest checkpoint is of step 2\n"
    )
    assert lines[-1]["step"] == 3


@pytest.mark.extensive("many engines", but=("1-shardwright-*", "2-shardwright-hold"))
@pytest.mark.parametrize("accumulate", ["communicate", "hold"])
@pytest.mark.parametrize("engine", ["shardwright", "none", "ddp", "fsdp2"])
@pytest.mark.parametrize("count", [1, 2])
def test_gradient_hooks_see_each_step(folder: Path, count: int, engine: str, accumulate: str) -> None:
    if engine == "none" and count > 1:
        return
    options = ["--parallel.engine", engine, "--train.accumulate", accumulate, "--train.micro_batch", "1"]
    found = train(folder, count, *options, hooks=["crossing:Calls"])
    assert [status for status, _ in found] == [0] * count, found
    # Once per micro-batch, or where gradients are held once per step: as the engine reduces them.
    micro_batches = 4 // count
    calls = 1 if accumulate == "hold" and engine in ("shardwright", "fsdp2") else micro_batches
    for each in records(folder / "run"):
        assert each["metrics"] == {"gradients": calls, "forwards": micro_batches}


def test_in_a_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph calls no hooks of modules and parameters, so hooks that register some are refused."""
    for module in (train_command, world):
        monkeypatch.setattr(module, "check_device", lambda config, kind: None)
    hooks = ["crossing:Read", "my_accuracy:Accuracy", "my_stopping:EarlyStopping", "my_average:MovingAverage",
             "my_schedule:Steps"]  # fmt: skip
    assert train(folder, 1, hooks=hooks, run="plain")[0][0] == 0
    with use_streams(torch.device("cpu"), CpuGraphs()):
        assert train(folder, 1, "--train.cuda_graph", "true", hooks=hooks, run="graph")[0][0] == 0
        for key in ("loss", "lr", "metrics", "validation_metrics"):
            assert [each[key] for each in records(folder / "graph")] == [
                each[key] for each in records(folder / "plain")
            ]
        for hook in ("crossing:Again", "crossing:Calls", "my_gradients:Gradients"):
            capsys.readouterr()
            assert train(folder, 1, "--train.cuda_graph", "true", hooks=[hook], run=hook)[0][0] == 2
            name = hook.partition(":")[2]
            assert (
                f"train.cuda_graph: expected false with hook '{name}', which reg" in capsys.readouterr().err
            )


@pytest.mark.extensive("each method on each rank", but=("1-Fails-*", "2-Last-after_step"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("count", "who"), [(1, "Fails"), (2, "Fails"), (2, "Last")])
def test_a_hook_that_raises_is_one_error(
    folder: Path, capsys: Any, count: int, method: str, who: str
) -> None:
    if who == "Last" and count == 1:
        return
    found = train(folder, count, hooks=[f"crossing:{who}_{method}"])
    error = capsys.readouterr().err + "".join(text for _, text in found)
    assert all(status for status, _ in found)
    assert "Traceback" not in error
    assert (
        error.count(
            f"The method {method} of hook '{who}_{method}' raised ValueError: not on a Thursday (crossing.py, line"
        )
        == 1
    )
    assert error.count("\n") == (2 if who == "Last" else 1)  # the other rank lost contact


@pytest.mark.extensive("each is a launch")
@pytest.mark.parametrize("method", ["after_step", "load_state_dict"])
def test_a_hook_that_raises_under_the_launcher(folder: Path, method: str) -> None:
    """One rank of two: one line, and the status of an error of the user."""
    job = config_file(folder, JOB)
    hooks = ["--run.hooks", f'["crossing:Last_{method}"]', "--nproc", "2"]
    options = ["--run.dir", "run", "--train.steps", "2", *hooks]
    if method == "load_state_dict":
        assert run("train", job, *options, cwd=folder)[0] == 0
        options = ["--resume", "run", "--train.steps", "4", *hooks]
    status, _, error = run("train", job, *options, cwd=folder)
    assert status == 2
    message = (
        f"The method {method} of hook 'Last_{method}' raised ValueError: not on a Thursday (crossing.py, line"
    )
    assert error.count(message) == 1 and error.count("\n") == 1, error
    end = json.loads((folder / "run" / "exit.json").read_text())
    assert end["status"] == 2 and message in end["reason"]


NAMES = ("a", "a_metric_of_forty_characters_has_this_name", "word " * 40)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", NAMES)
def test_explanations_fit_a_terminal(name: str, words: str) -> None:
    """A metric with any name and text has its lines, and the lines of the other figures do not change."""
    plain, found = (
        explain_figures(RunFacts(False, True, True, True, {}, {}, metrics)).splitlines()
        for metrics in ({}, {name: words})
    )
    own = [line for line in found if line not in plain]
    assert [line for line in found if line in plain] == plain and max(map(len, plain)) <= 80
    assert " ".join(" ".join(own).split()) == " ".join(f"{name} {words}".split())
    assert all(len(line) <= 80 for line in own) or len(name) > 66


# -- the best checkpoint -----------------------------------------------------------------------------------------------


class_of_values = """
from shardwright.train.extend import Fault, TrainerHook

VALUES = {values}


class Given(TrainerHook):
    step_metrics = ("given",)
    higher_is_better = ("given",)

    def setup(self, job):
        self.job, self.rewound = job, False

    def metrics(self, step):
        value = VALUES[step - 1]
        return {{}} if value is None else {{"given": (value * (self.job.rank + 1), self.job.rank + 1)}}

    def before_optimizer(self, step):
        if step.step == {rewind} and not self.rewound:
            self.rewound = True
            return Fault("rewind", "again")
"""


@pytest.mark.extensive("runs with many checkpoints", but=("steps-rewind-url",))
@pytest.mark.parametrize("place", ["folder", "url"])
@pytest.mark.parametrize("rewind", [0, 6], ids=["straight", "rewind"])
@pytest.mark.parametrize("length", [["--train.steps", "8"], ["--train.epochs", "2"]], ids=["steps", "epochs"])
def test_the_best_checkpoint_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, rewind: int, length: list[str]
) -> None:
    """Whatever ranks the run has, and wherever its checkpoints are: found by a plain look at the values."""
    known_to_children(folder)
    monkeypatch.syspath_prepend(str(folder))
    values = [9.0, 3.0, None, 5.0, 1.0, 2.0, 8.0, 4.0, 9.5, 4.5, 0.0, 5.0]
    (folder / "given.py").write_text(class_of_values.format(values=values, rewind=rewind))
    documents(folder / "some.jsonl", 0, 17)  # 16 are trained, in 8 steps of two epochs
    options = [
        "--checkpoint.keep", "1", "--checkpoint.keep_best", "given", "--data.source", str(folder / "some.jsonl"),
        "--data.packing", "best_fit", "--train.seq_len", "72", "--model.max_seq_len", "72", "--validation.every", "0",
        "--data.validation_fraction", "0.05", "--checkpoint.asynchronous", str(place == "folder").lower(),
    ]  # fmt: skip
    if place == "url":
        options += ["--checkpoint.folder", f"fake://{folder}/store"]
    job = JOB.replace("steps = 8\n", "")

    where = folder / "run" / "checkpoints" if place == "folder" else f"fake://{folder}/store/run"
    assert [status for status, _ in train(folder, 2, *options, *length, hooks=["given:Given"], job=job)] == [
        0,
        0,
    ]
    assert steps_in(where) == [8, 4]
    summary = (folder / "run" / "summary.txt").read_text()
    assert "step-4 (given 5.0000)" in summary
    longer = [length[0], str(int(length[1]) * 3 // 2)]
    assert cli.main(["train", "--resume", "run", *longer]) == 0
    assert steps_in(where) == [12, 4]  # of equal ones the earlier
