"""Checkpoints behind URLs: whole or absent at each failure, one error on every rank, only needed bytes are read."""

from __future__ import annotations

import importlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import INDEX, Damaged, list_checkpoints, remove_checkpoint, save_state
from shardwright.checkpoint.load.checkpoints import checkpoint_at
from shardwright.checkpoint.save.collective_save import write_state
from shardwright.checkpoint.storage import object_files
from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.checkpoint.storage.locations import store_of
from shardwright.checkpoint.storage.object_store import ObjectStore
from shardwright.checkpoint.storage.stores import Store
from shardwright.engine import RankGroup
from tests.checkpoint.kit.models import trained
from tests.checkpoint.kit.states import load_state
from tests.support.pool import multirank

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
from tests.checkpoint.kit.fake_store import FAILS_AT, HIDDEN, FakeStore, known_to_children  # noqa: E402


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    FakeStore.restart()
    yield
    FakeStore.restart()
    fsspec.filesystem("memory").store.clear()


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(30, 5, generator=generator),
        "b": torch.randn(7, generator=generator),
        "step": seed,
    }


def zeros() -> dict[str, Any]:
    return {"a": torch.zeros(30, 5), "b": torch.zeros(7)}


def loads(url: str, seed: int = 0) -> bool:
    """Whether a whole checkpoint is there; it must be the one of this seed. Nothing else may be there."""
    read, expected = zeros(), state(seed)
    try:
        values = load_state(url, read, RankGroup(alone=True))
    except FileNotFoundError as error:
        assert "holds no whole checkpoint: a save was interrupted, or the path is wrong" in str(error)
        assert not read["a"].any() and not read["b"].any()
        return False
    assert all(torch.equal(read[name], expected[name]) for name in read) and values["step"] == seed
    return True


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name != HIDDEN) if folder.exists() else []


