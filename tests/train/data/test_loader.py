"""Steps made ahead of time: in order, with their errors, and without threads left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from shardwright.train.data.samples.batch import Batch
from shardwright.train.data.samples.loader import Loader, Share
from shardwright.train.data.samples.stream import Stream
from tests.train.kit.tokens import random_tokens, source_of


class Uneven(Stream):
    """A stream some batches of which take longer, and one of which may fail."""

    fails_at: int | None = None

    def batch(self, first: int, count: int) -> Batch:
        time.sleep(0.003 * (first // count % 3))
        if self.fails_at is not None and first <= self.fails_at < first + count:
            raise OSError("the disk is gone")
        return super().batch(first, count)


def stream_of(fails_at: int | None = None) -> Stream:
    tokens = random_tokens(1, documents=60, longest=40, masked=True)
    stream = Uneven([source_of(tokens, 16, "best_fit", separate=True)], [1], 0, separate=True)
    stream.fails_at = fails_at
    return stream


def data_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("data")]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_come_in_order(workers: int, ahead: int) -> None:
    stream = stream_of()
    with Loader(stream, Share(12, 3, rank=1, ranks=2), stop=60, workers=workers, ahead=ahead) as loader:
        steps = list(loader)
    assert [step.first for step in steps] == [0, 12, 24, 36, 48]
    for step in steps:
        whole = stream.batch(step.first, 12)
        rows = torch.cat([batch.inputs for batch in step.batches])
        assert len(step.batches) == 2 and torch.equal(rows, whole.inputs[6:])
        assert step.trained == stream.trained(step.first, 12)
    assert not data_threads()


def test_steps_are_made_before_they_are_asked_for() -> None:
    stream = stream_of()
    begun = []
    make = stream.batch
    stream.batch = lambda first, count: begun.append(first) or make(first, count)  # type: ignore[method-assign]
    with Loader(stream, Share(4, 4), workers=1, ahead=2) as loader:
        next(loader)
        deadline = time.monotonic() + 5
        while len(begun) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert begun == [0, 4, 8]  # and no more: batches are memory
    with Loader(stream, Share(4, 4), workers=0) as loader:
        begun.clear()
        next(loader)
        assert begun == [0]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_of_a_worker_is_raised_where_its_step_is_due(workers: int) -> None:
    with Loader(stream_of(fails_at=21), Share(8, 4), workers=workers) as loader:
        assert [next(loader).first, next(loader).first] == [0, 8]
        for _ in range(2):  # the steps after it are not the ones the run needs
            with pytest.raises(OSError, match="the disk is gone"):
                next(loader)
    assert not data_threads()


def test_an_error_of_the_user_leaves_no_thread() -> None:
    with pytest.raises(KeyError), Loader(stream_of(), Share(8, 4), workers=3) as loader:
        next(loader)
        raise KeyError("of the training loop")
    assert not data_threads()
    with pytest.raises(ValueError, match="expected an open loader"):
        next(loader)
    loader.close()


INTERRUPTED = """
import signal, sys, time
from shardwright.train.data.samples.loader import Loader, Share
from shardwright.train.data.samples.stream import Stream
from tests.train.kit.tokens import random_tokens, source_of
with_close = sys.argv[1] == "close"
source = source_of(random_tokens(1, documents=60, longest=40), 16, "best_fit", separate=True)
loader = Loader(Stream([source], [1], 0, separate=True), Share(8, 4), workers=2)
first = next(loader)
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        next(loader)
except KeyboardInterrupt:
    if with_close:
        loader.close()
    print("left", flush=True)
"""


@pytest.mark.extensive("a process for each end")
@pytest.mark.parametrize("close", ["close", "leave"])
def test_a_process_ends_at_once_after_a_signal(close: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, close], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, "left\n", "")


def test_a_signal_during_the_wait_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of()
    with Loader(stream, Share(8, 4), workers=1) as loader:
        next(loader)
        pending = loader._pending[0] if loader._pending else None
        monkeypatch.setattr("shardwright.train.data.samples.loader._Pending.result", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        monkeypatch.undo()
        assert pending is not None and next(loader).first == 8


def _interrupted(self: object) -> None:
    raise KeyboardInterrupt


def test_shares_cover_a_global_batch() -> None:
    for ranks in (1, 2, 3, 4):
        for micro in (1, 2):
            shares = [Share(24, micro, rank, ranks).micro_batches(48) for rank in range(ranks)]
            assert [index for share in shares for part in share for index in part] == list(range(48, 72))


def test_impossible_shares_are_refused() -> None:
    for share in [(24, 5, 0, 1), (24, 4, 0, 4), (24, 2, 2, 2)]:
        with pytest.raises(ValueError, match="share: expected ranks"):
            Share(*share)
    with pytest.raises(ValueError, match="loader: expected workers >= 0"):
        Loader(stream_of(), Share(8, 4), workers=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_the_gpu() -> None:
    stream = stream_of()
    with Loader(stream, Share(8, 4), pin=True) as loader:
        batch = next(loader).batches[0]
    assert batch.inputs.is_pinned() and batch.documents is not None and batch.documents.is_pinned()
    assert torch.equal(batch.to("cuda", non_blocking=True).targets.cpu(), stream.batch(0, 4).targets)
