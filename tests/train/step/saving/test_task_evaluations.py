"""`[validation] tasks`: evaluations beside the steps of a run, and what happens to them when the run ends or resumes.

A package stands for lm_eval, except in the last test; in most tests also an object for the process.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.train.config import load_config
from shardwright.train.errors import UserError
from shardwright.train.extend import RunEnd, StepRecord
from shardwright.train.launch import evaluation_process
from shardwright.train.launch.evaluation_process import EvaluationProcess
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread
from shardwright.train.run.evaluations import add_tasks, evaluated_steps, evaluations_of, failures_of
from shardwright.train.run.folder import RunFolder
from shardwright.train.step.saving import task_evaluations
from shardwright.train.step.saving.task_evaluations import TaskEvaluations, await_tasks
from tests.support import multirank
from tests.train.kit.jobs import HYBRID, config_file, finish, start, steps_in, tiny, train_here, wait_for
from tests.train.kit.lm_eval import install_lm_eval

TASKS = [
    "--validation.tasks",
    '["colours"]',
    "--validation.tasks_every",
    "4",
    "--validation.tasks_limit",
    "7",
]


class Lines:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.figures: list[tuple[int, dict[str, float]]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def tasks(self, step: int, values: dict[str, float]) -> None:
        self.figures.append((step, values))

    def step(self, record: StepRecord) -> None: ...
    def close(self, end: RunEnd) -> None: ...


class Process:
    """In the place of the process: a test ends it."""

    started: list[Process]

    def __init__(self, folder: RunFolder, step: int, settings: object) -> None:
        self.folder, self.step, self.log = folder, step, folder.evaluation_log(step)
        self.status: int | None = None
        self.is_stopped = False
        Process.started.append(self)

    def finish(self, value: float = 0.5) -> None:
        metrics = {"acc": {"value": value, "stderr": None}, "odd": {"value": None, "stderr": None}}
        add_tasks(self.folder.evaluation_file(self.step), self.step, {"colours": {"metrics": metrics}})
        self.status = 0

    def poll(self) -> int | None:
        return self.status

    def stop(self) -> None:
        self.is_stopped = True

    ask_to_end = stop

    def error(self) -> str:
        return "lm-eval failed"


class Bench:
    """Evaluations of a run whose processes are objects. `signals`: of the run."""

    def __init__(self, folder: Path) -> None:
        Process.started = []
        self.folder, self.lines, self.signals = RunFolder(folder), Lines(), [0]
        config = tiny(validation={"tasks": ["mine.yaml"], "tasks_every": 2})
        # A sink of `[log] sinks` gets the figures, in a thread.
        reporter = Reporter([self.lines], {"lines": SinkThread("lines", lambda: self.lines, 2.0)})  # type: ignore[list-item, return-value]
        self.evaluations = TaskEvaluations(
            config.validation,
            config.train.steps,
            self.folder,
            self.folder.checkpoints,
            reporter,
            lambda: self.signals[0] > 0,
        )

    def save(self, *steps: int) -> None:
        for step in steps:
            (self.folder.checkpoints / f"step-{step}").mkdir(parents=True)
            (self.folder.checkpoints / f"step-{step}" / "index.json").write_text("{}")
            self.evaluations.saved(step)

    def look(self) -> None:
        self.evaluations.after_step(None)  # type: ignore[arg-type]

    def logs(self) -> list[str]:
        return sorted(file.name for file in self.folder.evaluations.glob("*.log"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(task_evaluations, "EvaluationProcess", Process)
    monkeypatch.setattr(task_evaluations, "POLL_SECONDS", 0.01)
    return Bench(tmp_path)


def test_results_are_reported_with_the_step_that_they_belong_to(bench: Bench) -> None:
    bench.save(1, 2, 3)
    (process,) = Process.started
    assert process.step == 2  # others are not due
    process.finish()
    bench.look()
    assert bench.lines.figures == [(2, {"tasks/colours/acc": 0.5})]
    assert "tasks of step 2: colours acc 0.5000, colours odd -" in bench.lines.lines


def test_one_evaluation_waits_and_a_newer_one_takes_its_place(bench: Bench) -> None:
    bench.save(2, 4, 6)
    assert [each.step for each in Process.started] == [2] and bench.logs() == ["2.log", "6.log"]
    assert any(line.startswith("tasks of step 4 are left out: those of step 2") for line in bench.lines.lines)
    Process.started[0].finish()
    bench.look()
    assert [each.step for each in Process.started] == [2, 6]


def test_a_checkpoint_stays_until_its_evaluation_has_ended(bench: Bench) -> None:
    bench.save(2, 3, 4)
    assert bench.evaluations.unused([2, 3, 4]) == [3]
    assert steps_in(bench.folder.checkpoints) == [4, 3, 2]
    Process.started[0].finish()
    bench.look()
    assert steps_in(bench.folder.checkpoints) == [4, 3]
    bench.save(6, 8)  # step 6 waits, then it is left out
    assert bench.evaluations.unused([4, 6, 8]) == [6]


def test_a_checkpoint_to_which_the_run_has_gone_back_stays(bench: Bench) -> None:
    bench.save(2, 4)
    assert bench.evaluations.unused([2]) == []  # the run has newer ones, and deletes this one later
    bench.evaluations.forget_after(2)
    Process.started[0].finish()
    bench.look()
    assert 2 in steps_in(bench.folder.checkpoints)


def test_an_evaluation_that_fails_is_a_warning_with_its_log(bench: Bench) -> None:
    bench.save(2)
    Process.started[0].status = 1
    bench.look()
    warning = bench.lines.lines[-1]
    assert warning.startswith(
        "warning: tasks of step 2 are not evaluated: lm-eval failed. The run goes on; log: "
    )
    assert warning.endswith("evaluations/2.log")
    assert bench.lines.lines.count(warning) == 2  # of the terminal and of the added sink: once each


def test_a_failed_evaluation_is_repeated_once_and_then_named_with_its_command(bench: Bench) -> None:
    bench.save(2)
    Process.started[0].status = 1
    bench.look()
    bench.evaluations.end(RunEnd("interrupted", 2))
    for session in range(3):
        again = Bench(bench.folder.path)
        again.evaluations.setup(SimpleNamespace(steps_done=2))  # type: ignore[arg-type]
        assert len(Process.started) == (session == 0)
        for process in Process.started:
            process.status = -9
        again.look()
        named = [line for line in again.lines.lines if line.startswith("warning: ")]
        assert len(named) == 2 * (session == 0)  # of the terminal and of the added sink
        command = f"shardwright evaluate {bench.folder.path} --step 2 --tasks mine.yaml repeats it; log: "
        assert all(
            "again; no resume tries it once more. The run goes on; " + command in each for each in named
        )
        again.evaluations.finish(2)
        assert len(Process.started) == (session == 0)
    again.evaluations.saved(2)  # the run has gone back: these are other weights
    Process.started[0].finish()
    again.look()
    assert evaluated_steps(bench.folder) == [2] and not failures_of(bench.folder, 2)


def test_the_last_step_that_fails_is_named_with_its_command(bench: Bench) -> None:
    bench.save(STEPS)
    Process.started[0].status = 1
    bench.look()
    assert f"--step {STEPS} --tasks mine.yaml repeats it; log: " in bench.lines.lines[-1]


STEPS = tiny().train.steps


@pytest.mark.parametrize("seed", range(20))
def test_generated_runs_have_the_results_of_their_own_weights(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves, rewinds, restarts, kills and failures in a drawn order. Each save of a step has weights of its own."""
    monkeypatch.setattr(task_evaluations, "EvaluationProcess", Process)
    draw = random.Random(seed)
    weights: dict[int, float] = {}  #: of the checkpoint of each step
    failed: Counter[tuple[int, float]] = Counter()
    lines: list[str] = []
    kills = 0  #: of the run, which may not have seen a failure
    bench, done = Bench(tmp_path), 0

    def end_one() -> None:
        """End a process, or start none for a moment."""
        for process in Process.started:
            if process.status is None and not process.is_stopped:
                if draw.random() < 0.5:
                    process.finish(weights[process.step])
                else:
                    process.status = draw.choice([1, -9])
                    failed[process.step, weights[process.step]] += 1

    while done < STEPS:
        event = draw.choice(
            ["step", "step", "step", "end one", "look", "rewind", "resume", "killed", "delete"]
        )
        if event == "step":
            done += 1
            checkpoint = bench.folder.checkpoints / f"step-{done}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "index.json").write_text("{}")
            weights[done] = draw.random()
            bench.evaluations.saved(done)
        elif event == "end one":
            end_one()
        elif event == "look":
            bench.look()
        elif event == "delete":
            for step in bench.evaluations.unused(range(1, done)):
                shutil.rmtree(bench.folder.checkpoints / f"step-{step}", ignore_errors=True)
        else:
            saved = [step for step in steps_in(bench.folder.checkpoints) if step <= done]
            back = draw.choice(saved) if event == "rewind" and saved else max(saved, default=0)
            for step in steps_in(bench.folder.checkpoints):
                if step > back:
                    shutil.rmtree(bench.folder.checkpoints / f"step-{step}")
            if event == "rewind":
                bench.evaluations.forget_after(back)
            else:
                if event == "resume":
                    bench.evaluations.end(RunEnd(draw.choice(["interrupted", "failed"]), done))
                    assert all(each.is_stopped or each.status is not None for each in Process.started)
                kills += event == "killed"
                lines += bench.lines.lines
                bench = Bench(tmp_path)
                bench.evaluations.setup(SimpleNamespace(steps_done=back))  # type: ignore[arg-type]
            done = back
    bench.evaluations.finish(STEPS)
    while not all(each.status is not None or each.is_stopped for each in Process.started):
        end_one()
        bench.look()
    bench.evaluations.end(RunEnd("finished", STEPS))
    lines += bench.lines.lines
    found = {
        each.step: each.tasks["colours"]["metrics"]["acc"]["value"]
        for each in evaluations_of(bench.folder, STEPS)
    }
    assert {step: value for step, value in found.items() if value != weights[step]} == {}
    assert max(failed.values(), default=0) <= 2 + kills
    assert STEPS in found or failed[STEPS, weights[STEPS]]
    reasons = ("are left out", "is gone", "not evaluated")
    for step in range(2, STEPS + 1, 2):
        assert step in found or any(
            f"of step {step} " in line and line_has(line, reasons) for line in lines
        ), step


