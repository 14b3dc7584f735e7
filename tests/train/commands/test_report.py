"""`shardwright report`: the figures of runs on a page, what it says of damaged files, and mistakes in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from tests.page.kit import HOSTILE, noted, read_page
from tests.train.kit.jobs import records


def report(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = cli.main(["report", *map(str, arguments)])
    return status, *capsys.readouterr()


def page(capsys: pytest.CaptureFixture[str], file: Path, *runs: Path) -> dict[str, Any]:
    status, out, err = report(capsys, *runs, "--html", file)
    assert (status, out, err) == (0, f"wrote {file}\n", "")
    return read_page(file.read_text())[2]


@pytest.fixture
def copied(plain_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_run, tmp_path / "copied"))


def test_the_figures_of_a_run(plain_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = page(capsys, tmp_path / "page.html", plain_run)
    (run,) = data["runs"]
    steps = records(plain_run)
    assert (
        run["notices"] == [] and run["incidents"] == [] and run["plan"] is None and data["differences"] == []
    )
    assert run["curves"]["loss"] == [[each["step"], float(f"{each['loss']:.6g}")] for each in steps]
    assert [step for step, _ in run["curves"]["validation_loss"]] == [4, 8]
    assert run["results"]["train_loss"] == steps[-1]["loss"] and run["steps"] == 8
    assert run["settings"]["train.micro_batch"] == "2" and run["sessions"][0]["versions"]["torch"]
    assert sum(run["split"].values()) == pytest.approx(run["step_seconds"])


def test_without_a_file_it_is_in_the_folder_of_the_first_run(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(capsys, copied) == (0, f"wrote {copied / 'report.html'}\n", "")
    assert (copied / "report.html").is_file()


def test_differences_between_runs(
    plain_run: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = records(copied)
    lines[4]["loss"] *= 1.25
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(settings.replace("lr = 0.01", "lr = 0.02"))
    data = page(capsys, tmp_path / "page.html", plain_run, copied)
    first, second = data["runs"]
    assert data["differences"] == [{"key": "optimizer.lr", "values": ["0.01", "0.02"]}]
    assert first["largest_difference"] is None
    assert second["largest_difference"] == pytest.approx(0.25) and second["largest_at"] == 5
    assert [value for _, value in second["curves"]["difference"] if value] == [pytest.approx(25)]


def test_what_happened_to_a_run(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((copied / "run.json").read_text())
    (session,) = record["sessions"]
    failed = {**session, "to_step": 3, "status": "failed", "ended_by": "rank 1 was killed"}
    record["sessions"] = [failed, {**session, "from_step": 3, "attempt": 2}]
    (copied / "run.json").write_text(json.dumps(record))
    skip = {"action": "skip", "reason": "the loss of step 5 is nan", "samples": [32, 40]}
    with (copied / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 5, "incident": skip}) + "\n")
        stream.write(json.dumps({"step": 6, "save_failure": "the disk is full"}) + "\n")
    (copied / "exit.json").write_text(
        json.dumps({"status": 75, "reason": "out of memory", "step": 8, "rank": 1})
    )
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert [(each["step"], each["what"]) for each in run["incidents"]] == [
        (3, "session failed"), (3, "restart"), (5, "step skipped"), (6, "checkpoint not written"),
        (8, "end of the job"),
    ]  # fmt: skip
    texts = " ".join(each["text"] for each in run["incidents"])
    assert (
        "rank 1 was killed" in texts
        and "samples 32 to 39 are left out" in texts
        and "exit status 75, rank 1" in texts
    )
    assert run["out_of_memory"]


def test_objects_of_numbers_are_curves(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts of a step, which add up, and norms of units."""
    lines = records(copied)
    for line in lines:
        line["parts"] = {"forward": 0.25 * line["seconds"], "host": 0.75 * line["seconds"]}
        line["grad_norms"] = {"layers.0": line["step"]}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert run["split"]["host"] == pytest.approx(3 * run["split"]["forward"])
    assert run["curves"]["grad_norms/layers.0"] == [[step, step] for step in range(1, 9)]


def test_a_noted_step_of_one_run(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "step_notes.json").write_text(json.dumps(noted()))
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["noted"]["step"] == 3
    assert page(capsys, tmp_path / "page.html", copied, copied)["runs"][0]["noted"] is None
    (copied / "step_notes.json").write_text("{}")
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["noted"] is None
    (copied / "step_notes.json").write_text('{"names": []}')
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert run["noted"] is None and "step_notes.json: expected the notes of a step" in run["notices"][0]


def test_a_plan_beside_a_run(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "fits": "yes", "device": "h100", "ranks": 2, "reserved_bytes": 5, "live_bytes": 4, "exact": {"parameters": 1},
        "speed": None, "peak": {"text": "backward"},
    }  # fmt: skip
    (copied / "logs").mkdir(exist_ok=True)
    (copied / "logs" / "plan.json").write_text(json.dumps({**plan, "other": 1}))
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["plan"] == plan
    (copied / "logs" / "plan.json").write_text("")  # it was not made to its end
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["plan"] is None


def test_damaged_files_are_named_and_the_rest_is_shown(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copied / "metrics.jsonl").open("a") as stream:
        stream.write("[1]\n" * 7 + '{"step": 9, "los')
    for name in ("run.json", "exit.json"):
        (copied / name).write_text("{")
    (copied / "config.toml").write_bytes(b"\xff[")
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert len(run["curves"]["loss"]) == 8 and run["results"]["tokens_per_second"] > 0
    notices = "\n".join(run["notices"])
    for words in ("run.json", "exit.json", "config.toml", "line 9 of", "3 more lines of it are damaged"):
        assert words in notices
    (copied / "run.json").write_text(
        json.dumps({**json.loads((copied / "data.json").read_text()), "name": 3})
    )
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["status"] == ""


def test_a_run_without_metrics_is_shown(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "metrics.jsonl").unlink()
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert run["curves"] == {} and "metrics.jsonl: cannot read the metrics" in run["notices"][0]


def test_hostile_names(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**record, "name": HOSTILE}))
    folder = copied.rename(tmp_path / "a <script>alert(3)<")
    file = tmp_path / "page.html"
    assert HOSTILE in page(capsys, file, folder)["title"]
    assert [name for name, _ in read_page(file.read_text())[0]].count("script") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing: expected the folder of a run, found no such folder"),
        (["."], ".: expected the folder of a run, found no run.json in it"),
        ([], "the following arguments are required: RUN"),
        (["RUN", "--html", "."], "--html: expected a file, found a folder at ."),
        (
            ["RUN", "--html", "nowhere/a.html"],
            "--html: expected a file in a folder that exists, found no folder nowhere",
        ),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, plain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status, out, err = report(capsys, *(str(plain_run) if each == "RUN" else each for each in arguments))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert message in err
