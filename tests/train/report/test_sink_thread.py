"""Sinks that are slow, hang or need a package: the run does not wait, and says it once."""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.train.config.catalog import sinks as catalog
from shardwright.train.config.catalog.records import RunSink
from shardwright.train.config.catalog.sinks import check_packages
from shardwright.train.errors import UserError
from shardwright.train.extend import NamedSink, RunEnd
from shardwright.train.report import sink_thread
from shardwright.train.report.reporter import Reporter
from shardwright.train.report.sink_thread import SinkThread, SlowSink
from shardwright.train.run import deadlines
from tests.train.kit.jobs import TINY, config_file, finish, ranks, records, start, train_here

SHORT = TINY.replace("steps = 8", "steps = 3")
END = RunEnd("finished", 3)

MINE = """
import atexit
import threading
from concurrent.futures import ThreadPoolExecutor

from shardwright.train.report import sink_thread
from shardwright.train.extend import NamedSink

never = threading.Event()


class Hanging:
    "Python joins its worker thread, which never ends, when the process ends."

    def __init__(self, site):
        sink_thread.CLOSE_SECONDS = 0.5
        self.pool = ThreadPoolExecutor(1)

    def step(self, record):
        pass

    def say(self, text):
        pass

    def close(self, end):
        self.pool.submit(never.wait)
        atexit.register(never.wait)
        never.wait()


class Ended:
    def __init__(self, site):
        self.file = site.folder / "end.txt"
        self.facts = site.facts

    def step(self, record):
        pass

    def say(self, text):
        pass

    def close(self, end):
        lines = [end.status, end.step, end.results.get("train_loss"), end.picture, self.facts["ranks"]]
        self.file.write_text("\\n".join(map(str, lines)))


class Wide(Ended):
    def close(self, end, code):
        pass


def wait_for_ever(site):
    never.wait()


HANGING = NamedSink("hanging", "", Hanging)
CLOSED = NamedSink("closed", "", wait_for_ever)
ENDED = NamedSink("ended", "", Ended)
WIDE = NamedSink("wide", "", Wide)
NEEDY = NamedSink("needy", "", Ended, needs="package_not_there", install="not-there[all]")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with mine.py. Its imports are forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.modules.pop("mine", None)
    sys.path[:] = path


class Scripted(RunSink):
    """A sink whose calls do what a test says."""

    def __init__(self, step: Any = None, close: Any = None) -> None:
        self.on_step, self.on_close = step, close
        self.calls: list[tuple[str, object, int]] = []

    def step(self, record: Any) -> None:
        self.calls.append(("step", record.step, threading.get_ident()))
        if self.on_step:
            self.on_step(record)

    def say(self, text: str) -> None:
        self.calls.append(("say", text, threading.get_ident()))

    def close(self, end: RunEnd) -> None:
        self.calls.append(("close", end.status, threading.get_ident()))
        if self.on_close:
            self.on_close()


class Record:
    def __init__(self, step: int) -> None:
        self.step = step


def steps(sink: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        sink.step(Record(step))


def test_all_calls_run_in_one_thread_in_order() -> None:
    opened: list[int] = []
    sink = Scripted()

    def make() -> Scripted:
        opened.append(threading.get_ident())
        return sink

    thread = SinkThread("one", make, 1.0)
    thread.step(Record(1))
    thread.say("text")
    thread.close(END, 5.0)
    assert [call[:2] for call in sink.calls] == [("step", 1), ("say", "text"), ("close", "finished")]
    assert {call[2] for call in sink.calls} == set(opened) != {threading.get_ident()}


def test_a_sink_may_keep_a_connection_of_its_thread(tmp_path: Path) -> None:
    """A connection of sqlite3 works in one thread only."""

    class Table:
        def __init__(self) -> None:
            self.database = sqlite3.connect(tmp_path / "losses.db")
            self.database.execute("CREATE TABLE steps (step INTEGER)")

        def step(self, record: Any) -> None:
            self.database.execute("INSERT INTO steps VALUES (?)", (record.step,))

        def say(self, text: str) -> None:
            pass

        def close(self, end: RunEnd) -> None:
            self.database.commit()
            self.database.close()

    thread = SinkThread("table", Table, 1.0)
    steps(thread, 1, 3)
    thread.close(END, 5.0)
    database = sqlite3.connect(tmp_path / "losses.db")
    assert database.execute("SELECT step FROM steps ORDER BY step").fetchall() == [(1,), (2,), (3,)]


def test_steps_wait_for_a_slow_sink_once() -> None:
    go_on = threading.Event()
    sink = Scripted(step=lambda record: go_on.wait())
    thread = SinkThread("slow", lambda: sink, 0.3)
    began = time.monotonic()
    steps(thread, 1, 50)
    assert 0.3 <= time.monotonic() - began < 2.0  # and not 50 times 0.3 s
    with pytest.raises(SlowSink, match=r"did not close within 0.1 s, 50 calls before it are waiting"):
        thread.close(END, 0.1)
    go_on.set()


def test_a_late_error_names_its_own_step() -> None:
    def fail(record: Any) -> None:
        time.sleep(0.05)
        if record.step == 2:
            raise OSError("no room")

    sink = Scripted(step=fail)
    lines: list[str] = []
    own = Scripted()
    own.say = lines.append  # type: ignore[method-assign,assignment]
    with Reporter([own], {"late": SinkThread("late", lambda: sink, 0.0)}) as reporter:
        steps(reporter, 1, 4)
        reporter.close(END)
    assert re.match(
        r"sink 'late' stopped at step 2: it raised OSError: no room \(test_sink_thread.py, line", lines[0][9:]
    )
    assert reporter.stopped and len(lines) == 1
    assert [call[1] for call in sink.calls] == [1, 2, "finished"]  # nothing between the error and the end


def test_a_sink_that_never_answers_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_thread, "MOST_CALLS", 20)
    monkeypatch.setattr(deadlines, "HURRIED_SECONDS", 0.1)
    go_on = threading.Event()
    own, sink = Scripted(), Scripted(step=lambda record: go_on.wait())
    with Reporter([own], {"stuck": SinkThread("stuck", lambda: sink, 0.0)}) as reporter:
        steps(reporter, 1, 40)
        reporter.close(END)
    assert "sink 'stuck' stopped at step 21: it raised SlowSink: 20 calls are waiting" in reporter.stopped[0]
    assert [call[1] for call in own.calls if call[0] == "step"] == list(range(1, 41))
    go_on.set()


def test_a_sink_that_calls_exit_does_not_end_the_run() -> None:
    thread = SinkThread("leaving", lambda: Scripted(step=lambda record: sys.exit(3)), 5.0)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        thread.step(Record(1))


def test_sinks_get_how_the_run_failed() -> None:
    sink, own = Scripted(), Scripted()
    with pytest.raises(ZeroDivisionError), Reporter([own], {"a": SinkThread("a", lambda: sink, 1.0)}):
        raise ZeroDivisionError
    assert [call[:2] for call in (*sink.calls, *own.calls)] == [("close", "failed")] * 2


def test_sinks_get_the_results_of_a_run(folder: Path) -> None:
    job = config_file(folder, SHORT)
    assert train_here(job, "--run.dir", "run", "--log.sinks", '["mine:ENDED"]') == 0
    status, step, loss, picture, count = (folder / "run" / "end.txt").read_text().splitlines()
    assert (status, step, count) == ("finished", "3", "1")
    assert float(loss) > 0 and Path(picture) == folder / "run" / "loss.png" and Path(picture).exists()


def test_a_sink_that_hangs_when_it_opens_does_not_hang_the_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deadlines, "OPENING_SECONDS", 0.5)
    job = config_file(folder, SHORT)
    try:
        status = train_here(job, "--run.dir", "run", "--log.sinks", '["mine:CLOSED", "mine:ENDED"]')
    finally:
        sys.modules["mine"].never.set()
    stop = "sink 'mine:CLOSED' is not used: it did not open within 0.5 s"
    out = capsys.readouterr().out
    assert status == 0 and out.count(f"warning: {stop}. The run goes on without this sink") == 1
    assert f"  warning         {stop}" in out and len(records(folder / "run")) == 3
    assert (folder / "run" / "end.txt").read_text().startswith("finished")  # the other sink


@pytest.mark.extensive("it waits for a timeout")
def test_a_sink_that_hangs_at_its_end_does_not_hang_the_job(folder: Path) -> None:
    """Also if its package has a thread and a function for which Python waits when a process ends."""
    job = config_file(folder, SHORT)
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(sink_thread.__file__).parents[2]), str(folder)])}
    process = start(
        "train", job, "--run.dir", "run", "--log.sinks", '["mine:HANGING"]', environment=environment
    )
    status, out, err = finish(process, timeout=100)
    assert status == 0, err
    stop = "sink 'mine:HANGING' raised SlowSink: the sink did not close within 0.5 s"
    assert out.count(f"warning: {stop}") == 1 and f"  warning         {stop}" in out
    assert (
        len(records(folder / "run")) == 3
        and '"status": "finished"' in (folder / "run" / "run.json").read_text()
    )


def test_a_missing_package_is_one_error_before_any_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = config_file(folder, SHORT)
    for arguments in ([], ["--nproc", "2", "--parallel.engine", "shardwright"]):
        assert train_here(job, "--run.dir", "run", "--log.sinks", '["mine:NEEDY"]', *arguments) == 2
        message = (
            "error: log.sinks: sink 'mine:NEEDY' needs the package package_not_there, which is not installed; "
            "install it: pip install 'not-there[all]'"
        )
        assert capsys.readouterr().err.strip() == message and not (folder / "run").exists()
    ended = ranks(2, "train", job, "--log.sinks", '["mine:NEEDY"]', folders=[folder, folder])
    assert [status for status, _ in ended] == [2, 2]
    assert "".join(text for _, text in ended).count("package_not_there") == 1


def test_a_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder wandb where it runs."""
    (tmp_path / "only_a_folder").mkdir()
    (tmp_path / "with_a_file.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {
        name: NamedSink(name, "", lambda site: None, needs=name) for name in ("only_a_folder", "with_a_file")
    }  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(catalog, "sinks", known)
    check_packages(["with_a_file"])
    with pytest.raises(UserError, match="needs the package only_a_folder"):
        check_packages(["only_a_folder"])


def test_a_close_with_other_arguments_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = config_file(folder, SHORT)
    assert train_here(job, "--run.dir", "run", "--log.sinks", '["mine:WIDE"]') == 2
    assert re.search(
        r"returned a Wide with close\(end, code\); expected close\(end\)", capsys.readouterr().err
    )
