"""`shardwright evaluate`: results in the folder of the run and in `compare`, and what it refuses.

A package stands for lm_eval, except in the last test: what lm_eval computes is its own matter.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from shardwright import cli
from shardwright.train.commands.export import export
from shardwright.train.commands.hugging_face.evaluate import check_job
from shardwright.train.commands.hugging_face.tables import other_conditions
from shardwright.train.commands.pages.report import page_of
from shardwright.train.commands.pages.shown_run import read_shown_run
from shardwright.train.errors import UserError
from shardwright.train.run.evaluations import Evaluation
from tests.support.strict_json import strict
from tests.train.kit.jobs import HYBRID, config_file, tiny, train_here
from tests.train.kit.lm_eval import TASK, install_lm_eval


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_lm_eval(tmp_path / "packages", monkeypatch)


@pytest.fixture
def run(plain_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_run, tmp_path / "run"))


def evaluate(*arguments: object) -> int:
    return cli.main(["evaluate", *map(str, arguments), "--device", "cpu"])


@pytest.mark.usefixtures("lm_eval")
def test_results_are_in_the_folder_of_the_run_and_in_compare(
    run: Path, plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shapes.yaml").write_text("task: shapes\n")
    assert evaluate(run, "--tasks", f"colours,{tmp_path / 'shapes.yaml'}", "--limit", 7) == 0
    out, err = capsys.readouterr()
    file = run / "evaluations" / "8.json"
    assert f"lm-eval computes colours, shapes.yaml of step 8; its log: {file.with_suffix('.log')}" in err
    assert "Tasks at step 8" in out and f"wrote {file}" in out.replace("\n", "")
    written = strict(file.read_text())
    assert written["step"] == 8 and list(written["tasks"]) == ["colours", "shapes"]
    first = written["tasks"]["colours"]
    assert first["metrics"] == {
        "acc": {"value": 0.25, "stderr": 0.125, "higher_is_better": True},
        "exact_match,strict": {"value": None, "stderr": None, "higher_is_better": None},
    }
    facts = ("samples", "limit", "shots", "version", "lm_eval")
    assert [first[key] for key in facts] == [7, 7, 5, 1.0, "9.9"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "tasks"))
    events.Reload()
    (point,) = events.Scalars("tasks/shapes/acc")
    assert (point.step, point.value) == (8, 0.5)

    assert evaluate(run, "--tasks", "numbers", "--step", 8) == 0  # beside those of the first call
    tasks = strict(file.read_text())["tasks"]
    assert list(tasks) == ["colours", "shapes", "numbers"] and tasks["colours"] == first
    assert evaluate(run, "--tasks", "colours", "--step", 6) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(run), str(plain_run), "--out", str(tmp_path / "compared")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["shapes", "acc", "0.5000", "±", "0.1250", "-"] in rows and [
        "colours",
        "exact_match,strict",
        "-",
        "-",
    ] in rows
    compared = strict((tmp_path / "compared" / "compare.json").read_text())["runs"]
    assert compared[0]["evaluation"] == strict(file.read_text()) and compared[1]["evaluation"] is None
    assert ["colours", "acc", "6", "0.2500", "±", "0.1250", "-"] in rows
    assert [each["step"] for each in compared[0]["evaluations"]] == [6, 8] and compared[1][
        "evaluations"
    ] == []
    curve = read_shown_run(run).curves()["tasks/colours/acc"]
    assert curve == [(6, 0.25), (8, 0.25)]
    assert '"tasks/colours/acc":' in page_of([read_shown_run(run), read_shown_run(plain_run)])
    other = tmp_path / "other"
    shutil.copytree(run, other)
    assert evaluate(other, "--tasks", "colours") == 0
    capsys.readouterr()
    assert cli.main(["compare", str(run), str(other), "--out", str(tmp_path / "compared")]) == 0
    out = capsys.readouterr().out
    assert "colours does not compare: samples 7 in run, 100 in other" in " ".join(out.split())
    file.write_text('{"step": 8}')
    assert cli.main(["compare", str(run), str(plain_run), "--out", str(tmp_path / "compared")]) == 2
    assert "8.json: expected results of tasks, found KeyError: 'tasks'" in capsys.readouterr().err


@pytest.mark.usefixtures("lm_eval")
def test_a_folder_of_an_export_has_its_results(
    plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    export(plain_run, folder)
    assert evaluate(folder, "--tasks", "colours") == 0
    assert strict((folder / "evaluation.json").read_text())["step"] is None
    assert evaluate(folder, "--tasks", "colours", "--step", 3) == 2
    assert "expected no --step and no --dtype" in capsys.readouterr().err


@pytest.mark.usefixtures("lm_eval")
def test_tasks_in_a_chat_template(
    run: Path, plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tasks", "colours", "--apply-chat-template"
    assert evaluate(run, *words) == 2
    assert "--apply-chat-template: expected a tokenizer with a chat template" in capsys.readouterr().err
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = (run / "config.toml").read_text()
    template = f'chat_template = "{tmp_path / "chat.jinja"}"'
    (run / "config.toml").write_text(config.replace('chat_template = ""', template))
    assert evaluate(run, *words) == 0
    task = strict((run / "evaluations" / "8.json").read_text())["tasks"]["colours"]
    assert (task["shots"], task["chat_template"]) == (6, True)  # the package counts one more
    old = {key: value for key, value in task.items() if key != "chat_template"}
    pair = [Evaluation(8, {"colours": each}) for each in (task, old)]
    lines = other_conditions(["a", "b"], pair)
    assert lines == ["colours does not compare: chat_template True in a, False in b"]
    settings = tiny(validation={"tasks": ["colours"], "tasks_apply_chat_template": True})
    with pytest.raises(UserError, match=r"validation\.tasks_apply_chat_template: expected a tokenizer with"):
        check_job(settings.validation, settings.data, settings.model.shape())


@pytest.mark.usefixtures("lm_eval")
def test_a_check_of_names_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "--check", "--tasks", "colours"]) == 0
    assert cli.main(["evaluate", "--check", "--tasks", "colors"]) == 2
    assert cli.main(["evaluate", "--tasks", "colours"]) == 2
    assert "evaluate: expected RUN, found none" in capsys.readouterr().err


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--tasks", "colours,colors"], 2, "--tasks: expected tasks of lm-eval, found 'colors'; `lm-eval ls tasks`"),
        (["--tasks", "none.yaml"], 2, "--tasks: expected the file of a task, found nothing at none.yaml"),
        (["--tasks", ","], 2, "--tasks: expected names or files, separated by commas, found ','"),
        (["--tasks", "colours", "--step", "7"], 2, "--step: expected a step with a checkpoint in "),
        (["--tasks", "crash"], 1, "evaluate: lm-eval failed: RuntimeError: no such data for crash; see "),
        pytest.param(
            ["--tasks", "end"], 1, "evaluate: lm-eval ended with status 3 and without a result; see ",
            marks=pytest.mark.extensive("another process that fails"),
        ),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    arguments: list[str], status: int, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run, *arguments) == status
    errors = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith("lm-eval computes")
    ]
    assert len(errors) == 1 and errors[0].startswith(f"error: {message}")
    assert not list(run.glob("evaluations/*.json"))


@pytest.mark.usefixtures("lm_eval")
def test_a_run_without_a_whole_checkpoint_and_no_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    for folder, message in [
        (run, "expected a whole checkpoint"),
        (tmp_path / "nowhere", "expected the folder of a run"),
    ]:
        assert evaluate(folder, "--tasks", "colours") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.usefixtures("lm_eval")
def test_a_model_that_transformers_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "shardwright_hybrid"}')
    assert evaluate(tmp_path, "--tasks", "colours") == 2
    assert "expected a model that transformers reads" in capsys.readouterr().err
    job = config_file(tmp_path, tiny(model=HYBRID, train={"steps": 1}).to_toml())
    assert train_here(job, "--run.dir", tmp_path / "run") == 0
    capsys.readouterr()
    assert evaluate(tmp_path / "run", "--tasks", "colours") == 2
    assert "a kind of model without a class of transformers" in capsys.readouterr().err


def test_without_lm_eval(
    plain_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert evaluate(plain_run, "--tasks", "colours") == 2
    assert (
        "evaluate: needs the extra evaluate, found no package lm_eval; pip install" in capsys.readouterr().err
    )


@pytest.mark.extensive("lm-eval takes half a minute to import")
def test_lm_eval_finds_the_choices_that_the_model_prefers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (extra evaluate)")
    transformers = pytest.importorskip("transformers", reason="needs transformers, to compare with")
    for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [
        {"question": f"The {word}", "choices": [" the", " zzz"], "answer": n % 2}
        for n, word in enumerate("abcdefgh")
    ]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(TASK.replace("FILE", str(tmp_path / "letters.jsonl")))
    assert evaluate(run, "--tasks", tmp_path / "letters.yaml", "--limit", 7) == 0, capfd.readouterr().err
    found = strict((run / "evaluations" / "8.json").read_text())["tasks"]["letters"]

    export(run, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def likelihood(question: str, choice: str) -> float:
        ids = torch.tensor(list((question + choice).encode()))
        with torch.no_grad():
            chances = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return float(chances.gather(1, ids[1:, None])[-len(choice) :].sum())

    right = [
        int(likelihood(row["question"], row["choices"][1]) > likelihood(row["question"], row["choices"][0]))
        == row["answer"]
        for row in rows[:7]
    ]  # fmt: skip
    assert found["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 7)
    assert found["samples"] == 7 and found["limit"] == 7
    assert "letters" in capfd.readouterr().out
