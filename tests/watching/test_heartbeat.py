"""Heartbeats: what is written is what other processes read, also of a process that was killed, and nothing stays
behind."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardwright.engine import heartbeat
from shardwright.watching import STOPPED, HeartbeatReader, launched
from shardwright.watching.reading import ENDED, LEFT, RUNS, in_words


@pytest.fixture
def beat(tmp_path: Path) -> Iterator[heartbeat.Heartbeat]:
    opened = heartbeat.open_heartbeat(1, 4, tmp_path)
    yield opened
    heartbeat.close_heartbeat()


@pytest.mark.parametrize("ranks", [[], [0], [3, 0, 1], [*range(9), 12, 14, 15]])
def test_names_of_groups_have_their_ranks(ranks: list[int]) -> None:
    assert heartbeat.ranks_of(heartbeat.group_name(ranks)) == sorted(ranks)


def test_readers_see_the_place(beat: heartbeat.Heartbeat) -> None:
    beat.at(heartbeat.BACKWARD, "layers.7")
    beat.enter("reduce-scatter", "0-3", 4096, "layers.9")
    seen = HeartbeatReader(beat).look()
    assert (seen.rank, seen.pid, seen.process, seen.answers, seen.step) == (1, os.getpid(), RUNS, None, 1)
    assert (heartbeat.PHASES[seen.phase], seen.unit, seen.collective) == (
        "backward",
        "layers.7",
        "reduce-scatter",
    )
    assert (seen.group, seen.count, seen.nbytes, seen.subject, seen.counts) == (
        "0-3",
        1,
        4096,
        "layers.9",
        {"0-3": 1},
    )
    beat.leave()
    assert HeartbeatReader(beat).look().collective == ""
    beat.await_result("reduce-scatter", "0-3", 4096, "layers.9")
    assert HeartbeatReader(beat).look().counts == {"0-3": 1}  # it was counted when it began


def test_ring_keeps_the_latest_entries_and_no_torn_one(beat: heartbeat.Heartbeat) -> None:
    for number in range(3 * heartbeat.SLOTS):
        beat.enter("all-gather", "0-3", number)
    entries = HeartbeatReader(beat).entries()
    assert [each.nbytes for each in entries] == [*range(2 * heartbeat.SLOTS + 1, 3 * heartbeat.SLOTS)]
    assert [each.count for each in entries] == [each.nbytes + 1 for each in entries]
    slot = heartbeat.RING_AT + (entries[-1].number % heartbeat.SLOTS) * heartbeat.ENTRY.size
    struct.pack_into("q", beat.memory, slot + heartbeat.ENTRY.size - 8, 0)  # as if it were being written
    assert HeartbeatReader(beat).last() == entries[-2]


def test_more_names_than_there_is_room_for(beat: heartbeat.Heartbeat) -> None:
    for number in range(300):
        beat.at(heartbeat.FORWARD, f"{number}." + "x" * 990)
    beat.at(heartbeat.FORWARD, "0." + "x" * 990)
    assert HeartbeatReader(beat).look().unit == "0." + "x" * 990
    beat.at(heartbeat.FORWARD, "299." + "x" * 990)
    assert HeartbeatReader(beat).look().unit == ""


def test_contexts_return_to_the_earlier_place(beat: heartbeat.Heartbeat) -> None:
    beat.at(heartbeat.FORWARD, "a")
    with pytest.raises(KeyError), heartbeat.during(heartbeat.SAVE), heartbeat.inside("barrier", "0-3"):
        assert HeartbeatReader(beat).look().collective == "barrier"
        raise KeyError
    seen = HeartbeatReader(beat).look()
    assert (seen.phase, seen.unit, seen.collective) == (heartbeat.FORWARD, "a", "")


def test_a_phase_around_units_stays(beat: heartbeat.Heartbeat) -> None:
    """A unit's forward in a validation, and what comes after it."""
    beat.at(heartbeat.FORWARD, "a")
    beat.at(heartbeat.OUTSIDE)
    with heartbeat.during(heartbeat.VALIDATION):
        beat.at(heartbeat.FORWARD, "a")
        seen = HeartbeatReader(beat).look()
        assert (seen.phase, seen.unit, seen.around) == (heartbeat.FORWARD, "a", heartbeat.VALIDATION)
        assert in_words(HeartbeatReader(beat).last(), 0).endswith(
            "after step 0  forward of a in the validation"
        )
        beat.at(heartbeat.OUTSIDE)
        seen = HeartbeatReader(beat).look()
        assert (seen.phase, seen.around) == (heartbeat.VALIDATION, heartbeat.VALIDATION)
    beat.at(heartbeat.FORWARD, "a")
    assert HeartbeatReader(beat).look().around == heartbeat.OUTSIDE
    beat.at(heartbeat.OUTSIDE)
    assert HeartbeatReader(beat).look().phase == heartbeat.OUTSIDE


