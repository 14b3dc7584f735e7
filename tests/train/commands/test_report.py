"""`shardwright report`: the figures of runs on a page, what it says of damaged files, and mistakes in one line."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.train.commands.pages.report import page_of
from shardwright.train.commands.pages.shown_run import read_shown_run
from shardwright.train.errors import UserError
from shardwright.train.report.page.document import LIMIT, size_of
from tests.train.kit.jobs import records
from tests.train.report.page.kit import HOSTILE, noted, read_page

PLAN = {
    "fits": "yes", "device": "h100", "ranks": 2, "reserved_bytes": 5, "live_bytes": 4, "exact": {"parameters": 1},
    "speed": None, "peak": {"text": "backward"},
}  # fmt: skip


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
    record["status"] = "failed"
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
    assert run["out_of_memory"] and run["notices"][0] == "the run failed: out of memory"


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
    (copied / "logs").mkdir(exist_ok=True)
    (copied / "logs" / "plan.json").write_text(json.dumps({**PLAN, "other": 1}))
    assert page(capsys, tmp_path / "page.html", copied)["runs"][0]["plan"] == PLAN
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


DAMAGES = (None, "x", [1], math.inf, -(10**400), "\ud800")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value in a JSON value, as keys and numbers."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*place, key)
        yield from places(each, (*place, key))


def damaged(value: Any, place: tuple[Any, ...], damage: Any) -> Any:
    changed = copy.deepcopy(value)
    around = functools.reduce(lambda inner, key: inner[key], place[:-1], changed)
    around[place[-1]] = damage
    return changed


def test_a_damaged_value_is_never_a_traceback(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value of a run's files, replaced by one of other kinds, gives a page that can be written, or one error."""
    draw = random.Random(0)
    lines = records(copied)
    lines[-1] |= {"extra_losses": {"mtp": 1.0}, "norms": {"layers.0": 1.0}, "not_finite": {"lr": "nan"}}
    skip = {"action": "skip", "reason": "the loss is nan", "samples": [32, 40]}
    contents: dict[str, Any] = {
        "run.json": json.loads((copied / "run.json").read_text()),
        "exit.json": {"status": 75, "reason": "out of memory", "step": 8, "rank": 1, "time": "now"},
        "step_notes.json": {**noted(), "notes": noted()["notes"][:4]},
        "logs/plan.json": PLAN,
        "unit_norms.jsonl": [{"units": ["layers.0", "norm"]}, {"step": 1, "norms": [1.0, None]}],
        "metrics.jsonl": [*lines[-2:], {"step": 5, "incident": skip}, {"step": 6, "save_failure": "full"}],
    }

    def write(name: str, content: Any) -> None:
        lines = content if isinstance(content, list) else [content]
        (copied / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    (session,) = contents["run.json"]["sessions"]
    contents["run.json"]["sessions"].append({**session, "from_step": 3, "attempt": 2})
    (copied / "logs").mkdir(exist_ok=True)
    for name, content in contents.items():
        write(name, content)
    for name, content in contents.items():
        for place in places(content):
            for damage in draw.sample(DAMAGES, 2):
                write(name, damaged(content, place, damage))
                try:
                    assert read_data(page_of([read_shown_run(copied)]))["runs"]
                except UserError as error:
                    assert "\n" not in str(error)
                except Exception as error:
                    raise AssertionError(f"{name}, {place}, {damage!r:.20}") from error
        write(name, content)


def read_data(text: str) -> dict[str, Any]:
    """The data of a page, which must be encoded first, as those of its file."""
    begin = text.encode().decode().index('id="data">') + len('id="data">')
    data: dict[str, Any] = json.loads(text[begin : text.index("</script>", begin)])
    return data


@pytest.mark.parametrize(
    ("name", "place", "damage", "notice"),
    [
        ("run.json", ("sessions", 0, "attempt"), None, "session 1: expected a whole number for attempt, found None"),
        ("run.json", ("sessions", 0, "from_step"), [], "expected a whole number for from_step, found a list"),
        ("run.json", ("status",), 10**400, "expected a text for status, found 1000"),
        ("step_notes.json", ("notes", 0, 0), math.inf, "expected the notes of a step, found others: OverflowError"),
        ("step_notes.json", ("notes", 0, 0), 10**400, "found others: ValueError: a number above"),
        ("exit.json", ("status",), "x", "exit.json: expected a whole number for status, found 'x'"),
        ("logs/plan.json", ("exact",), [], "the plan is not shown, since it has no valid exact"),
        ("unit_norms.jsonl", ("norms", 0), -1.0, "expected norms by unit, found 1 line damaged, the first is line 2"),
        ("metrics.jsonl", ("loss",), 10**400, "expected a number for loss, found 1000"),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_damaged_value_is_named(
    name: str, place: tuple[Any, ...], damage: Any, notice: str, copied: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (copied / "logs").mkdir(exist_ok=True)
    contents = {"exit.json": {"status": 1}, "step_notes.json": noted(), "logs/plan.json": PLAN}
    norms = ['{"units": ["norm"]}', '{"step": 1, "norms": [1.0]}']
    (copied / "unit_norms.jsonl").write_text("\n".join(norms) + "\n")
    lines = (copied / name).read_text().splitlines() if name not in contents else [json.dumps(contents[name])]
    if name == "run.json":
        lines = ["".join(lines)]
    lines[-1] = json.dumps(damaged(json.loads(lines[-1]), place, damage))
    (copied / name).write_text("\n".join(lines) + "\n")
    (run,) = page(capsys, tmp_path / "page.html", copied)["runs"]
    assert any(notice in each for each in run["notices"])


def test_half_a_character_in_a_name(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**record, "name": "a\ud800"}))
    page(capsys, tmp_path / "page.html", copied)
    assert read_page((tmp_path / "page.html").read_text())[1]["title"].startswith("a\ufffd")


def test_long_lists_are_capped_with_a_notice(copied: Path) -> None:
    """The first and the last incidents stay, and the begin of memory.txt."""
    skips = [{"step": 8, "incident": {"action": "skip", "reason": f"loss {i} is nan"}} for i in range(15_000)]
    with (copied / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(each) + "\n" for each in skips)
    (copied / "memory.txt").write_text("layers\n" * 15_000)
    record = json.loads((copied / "run.json").read_text())
    record["sessions"] = [{**record["sessions"][0], "status": "x" * 5_000}] * 150
    (copied / "run.json").write_text(json.dumps(record))
    run = read_shown_run(copied)
    text = page_of([run])
    (shown,) = read_data(text)["runs"]
    assert size_of(text) < LIMIT
    count, most = len(run.incidents), len(shown["incidents"])
    assert 10 <= most <= 1_000 and shown["incidents"][-1]["text"] == run.incidents[-1]["text"]
    notices = "\n".join(shown["notices"])
    assert f"{count - most:,} of {count:,} incidents are left out of this page" in notices
    assert "characters are left out of this page" in notices and "4,000 more characters" in str(
        shown["sessions"]
    )
    text = page_of([run] * 20)
    last = read_data(text)["runs"][19]
    assert size_of(text) < LIMIT and len(last["memory_text"]) >= 1_000
    assert any("of 150 sessions are left out" in each for each in last["notices"])


def test_a_page_that_is_too_large_is_one_error(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copied / "config.toml").open("a") as stream:
        stream.writelines(f'[section_{i}]\nkey = "{"x" * 900}"\n' for i in range(2_000))
    file = tmp_path / "page.html"
    status, out, err = report(capsys, copied, "--html", file)
    assert (status, out, err.count("\n")) == (2, "", 1) and not file.exists()
    assert "expected a page of less than 1,500,000 bytes" in err and "Most of it is from config.toml" in err
    assert "Report fewer runs" in report(capsys, copied, copied, "--html", file)[2]


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
