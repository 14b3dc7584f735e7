"""Services that show metrics: what they get of a run, read back from their own files, and how a run continues there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.errors import UserError
from shardwright.train.extend import RunEnd, RunSite, StepRecord, sinks
from shardwright.train.report import sink_thread
from shardwright.train.report.sinks.service import KnownRun, ServiceSink, project_of, settings_of
from tests.train.kit.jobs import TINY, config_file, finish, records, run, start, tiny

PACKAGES = ("wandb", "mlflow", "trackio")
INSTALLED = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
SOURCE = str(Path(sink_thread.__file__).parents[3])


def test_a_missing_package_is_named_with_its_version() -> None:
    """An error asks to install the packages that the extra of that name installs."""
    project = tomllib.loads((Path(SOURCE).parent / "pyproject.toml").read_text())["project"]
    for name in PACKAGES:
        assert [sinks.get(name).install] == project["optional-dependencies"][name]


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        name not in INSTALLED, reason=f"the package {name} is not installed (extra {name})"
    )


# ------------------------------------------------------------------------------
# Without a service


def record_of(step: int, validation: float | None = None) -> StepRecord:
    return StepRecord(step, 1.0 / step, 0.5, 1e-3, 8 * step, 0.1, 0.0, 10.0, 1e9, None, 1, 2, 3, validation)


@dataclass
class Notes:
    """A run in a service that notes its calls."""

    site: RunSite
    project: str
    stored: KnownRun | None
    id: str = "abc"
    url: str = "http://somewhere"
    calls: list[tuple[str, object]] = field(default_factory=list)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step))

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("tasks", step))

    def finish(self, end: RunEnd) -> None:
        self.calls.append(("finish", end.status))


def noted(folder: Path, steps_done: int = 0, project: str = "p") -> tuple[ServiceSink, list[Notes]]:
    runs: list[Notes] = []

    def start(*arguments: Any) -> Notes:
        runs.append(Notes(*arguments))
        return runs[-1]

    return ServiceSink("notes", RunSite(folder, tiny(), steps_done), project, start), runs


def test_nothing_is_sent_before_the_first_step(tmp_path: Path) -> None:
    sink, runs = noted(tmp_path)
    sink.say("text")
    sink.close(RunEnd("failed", 0))
    assert runs == [] and list(tmp_path.iterdir()) == []
    sink.step(record_of(1))
    assert runs[0].calls == [("log", 1)] and runs[0].stored is None


def test_a_resumed_run_continues_and_repeats_no_step(tmp_path: Path) -> None:
    sink, _ = noted(tmp_path)
    for step in range(1, 6):
        sink.step(record_of(step))
    again, runs = noted(tmp_path, steps_done=3)
    for step in range(4, 8):
        again.step(record_of(step))
    again.close(RunEnd("finished", 7))
    assert [(each.stored and each.stored.id, each.calls) for each in runs] == [
        ("abc", [("log", 6), ("log", 7), ("finish", "finished")])
    ]
    assert json.loads((tmp_path / "notes.json").read_text()) == {
        "id": "abc", "project": "p", "url": "http://somewhere", "step": 7
    }  # fmt: skip


def test_a_resumed_run_without_new_steps_still_ends_in_the_service(tmp_path: Path) -> None:
    sink, _ = noted(tmp_path)
    for step in range(1, 6):
        sink.step(record_of(step))
    again, runs = noted(tmp_path, steps_done=3)
    again.step(record_of(4))
    again.close(RunEnd("interrupted", 4))
    assert [each.calls for each in runs] == [[("finish", "interrupted")]]


def test_results_of_tasks_come_later_than_their_step(tmp_path: Path) -> None:
    sink, runs = noted(tmp_path)
    sink.tasks(2, {"tasks/colours/acc": 0.5})
    assert json.loads((tmp_path / "notes.json").read_text())["step"] == 0  # a resume finds this run
    for step in range(1, 6):
        sink.step(record_of(step))
    sink.tasks(3, {"tasks/colours/acc": 0.5})
    assert runs[0].calls[0] == ("tasks", 2) and runs[0].calls[-1] == ("tasks", 3) and len(runs) == 1
    assert json.loads((tmp_path / "notes.json").read_text())["step"] == 5


def test_another_project_gets_a_new_run(tmp_path: Path) -> None:
    sink, _ = noted(tmp_path)
    sink.step(record_of(1))
    other, runs = noted(tmp_path, steps_done=1, project="q")
    other.step(record_of(2))
    assert runs[0].stored is None and runs[0].project == "q"


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"id": "abc"}')
    noted(tmp_path)
    with pytest.raises(
        UserError, match=r"notes.json: expected the id, project, url and step .* delete the file"
    ):
        noted(tmp_path, steps_done=3)


def test_steps_between_the_lines_of_the_log_are_sent_if_they_have_a_validation(tmp_path: Path) -> None:
    runs: list[Notes] = []

    def start(*arguments: Any) -> Notes:
        runs.append(Notes(*arguments))
        return runs[-1]

    sink = ServiceSink("notes", RunSite(tmp_path, tiny(log={"every": 3}), 0), "p", start)
    for step in range(1, 8):
        sink.step(record_of(step, 2.0 if step == 4 else None))
    assert runs[0].calls == [("log", 3), ("log", 4), ("log", 6)]


def test_settings_have_no_path_that_the_user_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    config = tiny(data={"source": "text.txt"})
    values = settings_of(RunSite(tmp_path, config, 0, {"ranks": 2, "corpus": {"sha256": "00"}}))
    assert values["data.source"] == "text.txt" and str(tmp_path) not in json.dumps(values)
    assert (values["facts.ranks"], values["facts.corpus.sha256"]) == (2, "00")
    assert values["model.vocab_size"] == config.model.shape().vocab_size
    stored = settings_of(
        RunSite(tmp_path, config.resolved(), 3)
    )  # as a resume reads it from the run's folder
    assert (
        "data.source" not in stored
        and str(tmp_path) not in json.dumps(stored)
        and stored["run.name"] == "tiny"
    )


def test_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    assert project_of(RunSite(tmp_path, tiny(), 0), "WANDB_PROJECT") == "shardwright"
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert project_of(RunSite(tmp_path, tiny(), 0), "WANDB_PROJECT") == "theirs"
    assert project_of(RunSite(tmp_path, tiny(log={"project": "mine"}), 0), "WANDB_PROJECT") == "mine"


# ------------------------------------------------------------------------------
# With the packages, offline


def environment_in(folder: Path) -> dict[str, str]:
    """Everything that the services write goes below `folder`. Nothing goes over the network."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    return {
        "PYTHONPATH": path, "HOME": str(home), "WANDB_MODE": "offline", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
        "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secret_of_the_test",
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five steps with all installed services, then resumed from step 3 to step 7.

    Steps 4 and 5 run twice, as after a crash behind a checkpoint.
    """
    if not INSTALLED:
        pytest.skip(f"none of the packages {', '.join(PACKAGES)} is installed")
    folder = tmp_path_factory.mktemp("services")
    job = config_file(folder, TINY.replace("steps = 8", "steps = 5"))
    sinks = ["--log.sinks", json.dumps(INSTALLED), "--log.project", "tests"]
    options: dict[str, Any] = {"environment": environment_in(folder), "cwd": folder}
    status, out, err = run("train", job.name, "--run.dir", "run", *sinks, **options)
    assert status == 0 and "warning" not in out, out + err
    shutil.copytree(folder / "run", folder / "first")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-5")
    status, out, err = run("train", "--resume", "run", "--train.steps", "7", **options)
    assert status == 0 and "warning" not in out and "from step 3" in out, out + err
    return folder


def losses_of(folder: Path) -> dict[int, float]:
    """The losses of both sessions: the first has steps 1 to 5, the second 6 and 7."""
    values = {each["step"]: each["loss"] for each in records(folder / "run")}
    return {**values, **{each["step"]: each["loss"] for each in records(folder / "first")}}


def assert_settings(values: Mapping[str, Any], folder: Path) -> None:
    """The settings and facts are there. Paths and secrets are not."""
    assert str(values["model.dim"]) == "32" and values["run.name"] == "tiny"
    assert str(values["facts.ranks"]) == "1" and "facts.versions.torch" in values
    text = json.dumps(dict(values))
    for secret in (str(folder), "hf_secret", os.path.dirname(os.__file__)):
        assert secret not in text, secret


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of W&B's transaction logs below `folder`, session by session. The format is LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, parts = file.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
            parts += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record()
                record.ParseFromString(parts)
                yield record
                parts = b""


def items(values: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in values}


@pytest.mark.extensive("a service that takes half a minute to import and to end")
@needs("wandb")
def test_weights_and_biases(folder: Path) -> None:
    found = list(wandb_records(folder / "run"))
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert len({each.run_id for each in runs}) == 1 and {each.project for each in runs} == {"tests"}
    assert runs[0].run_id == json.loads((folder / "run" / "wandb.json").read_text())["id"]
    settings: dict[str, Any] = {}
    for each in runs:
        settings |= items(each.config.update)
    assert_settings(settings, folder)
    history = [
        items(record.history.item) for record in found if record.WhichOneof("record_type") == "history"
    ]
    losses = [(each["_step"], each["loss/train"]) for each in history if "loss/train" in each]
    assert losses == [(step, pytest.approx(loss)) for step, loss in sorted(losses_of(folder).items())]
    assert [each["_step"] for each in history if "loss/validation" in each] == [4, 5, 7]
    assert any(each.get("loss/curve._type") == "image-file" for each in history)
    assert [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"] == [0, 0]
    everything = b"".join(record.SerializeToString() for record in found)
    host = socket.gethostname()
    assert b"hf_secret" not in everything and (len(host) < 6 or host.encode() not in everything)
    kinds = {record.WhichOneof("record_type") for record in found}
    assert not kinds & {"output", "output_raw"}  # the terminal


@pytest.mark.extensive("a service that takes long to import")
@needs("mlflow")
def test_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{folder}/mlruns")
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "tiny"
    assert found.info.run_id == json.loads((folder / "run" / "mlflow.json").read_text())["id"]
    assert_settings(found.data.params, folder)
    assert str(folder) not in json.dumps(found.data.tags)
    history = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "loss/train")]
    assert sorted(history) == [
        (step, pytest.approx(loss)) for step, loss in sorted(losses_of(folder).items())
    ]
    assert [each.path for each in client.list_artifacts(found.info.run_id)] == ["loss.png"]


@pytest.mark.extensive("a service that takes long to import")
@needs("trackio")
def test_trackio(folder: Path) -> None:
    (file,) = (folder / "trackio").glob("tests*.db")
    database = sqlite3.connect(file)
    rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {row[0] for row in rows} == {json.loads((folder / "run" / "trackio.json").read_text())["id"]}
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, each["loss/train"]) for step, each in values if "loss/train" in each]
    assert losses == [(step, pytest.approx(loss)) for step, loss in sorted(losses_of(folder).items())]
    assert [(step, each["status"]) for step, each in values if "status" in each] == [
        (5, "finished"),
        (7, "finished"),
    ]
    assert any("loss/curve" in each for _, each in values)
    (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert_settings(json.loads(config), folder)


LATE = """
import sys
from pathlib import Path
from shardwright.train.commands.hugging_face.late_results import send
from shardwright.train.run.folder import RunFolder

