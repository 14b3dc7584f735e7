"""The start of a job: ranks that differ, folders in use, names that hide others, and words while it takes long."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardwright import cli
from shardwright.checkpoint import Damaged
from shardwright.cli import program
from shardwright.train.errors import UserError
from shardwright.train.launch.job_end import Complaint
from shardwright.train.launch.judgement import EndOfRanks, Evidence, announce, judge
from shardwright.train.parallel import world
from shardwright.train.parallel.rank_facts import collective_timeout
from shardwright.train.rank import startup_check
from shardwright.train.rank.startup_check import (
    Statement,
    agree_on_start,
    facts_of,
    first_of_host,
    is_to_report,
)
from shardwright.train.report import progress
from shardwright.train.report.progress import Start
from shardwright.train.run import lock
from shardwright.train.run.folder import RunFolder
from tests.train.kit.jobs import TINY, config_file, losses, ranks, run, tiny, train_here, wait_for


def answers(*statements: Statement | None, status: int = UserError.MISTAKE) -> list[str]:
    """The answer to each rank, with this status; None is a rank that never comes."""
    store = dist.HashStore()
    found = ["?"] * len(statements)

    def ask(rank: int, statement: Statement) -> None:
        try:
            agree_on_start(store, rank, len(statements), statement, collective_timeout())
            found[rank] = ""
        except UserError as error:
            found[rank] = str(error) if error.status == status else f"with status {error.status}: {error}"

    threads = [
        threading.Thread(target=ask, args=(rank, statement))
        for rank, statement in enumerate(statements)
        if statement is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def stated(sha256: str = "a" * 64, **sections: Any) -> Statement:
    return Statement(
        facts_of(tiny(**sections).model_dump(), {"the text of data.source": sha256}, None, "cpu")
    )


def test_ranks_that_differ_get_one_answer_that_names_them() -> None:
    assert answers(stated(), stated()) == ["", ""]
    # The same text may lie elsewhere on another host.
    assert answers(stated(), stated(data={"source": "elsewhere.txt"})) == ["", ""]
    source = {"path": "/here/a.jsonl", "weight": 1.0}
    here = {
        "sources": [source],
        "tokenizer": "/here/t",
        "chat_template": "/here/c",
        "validation_source": "/here/v",
    }
    there = {**here, "sources": [{**source, "path": "/there/a.jsonl"}], "tokenizer": "/there/t"}
    there |= {"chat_template": "/there/c", "validation_source": "/there/v"}
    assert answers(stated(data=here), stated(data=there)) == ["", ""]
    heavier = {**here, "sources": [{**source, "weight": 2.0}]}
    assert "found data.sources: " in answers(stated(data=here), stated(data=heavier))[0]
    rate = stated(optimizer={"lr": 0.5})
    (first, *others) = answers(stated(), rate, stated(), rate)
    assert first.startswith(
        "expected the same job on every rank, found optimizer.lr: 0.01 on ranks 0, 2, 0.5 on ranks 1, 3;"
    )
    assert others == [first] * 3
    text = answers(stated(), stated("b" * 64))
    assert (
        "found the text of data.source: sha256 aaaaaaaaaaaa on rank 0, sha256 bbbbbbbbbbbb on rank 1;"
        in text[1]
    )
    both = answers(stated(), stated("b" * 64, run={"seed": 3}))[0]
    assert "found run.seed: 0 on rank 0, 3 on rank 1 (the text of data.source too)" in both


def test_a_mistake_of_one_rank_reaches_all() -> None:
    mistake = Statement({}, "x.toml: expected a configuration file, found nothing there")
    assert answers(stated(), mistake) == [f"rank 1: {mistake.mistake}"] * 2
    assert answers(mistake, mistake) == [mistake.mistake] * 2


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "PATIENCE", timedelta(seconds=0.2))
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT", "0.2")
    answer = answers(stated(), None, status=UserError.PASSING)[0]
    assert answer.startswith("expected 2 ranks to start, got no answer from rank 1;")
    mistake = Statement({}, "x.toml: expected a configuration file, found nothing there")
    assert answers(mistake, None)[0] == f"rank 0: {mistake.mistake}"  # another start would end like this


@pytest.mark.extensive("both ranks wait", but=("1",))
@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_wait_as_long_as_another_one_makes_progress(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Twelve times the timeout: the first rank waits for another host, or others for the first rank."""
    monkeypatch.setattr(startup_check, "PATIENCE", timedelta(seconds=0.25))
    monkeypatch.setattr(startup_check, "SECONDS_OF_A_SIGN", 0.0)
    store, ended = dist.HashStore(), {}

    def start(rank: int) -> None:
        sign = startup_check.signs_of_progress(store)
        for _ in range(60 if rank == slow else 0):
            time.sleep(0.05)
            sign()
        try:
            agree_on_start(store, rank, 2, stated(), timedelta(seconds=0.25))
            ended[rank] = ""
        except (UserError, RuntimeError) as error:
            ended[rank] = str(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == {0: "", 1: ""}


def test_a_mistake_counts_before_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the others is short then: they may be at work for long."""
    monkeypatch.setattr(startup_check, "SECONDS_TO_JOIN", 0.2)
    mistake = Statement({}, "data.source: expected a file, found nothing at a.txt")
    began = time.monotonic()
    assert answers(stated(), mistake, None)[:2] == [f"rank 1: {mistake.mistake}"] * 2
    assert answers(mistake, mistake, None)[:2] == [f"ranks 0, 1: {mistake.mistake}"] * 2
    assert time.monotonic() - began < 10


class Host:
    """Ranks of hosts, as threads, that read data: who began, in order, and what each got."""

    def __init__(self) -> None:
        self.store, self.began, self.got = dist.HashStore(), [], {}  # type: ignore[var-annotated]

    def read(
        self, rank: int, local: int, work: Callable[[], str], monkeypatch: pytest.MonkeyPatch
    ) -> threading.Thread:
        def ask() -> None:
            def begin() -> str:
                self.began.append(rank)
                return work()

            try:
                self.got[rank] = first_of_host(self.store, rank, begin)
            except Exception as error:
                self.got[rank] = f"{type(error).__name__}: {error}"

        monkeypatch.setenv("LOCAL_RANK", str(local))
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.1)  # it has read the variable
        return thread


def test_the_first_rank_of_a_host_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host, ready = Host(), threading.Event()
    threads = [host.read(1, 1, lambda: "one", monkeypatch), host.read(2, 2, lambda: "two", monkeypatch)]
    threads.append(host.read(0, 0, lambda: "zero" if ready.wait(30) else "", monkeypatch))
    assert host.began == [0]
    monkeypatch.setenv("GROUP_RANK", "1")  # another host
    threads.append(host.read(3, 0, lambda: "three", monkeypatch))
    assert host.began == [0, 3]
    ready.set()
    for thread in threads:
        thread.join()
    assert host.got == {0: "zero", 1: "one", 2: "two", 3: "three"} and sorted(host.began[2:]) == [1, 2]


@pytest.mark.parametrize("error", [UserError("data: bad"), OSError("data: bad"), Damaged("data: bad")])
def test_a_mistake_of_the_first_rank_of_a_host_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> str:
        raise error

    host = Host()
    threads = [host.read(1, 1, lambda: "one", monkeypatch), host.read(0, 0, fail, monkeypatch)]
    for thread in threads:
        thread.join()
    assert host.began == [0] and host.got[1] == "UserError: data: bad"


def test_a_rank_without_a_first_one_on_its_host_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "PATIENCE", timedelta(seconds=0.2))
    host = Host()
    host.read(1, 1, lambda: "one", monkeypatch).join()
    assert host.got == {1: "one"}


def test_a_verdict_ends_the_wait_for_the_first_rank_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    thread = host.read(1, 1, lambda: "one", monkeypatch)
    host.store.set("start/verdict", "rank 0: wrong")
    thread.join()
    assert host.got == {1: "UserError: rank 0: wrong"} and not host.began


@pytest.mark.extensive("each number of ranks", but=("False-2",))
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("launched", [True, False])
def test_damaged_data_are_one_line_within_seconds(tmp_path: Path, count: int, launched: bool) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "whole"}\n' * 20000 + '{"text": "cut o')
    config, began = config_file(tmp_path), time.monotonic()
    arguments = (
        "train",
        config,
        "--parallel.engine",
        "ddp",
        "--data.source",
        data,
        "--run.dir",
        tmp_path / "run",
    )
    if launched:
        status, _, said = run(*arguments, "--nproc", str(count))
        assert status == 2
    else:
        ended = ranks(count, *arguments)
        assert [status for status, _ in ended] == [2] * count
        said = "".join(err for _, err in ended)
    # On a busy machine some ranks start too late to state the mistake, too. Then the error names those that have.
    mistake = "data.source: expected JSON, found an error at column 10 of line 20001 of"
    assert re.match(rf"error: (?:ranks? [\d, ]+: )?{mistake}", said), said
    assert said.count("\n") == 1 and not (tmp_path / "run").exists()
    assert (
        time.monotonic() - began < 60
    )  # programs start slowly on a busy machine; ranks would wait 10 minutes


@pytest.mark.parametrize(
    ("seen", "mask", "used"),
    [
        ([["a"], ["b"]], "0", [0, 0]),  # the scheduler shows each rank a GPU of its own
        ([["a", "b"], ["a", "b"]], "", [0, 1]),
        ([["a"], ["a"]], "", "expected a GPU for each rank of this machine, found 1 for at least 2 ranks"),
        ([["a"], ["a"]], "0", r"expected a GPU for each rank of this machine, found ranks 0 and 1 on one \(GPU-a\)"),
        ([["a", "b"]] * 3, "0,1", "found 2 for at least 3 ranks"),
    ],
)  # fmt: skip
def test_each_rank_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, seen: list[list[str]], mask: str, used: list[int] | str
) -> None:
    store, indices = dist.HashStore(), []
    config = tiny(run={"device": "cuda"}, parallel={"engine": "shardwright"}, train={"global_batch": 12})
    for name in world.MASKS:
        monkeypatch.delenv(name, raising=False)
    if mask:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    monkeypatch.setenv("WORLD_SIZE", str(len(seen)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)

    def start() -> None:
        for rank, gpus in enumerate(seen):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: len(gpus))
            monkeypatch.setattr(
                "torch.cuda.get_device_properties",
                lambda device, gpus=gpus: SimpleNamespace(uuid=gpus[device.index]),
            )
            device = world.pick_device(config)
            world.claim_gpu(store, rank, "host", device)
            indices.append(device.index)

    if isinstance(used, str):
        with pytest.raises(UserError, match=used):
            start()
    else:
        start()
        assert indices == used


def test_one_rank_reports_what_several_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "SECONDS_TO_REPORT", 0.1)
    store = dist.HashStore()
    assert is_to_report(store, 0, "one") and not is_to_report(store, 1, "one")
    assert is_to_report(store, 1, "two") and not is_to_report(store, 0, "two")


def test_a_mistake_of_another_rank_is_printed_under_torchrun(tmp_path: Path) -> None:
    """Each rank has its own working folder, and so its own file."""
    engine = ("--parallel.engine", "ddp", "--run.dir", tmp_path / "run")
    for rank, text in enumerate((TINY, TINY.replace("lr = 1e-2", "lr = 2e-2"))):
        config_file(tmp_path / f"of{rank}", text)
    ended = ranks(2, "train", "tiny.toml", *engine, folders=[tmp_path / "of0", tmp_path / "of1"])
    assert [status for status, _ in ended] == [2, 2]
    said = "".join(err for _, err in ended)
    assert said.startswith(
        "error: expected the same job on every rank, found optimizer.lr: 0.01 on rank 0, 0.02 on rank 1"
    )
    assert said.count("\n") == 1 and not (tmp_path / "run").exists()
    (tmp_path / "of1" / "tiny.toml").unlink()
    ended = ranks(2, "train", "tiny.toml", *engine, folders=[tmp_path / "of0", tmp_path / "of1"])
    assert [status for status, _ in ended] == [2, 2]
    said = "".join(err for _, err in ended)
    assert said.startswith("error: rank 1: tiny.toml: expected a configuration file, found nothing there (")
    assert said.endswith("/of1/tiny.toml)\n") and said.count("\n") == 1


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    folder.mkdir()
    with lock.claim(folder):
        assert cli.main(["train", str(config), "--run.dir", str(folder)]) == 2
        assert f"found a run that uses it (process {os.getpid()} on " in capsys.readouterr().err
        with lock.share(folder), pytest.raises(UserError, match="expected a folder that no run is using"):
            lock.claim(folder)
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    before = (folder / "run.json").read_bytes()
    # Another process has it, and is killed: nothing of its lock is left.
    script = "import sys, pathlib; from shardwright.train.run.lock import claim; "
    script += "held = claim(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert cli.main(["train", "--resume", str(folder), "--train.steps", "3"]) == 2
    assert f"found a run that uses it (process {holder.pid} on " in capsys.readouterr().err
    assert (folder / "run.json").read_bytes() == before
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert cli.main(["train", "--resume", str(folder), "--train.steps", "3"]) == 0


@pytest.mark.extensive("a job for each module")
def test_the_users_own_modules_hide_nothing_from_ranks(tmp_path: Path) -> None:
    """A random.py in the working folder would take the place of Python's, for the launcher and for each rank."""
    config_file(tmp_path)
    for name in ("random.py", "rich.py", "socket.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n")
    arguments = ("--nproc", "2", "--parallel.engine", "ddp", "--train.steps", "1", "--run.dir", "run")
    status, _, err = run("train", "tiny.toml", *arguments, cwd=tmp_path)
    assert (status, err) == (0, "") and len(losses(tmp_path / "run")) == 1


def test_the_launcher_imports_no_engine() -> None:
    code = "import sys, shardwright.train.commands.train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {
        "shardwright.engine.compat.probe",
        "shardwright.engine.front.api",
        "torch.distributed.tensor",
        "torch._dynamo",
    }


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_missing_package_is_named_before_anything_is_made(tmp_path: Path, ranks: str) -> None:
    config_file(tmp_path)
    code = (
        "import sys; sys.modules['rich.progress'] = None; from shardwright.cli import main; sys.exit(main())"
    )
    arguments = ["train", "tiny.toml", "--parallel.engine", "ddp", "--nproc", ranks]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2, done
    needs = "the trainer needs the extra train: pip install -e '.[train]' in the checkout"
    assert done.stderr == f"error: rich is not installed; {needs}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


