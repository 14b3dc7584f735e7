"""Saves that fail: full disks, errors of input and output, limits, interrupts and killed ranks, at every call.

The older checkpoint stays, every rank raises one error that names file and reason, no unfinished folder stays, and the
next save works.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch.distributed as dist

from shardwright.checkpoint import save_state
from tests.checkpoint.kit.calls import Call, recorded, renames_alone
from tests.checkpoint.kit.disk import Script, check_every_cut
from tests.checkpoint.kit.states import small_tensors_spread, state, step_of
from tests.support.pool import forkserver, multirank

KINDS = ("first", "exchange", "renames")


@pytest.fixture(params=KINDS)
def older(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether there is an older checkpoint; it is replaced with and without a system that can exchange names."""
    with renames_alone() if request.param == "renames" else contextlib.nullcontext():
        yield request.param != "first"


def prepare(folder: Path, older: bool) -> Path:
    folder.mkdir()
    if older:
        save_state(folder / "c", state(1))
    return folder / "c"


class Fault:
    """An error at one call, or also at all calls after it."""

    def __init__(self, number: int, error: BaseException, onwards: bool = False) -> None:
        self.number, self.error, self.onwards = number, error, onwards
        self.happened = False

    def __call__(self, at: int, call: Call) -> None:
        if at == self.number or (self.onwards and at > self.number):
            self.happened = True
            if isinstance(self.error, OSError):
                raise OSError(self.error.errno, self.error.strerror, call.path)
            raise self.error


def check_the_next_save(path: Path) -> None:
    save_state(path, state(3), overwrite=True)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert step_of(path) == 3


@pytest.mark.extensive("each call with each error", but=("first-EIO",))
@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_any_call_may_fail(tmp_path: Path, older: bool, reason: int) -> None:
    number, failures, happened = 0, 0, True
    while happened:
        path = prepare(tmp_path / f"{number}", older)
        fault = Fault(number, OSError(reason, os.strerror(reason)))
        failed = False
        with recorded(path.parent, before=fault):
            try:
                save_state(path, state(2), overwrite=True)
            except OSError as error:
                failed = True
                assert error.errno == reason and error.filename
        # After the commit only the removal of the older checkpoint can fail, and the next save removes it.
        assert step_of(path) == ((1 if older else None) if failed else 2), number
        assert not failed or [each.name for each in path.parent.iterdir()] == ["c"] * older, number
        number, failures, happened = number + 1, failures + failed, fault.happened
        check_the_next_save(path)
    assert failures > 12


@pytest.mark.extensive("each call")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_at_any_call(tmp_path: Path, older: bool, when: Any) -> None:
    number, happened = 0, True
    while happened:
        path = prepare(tmp_path / f"{number}", older)
        fault = Fault(number, KeyboardInterrupt())
        with recorded(path.parent, **{when: fault}):
            try:
                save_state(path, state(2), overwrite=True)
                assert not fault.happened
            except KeyboardInterrupt:
                assert fault.happened
        assert step_of(path) in (1 if older else None, 2)
        # An interrupt between the commit and the removal can leave the older one, which the next save removes.
        assert {each.name for each in path.parent.iterdir()} <= {"c", ".c.old"}, number
        number, happened = number + 1, fault.happened
        check_the_next_save(path)
    assert number > 12


@pytest.mark.extensive("each call")
@pytest.mark.parametrize("onwards", [False, True], ids=["once", "from_then_on"])
def test_a_cut_of_power_after_a_failure(tmp_path: Path, older: bool, onwards: bool) -> None:
    """A cut of power must not bring back what the clean-up after a failure removes."""
    number, happened = 0, True
    while happened:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path = folder / "c"
        with recorded(folder) as begin:
            if older:
                save_state(path, state(1))
        fault = Fault(number, OSError(errno.EIO, "EIO"), onwards)
        with recorded(folder, before=fault) as calls, contextlib.suppress(OSError):
            save_state(path, state(2), overwrite=True)

        def check(place: Path, done: int) -> None:
            steps = (1, 2) if older and done else (None, 1, 2)
            assert step_of(place / "c") in steps, number  # noqa: B023

        if any(call.kind in ("rename", "exchange") for call in calls):
            # Three names in a circle can be put back safely only where changes of a folder keep their order.
            ordered = any(call.other.endswith(".old") for call in calls)
            check_every_cut(Script([*begin, *calls], [len(begin)]), folder, check, ordered=ordered)
        check_the_next_save(path)
        number, happened = number + 1, fault.happened