def uploads(folder: Path) -> list[str]:
    """Uploads that have not ended."""
    return [each.name for each in (folder / HIDDEN).iterdir()] if (folder / HIDDEN).exists() else []


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_a_url_holds_the_checkpoint_and_nothing_else() -> None:
    url = "memory://runs/one/step-3"
    model = nn.Linear(3, 4)
    sw.save_checkpoint(url, model, extra={"step": 3})
    stored = [each["name"].rsplit("/", 1)[1] for each in fsspec.filesystem("memory").ls("/runs/one/step-3")]
    attempt = checkpoint_at(url).index.attempt  # type: ignore[attr-defined]
    assert sorted(stored) == [".metadata", f"__0_0.{attempt}.distcp", f"__values.{attempt}.distcp", INDEX]
    other = nn.Linear(3, 4)
    assert sw.load_checkpoint(url, other) == {"step": 3}
    assert torch.equal(model.weight, other.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    save_state("memory://runs/dcp", state())
    read = {**zeros(), "step": -1}
    dcp.load(read, storage_reader=FsspecReader("memory://runs/dcp"), no_dist=True)
    assert torch.equal(read["a"], state()["a"]) and read["step"] == 0


def test_a_local_url_is_the_folder(tmp_path: Path) -> None:
    assert isinstance(store_of(f"file://{tmp_path}/c"), LocalStore)
    sw.save_checkpoint(f"file://{tmp_path}/c", nn.Linear(2, 2))
    sw.load_checkpoint(tmp_path / "c", nn.Linear(2, 2))


def test_any_store_of_the_protocol_is_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer process opens it again by its address."""
    inner = ObjectStore(f"fake://{tmp_path}/c")

    def passed_on(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(inner, name)(*args, **kwargs)

    names = [name for name in dir(Store) if not name.startswith("_") and name not in ("path", "is_local")]
    kind = type(
        "Own",
        (),
        {"path": None, "is_local": False, **{name: passed_on(name) for name in (*names, "__str__")}},
    )
    own: Any = kind()
    assert store_of(own) is own
    known_to_children(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    saved, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with sw.AsyncCheckpoint() as background:
        background.save(own, saved)
        background.wait()
    sw.load_checkpoint(own, other)
    assert torch.equal(saved.weight, other.weight)
    remove_checkpoint(own)
    assert list_checkpoints(own) == []


@pytest.mark.parametrize("failure", ["once", "down", "lost"])
def test_each_failure_of_a_save_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setattr(object_files, "BLOCK", 256)
    monkeypatch.setattr(object_files, "SLICE", 100)
    number, outcomes = 0, []
    while True:
        number += 1
        folder, url = tmp_path / str(number), f"fake://{tmp_path}/{number}"
        FakeStore.restart(number, failure)
        problem = None
        try:
            save_state(url, state())
        except OSError as error:
            problem = str(error)
        reached = FakeStore.changes >= number
        FakeStore.restart()
        if not reached:
            assert problem is None and loads(url)
            break
        outcomes.append(loads(url))
        assert outcomes[-1] == (problem is None), f"change {number}"
        if problem is not None:
            assert url in problem and "the store has failed" in problem and "\n" not in problem
            if failure == "once":
                assert names(folder) == uploads(folder) == []
            save_state(url, state(1), overwrite=True)
            assert loads(url, 1)
    assert number > 8 and not all(outcomes)


def test_an_answer_that_is_lost_does_not_undo_the_commit(tmp_path: Path) -> None:
    url = f"fake://{tmp_path}/c"
    FakeStore.restart()
    save_state(url, state())
    commit = FakeStore.changes - 2  # the two after it remove what is no longer needed
    FakeStore.restart(commit, "lost")
    save_state(f"fake://{tmp_path}/d", state())
    assert FakeStore.calls["pipe_file"] == 5 and loads(f"fake://{tmp_path}/d")


@pytest.mark.parametrize("late", [False, True])
def test_a_load_and_a_save_do_not_need_a_list(tmp_path: Path, late: bool) -> None:
    url = f"fake://{tmp_path}/c"
    FakeStore.restart(late=late)
    save_state(url, state(), verified=True)
    assert loads(url) and FakeStore.calls["ls"] == 2


def test_a_failure_is_removed_though_lists_are_late(tmp_path: Path) -> None:
    FakeStore.restart(late=True)
    save_state(f"fake://{tmp_path}/c", state())
    for number in range(2, FakeStore.changes - 2):
        FakeStore.restart(number, late=True)
        with pytest.raises(OSError, match="the store has failed"):
            save_state(f"fake://{tmp_path}/{number}", state())
        assert names(tmp_path / str(number)) == []
        FakeStore.restart()
        assert not loads(f"fake://{tmp_path}/{number}")


def test_a_whole_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    url = f"fake://{tmp_path}/c"
    save_state(url, state())
    before = names(tmp_path / "c")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"holds a whole checkpoint.*cannot be renamed"):
            save_state(url, state(1), overwrite=overwrite)
    assert names(tmp_path / "c") == before and loads(url)


def test_a_folder_that_was_copied_is_read_and_removed(tmp_path: Path) -> None:
    """Its files have no attempt in their names."""
    save_state(tmp_path / "saved", state())
    shutil.copytree(tmp_path / "saved", tmp_path / "c")
    url = f"fake://{tmp_path}/c"
    assert loads(url)
    with pytest.raises(FileExistsError, match="which no save has written"):
        save_state(url, state(1), overwrite=True)
    (tmp_path / "c" / "thesis.txt").write_text("mine")
    remove_checkpoint(url)
    assert names(tmp_path / "c") == ["thesis.txt"]


@pytest.mark.parametrize("damage", ["index", "short", "missing", "uncommitted"])
def test_what_is_not_whole_is_replaced_if_asked(tmp_path: Path, damage: str) -> None:
    url, folder = f"fake://{tmp_path}/c", tmp_path / "c"
    save_state(url, state())
    (data,) = folder.glob("__0_0.*")
    if damage == "index":
        (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:-9])
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "missing":
        data.unlink()
    else:
        (folder / INDEX).unlink()
    with pytest.raises(FileNotFoundError if damage == "uncommitted" else Damaged):
        load_state(url, zeros(), RankGroup(alone=True))
    with pytest.raises(FileExistsError, match="Pass overwrite=True to delete it"):
        save_state(url, state(1))
    save_state(url, state(1), overwrite=True)
    assert loads(url, 1) and len(names(folder)) == 4


@pytest.mark.parametrize("foreign", ["thesis.txt", "step-9/index.json"])
def test_other_objects_are_never_removed(tmp_path: Path, foreign: str) -> None:
    (tmp_path / "c" / foreign).parent.mkdir(parents=True)
    (tmp_path / "c" / foreign).write_text("mine")
    with pytest.raises(FileExistsError, match="which no save has written"):
        save_state(f"fake://{tmp_path}/c", state(), overwrite=True)
    assert (tmp_path / "c" / foreign).read_text() == "mine" and len(names(tmp_path / "c")) == 1


def test_two_saves_at_once_do_not_mix(tmp_path: Path) -> None:
    """The second begins when the first has uploaded its tensors, and deletes what it finds."""
    url, alone = f"fake://{tmp_path}/c", RankGroup(alone=True)
    place = store_of(url)

    def second(nbytes: int) -> None:
        if not begun:
            begun.append(nbytes)
            save_state(url, state(1), overwrite=True)

    begun: list[int] = []
    with pytest.raises(OSError, match="one program at a time"):
        write_state(url, state(), alone, progress=second)
    assert begun and loads(url, 1)
    assert place.description_name() == INDEX


def test_damage_is_noticed_before_anything_changes(tmp_path: Path) -> None:
    url, folder = f"fake://{tmp_path}/c", tmp_path / "c"
    save_state(url, state())
    for name in names(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 8
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        read = zeros()
        with pytest.raises(Damaged, match=name.replace(".", r"\.")):
            load_state(url, read, RankGroup(alone=True))
        assert not read["a"].any()
        (folder / name).write_bytes(whole)
    assert loads(url)


def test_each_failure_of_a_load_is_one_error(tmp_path: Path) -> None:
    url = f"fake://{tmp_path}/c"
    save_state(url, state())
    for number in range(1, 100):
        FakeStore.restart(number, "answer")
        try:
            load_state(url, zeros(), RankGroup(alone=True))
            break
        except OSError as error:
            assert str(error).startswith(url) and str(error).endswith("cannot be read: the store has failed")
    assert 8 < number < 50


def test_only_needed_bytes_are_read_in_small_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK", "SLICE"):
        monkeypatch.setattr(object_files, name, 1 << 12)
    monkeypatch.setattr(object_files, "READ_AT_ONCE", 1 << 14)
    monkeypatch.setattr("shardwright.checkpoint.format.nested.CHUNK_BYTES", 1 << 13)
    url = f"fake://{tmp_path}/c"
    FakeStore.restart()
    save_state(url, {"a": torch.arange(1 << 16).view(256, 256)})
    stored = sum((tmp_path / "c" / name).stat().st_size for name in names(tmp_path / "c"))
    index = (tmp_path / "c" / INDEX).stat().st_size
    assert FakeStore.largest_request <= max(1 << 13, index)
    FakeStore.restart()
    part = torch.zeros(8, 256, dtype=torch.int64)
    monkeypatch.setattr(
        "shardwright.checkpoint.format.nested.boxes_to_load", lambda name, tensor: [((16, 0), part)]
    )
    load_state(url, {"a": torch.zeros(256, 256, dtype=torch.int64)}, RankGroup(alone=True))
    assert torch.equal(part, torch.arange(1 << 16).view(256, 256)[16:24])
    # Everything once for its digest, and the end of the index, which is looked at first.
    assert FakeStore.bytes_read <= stored + part.nbytes + 3
    assert FakeStore.largest_request <= max(1 << 12, index)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kind", "problem"),
    [
        ("nosuch://a/b", OSError, r"^nosuch://a/b: no file system for nosuch:// \("),
        ("memory://", ValueError, "names no place for a checkpoint"),
        ("memory://a/../b", ValueError, "names no place for a checkpoint"),
        ("simplecache::memory://a/b", ValueError, "expected a URL such as s3://bucket"),
        ("memory://a?b=c", ValueError, "expected a URL such as s3://bucket"),
        (Path("s3://bucket/run"), ValueError, "Pass the URL as a string"),
    ],
    ids=str,
)
def test_urls_that_cannot_be_used_are_one_error(url: Any, kind: type[Exception], problem: str) -> None:
    for use in (sw.save_checkpoint, sw.load_checkpoint):
        with pytest.raises(kind, match=problem) as caught:
            use(url, nn.Linear(2, 2))
        assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        importlib.import_module("fsspec.registry").known_implementations,
        "absent",
        {"class": "a_package_that_is_absent.System", "err": "Install a_package_that_is_absent"},
    )
    with pytest.raises(
        OSError, match=r"^absent://a/b: a package for absent:// is missing \(Install a_package"
    ):
        sw.save_checkpoint("absent://a/b", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (PermissionError("Access Denied"), r"written: Access Denied\. Check the credentials"),
        (RuntimeError("Unable to locate credentials"), r"Check the credentials"),
        (ConnectionRefusedError(111, "Connection refused"), r"refused\. Check the network and the address"),
        (FileNotFoundError("The specified bucket does not exist"), r"bucket does not exist\. Check the URL"),
        (ValueError("one\ntwo"), r"written: one two$"),
        (NotImplementedError(), r"written: NotImplementedError$"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_reasons_of_a_store_are_one_line_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception, advice: str
) -> None:
    FakeStore.restart(1)
    monkeypatch.setattr(FakeStore, "reason", reason)
    with pytest.raises(OSError, match=advice) as caught:
        sw.save_checkpoint(f"fake://{tmp_path}/c", nn.Linear(2, 2))
    assert str(caught.value).startswith(f"fake://{tmp_path}/c/__begun.") and "\n" not in str(caught.value)


def test_a_store_that_does_not_answer_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(object_files, "PATIENCE", 0.2)
    monkeypatch.setattr(FakeStore, "_asked", lambda self, call: answered.wait(20))
    try:
        for use in (sw.save_checkpoint, sw.load_checkpoint):
            with pytest.raises(OSError, match=r"^fake://a/b: no answer within 0 s\. Check the network"):
                use("fake://a/b", nn.Linear(2, 2))
    finally:
        answered.set()


# -- several ranks -----------------------------------------------------------------------------------------------------


def whole(model: nn.Module) -> dict[str, Any]:
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)()
        for name, each in model.state_dict().items()
    }


@pytest.mark.filterwarnings("ignore:The checkpoint was saved by")
@multirank(3)
def test_two_ranks_save_one_loads_and_saves_and_three_load(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    url, everyone = f"fake://{tmp_path}", dist.group.WORLD
    pair, one = dist.new_group([0, 1]), dist.new_group([0])
    expected: Any = None
    if rank < 2:
        model, optimizer = trained(0, pair)
        sw.save_checkpoint(f"{url}/two", model, optimizer, process_group=pair)
        expected = whole(model)
    if rank == 0:
        model, optimizer = trained(1, one)
        sw.load_checkpoint(f"{url}/two", model, optimizer, process_group=one)
        sw.save_checkpoint(f"{url}/one", model, optimizer, process_group=one)
    dist.barrier()
    model, optimizer = trained(2, everyone)
    sw.load_checkpoint(f"{url}/one", model, optimizer)
    read = whole(model)
    if rank < 2:
        assert all(torch.equal(read[name], expected[name]) for name in read)
        assert uploads(tmp_path / "two") == uploads(tmp_path / "one") == []


@multirank(2)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failure_on_one_rank_is_one_error_on_every_rank(
    rank: int, world_size: int, tmp_path: Path, number: int
) -> None:
    url = f"fake://{tmp_path}/c"
    mine = {f"t{rank}": torch.full((5,), float(rank))}
    FakeStore.restart(number if rank == 1 else None)  # rank 1's changes are those of its upload
    with pytest.raises(
        OSError, match=rf"^rank 1: {url}/__1_0\.[0-9a-f]+\.distcp cannot be written: the store has fai"
    ):
        save_state(url, mine)
    FakeStore.restart()
    dist.barrier()
    assert names(tmp_path / "c") == uploads(tmp_path / "c") == []
    save_state(url, mine)
    read = {f"t{rank}": torch.zeros(5)}
    load_state(url, read, RankGroup())
    assert torch.equal(read[f"t{rank}"], mine[f"t{rank}"])


@multirank(2)
def test_a_store_that_the_ranks_do_not_share_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^rank 1: memory://c/__begun.* is not there.*store that they share"):
        save_state("memory://c", {"t": torch.ones(3)})
    assert not fsspec.filesystem("memory").find("/c")


# -- asynchronous ------------------------------------------------------------------------------------------------------


@pytest.mark.extensive("another writer")
@multirank(2)
def test_an_asynchronous_save_is_the_same_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    known_to_children(tmp_path)
    mine = {f"t{rank}": torch.arange(1000.0) + rank, "both": torch.ones(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with sw.AsyncCheckpoint(verified=rank == 0) as checkpoints:
            checkpoints.save_state(f"fake://{tmp_path}/a", mine)
            checkpoints.wait()
            outcome = checkpoints.poll()
            assert outcome is not None and outcome.committed and outcome.path == f"fake://{tmp_path}/a"
            with pytest.raises(FileExistsError, match="holds a whole checkpoint"):
                checkpoints.save_state(f"fake://{tmp_path}/a", mine, overwrite=True)
    save_state(f"fake://{tmp_path}/b", mine)
    attempts = [checkpoint_at(f"fake://{tmp_path}/{name}").index.attempt for name in "ab"]  # type: ignore[union-attr]
    stored = [
        {
            name.replace(attempt, ""): (tmp_path / place / name).read_bytes()
            for name in names(tmp_path / place)
        }
        for place, attempt in zip("ab", attempts, strict=True)
    ]
    assert stored[0].keys() == stored[1].keys() and len(stored[0]) == 5
    for name in ("__0_0..distcp", "__1_0..distcp", "__values..distcp"):
        assert stored[0][name] == stored[1][name]


@pytest.mark.extensive("another writer")
@multirank(2)
def test_an_asynchronous_save_that_fails_leaves_nothing(rank: int, world_size: int, tmp_path: Path) -> None:
    known_to_children(tmp_path)
    mine = {f"t{rank}": torch.full((5,), float(rank))}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv(FAILS_AT, "/broken/__1_0.")
        with sw.AsyncCheckpoint() as checkpoints:
            checkpoints.save_state(f"fake://{tmp_path}/broken", mine)
            with pytest.raises(
                OSError, match=r"^rank 1: fake://\S+/__1_0\.\S+ cannot be written: the store has fai"
            ):
                checkpoints.wait()
            dist.barrier()
            assert not names(tmp_path / "broken") and not uploads(tmp_path / "broken")
            checkpoints.save_state(f"fake://{tmp_path}/next", mine)
    load_state(f"fake://{tmp_path}/next", mine, RankGroup())