def line_has(line: str, words: Collection[str]) -> bool:
    return any(word in line for word in words)


def test_a_process_that_cannot_start_is_a_warning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(task_evaluations, "EvaluationProcess", refuse)
    bench.save(2)
    assert bench.lines.lines[0].startswith(
        "warning: tasks of step 2 are not evaluated: no room. The run goes on"
    )


def test_the_end_of_a_run_waits_for_its_last_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.save(2, 5)

    def finish_all(seconds: float) -> None:
        Process.started[-1].finish()

    bench.evaluations.finish(5)
    assert bench.evaluations.wait(0.0)
    monkeypatch.setattr(task_evaluations.time, "sleep", finish_all)
    assert not bench.evaluations.wait(60.0)
    bench.evaluations.end(RunEnd("finished", 5))
    assert [step for step, _ in bench.lines.figures] == [2, 5]
    assert any(line.startswith("waiting for the tasks of step 2 and step 5;") for line in bench.lines.lines)


@multirank(2)
@pytest.mark.parametrize("stopped_rank", [None, 0, 1])
def test_all_ranks_wait_in_rounds(rank: int, world_size: int, stopped_rank: int | None) -> None:
    class First:
        rounds = 0

        def finish(self, step: int) -> None:
            assert step == 7

        def wait(self, seconds: float) -> bool:
            self.rounds += 1
            assert seconds == 0.5  # a quarter of the stall's limit
            return self.rounds < 4 or stopped_rank is not None

    stop: Any = SimpleNamespace(signal_number=15 if rank == stopped_rank else None)
    first: Any = First() if rank == 0 else None
    await_tasks(first, stop, 7, torch.device("cpu"), stall_seconds=2.0)
    assert first is None or first.rounds == (4 if stopped_rank is None else 1)


