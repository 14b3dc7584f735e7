"""``AsyncCheckpoint``: each equals a synchronous checkpoint of its step, and failures reach every rank."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import save_state
from shardwright.checkpoint.asynchronous import background, messages
from shardwright.checkpoint.asynchronous.messages import JsonLines, Report, send
from shardwright.checkpoint.asynchronous.staging import SaveJob, SharedMemory, stage
from shardwright.checkpoint.format.nested import CHUNK_BYTES
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint, checkpoint_at
from shardwright.checkpoint.save.plan import SavePlan
from shardwright.checkpoint.save.writing import write_boxes
from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.checkpoint.storage.save_names import note_of_rank
from shardwright.checkpoint.storage.threads import MOST
from shardwright.engine import RankGroup
from tests.checkpoint.kit.background import pid_of_writer, values
from tests.checkpoint.kit.states import load_state
from tests.support.pool import multirank, world_mesh

ROOT = Path(__file__).parents[3]

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "per_parameter": {},
    "row": {"layout": "ragged"},
    "element": {"layout": sw.Ragged("element")},
}


def trained(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    if layout == "plain":
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    for layer in (model[0], model[2], model):
        sw.fully_shard(layer, mesh=world_mesh(dist.get_world_size()), **LAYOUTS[layout])
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 50)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digests(path: Path) -> dict[str, str]:
    """The digests of all files, after they were compared with the files."""
    checkpoint = checkpoint_at(path)
    checkpoint.verify()
    assert isinstance(checkpoint, OwnCheckpoint)
    assert {each.name for each in path.iterdir()} == {*checkpoint.index.files, "index.json"}
    return {name: file.sha256 for name, file in checkpoint.index.files.items()}


@pytest.mark.extensive("each number of ranks starts writers of its own", but=("2ranks",))
@multirank(1, 2, 3)
def test_each_equals_the_synchronous_one_of_its_step(rank: int, world_size: int, tmp_path: Path) -> None:
    with sw.AsyncCheckpoint() as checkpoints:
        for layout in LAYOUTS:
            model, optimizer = trained(layout)
            for number in range(3):
                extra = {"step": number, "notes": [number, "a", ("a", "a")], "moment": torch.ones(2) * number}
                place = tmp_path / f"{layout}-{number}"
                sw.save_checkpoint(place.with_suffix(".sync"), model, optimizer, extra=extra)
                checkpoints.save(place, model, optimizer, extra=extra)
                extra["moment"].zero_()
                step(model, optimizer)
        checkpoints.wait()
        outcome = checkpoints.poll()
        assert outcome is not None and outcome.committed and outcome.error is None and outcome.path == place
        if rank == 0:
            for layout in LAYOUTS:
                places = [tmp_path / f"{layout}-{number}" for number in range(3)]
                each = [digests(place) for place in places]
                assert each == [digests(place.with_suffix(".sync")) for place in places]
                assert len({tuple(files.values()) for files in each}) == 3  # training went on between them
            assert len(list(tmp_path.iterdir())) == len(LAYOUTS) * 3 * 2
    dist.barrier()


# -- failures ----------------------------------------------------------------------------------------------------------


def number_in(path: Path) -> float:
    """The number that is stored, if the checkpoint is whole."""
    state = values(0.0)
    number = load_state(path, state, RankGroup(alone=True))["number"]
    for name, tensor in values(number)["model"].items():
        assert torch.equal(state["model"][name], tensor)
    return float(number)


@pytest.mark.extensive("more writers")
@multirank(2)
def test_a_failure_is_raised_on_every_rank_and_the_next_save_works(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    with sw.AsyncCheckpoint() as checkpoints:
        checkpoints.save_state(tmp_path / "good", values(1))
        checkpoints.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.prlimit(pid_of_writer(checkpoints), resource.RLIMIT_FSIZE, (3000, limits[1]))
        checkpoints.save_state(tmp_path / "large", values(2))
        problem = r"^rank 1: /.*\.partial/__1_0\.distcp: File too large$"
        with pytest.raises(OSError, match=problem):
            checkpoints.save_state(tmp_path / "next", values(3))
        outcome = checkpoints.poll()
        assert outcome is not None and not outcome.committed and "File too large" in str(outcome.error)
        dist.barrier()
        assert [each.name for each in tmp_path.iterdir()] == ["good"]
        dist.barrier()
        if rank == 1:
            resource.prlimit(pid_of_writer(checkpoints), resource.RLIMIT_FSIZE, limits)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            checkpoints.save_state(tmp_path / "good", values(3))
        checkpoints.save_state(tmp_path / "next", values(3))
        checkpoints.wait()
        assert number_in(tmp_path / "next") == 3 and number_in(tmp_path / "good") == 1


@pytest.mark.extensive("each rank's writer")
@multirank(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_writer_is_an_error_on_every_rank(
    rank: int, world_size: int, victim: int, tmp_path: Path
) -> None:
    place = tmp_path / "good"
    with sw.AsyncCheckpoint() as checkpoints:
        checkpoints.save_state(place, values(1))
        checkpoints.wait()
        pid = pid_of_writer(checkpoints)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, number)  # for the trainer, which decides what becomes of the writer
        if rank == victim:
            os.kill(pid, signal.SIGSTOP)
        checkpoints.save_state(place, values(2), overwrite=True)
        assert rank != victim or checkpoints.poll() is None
        if rank == victim:
            os.kill(pid, signal.SIGKILL)
        problem = rf"^rank {victim}: the writer process \d+ was ended by SIGKILL, so .*good was not saved"
        with pytest.raises(RuntimeError, match=problem):
            checkpoints.wait()
        dist.barrier()
        assert [each.name for each in tmp_path.iterdir()] == ["good"] and number_in(place) == 1
        dist.barrier()
        checkpoints.save_state(place, values(3), overwrite=True)
        checkpoints.wait()
        assert number_in(place) == 3


@pytest.mark.extensive("a third writer to kill")
def test_a_writer_that_dies_without_work_is_replaced(tmp_path: Path) -> None:
    with sw.AsyncCheckpoint() as checkpoints:
        pid = pid_of_writer(checkpoints)
        os.kill(pid, signal.SIGKILL)
        while checkpoints._writer is not None and checkpoints._writer.lives:
            time.sleep(0.01)
        with pytest.warns(UserWarning, match=f"writer process {pid} was ended by SIGKILL"):
            checkpoints.save_state(tmp_path / "c", values(1))
        checkpoints.wait()
    assert number_in(tmp_path / "c") == 1
    with pytest.raises(RuntimeError, match="closed"):
        checkpoints.save_state(tmp_path / "d", values(1))


@pytest.mark.extensive("another writer")
def test_what_appeared_at_the_place_meanwhile_stays(tmp_path: Path) -> None:
    with sw.AsyncCheckpoint() as checkpoints:
        os.kill(pid_of_writer(checkpoints), signal.SIGSTOP)
        checkpoints.save_state(tmp_path / "c", values(1))
        save_state(tmp_path / "c", values(2))
        os.kill(pid_of_writer(checkpoints), signal.SIGCONT)
        # The other save has taken the unfinished folder for a leftover.
        with pytest.raises(OSError, match="c: what this save had written was removed, by another program"):
            checkpoints.wait()
    assert number_in(tmp_path / "c") == 2
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def run(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process and session of its own."""
    start = "import os, signal, sys, time, torch\nimport shardwright as sw\nfrom pathlib import Path\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(sw.__file__).parents[1]), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
        check=False,
    )


