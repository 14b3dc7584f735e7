"""Boards: what is written is what other processes read, also of a process that was killed, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardwright.engine import heartbeat as boards
from shardwright.watching import launched
from shardwright.watching.reading import ENDED, LEFT, RUNS, STOPPED, BoardReader, in_words


@pytest.fixture
def board(tmp_path: Path) -> Iterator[boards.Board]:
    opened = boards.open_board(1, 4, tmp_path)
    yield opened
    boards.close_board()


@pytest.mark.parametrize("ranks", [[], [0], [3, 0, 1], [*range(9), 12, 14, 15]])
def test_names_of_groups_have_their_ranks(ranks: list[int]) -> None:
    assert boards.ranks_of(boards.group_name(ranks)) == sorted(ranks)


def test_readers_see_the_place(board: boards.Board) -> None:
    board.at(boards.BACKWARD, "layers.7")
    board.enter("reduce-scatter", "0-3", 4096, "layers.9")
    seen = BoardReader(board).look()
    assert (seen.rank, seen.pid, seen.process, seen.answers, seen.step) == (1, os.getpid(), RUNS, None, 1)
    assert (boards.PHASES[seen.phase], seen.unit, seen.collective) == (
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
    board.leave()
    assert BoardReader(board).look().collective == ""
    board.await_result("reduce-scatter", "0-3", 4096, "layers.9")
    assert BoardReader(board).look().counts == {"0-3": 1}  # it was counted when it began


def test_ring_keeps_the_latest_entries_and_no_torn_one(board: boards.Board) -> None:
    for number in range(3 * boards.SLOTS):
        board.enter("all-gather", "0-3", number)
    entries = BoardReader(board).entries()
    assert [each.nbytes for each in entries] == [*range(2 * boards.SLOTS + 1, 3 * boards.SLOTS)]
    assert [each.count for each in entries] == [each.nbytes + 1 for each in entries]
    slot = boards.RING_AT + (entries[-1].number % boards.SLOTS) * boards.ENTRY.size
    struct.pack_into("q", board.memory, slot + boards.ENTRY.size - 8, 0)  # as if it were being written
    assert BoardReader(board).last() == entries[-2]


def test_more_names_than_there_is_room_for(board: boards.Board) -> None:
    for number in range(300):
        board.at(boards.FORWARD, f"{number}." + "x" * 990)
    board.at(boards.FORWARD, "0." + "x" * 990)
    assert BoardReader(board).look().unit == "0." + "x" * 990
    board.at(boards.FORWARD, "299." + "x" * 990)
    assert BoardReader(board).look().unit == ""


def test_contexts_return_to_the_earlier_place(board: boards.Board) -> None:
    board.at(boards.FORWARD, "a")
    with pytest.raises(KeyError), boards.during(boards.SAVE), boards.inside("barrier", "0-3"):
        assert BoardReader(board).look().collective == "barrier"
        raise KeyError
    seen = BoardReader(board).look()
    assert (seen.phase, seen.unit, seen.collective) == (boards.FORWARD, "a", "")


def test_a_phase_around_units_stays(board: boards.Board) -> None:
    """A unit's forward in a validation, and what comes after it."""
    board.at(boards.FORWARD, "a")
    board.at(boards.OUTSIDE)
    with boards.during(boards.VALIDATION):
        board.at(boards.FORWARD, "a")
        seen = BoardReader(board).look()
        assert (seen.phase, seen.unit, seen.around) == (boards.FORWARD, "a", boards.VALIDATION)
        assert in_words(BoardReader(board).last(), 0).endswith("after step 0  forward of a in the validation")
        board.at(boards.OUTSIDE)
        seen = BoardReader(board).look()
        assert (seen.phase, seen.around) == (boards.VALIDATION, boards.VALIDATION)
    board.at(boards.FORWARD, "a")
    assert BoardReader(board).look().around == boards.OUTSIDE
    board.at(boards.OUTSIDE)
    assert BoardReader(board).look().phase == boards.OUTSIDE


def test_first_steps_and_slow_phases_get_patience(board: boards.Board) -> None:
    def patient(phase: int) -> bool:
        board.at(phase)
        return BoardReader(board).look().patient

    for number in (1000, 1001):
        board.begin_step(number)
        assert patient(boards.FORWARD)
    board.begin_step(1002)
    assert not patient(boards.FORWARD) and patient(boards.SAVE)
    with boards.during(boards.SAMPLE):
        assert patient(boards.FORWARD)
    assert not patient(boards.FORWARD)
    board.at(boards.FORWARD)
    board.be_patient()
    assert BoardReader(board).look().patient


def test_without_a_board_nothing_is_written(tmp_path: Path) -> None:
    assert boards.current is None
    boards.at(boards.FORWARD)
    boards.begin_step(3)
    with boards.during(boards.SAVE), boards.inside("barrier", "0"):
        pass


def test_states_of_processes_and_what_killed_ones_leave(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        boards.open_board(0, 1, tmp_path).at(boards.FORWARD, "layers.1")
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 30
    board, reader = boards.board_of(child, tmp_path), None
    while reader is None:
        assert time.monotonic() < deadline
        with suppress(FileNotFoundError, ValueError):  # there is no file yet, or not all of it
            reader = BoardReader(board)
        time.sleep(0.01)
    while reader.look().unit != "layers.1":
        time.sleep(0.01)
    assert reader.process() == RUNS
    boards.remove_left_boards(tmp_path)
    assert board.exists()  # its process runs
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert reader.process() == STOPPED
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert reader.process() == ENDED
    assert reader.look().unit == "layers.1"
    boards.remove_left_boards(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_process_that_leaves_in_order(tmp_path: Path) -> None:
    reader = BoardReader(boards.open_board(0, 1, tmp_path))
    boards.close_board()
    assert reader.process() == LEFT and not [*tmp_path.iterdir()]


def test_a_forked_child_does_not_write(board: boards.Board) -> None:
    child = os.fork()
    if not child:
        os._exit(int(boards.current is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_containers_that_share_memory_have_boards_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have a process with this number, of the same user."""
    own = boards.board_of(os.getpid(), tmp_path)
    monkeypatch.setattr(boards, "_container", lambda: 1)
    assert boards.board_of(os.getpid(), tmp_path) != own


def test_other_files_are_no_boards(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for content in (b"", b"x" * boards.SIZE):
        file.write_bytes(content)
        with pytest.raises(FileNotFoundError):
            BoardReader(file)
    with pytest.raises(FileNotFoundError):
        BoardReader(tmp_path / "none")


def test_a_board_that_is_being_made_is_not_taken_for_a_left_one(tmp_path: Path) -> None:
    """Ranks that start together each remove what earlier ones have left."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            for _ in range(3000):
                file = boards._new_locked_file(path := boards.board_of(os.getpid(), tmp_path))
                path.unlink()  # fails if it was removed
                os.close(file)
            os._exit(0)
        os._exit(1)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        boards.remove_left_boards(tmp_path)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_a_launcher_does_not_take_the_board_of_an_earlier_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the same number, and was killed. The new one has no board yet."""
    monkeypatch.setattr(boards, "folder_of_boards", lambda: tmp_path)
    board = boards.Board(0, 1)
    with suppress(OSError):
        os.close(board._file)  # which ends the lock, as the end of a process does
    assert launched._open(os.getpid()) is None
    board.close()