@pytest.mark.parametrize("status", ["interrupted", "failed", "finished"])
def test_a_run_that_stops_ends_the_process_and_says_so(bench: Bench, status: Any) -> None:
    bench.save(2, 4)
    bench.signals[0] = 15
    bench.evaluations.end(RunEnd(status, 5))
    assert [each.is_stopped for each in Process.started] == [True]
    last = bench.lines.lines[-1]
    assert "are not evaluated, since" in last and "shardwright evaluate" in last


def test_a_resume_evaluates_what_has_no_results(bench: Bench) -> None:
    bench.save(2, 4)
    bench.evaluations.end(RunEnd("interrupted", 5))
    shutil.rmtree(bench.folder.checkpoints / "step-2")
    again = Bench(bench.folder.path)
    again.evaluations.setup(type("Job", (), {"steps_done": 5})())
    assert [each.step for each in Process.started] == [4]
    assert "warning: tasks of step 2 have no results, and its checkpoint is gone" in again.lines.lines
    assert "tasks of step 4 are evaluated again: they have no results" in again.lines.lines


def test_a_rewind_ends_evaluations_of_later_steps(bench: Bench) -> None:
    bench.save(2, 4)
    bench.evaluations.forget_after(3)
    assert [each.is_stopped for each in Process.started] == [False] and bench.logs() == ["2.log"]
    bench.evaluations.forget_after(1)
    assert [each.is_stopped for each in Process.started] == [True] and bench.logs() == []


