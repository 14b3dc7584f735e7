"""``open_checkpoint`` and the options of saves and loads that programs around a training loop need."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwright as sw
from shardwright.checkpoint import (
    Damaged,
    StoredForm,
    list_checkpoints,
    nested,
    open_checkpoint,
    remove_checkpoint,
    save_state,
)
from tests.support import multirank, world_mesh

FROZEN, TRAINED = "0.weight", "2.weight"


def made(seed: int, dtype: torch.dtype = torch.float32, one_group: bool = True) -> tuple[Any, Any]:
    """A sharded model whose first layer is frozen, and its optimizer, with one group of parameters or two."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    model[0].requires_grad_(False)
    sw.fully_shard(model, mesh=world_mesh(dist.get_world_size()))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained}] if one_group else [{"params": [p]} for p in trained]
    return model, sw.fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.1 if seed == 0 else 0.5))


def step(model: Any, optimizer: Any) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def saved(folder: Path, **options: Any) -> tuple[Any, Any]:
    model, optimizer = made(0)
    step(model, optimizer)
    extra = {"step": 1, "deep": {"places": [1, 2]}}
    sw.save_checkpoint(folder, model, optimizer, extra=extra, verified=True, **options)
    return model, optimizer


@multirank(1, 2)
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_open_says_what_there_is(rank: int, world_size: int, tmp_path: Path, frozen: bool) -> None:
    model, _ = saved(tmp_path / "c", frozen=frozen)
    stored = sw.open_checkpoint(tmp_path / "c")
    assert stored.value("extra") == {"step": 1, "deep": {"places": [1, 2]}} and stored.value("other") is None
    assert (f"model.{FROZEN}" in stored.tensors) == frozen
    form = stored.tensors[f"model.{TRAINED}"]
    assert (form.dtype, form.shape, form.nbytes) == (torch.float32, (3, 5), 60) and form.parts >= 1
    assert stored.ranks == world_size and stored.has_digests and "torch" in stored.about
    assert stored.files == {name: (tmp_path / "c" / name).stat().st_size for name in stored.files}
    counted: list[int] = []
    stored.verify(counted.append)
    assert rank or sum(counted)
    for dtype in (torch.float32, torch.bfloat16):
        read = torch.zeros(3, 5, dtype=dtype)
        stored.read({f"model.{TRAINED}": read})
        assert torch.equal(read, values(model)[TRAINED].to(dtype))


@pytest.mark.extensive("each choice")
@multirank(1, 2)
def test_loads_with_every_choice(rank: int, world_size: int, tmp_path: Path) -> None:
    """Frozen parameters, settings, dtypes and groups; a choice that does not fit is one error, and changes nothing."""
    folders = {frozen: tmp_path / f"frozen-{frozen}" for frozen in (True, False)}
    expected = {frozen: values(saved(folder, frozen=frozen)[0]) for frozen, folder in folders.items()}
    for frozen, settings, convert, same_dtype, one_group in itertools.product((True, False), repeat=5):
        folder = folders[frozen]
        model, optimizer = made(1, torch.float32 if same_dtype else torch.bfloat16, one_group)
        before = values(model)
        options = {"frozen": frozen, "settings": settings, "convert": convert, "generators": False}
        case = (options, same_dtype, one_group)
        if not (same_dtype or convert):
            with pytest.raises(ValueError, match=r"has dtype torch\.float32, expected torch\.bfloat16"):
                sw.load_checkpoint(folder, model, optimizer, **options)
            assert all(torch.equal(value, before[name]) for name, value in values(model).items()), case
            continue
        sw.load_checkpoint(sw.open_checkpoint(folder), model, optimizer, **options)
        for name, value in values(model).items():
            from_there = frozen or not name.startswith("0.")
            there = expected[frozen][name].to(value.dtype) if from_there else before[name]
            assert torch.equal(value, there), (case, name)
        assert {group["lr"] for group in optimizer.param_groups} == {0.1 if settings else 0.5}, case
        assert all(float(state["step"]) == 1 for state in optimizer.state.values()) and optimizer.state, case


@multirank(2)
def test_one_that_was_replaced_or_damaged_is_not_loaded(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path / "c")
    stored = sw.open_checkpoint(tmp_path / "c")
    before = values(model)
    sw.save_checkpoint(tmp_path / "c", model, optimizer, extra={"step": 2}, overwrite=True)
    with pytest.raises(OSError, match="another program has replaced"):
        sw.load_checkpoint(stored, model, optimizer)
    with pytest.raises(OSError, match="another program has replaced"):
        stored.verify()
    again = sw.open_checkpoint(tmp_path / "c")
    assert again.value("extra") == {"step": 2}
    dist.barrier()
    if rank == 0:
        file = tmp_path / "c" / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    for action in (again.verify, lambda: sw.load_checkpoint(again, model, optimizer)):
        with pytest.raises(Damaged, match=r"__1_0\.distcp is not the file that was saved"):
            action()
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@multirank(1, 2)
def test_a_nested_state_with_notes(rank: int, world_size: int, tmp_path: Path) -> None:
    first, _ = made(0)
    second, _ = made(1)
    state = {"one": first.state_dict(), "two": second.state_dict(), "numbers": [1, {"x": None}]}
    save_state(tmp_path / "c", state, notes={"by": "a test"})
    stored = open_checkpoint(tmp_path / "c")
    assert stored.about["by"] == "a test" and stored.value("numbers") == [1, {"x": None}]
    rooms = {name: torch.zeros(form.shape) for name, form in stored.tensors.items()}
    stored.read(rooms)
    entries = {
        keys: rooms[each.name] if isinstance(each, StoredForm) else each
        for keys, each in stored.entries.items()
    }
    content = nested(entries)
    for key, model in (("one", first), ("two", second)):
        assert all(torch.equal(content[key][name], value) for name, value in values(model).items())
    assert content["numbers"] == state["numbers"]