folder = RunFolder(Path("run"))
metrics = {"acc": {"value": 0.25, "stderr": 0.1, "higher_is_better": True}}
send(folder, 5, {"colours": {"metrics": metrics}}, print)
"""


@pytest.mark.extensive("services that take half a minute to import and to end")
def test_a_service_gets_results_of_tasks_after_the_end_of_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Path(shutil.copytree(folder, tmp_path / "later"))
    options: dict[str, Any] = {"environment": environment_in(later), "cwd": later}
    status, out, err = finish(start(command=(sys.executable, "-c", LATE), **options))
    assert status == 0 and "gets no results" not in out, out + err
    if "wandb" in INSTALLED:
        found = list(wandb_records(later / "run"))
        assert len({each.run.run_id for each in found if each.WhichOneof("record_type") == "run"}) == 1
        history = [items(each.history.item) for each in found if each.WhichOneof("record_type") == "history"]
        (row,) = [each for each in history if "tasks/colours/acc" in each]
        assert (row["tasks/step"], row["tasks/colours/acc"], row["_step"]) == (5, 0.25, 8)
    if "mlflow" in INSTALLED:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient(f"file://{later}/mlruns")
        name = json.loads((later / "run" / "mlflow.json").read_text())["id"]
        (point,) = client.get_metric_history(name, "tasks/colours/acc")
        assert (point.step, point.value, client.get_run(name).info.status) == (5, 0.25, "FINISHED")
    if "trackio" in INSTALLED:
        (file,) = (later / "trackio").glob("tests*.db")
        rows = sqlite3.connect(file).execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        (row,) = [row for row in rows if "tasks/colours/acc" in json.loads(row[2])]
        assert row[:2] == (json.loads((later / "run" / "trackio.json").read_text())["id"], 5)


UNREACHABLE = "http://127.0.0.1:9"
FAILING = {
    "WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": UNREACHABLE, "WANDB_INIT_TIMEOUT": "2",
    "MLFLOW_TRACKING_URI": UNREACHABLE, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "TRACKIO_SERVER_URL": UNREACHABLE,
}  # fmt: skip
"""Servers that do not answer. For trackio there is no token either: without a network it keeps its metrics here."""


@pytest.mark.extensive("services fail after timeouts")
@pytest.mark.skipif(not INSTALLED, reason=f"none of the packages {', '.join(PACKAGES)} is installed")
def test_a_run_goes_on_without_services_that_fail(tmp_path: Path) -> None:
    job = config_file(tmp_path, TINY.replace("steps = 8", "steps = 3"))
    arguments = ["train", job, "--run.dir", "run", "--log.sinks", json.dumps(INSTALLED)]
    status, out, err = run(*arguments, environment={**environment_in(tmp_path), **FAILING}, cwd=tmp_path)
    assert status == 0, out + err
    for name in INSTALLED:
        stop = f"sink '{name}' stopped at step 1: it raised "
        assert len(re.findall(rf"^warning: {stop}", out, re.MULTILINE)) == 1, out
        assert f"  warning         {stop}" in out
    assert len(records(tmp_path / "run")) == 3


@pytest.mark.extensive("each service is imported")
@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        pytest.param(
            "wandb", {"WANDB_MODE": "online"},
            r"^error: log.sinks: sink 'wandb' found no key for api.wandb.ai; run `wandb login`", marks=needs("wandb"),
        ),
        pytest.param(
            "mlflow", {"MLFLOW_TRACKING_URI": "nonsense://here"},
            r"^error: log.sinks: sink 'mlflow' cannot open MLflow's tracking URI; set MLFLOW_TRACKING_URI",
            marks=needs("mlflow"),
        ),
    ],
)  # fmt: skip
def test_wrong_settings_of_a_service_are_one_error(
    tmp_path: Path, name: str, environment: dict[str, str], message: str
) -> None:
    job = config_file(tmp_path, TINY)
    variables = {**environment_in(tmp_path), **environment}
    arguments = ["train", job, "--run.dir", "run", "--log.sinks", f'["{name}"]']
    status, out, err = run(*arguments, environment=variables, cwd=tmp_path)
    assert status == 2 and re.search(message, err, re.MULTILINE) and "Traceback" not in err, err
    assert "step 1/" not in out