# ---------------------------------------------------------------------------------------------------------------------
# With processes


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_lm_eval(tmp_path / "packages", monkeypatch)
    return tmp_path / "packages"


def job(tmp_path: Path) -> tuple[Path, Path]:
    return config_file(tmp_path), tmp_path / "run"


def gone(file: Path) -> Callable[[], bool]:
    """Whether the process whose number is in the file has ended."""

    def look() -> bool:
        try:
            os.kill(int(file.read_text()), 0)
        except ProcessLookupError:
            return True
        return False

    return look


SCRIPT = """#!/bin/sh
echo "arguments $*"
echo "ranks $RANK, GPUs <$CUDA_VISIBLE_DEVICES>"
sleep 600 &
echo $! > "$PIDS"
case "$*" in *endless*) wait;; esac
kill $!
echo "error: no such task" >&2
exit 2
"""


def test_the_process_is_no_rank_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, pids = tmp_path / "python", tmp_path / "pids"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("PIDS", str(pids))
    monkeypatch.setenv("RANK", "0")
    settings = tiny(validation={"tasks": ["colours", "mine.yaml"], "tasks_limit": 7}).validation
    process = EvaluationProcess(RunFolder(tmp_path), 4, settings)
    wait_for(lambda: process.poll() is not None)
    assert (process.poll(), process.error()) == (2, "no such task")
    log = process.log.read_text()
    options = f"evaluate {tmp_path} --step 4 --tasks colours,mine.yaml --device cpu --batch-size 8 --limit 7"
    assert f"arguments -P -m shardwright {options}\n" in log and "ranks , GPUs <>" in log
    pids.unlink()
    endless = tiny(validation={"tasks": ["endless"]}).validation
    process = EvaluationProcess(RunFolder(tmp_path), 4, endless)
    wait_for(lambda: pids.exists() and bool(pids.read_text()))
    process.stop()
    wait_for(gone(pids), 5)


def test_an_error_of_an_earlier_evaluation_is_not_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    log = RunFolder(tmp_path).evaluation_log(4)
    log.parent.mkdir()
    log.write_text("error: no such task\n")
    process = EvaluationProcess(RunFolder(tmp_path), 4, tiny().validation)
    wait_for(lambda: process.poll() is not None)
    assert process.error() == "shardwright evaluate ended with status -9"


