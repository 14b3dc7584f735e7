"""Two programs that use one URL at once: two saves whose requests take turns, or a load of what is replaced."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import Damaged, save_state
from shardwright.checkpoint.load import collective_load
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint
from shardwright.checkpoint.storage import object_store
from shardwright.engine import RankGroup
from tests.checkpoint.kit.states import load_state

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
from tests.checkpoint.kit.fake_store import FakeStore  # noqa: E402

ALONE = RankGroup(alone=True)


@pytest.fixture(autouse=True)
def _same_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeStore.restart()
    monkeypatch.setattr(object_store, "promptly", lambda action, url: action())
    yield
    FakeStore.restart()


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((3,), float(value)), "step": value}


def content(url: str) -> float:
    """The number of the save that is there, found whole."""
    read = {"t": torch.zeros(3)}
    step: float = load_state(url, read, ALONE)["step"]
    assert read["t"].tolist() == [step] * 3
    return step


class Save(threading.Thread):
    """A save that waits before one of its requests until it may go on."""

    def __init__(self, url: str, value: float, overwrite: bool, pause_at: int) -> None:
        super().__init__(daemon=True)
        self.url, self.value, self.overwrite, self.pause_at = url, value, overwrite, pause_at
        self.requests = 0
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            save_state(self.url, state(self.value), overwrite=self.overwrite)
        except Exception as error:
            self.error = error
        self.is_waiting.set()

    def request(self) -> None:
        self.requests += 1
        if self.requests == self.pause_at:
            self.is_waiting.set()
            assert self.may_go_on.wait(20)


def take_turns(url: str, overwrite: bool, pauses: tuple[int, int]) -> tuple[Save, Save]:
    """The first save begins, the second begins, the first ends, the second ends."""
    saves = Save(url, 1, overwrite, pauses[0]), Save(url, 2, overwrite, pauses[1])
    for each in saves:
        each.start()
        assert each.is_waiting.wait(20)
    for each in saves:
        each.may_go_on.set()
        each.join(20)
    return saves


@pytest.mark.extensive("programs of their own", but=("False-False",))
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("conditional", [True, False])
def test_at_most_one_of_two_saves_succeeds_and_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, conditional: bool
) -> None:
    real, real_write = FakeStore._asked, FakeStore.pipe_file

    def asked(self: FakeStore, call: str) -> None:
        if isinstance(thread := threading.current_thread(), Save):
            thread.request()
        real(self, call)

    def pipe_file(self: FakeStore, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create" and not conditional:
            raise NotImplementedError
        real_write(self, path, value, mode, **options)

    monkeypatch.setattr(FakeStore, "_asked", asked)
    monkeypatch.setattr(FakeStore, "pipe_file", pipe_file)
    outcomes: Counter[str] = Counter()
    for first in range(1, 40):
        for second in range(1 + first % 2, 40, 2):
            url = f"fake://{tmp_path}/{first}-{second}"
            saves = take_turns(url, overwrite, (first, second))
            errors = [str(each.error) for each in saves if each.error is not None]
            done = [each.value for each in saves if each.error is None]
            assert all(isinstance(each.error, OSError) for each in saves if each.error is not None)
            assert all("\n" not in text and "fake:///" in text for text in errors), errors
            assert len(done) <= 1, (first, second)
            if done:
                try:
                    assert content(url) == done[0], (first, second, errors)
                except (Damaged, FileNotFoundError):
                    # A store without a condition: overwrite=True has let both write between two requests of the other.
                    assert not conditional and overwrite
            outcomes[f"{len(done)} saved"] += 1
            if saves[1].requests < second:  # it has ended before
                break
        if saves[0].requests < first:
            break
    assert outcomes["1 saved"] > 50, outcomes


def replace(url: str, value: float) -> None:
    object_store.ObjectStore(url).clear()
    save_state(url, state(value))


@pytest.mark.parametrize("when", ["before the comparison", "after the comparison", "while it is read"])
def test_a_checkpoint_at_a_url_is_replaced_during_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    url = f"fake://{tmp_path}/c"
    save_state(url, state(1))
    verify, read_boxes = OwnCheckpoint.verify, collective_load.read_boxes

    def verify_slowly(*args: Any) -> None:
        if when == "before the comparison":
            replace(url, 2)
        verify(*args)
        if when == "after the comparison":
            replace(url, 2)

    def read_slowly(*args: Any) -> None:
        if when == "while it is read":
            replace(url, 2)
        read_boxes(*args)

    monkeypatch.setattr(OwnCheckpoint, "verify", verify_slowly)
    monkeypatch.setattr(collective_load, "read_boxes", read_slowly)
    read = {"t": torch.zeros(3)}
    with pytest.raises(
        OSError, match=r"c: another program has replaced or removed the checkpoint while it was read"
    ):
        load_state(url, read, ALONE)
    assert read["t"].tolist() == [0, 0, 0]
    monkeypatch.undo()
    assert content(url) == 2