def test_a_folder_by_torchs_writer(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 4, "rate": {"lr": 0.5}}
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    stored = sw.open_checkpoint(tmp_path / "c")
    assert not stored.has_digests and stored.ranks is None and stored.value("step") is None
    assert stored.tensors["model.w"].shape == (2, 3)
    assert stored.pickled_values({"step", "rate"}) == {("step",): 4, ("rate", "lr"): 0.5}
    room = torch.zeros(2, 3)
    stored.read({"model.w": room})
    assert torch.equal(room, state["model"]["w"])


@pytest.mark.extensive("another writer")
@multirank(2)
def test_a_background_save_leaves_out_what_is_frozen(rank: int, world_size: int, tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path / "now", frozen=False)
    with sw.AsyncCheckpoint(verified=True) as checkpoints:
        checkpoints.save(tmp_path / "later", model, optimizer, extra={"step": 1}, frozen=False)
    now, later = (set(sw.open_checkpoint(tmp_path / name).tensors) for name in ("now", "later"))
    assert now == later and f"model.{FROZEN}" not in now


def test_checkpoints_are_listed_and_removed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert list_checkpoints(tmp_path / "nothing") == []
    for name in ("one", "two"):
        sw.save_checkpoint(tmp_path / name, model)
    (tmp_path / "file").touch()
    assert sorted(list_checkpoints(tmp_path)) == ["one", "two"]
    (tmp_path / "two").rename(tmp_path / ".two.old")  # as a save leaves it that was killed while it replaced
    assert "two" not in list_checkpoints(tmp_path)
    assert {"one", "two"} <= set(list_checkpoints(tmp_path, recover=True))
    remove_checkpoint(tmp_path / "one")
    assert list_checkpoints(tmp_path) == ["two"]


@pytest.mark.parametrize("place", ["folder", "url", "store with folders"])
def test_folders_that_are_no_checkpoints_are_not_listed(place: str, tmp_path: Path) -> None:
    """Damaged checkpoints are, whatever is left of them; unfinished saves and other folders are not."""
    parent: Path | str = tmp_path
    if place == "url":
        fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
        parent = "memory://listed"
        fsspec.filesystem("memory").pipe_file("/listed/notes.txt", b"text")
    if place == "store with folders":
        pytest.importorskip("fsspec", reason="needs fsspec")
        parent = f"fsspec.implementations.local:LocalFileSystem://{tmp_path}"
        (tmp_path / "notes.txt").write_text("text")
        for name in ("whole", "no-index", "no-metadata", "bare"):
            (tmp_path / name).mkdir()
    names = ["whole", "no-index", "no-metadata", "bare"]
    for name in names:
        sw.save_checkpoint(f"{parent}/{name}", nn.Linear(2, 2))
    if place == "folder":
        (tmp_path / "no-index" / "index.json").unlink()
        (tmp_path / "no-metadata" / ".metadata").unlink()
        for file in (tmp_path / "bare").iterdir():
            file.unlink()
        shutil.copytree(tmp_path / "whole", tmp_path / f".new.{'0' * 16}.partial")
        for name in ("logs", "src/inner"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "logs" / "0.txt").touch()
        (tmp_path / "src" / "model.safetensors").touch()
        (tmp_path / "file").touch()
    assert sorted(list_checkpoints(parent)) == sorted(names)


@multirank(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_is_frozen_has_the_names_of_the_plain_model(
    rank: int, world_size: int, wrapped: bool, tmp_path: Path
) -> None:
    """A module may be called ``module``, also beside DistributedDataParallel, which calls its model so."""
    model = nn.Module()
    model.module, model.weight = nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(2, 2))
    model.module.requires_grad_(False)
    model.forward = lambda x: model.module(x) @ model.weight  # type: ignore[method-assign]
    whole: nn.Module = nn.parallel.DistributedDataParallel(model) if wrapped else model
    sw.save_checkpoint(tmp_path / "c", whole, frozen=False, generators=False)
    assert [*sw.open_checkpoint(tmp_path / "c").tensors] == ["model.weight"]
    with torch.no_grad():
        model.module.weight.fill_(7)
        model.weight.fill_(7)
    sw.load_checkpoint(tmp_path / "c", whole, frozen=False, generators=False)
    assert (model.module.weight == 7).all() and (model.weight == 1).all()
