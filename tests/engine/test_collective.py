"""Values between ranks of groups and meshes, errors that all ranks raise, and words for ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwright.checkpoint import Damaged
from shardwright.common.errors import SharedError
from shardwright.engine import OtherRankFailed, RankGroup, ranks_in_words
from tests.support import multirank, world_mesh


@multirank(1, 2, 4)
def test_values_of_ranks(rank: int, world_size: int) -> None:
    sizes = (2, 2) if world_size == 4 else (world_size,)
    mesh = RankGroup.of_mesh(world_mesh(*sizes, names=("a", "b")[: len(sizes)]))
    for ranks in (RankGroup(), mesh, RankGroup(dist.group.WORLD)):
        assert (ranks.rank, ranks.size, ranks.is_first) == (rank, world_size, rank == 0)
        assert list(ranks.numbers) == list(range(world_size))
        assert ranks.all_gather({"rank": rank}) == [{"rank": r} for r in range(world_size)]
        assert ranks.broadcast(f"of {rank}") == "of 0"
        assert ranks.run_on_all(lambda: rank * 2) == [r * 2 for r in range(world_size)]
        assert ranks.run_on_first(lambda: rank + 7) == 7
        assert (
            ranks.run_own(lambda: rank) == ranks.run_own(lambda: rank, others_raise=OtherRankFailed) == rank
        )
    ranks = RankGroup()
    assert ranks.gather(rank) == (list(range(world_size)) if rank == 0 else None)
    assert ranks.scatter([f"for {r}" for r in range(world_size)] if rank == 0 else None) == f"for {rank}"


@multirank(2)
def test_an_error_on_any_rank_is_raised_on_all(rank: int, world_size: int) -> None:
    mesh = RankGroup.of_mesh(world_mesh(world_size))
    for failing in (0, 1):
        for kind, there in (
            (ValueError, ValueError),
            (Damaged, Damaged),
            (OSError, OSError),
            (ZeroDivisionError, RuntimeError),
        ):

            def action(failing: int = failing, kind: type[Exception] = kind) -> None:
                if rank == failing:
                    raise kind("on purpose")

            for ranks in (RankGroup(), mesh):
                with pytest.raises(there, match=rf"rank {failing}: .*on purpose"):
                    ranks.run_on_all(action)
            with pytest.raises(kind if rank == failing else OtherRankFailed, match="on purpose") as caught:
                mesh.run_own(action, others_raise=OtherRankFailed)
            if rank != failing:
                assert str(caught.value) == (
                    f"Rank {failing} failed, so all ranks stop. {kind.__name__}: on purpose"
                )
            with pytest.raises(kind if rank == failing else LookupError):
                mesh.run_own(action, others_raise=LookupError)
    with pytest.raises(ValueError, match=r"^equal$"):
        RankGroup().run_on_all(lambda: (_ for _ in ()).throw(ValueError("equal")))


class Mistake(SharedError):
    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@multirank(2)
def test_a_shared_error_stays_as_it_is_on_all_ranks(rank: int, world_size: int) -> None:
    for failing in (0, 1):

        def action(failing: int = failing) -> None:
            raise Mistake("on purpose", 7) if rank == failing else OSError("another one")

        with pytest.raises(Mistake, match=r"^on purpose$") as caught:
            RankGroup().run_on_all(action)
        assert caught.value.status == 7


@multirank(2)
def test_damage_yields_to_a_rank_that_could_not_work(rank: int, world_size: int) -> None:
    ranks = RankGroup()
    for other, wins in ((OSError, OSError), (KeyError, KeyError), (ValueError, Damaged)):

        def action(other: type[Exception] = other) -> None:
            raise (other if rank else Damaged)("on purpose")

        with pytest.raises(wins, match="on purpose") as caught:
            ranks.run_on_all(action)
        assert type(caught.value) is wins


def test_one_process_and_words() -> None:
    for alone in (RankGroup(alone=True), RankGroup.of_mesh(None)):
        assert alone.alone and alone.all_gather(3) == [3] and alone.broadcast(3) == 3
        assert alone.gather(3) == [3] and alone.scatter([3]) == 3
        with pytest.raises(ZeroDivisionError):
            alone.run_on_all(lambda: 1 / 0)
    shown = [ranks_in_words(each) for each in ([1], [1, 2], range(8), [*range(16), 18], range(0, 40, 2))]
    assert shown == [
        "rank 1", "ranks 1, 2", "ranks 0, 1, 2, 3, 4, 5, 6, 7", "ranks 0-15, 18",
        "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more",
    ]  # fmt: skip


@multirank(2, 3)
@pytest.mark.parametrize("last", [True, False])
def test_equal_values_or_an_error_that_names_the_ranks(rank: int, world_size: int, last: bool) -> None:
    ranks = RankGroup.of_mesh(world_mesh(world_size)) if last else RankGroup()
    ranks.check_equal(ranks.all_gather("same"), lambda *found: ValueError("never", found))
    odd = world_size - 1 if last else 0
    values = ranks.all_gather("odd" if rank == odd else "same")
    with pytest.raises(ValueError, match="differs") as caught:
        ranks.check_equal(values, lambda *found: ValueError("differs", found))
    others = [each for each in range(world_size) if (each == odd) == last]
    assert caught.value.args[1] == (others, "odd" if last else "same", "same" if last else "odd")