@pytest.mark.parametrize("task", ["endless", "colours"])
def test_a_look_at_names_has_a_limit(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it the run begins with a warning, and nothing is left of the process and of those that it has started."""
    script, pids = tmp_path / "python", tmp_path / "pids"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(evaluation_process, "SECONDS_TO_CHECK", 1.0)
    monkeypatch.setenv("PIDS", str(pids))
    if task == "endless":
        warning = evaluation_process.check_names(RunFolder(tmp_path), [task])
        assert warning == "warning: lm-eval did not say within 1 s whether it knows the tasks endless"
    else:
        with pytest.raises(UserError, match=r"validation\.tasks: no such task"):
            evaluation_process.check_names(RunFolder(tmp_path), [task])
    wait_for(gone(pids), 5)


SOURCE = Path(evaluation_process.__file__).parents[3]
PAGE = (Path(__file__).parents[4] / "docs" / "evaluation.md").read_text()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of the example in docs/evaluation.md, with its task, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (settings,) = re.findall(r"```toml\n(\[validation\].*?)```", PAGE, re.DOTALL)
    (task,) = re.findall(r"```yaml\n(task: .*?)```", PAGE, re.DOTALL)
    Path("capitals.yaml").write_text(task)
    rows = [{"question": f"The {word}", "choices": [" the", " zzz"], "answer": 0} for word in "abcdefgh"]
    Path("capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validation = tomllib.loads(settings)["validation"]
    return config_file(tmp_path, tiny(validation=validation).to_toml())


def test_the_example_of_the_page_is_a_configuration(example: Path) -> None:
    assert load_config(example).validation.tasks == ("capitals.yaml",)


@pytest.mark.extensive("it starts processes that import torch")
def test_a_run_evaluates_a_file_of_a_task_beside_its_steps(
    packages: Path, example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = example.parent / "run"
    assert train_here(example, "--run.dir", folder) == 0
    out = capsys.readouterr().out
    assert "waiting for the tasks of step" in out
    assert "tasks of step 8: capitals acc 0.2500 ± 0.1250, capitals exact_match,strict -" in out
    for step in (4, 8):
        found = json.loads((folder / "evaluations" / f"{step}.json").read_text())
        assert found["step"] == step and found["tasks"]["capitals"]["limit"] == 100
    assert load_config(folder / "config.toml").validation.tasks == (str(example.parent / "capitals.yaml"),)


@pytest.mark.parametrize(
    ("tasks", "model", "message"),
    [
        (["none.yaml"], {}, "validation.tasks: expected the file of a task, found nothing at none.yaml"),
        (
            ["colours"],
            HYBRID,
            "validation.tasks: expected a model that transformers reads, which lm-eval needs",
        ),
    ],
)
def test_mistakes_are_found_before_a_run_has_a_folder(
    packages: Path,
    tmp_path: Path,
    tasks: list[str],
    model: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_file(tmp_path, tiny(model=model, validation={"tasks": tasks}).to_toml())
    assert train_here(config, "--run.dir", tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_lm_eval_no_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = job(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train_here(config, *TASKS, "--run.dir", folder) == 2
    assert "validation.tasks: needs the extra evaluate, found no package lm_eval" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.extensive("it starts three more processes")
def test_an_unknown_name_ends_the_run_before_its_first_step(
    packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = job(tmp_path)
    assert train_here(config, "--validation.tasks", '["colours", "colors"]', "--run.dir", folder) == 2
    assert (
        "error: validation.tasks: expected tasks of lm-eval, found 'colors'; `lm-eval ls tasks` lists them"
        in capsys.readouterr().err
    )
    assert not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text()


@pytest.mark.extensive("it waits for processes of several runs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_evaluation_when_its_run_is_stopped(
    packages: Path, tmp_path: Path, number: signal.Signals
) -> None:
    config, folder = job(tmp_path)
    (tmp_path / "temporary").mkdir()
    process = start(
        "train", config, "--run.dir", folder, "--validation.tasks", '["slow"]', "--validation.tasks_every", "4",
        "--train.steps", "100000",
        environment={"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": f"{packages}{os.pathsep}{SOURCE}"},
    )  # fmt: skip
    pid = packages / "lm_eval" / "pid"
    wait_for(lambda: process.poll() is not None or (pid.exists() and bool(pid.read_text())), 100)
    os.kill(process.pid, number)
    status, out, _ = finish(process)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    if number != signal.SIGKILL:
        assert "is not evaluated" in out or "are not evaluated, since the run ends; a resume" in out
    wait_for(gone(pid), evaluation_process.SECONDS_TO_END + 20)
    wait_for(lambda: not list((tmp_path / "temporary").glob("shardwright-evaluate-*")), 20)


@pytest.mark.extensive("lm_eval imports for half a minute")
def test_lm_eval_beside_two_ranks(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (extra evaluate)")
    for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(key, "1")
    folder = example.parent / "run"
    process = start(
        "train", example, "--nproc", "2", "--parallel.engine", "shardwright", "--run.dir", folder,
        "--checkpoint.keep", "1",
    )  # fmt: skip
    status, out, err = finish(process)
    assert status == 0, out + err
    assert {"4.json", "8.json"} <= {file.name for file in (folder / "evaluations").iterdir()}, out
    assert steps_in(folder / "checkpoints") == [8]