def test_a_file_in_place_of_a_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import types

    hiding = types.ModuleType("rich")
    hiding.__file__ = "/home/me/rich.py"
    monkeypatch.setitem(sys.modules, "rich", hiding)

    def fails(*_: object) -> int:
        raise ModuleNotFoundError(
            "No module named 'rich.console'; 'rich' is not a package", name="rich.console"
        )

    command = dataclasses.replace(program.COMMANDS["compare"], run=fails)
    monkeypatch.setitem(program.COMMANDS, "compare", command)
    assert cli.main(["compare", "a", "b"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: Python imports /home/me/rich.py instead of the package rich; rename this file"
    )


def test_a_start_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()  # a fixture that empties its text while a thread prints can lose a line
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    start = Start()
    start.begin("reading the text")
    wait_for(lambda: "reading the text (" in out.getvalue())  # the first second is over on a busy machine
    monkeypatch.setattr(progress, "EVERY", 0.0)
    start.doing("building the model")
    assert (
        "building the model (" in out.getvalue()
    )  # an action that begins in a slow start is printed at once
    start.end()
    assert not start.is_speaking and start.variables == {}


def test_a_start_has_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    start = Start()
    start.begin("reading the text")
    wait_for(lambda: out.getvalue().count("reading the text (") > 2)
    start.end()
    assert "\n" not in out.getvalue() and out.getvalue().endswith("\r\033[K")


def test_a_start_goes_on_with_its_action_after_an_error_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Start()
    start.begin("building the model")
    monkeypatch.setattr(start, "_began", time.monotonic() - 60)
    with pytest.raises(ValueError, match="damaged"), start.left_to_others():
        assert start._line() == ""
        raise ValueError("damaged")
    assert start._line().startswith("building the model (")
    start.end()


def test_a_quick_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    start = Start()
    start.begin("reading the text")
    start.doing("building the model")
    start.end()
    Start().doing("in a rank that does not speak")
    assert capsys.readouterr().out == ""


def test_a_job_interrupted_at_its_start_is_not_called_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before there is a model there is nothing to save; a run that is resumed has its record already."""
    folder = RunFolder(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    complaint = Complaint(0, 1, "interrupted", "interrupted", "")
    ended = EndOfRanks({0: 1, 1: -signal.SIGINT, 2: -9}, frozenset({2}))
    evidence = Evidence(folder, tmp_path, ended, [complaint], signal.SIGINT)
    assert announce(evidence, judge(evidence), debug=False) == 130
    assert capsys.readouterr().err == "stopped by SIGINT without saving\n"
