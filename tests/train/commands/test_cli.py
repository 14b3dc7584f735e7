"""The command line as a user meets it: what it prints, where, and with which exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwright
from shardwright.cli import main
from shardwright.train.config import Config
from shardwright.train.config.keys import keys

Capture = pytest.CaptureFixture[str]
NO_VALUE = "--train.steps: expected a value after it, found none; write --train.steps VALUE"


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 5\n")
    return str(path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the command line to the commands, which do nothing here."""
    seen: list[dict[str, Any]] = []

    def run_train(config: Config, **options: Any) -> int:
        seen.append({"config": config, **options})
        return 7

    def compare(runs: list[Path], out: Path | None) -> int:
        seen.append({"runs": runs, "out": out})
        return 0

    def generate(run: Path, prompt: str, **options: Any) -> str:
        seen.append({"run": run, "prompt": prompt, **options})
        return prompt + " and so on"

    command(monkeypatch, "commands.train", run_train=run_train)
    command(monkeypatch, "commands.compare", compare=compare)
    command(monkeypatch, "commands.generate", generate=generate)
    return seen


def command(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    module = types.ModuleType(f"shardwright.train.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr, without `error: `, of a command that must be refused with status 2."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: ")
    return printed.err.removeprefix("error: ").rstrip("\n")


# ------------------------------------------------------------------------------
# Help


def test_without_a_command_the_commands_are_listed(capsys: Capture) -> None:
    assert main([]) == 0
    printed = capsys.readouterr()
    assert all(name in printed.out for name in ("train", "compare", "generate", "--version"))
    assert printed.err == ""


@pytest.mark.parametrize("columns", [80, 120])
def test_help_lists_every_key_within_the_width(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    flat = " ".join(text.split())
    for key in keys():
        assert f"{key.title} {key.expected}; default {key.default} {key.description}" in flat
    assert "--nproc N" in text and "--resume [RUN]" in text


@pytest.mark.parametrize("name", ["compare", "generate"])
def test_other_commands_have_help(capsys: Capture, name: str) -> None:
    assert main([name, "--help"]) == 0
    assert "RUN" in capsys.readouterr().out


def test_version_is_printed(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardwright ")


def test_help_and_mistakes_do_not_load_torch(job: str) -> None:
    script = f"""
import sys
from shardwright.cli import main
for arguments in ([], ["--version"], ["train", "--help"], ["train", {job!r}, "--train.step", "3"]):
    main(arguments)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------
# What the commands are handed


def test_train_hands_on_configuration_options_and_status(job: str, calls: list[dict[str, Any]]) -> None:
    arguments = [
        "train",
        job,
        "--optimizer.lr",
        "1e-4",
        "--nproc",
        "2",
        "--run.name=x",
        "--train.max_norm",
        "0",
    ]
    assert main(arguments) == 7
    (call,) = calls
    config = call.pop("config")
    assert call == {"nproc": 2, "resume": None, "argv": arguments}
    assert (config.train.steps, config.optimizer.lr, config.run.name, config.train.max_norm) == (
        5,
        1e-4,
        "x",
        0,
    )


def test_overrides_may_stand_anywhere(job: str, calls: list[dict[str, Any]]) -> None:
    main(["--debug", "train", "--train.steps", "9", job, "--nproc=2", "--data.source", '["a.txt"]'])
    assert calls[0]["config"].train.steps == 9
    assert calls[0]["config"].data.source == ("a.txt",)
    assert calls[0]["nproc"] == 2


@pytest.mark.parametrize(
    ("given", "resume"),
    [([], None), (["--resume"], ""), (["--resume", "runs/a.b"], "runs/a.b"), (["--resume=r"], "r")],
)
def test_resume_with_and_without_a_run(
    job: str, calls: list[dict[str, Any]], given: list[str], resume: str | None
) -> None:
    main(["train", job, *given])
    assert calls[0]["resume"] == resume


def test_resume_before_the_configuration_does_not_swallow_it(job: str, calls: list[dict[str, Any]]) -> None:
    main(["train", "--resume", job])
    assert calls[0]["resume"] == "" and calls[0]["config"].train.steps == 5


def test_compare_hands_on_the_runs(calls: list[dict[str, Any]]) -> None:
    assert main(["compare", "a", "b", "c", "--out", "d"]) == 0
    assert main(["compare", "a", "b"]) == 0
    assert calls == [
        {"runs": [Path("a"), Path("b"), Path("c")], "out": Path("d")},
        {"runs": [Path("a"), Path("b")], "out": None},
    ]


def test_generate_prints_the_text(capsys: Capture, calls: list[dict[str, Any]]) -> None:
    assert main(["generate", "r", "--prompt", "so", "--top-k", "0", "--temperature", "1.5"]) == 0
    assert calls == [
        {
            "run": Path("r"),
            "prompt": "so",
            "tokens": 200,
            "temperature": 1.5,
            "top_k": 0,
            "seed": 0,
            "chat": False,
            "step": None,
        }
    ]
    assert capsys.readouterr().out == "so and so on\n"


# ------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trian", "unknown command trian; did you mean train?"),
        (
            "fly",
            "unknown command fly; the commands are init, train, compare, report, generate, evaluate, export, convert, "
            "inspect, layout, plan, calibrate, relay, extensions, doctor",
        ),
        ("--versoin", "unknown option --versoin; did you mean --version?"),
        (
            "train",
            "train: expected CONFIG.toml or --resume RUN, found neither; examples are in the folder examples/",
        ),
        ("train JOB --train.steps", NO_VALUE),
        ("train JOB --train.steps --nproc 2", NO_VALUE),
        (
            "train JOB --train.steps -1",
            "command line: train.steps: expected an integer >= 1, found -1 (an integer)",
        ),
        ("train JOB --train.step 3", "command line: unknown key train.step; did you mean train.steps?"),
        ("train JOB --steps 3", "unknown option --steps; did you mean --train.steps?"),
        ("train JOB --nprc 3", "unknown option --nprc; did you mean --nproc?"),
        ("train JOB --nproc 0", "train: argument --nproc: expected an integer >= 1, found '0'; SEE"),
        ("train JOB --nproc two", "train: argument --nproc: expected an integer >= 1, found 'two'; SEE"),
        ("train JOB more", "train: unexpected argument 'more'; SEE"),
        ("compare a", "compare: expected two runs or more, found 1"),
        ("compare a b --fast", "unknown option --fast; SEE"),
        ("generate a", "generate: the following arguments are required: --prompt; SEE"),
        (
            "generate a --prompt x --temperature nan",
            "generate: argument --temperature: expected a number >= 0, found 'nan'; SEE",
        ),
    ],
)
def test_mistake_is_one_line_and_status_2(
    capsys: Capture, calls: list[dict[str, Any]], job: str, command: str, expected: str
) -> None:
    arguments = command.replace("JOB", job).split()
    assert refused(capsys, *arguments) == expected.replace("SEE", f"see shardwright {arguments[0]} --help")
    assert calls == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[train]\nsteps = = 3", "expected TOML: "),
        ("[train]\nstep = 3", "unknown key train.step; did you mean train.steps?"),
        ("[train]\nsteps = 'x'", "train.steps: expected an integer >= 1, found"),
        ("[train]\nsteps = 0", "train.steps: expected an integer >= 1, found 0"),
    ],
)
def test_bad_file_is_one_line_and_status_2(capsys: Capture, tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    message = refused(capsys, "train", str(path))
    assert message.startswith(f"{path}: ") and part in message


def test_debug_shows_the_traceback_of_a_mistake(capsys: Capture) -> None:
    for arguments in (["train", "none.toml", "--debug"], ["--debug", "train", "none.toml"]):
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert "Traceback (most recent call last)" in printed
        assert printed.splitlines()[-1].startswith("error: none.toml:")


# ------------------------------------------------------------------------------
# Failures


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_train(config: Config, **options: Any) -> int:
        raise error

    command(monkeypatch, "commands.train", run_train=run_train)


def test_failure_is_one_line_and_status_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    failing(monkeypatch, RuntimeError("first\nsecond"))
    assert main(["train", job]) == 1
    expected = "error: RuntimeError: first second (add --debug to see the traceback)\n"
    assert capsys.readouterr().err == expected
    assert main(["train", job, "--debug"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "in run_train" in printed


@pytest.mark.parametrize("last", ["", "--help"])
def test_without_the_extra_it_is_named(job: str, last: str) -> None:
    # In a process of its own: a module that is imported a second time here would stay, as a second module.
    code = "import sys; sys.modules['pydantic'] = None; from shardwright.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "train", last or job], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: pydantic is not installed; ")
    assert done.stderr.endswith("needs the extra train: pip install -e '.[train]' in the checkout\n")


def test_another_missing_module_is_a_failure(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    failing(monkeypatch, ModuleNotFoundError("No module named 'lost'", name="lost"))
    assert main(["train", job]) == 1
    assert "ModuleNotFoundError: No module named 'lost'" in capsys.readouterr().err


def test_interruption_is_one_line_and_status_130(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["train", job]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    source = os.pathsep.join([str(Path(path).parent) for path in shardwright.__path__])
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *arguments],
        text=True, stderr=subprocess.PIPE, env=environment, timeout=60, **options,
    )  # fmt: skip


def test_process_ends_with_the_status_and_one_line() -> None:
    done = run("train", "none.toml", stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stdout == ""
    place = os.path.abspath("none.toml")
    assert done.stderr == f"error: none.toml: expected a configuration file, found nothing there ({place})\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run("train", "--help", stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""