@pytest.mark.extensive("another program to kill")
def test_a_killed_trainer_takes_its_writer_along(tmp_path: Path) -> None:
    place = tmp_path / "c"
    done = run(
        """
        from tests.checkpoint.kit.background import pid_of_writer, values
        checkpoints = sw.AsyncCheckpoint()
        checkpoints.save_state(sys.argv[1], values(1))
        checkpoints.wait()
        os.kill(pid_of_writer(checkpoints), signal.SIGSTOP)
        checkpoints.save_state(sys.argv[1], values(2), overwrite=True)
        print(pid_of_writer(checkpoints), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        place,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_the_end_of(int(done.stdout))
    assert number_in(place) == 1
    assert len(list(tmp_path.iterdir())) == 2  # with what it has begun
    save_state(place, values(3), overwrite=True)
    assert number_in(place) == 3 and [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.extensive("each thread", but=("main",))
@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_killed_trainer_takes_a_writer_along_that_still_imports_torch(tmp_path: Path, thread: str) -> None:
    (tmp_path / "torch.py").write_text(
        f"import time\nopen({str(tmp_path / 'imports')!r}, 'w')\ntime.sleep(100)\n"
    )
    done = run(
        """
        import threading, time
        from shardwright.checkpoint.asynchronous.writer_process import WriterProcess
        sys.path.insert(0, sys.argv[1])
        def start():
            global writer
            writer = WriterProcess(os.memfd_create("jobs"))
        if sys.argv[2] == "main":
            start()
        else:
            threading.Thread(target=start).start()
        while not os.path.exists(sys.argv[1] + "/imports"):
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGTERM)  # a scheduler's, to all processes of the job
        time.sleep(0.2)
        assert writer.lives
        print(writer.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        thread,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for_the_end_of(int(done.stdout))


def wait_for_the_end_of(process: int) -> None:
    state = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.extensive("seven programs end in seven ways")
def test_the_end_of_the_interpreter_and_an_interrupt_lose_nothing(tmp_path: Path) -> None:
    done = run(
        """
        from tests.checkpoint.kit.background import values
        checkpoints = sw.AsyncCheckpoint()
        folder = Path(sys.argv[1])
        try:
            checkpoints.save_state(folder / "interrupted", values(1))
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            checkpoints.wait()
        try:
            with sw.AsyncCheckpoint() as others:
                others.save_state(folder / "left", values(2))
                raise KeyError("training has failed")
        except KeyError:
            print((folder / "left").exists())
        checkpoints.save_state(folder / "last", values(3))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert {each.name: number_in(each) for each in tmp_path.iterdir()} == {
        "interrupted": 1,
        "left": 2,
        "last": 3,
    }


def test_the_first_rank_gives_up_at_the_end_if_others_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.2)
    plan = SavePlan.of(values(1), RankGroup())
    contents = dataclasses.replace(plan.contents, ranks=2)
    memory = SharedMemory()
    job = SaveJob(LocalStore(tmp_path / "c"), 0, False, plan.own, contents)
    job.unfinished.begin(0, overwrite=False)
    at, nbytes = stage(job, memory)
    commands, its_commands = os.pipe()
    results, its_results = os.pipe()
    send(its_commands, {"do": "save", "at": at, "bytes": nbytes})
    send(its_commands, {"do": "leave"})
    background.BackgroundWriter(JsonLines(commands), its_results, memory.descriptor).run()
    lines: JsonLines[Report] = JsonLines(results)
    reports = [lines.next(), lines.next()]
    assert [each and each["is"] for each in reports] == ["written", "failed"]
    assert not (tmp_path / "c").exists()
    for descriptor in (commands, its_commands, results, its_results):
        os.close(descriptor)
    memory.close()


def test_a_damaged_note_is_an_error(tmp_path: Path) -> None:
    save = LocalStore(tmp_path / "c").unfinished()
    save.begin(0, overwrite=False)
    written = write_boxes(save, "__0_0.distcp", SavePlan.of(values(1), RankGroup()).own)
    messages.leave_note(save, 0, "attempt", written)
    assert messages.read_note(save, 0, "attempt") == written
    with pytest.raises(RuntimeError, match="of another save"):
        messages.read_note(save, 0, "other")
    path = save.path / note_of_rank(0)
    path.write_text(path.read_text().replace("b", "c", 1))
    with pytest.raises(RuntimeError, match="note of rank 0 cannot be read"):
        messages.read_note(save, 0, "attempt")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.extensive("a measurement with 200 MiB")
def test_memory_is_one_copy_of_the_shard_and_the_chunks_of_two_threads(tmp_path: Path) -> None:
    done = run(
        """
        import json
        from tests.checkpoint.kit.states import load_state
        from shardwright.engine.collective import RankGroup
        from shardwright.checkpoint import save_state
        from tests.checkpoint.kit.background import pid_of_writer

        def field(pid, name):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024

        def peak(pid, action):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            before = field(pid, "VmRSS")
            action()
            return field(pid, "VmHWM") - before

        folder = Path(sys.argv[1])
        columns = torch.ones(5_000, 5_000).t()  # not contiguous, so a copy is needed
        state = {"large": torch.ones(25_000_000), "columns": columns, "small": torch.ones(1000, 25_000)}
        save_state(folder / "warm", {"a": torch.ones(10)})
        load_state(folder / "warm", {"a": torch.ones(10)}, RankGroup())
        figures = {
            "save": peak("self", lambda: save_state(folder / "c", state)),
            "load": peak("self", lambda: load_state(folder / "c", state, RankGroup())),
        }
        with sw.AsyncCheckpoint() as checkpoints:
            checkpoints.save_state(folder / "small", {"a": torch.ones(10)})
            checkpoints.wait()
            writer = pid_of_writer(checkpoints)
            def save(name):
                checkpoints.save_state(folder / name, state)
                checkpoints.wait()
            Path(f"/proc/{writer}/clear_refs").write_text("5")
            before = field(writer, "VmRSS")
            figures["first"] = peak("self", lambda: save("first"))
            figures["second"] = peak("self", lambda: save("second"))
            figures["writer"] = field(writer, "VmHWM") - before
            figures["shared"] = os.fstat(checkpoints._memory.descriptor).st_blocks * 512
        print(json.dumps(figures))
        """,
        tmp_path,
    )
    assert not done.stderr
    figures = json.loads(done.stdout)
    state, chunks, slack = 300_000_000, MOST * CHUNK_BYTES, 16 << 20  # slack: the allocator, and imports
    assert state <= figures["shared"] <= state + slack  # which is in "first" and "writer", too
    assert state - slack <= figures["first"] <= state + slack  # memory that others gave back counts, too
    assert figures["writer"] <= state + slack
    assert figures["second"] <= slack
    assert figures["save"] <= chunks + slack
    assert figures["load"] <= chunks + slack


class FakeRuntime:
    """CUDA's runtime where no page can be locked: it keeps the failure until a kernel asks for it."""

    def __init__(self) -> None:
        self.failed = False

    def cudaHostRegister(self, *_: Any) -> int:
        self.failed = True
        return 2

    def launch(self, *_: Any, **__: Any) -> None:
        if self.failed:
            self.failed = False
            raise RuntimeError("CUDA error: out of memory")


def test_pages_that_cannot_be_locked_do_not_fail_a_later_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    memory = SharedMemory()
    memory.reserve(1 << 12)
    assert memory.bytes(lock=True).nbytes >= 1 << 12
    runtime.launch()  # the next kernel of training
    memory.close()