def test_first_steps_and_slow_phases_get_patience(beat: heartbeat.Heartbeat) -> None:
    def patient(phase: int) -> bool:
        beat.at(phase)
        return HeartbeatReader(beat).look().patient

    for number in (1000, 1001):
        beat.begin_step(number)
        assert patient(heartbeat.FORWARD)
    beat.begin_step(1002)
    assert not patient(heartbeat.FORWARD) and patient(heartbeat.SAVE)
    with heartbeat.during(heartbeat.SAMPLE):
        assert patient(heartbeat.FORWARD)
    assert not patient(heartbeat.FORWARD)
    beat.at(heartbeat.FORWARD)
    beat.be_patient()
    assert HeartbeatReader(beat).look().patient


def test_without_a_heartbeat_nothing_is_written(tmp_path: Path) -> None:
    assert heartbeat.current is None
    heartbeat.at(heartbeat.FORWARD)
    heartbeat.begin_step(3)
    with heartbeat.during(heartbeat.SAVE), heartbeat.inside("barrier", "0"):
        pass


def test_states_of_processes_and_what_killed_ones_leave(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        heartbeat.open_heartbeat(0, 1, tmp_path).at(heartbeat.FORWARD, "layers.1")
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 30
    beat, reader = heartbeat.heartbeat_of(child, tmp_path), None
    while reader is None:
        assert time.monotonic() < deadline
        with suppress(FileNotFoundError, ValueError):  # there is no file yet, or not all of it
            reader = HeartbeatReader(beat)
        time.sleep(0.01)
    while reader.look().unit != "layers.1":
        time.sleep(0.01)
    assert reader.process() == RUNS
    heartbeat.remove_left_heartbeats(tmp_path)
    assert beat.exists()  # its process runs
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert reader.process() == STOPPED
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert reader.process() == ENDED
    assert reader.look().unit == "layers.1"
    heartbeat.remove_left_heartbeats(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_process_that_leaves_in_order(tmp_path: Path) -> None:
    reader = HeartbeatReader(heartbeat.open_heartbeat(0, 1, tmp_path))
    heartbeat.close_heartbeat()
    assert reader.process() == LEFT and not [*tmp_path.iterdir()]


def test_a_forked_child_does_not_write(beat: heartbeat.Heartbeat) -> None:
    child = os.fork()
    if not child:
        os._exit(int(heartbeat.current is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_containers_that_share_memory_have_heartbeats_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have a process with this number, of the same user."""
    own = heartbeat.heartbeat_of(os.getpid(), tmp_path)
    monkeypatch.setattr(heartbeat, "_container", lambda: 1)
    assert heartbeat.heartbeat_of(os.getpid(), tmp_path) != own


def test_other_files_are_no_heartbeats(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"", b"x" * heartbeat.SIZE):
        file.write_bytes(content)
        with pytest.raises(FileNotFoundError):
            HeartbeatReader(file)
    with pytest.raises(FileNotFoundError):
        HeartbeatReader(tmp_path / "none")


def test_a_heartbeat_that_is_being_made_is_not_taken_for_a_left_one(tmp_path: Path) -> None:
    """Ranks that start together each remove what earlier ones have left."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            for _ in range(3000):
                file = heartbeat._new_locked_file(path := heartbeat.heartbeat_of(os.getpid(), tmp_path))
                path.unlink()  # fails if it was removed
                os.close(file)
            os._exit(0)
        os._exit(1)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        heartbeat.remove_left_heartbeats(tmp_path)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_a_launcher_does_not_take_the_heartbeat_of_an_earlier_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the same number, and was killed. The new one has no heartbeat yet."""
    monkeypatch.setattr(heartbeat, "folder_of_heartbeats", lambda: tmp_path)
    beat = heartbeat.Heartbeat(0, 1)
    with suppress(OSError):
        os.close(beat._file)  # which ends the lock, as the end of a process does
    assert launched._open(os.getpid()) is None
    beat.close()