def test_limits_of_the_size_of_files(tmp_path: Path) -> None:
    path = prepare(tmp_path / "saved", True)
    largest = max(each.stat().st_size for each in path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(0, largest, 97):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"File too large: .*\.partial") as caught:
                save_state(path, state(2), overwrite=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert step_of(path) == 1
        assert [each.name for each in path.parent.iterdir()] == ["c"]
    check_the_next_save(path)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory at ``folder``. The test is skipped where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        problem = subprocess.run(command, capture_output=True, text=True).stderr.strip()
    except FileNotFoundError:
        problem = "there is no mount command"
    if problem:
        pytest.skip(f"cannot mount a small file system: {problem.splitlines()[0]}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("replacing", [False, True])
def test_disks_of_every_size(tmp_path: Path, replacing: bool) -> None:
    """From no free page to enough of them. Where it is enough, the save works."""
    place = tmp_path / "small"
    saved, pages = False, 2
    while not saved:
        with mounted(place, f"size={pages * 4096}"):
            path = place / "c"
            with contextlib.suppress(OSError):
                if replacing:
                    save_state(path, state(1))
            older = step_of(path)
            try:
                save_state(path, state(2), overwrite=True)
                saved = not replacing or older == 1
            except OSError as error:
                assert error.errno == errno.ENOSPC and "c" in str(error.filename)
                assert step_of(path) == older
                assert [each.name for each in place.iterdir()] == (["c"] if older else [])
        pages += 1
    assert pages > 4


@pytest.mark.parametrize("reason", [errno.EIO, errno.EDQUOT], ids=["EIO", "EDQUOT"])
def test_a_file_whose_close_fails_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """As on NFS. Another thread may have the number of the file from then on."""
    others: list[IO[bytes]] = []
    real = os.close

    def close(descriptor: int) -> None:
        writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        real(descriptor)
        if writes and not others:
            others.append(open(tmp_path / "other", "wb"))  # noqa: SIM115  closed below
            assert others[0].fileno() == descriptor
            raise OSError(reason, os.strerror(reason))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(OSError, match=re.escape(os.strerror(reason))) as raised:
            save_state(tmp_path / "c", state(1))
    assert str(tmp_path / ".c") in str(raised.value)
    with others[0] as stream:
        stream.write(b"whole")
    assert (tmp_path / "other").read_bytes() == b"whole"
    (tmp_path / "other").unlink()
    check_the_next_save(tmp_path / "c")


def test_a_file_system_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with mounted(place, "size=1m"):
        save_state(place / "c", state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(OSError, match=r"Read-only file system: '.*place/\.c\.\w+\.partial'"):
            save_state(place / "c", state(2), overwrite=True)
        assert step_of(place / "c") == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.extensive("each error", but=("EIO-*",))
@multirank(2)
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "interrupt"]
)
def test_ranks_raise_one_error(rank: int, world_size: int, tmp_path: Path, error: BaseException) -> None:
    for failing in range(world_size):
        number, happened = 0, True
        while happened:
            path = tmp_path / f"{failing}-{number}" / "c"
            save_state(path, state(1))
            fault = Fault(number if rank == failing else -1, error)
            message: str | None = None
            with small_tensors_spread(), recorded(path.parent, before=fault):
                try:
                    save_state(path, state(2), overwrite=True)
                except KeyboardInterrupt:
                    assert rank == failing and isinstance(error, KeyboardInterrupt)
                    message = f"rank {failing}: KeyboardInterrupt"
                except (OSError, RuntimeError) as failure:
                    message = str(failure)
            outcomes: list[Any] = [None] * world_size
            dist.all_gather_object(outcomes, (message, fault.happened))
            happened = any(each for _, each in outcomes)
            assert {each for each, _ in outcomes} == {message}, outcomes
            if message is not None and isinstance(error, OSError):
                assert re.fullmatch(rf"rank {failing}: .*: Input/output error", message), message
            elif message is not None:
                assert message == f"rank {failing}: KeyboardInterrupt"
            if rank == 0:
                assert step_of(path) in (
                    (1, 2) if isinstance(error, KeyboardInterrupt) else (1 if message else 2,)
                )
                assert not message or [each.name for each in path.parent.iterdir()] == ["c"], number
            dist.barrier()
            number += 1
        assert number > 4


def save_and_die(rank: int, folder: Path, dying: int, number: int) -> None:
    import datetime

    def die(at: int, call: Call) -> None:
        if rank == dying and at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/ranks",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    with small_tensors_spread(), recorded(folder / "saved", before=die):
        try:
            save_state(folder / "saved" / "c", state(2), overwrite=True)
        except Exception as error:
            (folder / f"error-of-{rank}").write_text(str(error))
            os._exit(3)
    os._exit(0)


@pytest.mark.parametrize(("dying", "number"), [(0, 0), (0, 4), (0, 13), (0, 16), (1, 0), (1, 2)])
def test_a_killed_rank_is_an_error_on_the_other(tmp_path: Path, dying: int, number: int) -> None:
    path = prepare(tmp_path / "saved", True)
    start = forkserver().Process
    ranks = [start(target=save_and_die, args=(rank, tmp_path, dying, number)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(50)
    assert [each.exitcode for each in ranks] == ([-9, 3] if dying == 0 else [3, -9])
    assert step_of(path) in (1, 2)
    check_the_next_save(path)
