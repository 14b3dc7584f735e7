"""Conversion of checkpoints: every form into every other bit by bit, names, memory, damage, and nothing that runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwright as sw
from shardwright.checkpoint import Damaged, Joined, Transposed, convert_checkpoint as convert
from shardwright.checkpoint.convert.conversion import FORMS
from shardwright.checkpoint.load.checkpoints import OwnCheckpoint, checkpoint_at
from shardwright.checkpoint.pretrained import files
from shardwright.checkpoint.storage.local_files import LocalWriter
from shardwright.checkpoint.storage.local_store import LocalSave
from shardwright.engine import RankGroup
from tests.checkpoint.kit.states import load_state
from tests.support import multirank, world_mesh


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(torch.float32)
    model.register_parameter("small", nn.Parameter(torch.randn(3, 2).bfloat16()))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    loss = model(torch.randn(4, 5)).square().mean() + model.small.float().sum() + model.empty.sum()
    loss.backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = trained()
    sw.save_checkpoint(tmp_path / "saved", model, optimizer, extra={"step": 3, "ends": (1, float("inf"))})
    return tmp_path / "saved"


def same(read: dict[str, Any], expected: dict[str, Any]) -> bool:
    return read.keys() == expected.keys() and all(
        read[name].dtype == value.dtype and torch.equal(read[name], value) for name, value in expected.items()
    )


def of_safetensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: each.view().clone() for name, each in files.open_stored(path).items()}


def name_of(form: str) -> str:
    return {"torch": "converted.pt"}.get(form, "converted")


@pytest.mark.extensive(
    "each form into each",
    but=("shardwright-dcp", "dcp-torch", "torch-safetensors", "safetensors-shardwright"),
)
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_weights_pass_through_two_forms(saved: Path, tmp_path: Path, first: str, second: str) -> None:
    between, end = tmp_path / f"between-{name_of(first)}", tmp_path / f"end-{name_of(second)}"
    convert(saved, between, first)
    convert(between, end, second)
    back = tmp_path / "back"
    convert(end, back, "shardwright")
    model, _ = trained(1)
    sw.load_checkpoint(back, model)
    assert same(model.state_dict(), trained()[0].state_dict())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["saved", between.name, end.name, "back"])


@pytest.mark.parametrize("form", ["shardwright", "dcp", "torch"])
def test_a_whole_state_is_kept(saved: Path, tmp_path: Path, form: str) -> None:
    convert(saved, tmp_path / name_of(form), form)
    convert(tmp_path / name_of(form), tmp_path / "back", "shardwright")
    model, optimizer = trained(1)
    random.seed(5)
    extra = sw.load_checkpoint(tmp_path / "back", model, optimizer)
    assert extra == {"step": 3, "ends": (1, float("inf"))}
    drawn = random.random()
    expected, its = trained(1)
    sw.load_checkpoint(saved, expected, its)
    assert random.random() == drawn
    assert same(model.state_dict(), expected.state_dict())
    assert optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"] == 0.03
    mine, theirs = optimizer.state_dict()["state"], its.state_dict()["state"]
    assert mine.keys() == theirs.keys() and all(same(mine[n], theirs[n]) for n in mine)


def test_torch_reads_what_it_should(saved: Path, tmp_path: Path) -> None:
    model, optimizer = trained()
    convert(saved, tmp_path / "dcp", "dcp")
    convert(saved, tmp_path / "all.pt", "torch")
    assert not (tmp_path / "dcp" / "index.json").exists()
    other, its = trained(1)
    values, moments = get_state_dict(other, its)
    dcp.load({"model": values, "optimizer": moments}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(values, model.state_dict())
    for mmap in (False, True):
        content = torch.load(tmp_path / "all.pt", weights_only=True, mmap=mmap)
        assert same(content["model"], model.state_dict())
    assert content["extra"] == {"step": 3, "ends": (1, float("inf"))}
    moment = content["optimizer"]["state"]["0.weight"]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])
    assert moment.data_ptr() % 64 == 0


def test_the_safetensors_package_reads_it(saved: Path, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    done = convert(saved, tmp_path / "one.safetensors", "safetensors", dtype=torch.float16)
    assert sorted(done.left_out) == ["extra", "generators", "optimizer"]
    expected = {n: v.half() if v.is_floating_point() else v for n, v in trained()[0].state_dict().items()}
    assert same(load_file(tmp_path / "one.safetensors"), expected)
    convert(saved, tmp_path / "several", "safetensors", max_shard_size=150)
    index = json.loads((tmp_path / "several" / files.SAFETENSORS_INDEX).read_text())["weight_map"]
    read: dict[str, Any] = {}
    for file in set(index.values()):
        read |= load_file(tmp_path / "several" / file)
    assert len(set(index.values())) > 1
    assert same(read, trained()[0].state_dict())


def test_a_part_is_chosen_by_its_key(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "moments.safetensors", "safetensors", key="optimizer.state")
    assert "0.weight.exp_avg" in of_safetensors(tmp_path / "moments.safetensors")
    convert(saved, tmp_path / "moments.pt", "torch", key="optimizer")
    content = torch.load(tmp_path / "moments.pt", weights_only=True)
    assert content["param_groups"][0]["lr"] == 0.03 and "0.weight" in content["state"]
    convert(saved, tmp_path / "model", "dcp", key="model")
    assert same(of_dcp(tmp_path / "model"), {f"model.{n}": v for n, v in trained()[0].state_dict().items()})
    with pytest.raises(ValueError, match=r"no tensors under 'mode'; its keys are .*model"):
        convert(saved, tmp_path / "none", "dcp", key="mode")


def of_dcp(path: Path) -> dict[str, torch.Tensor]:
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in entries.items()}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_a_key_map_renames_and_changes_forms(saved: Path, tmp_path: Path) -> None:
    weights = trained()[0].state_dict()
    names = {"0.weight": Transposed("in.w"), "2.weight": Joined(("a", "b"), 0, (1, 2)), "small": None}
    convert(saved, tmp_path / "c.safetensors", "safetensors", key_map=names)
    stored = of_safetensors(tmp_path / "c.safetensors")
    assert torch.equal(stored["in.w"], weights["0.weight"].t())
    assert torch.equal(torch.cat([stored["a"], stored["b"]]), weights["2.weight"])
    assert "small" not in stored and torch.equal(stored["0.bias"], weights["0.bias"])
    convert(saved, tmp_path / "c.pt", "torch", key="model", key_map={"0.weight": "first"})
    assert torch.equal(torch.load(tmp_path / "c.pt")["first"], weights["0.weight"])
    convert(tmp_path / "c.pt", tmp_path / "ours", "shardwright", key_map={"first": "0.weight"})
    other, _ = trained(1)
    sw.load_checkpoint(tmp_path / "ours", other)
    assert same(other.state_dict(), weights)
    for key_map, problem in (
        ({"first": "0.bias"}, "two tensors get"),
        ({"small": Transposed("x")}, "another form"),
    ):
        with pytest.raises(ValueError, match=problem):
            convert(tmp_path / "c.pt", tmp_path / "none", "dcp", key_map=key_map)
    with pytest.raises(ValueError, match="nested state"):
        convert(saved, tmp_path / "none", "dcp", key_map={"small": "h"})
    assert not (tmp_path / "none").exists()


@multirank(2)
def test_folders_of_fsdp2(rank: int, world_size: int, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    fully_shard(model, mesh=world_mesh(world_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    values, moments = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": moments, "step": 7}, checkpoint_id=str(tmp_path / "theirs"))
    dcp.save(dict(values), checkpoint_id=str(tmp_path / "flat"))
    expected = {name: value.full_tensor() for name, value in values.items()}
    if rank == 0:
        for source in ("theirs", "flat"):
            convert(tmp_path / source, tmp_path / f"{source}.safetensors", "safetensors")
            assert same(of_safetensors(tmp_path / f"{source}.safetensors"), expected)
            convert(tmp_path / source, tmp_path / f"{source}-ours", "shardwright")
        plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        its = torch.optim.AdamW(plain.parameters(), lr=0.5)
        state = {"model": plain.state_dict()}
        values = load_state(tmp_path / "theirs-ours", state, RankGroup(alone=True))
        assert same(plain.state_dict(), expected)
        assert values["step"] == 7 and values["optimizer"]["param_groups"][0]["lr"] == its.defaults["lr"] / 5
        assert checkpoint_at(tmp_path / "flat-ours").tensors.keys() == {f"model.{name}" for name in expected}
    torch.distributed.barrier()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_damage_is_noticed_while_reading(saved: Path, tmp_path: Path) -> None:
    opened = checkpoint_at(saved)
    assert isinstance(opened, OwnCheckpoint)
    content = bytearray((saved / "__0_0.distcp").read_bytes())
    content[opened.index.tensors["model.0.weight"].chunks[0].data] ^= 16
    (saved / "__0_0.distcp").write_bytes(content)
    before = sorted(p.name for p in tmp_path.iterdir())
    for form in FORMS:
        with pytest.raises(Damaged, match=r"saved is damaged: __0_0\.distcp .*SHA-256"):
            convert(saved, tmp_path / name_of(form), form)
    (saved / "index.json").write_text((saved / "index.json").read_text()[:-9])
    with pytest.raises(Damaged, match=r"saved is damaged: no readable index\.json"):
        convert(saved, tmp_path / "x", "dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for form, name in zip((*FORMS, "safetensors"), ("a", "b", "c", "d.pt", "e.safetensors"), strict=True):
        with monkeypatch.context() as patched:
            patched.setattr("shardwright.common.durable.os.fsync", full)
            patched.setattr("shardwright.checkpoint.pretrained.files.os.pwrite", full)
            patched.setattr("zipfile._ZipWriteFile.write", full)
            with pytest.raises(OSError, match="No space left"):
                convert(saved, tmp_path / name, form)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("form", ["shardwright", "dcp"])
def test_a_file_that_lost_bytes_gets_no_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """As on a full disk whose file system reports no error: the length is compared before the commit."""

    class Short(LocalWriter):
        def finish(self) -> None:
            if self._path.name == "__0_0.distcp":
                os.truncate(self._descriptor, 100)
            super().finish()

    monkeypatch.setattr(LocalSave, "create", lambda save, name: Short(save.path / name))
    with pytest.raises(OSError, match=r"__0_0\.distcp holds 100 bytes"):
        convert(saved, tmp_path / "converted", form)
    assert os.listdir(tmp_path) == ["saved"]


def test_wrong_arguments_are_errors_that_leave_nothing(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    torch.save(torch.ones(2), tmp_path / "bare.pt")
    torch.save({"a": {"b": torch.ones(2)}, "c": 1}, tmp_path / "nested.pt")
    torch.save({"a": torch.ones(2), "c": {1, 2}}, tmp_path / "set.pt")
    before = sorted(p.name for p in tmp_path.iterdir())
    cases: list[tuple[Path, Path, dict[str, Any], type[Exception], str]] = [
        (saved, tmp_path / "there", {}, FileExistsError, "there exists"),
        (saved, tmp_path / "no" / "x", {}, FileNotFoundError, "no such folder"),
        (saved, saved / "x", {}, ValueError, "inside"),
        (tmp_path / "none", tmp_path / "x", {}, FileNotFoundError, "found nothing there"),
        (tmp_path / "bare.pt", tmp_path / "x", {}, ValueError, "holds a Tensor"),
        (tmp_path / "nested.pt", tmp_path / "x", {"to": "safetensors"}, ValueError, "keys: a, c"),
        (tmp_path / "set.pt", tmp_path / "x", {}, ValueError, "c is a builtins.set"),
        (saved, tmp_path / "x", {"dtype": torch.float16}, ValueError, "only for safetensors"),
        (saved, tmp_path / "x", {"to": "safetensors", "dtype": torch.int8}, ValueError, "floating"),
        (saved, tmp_path / "x", {"to": "zip"}, ValueError, "expected a form"),
    ]
    for source, destination, options, kind, problem in cases:
        with pytest.raises(kind, match=problem):
            convert(source, destination, **{"to": "shardwright", **options})
    assert sorted(p.name for p in tmp_path.iterdir()) == before


class Attack:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("place", ["value", "tensor", "metadata", "torch", "compressed"])
def test_nothing_in_a_foreign_checkpoint_runs(tmp_path: Path, place: str) -> None:
    path, ran = tmp_path / "foreign", tmp_path / "ran"
    if place == "torch":
        path = tmp_path / "foreign.pt"
        torch.save({"a": torch.ones(2), "b": Attack(ran)}, path)
    else:
        state = {"a": torch.ones(2), "b": Attack(ran) if place == "value" else 3}
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
        file = path / "__0_0.distcp"
    if place == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(Attack(ran)))
    if place in ("tensor", "compressed"):
        with zipfile.ZipFile(file) as records:
            content = {name: records.read(name) for name in records.namelist()}
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for index, info in metadata.storage_data.items():
            with open(file, "ab") as stream:
                info.offset = stream.tell()
            if index.fqn == "a":
                target = tmp_path / "part.zip"
                compression = zipfile.ZIP_DEFLATED if place == "compressed" else zipfile.ZIP_STORED
                with zipfile.ZipFile(target, "w", compression) as records:
                    for name, data in content.items():
                        attacks = place == "tensor" and name.endswith("data.pkl")
                        records.writestr(name, pickle.dumps(Attack(ran), 2) if attacks else data)
                info.length = target.stat().st_size
                with open(file, "ab") as stream:
                    stream.write(target.read_bytes())
                target.unlink()
                break
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for form in ("shardwright", "torch"):
        with pytest.raises(Damaged):
            convert(path, tmp_path / name_of(form), form)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# -- memory ------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, threading, time
from pathlib import Path
from shardwright.checkpoint.format import nested
from shardwright.checkpoint.convert.conversion import convert_checkpoint as convert
nested.CHUNK_BYTES = 4 << 20

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10

def rise(source, to):
    global peak, done
    before, peak, done = anonymous(), 0, False
    watcher = threading.Thread(target=watch)
    watcher.start()
    convert(source, source.with_name(f"{source.name}-{to}" + (".pt" if to == "torch" else "")), to)
    done = True
    watcher.join()
    return (peak - before) >> 20

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

for case in sys.argv[2:]:
    first, to = case.split("-")
    rise(Path(sys.argv[1]) / f"small-{first}", to)
    print(rise(Path(sys.argv[1]) / f"large-{first}", to))
"""

CASES = ["shardwright-safetensors", "dcp-shardwright", "safetensors-torch"]


@pytest.mark.extensive("a measurement with large files")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.checkpoint.format.nested.CHUNK_BYTES", 4 << 20)
    largest = 24  # MiB, of 72 in all
    sizes = [largest, *[8] * 6]
    tensors = {f"t{n}": torch.full((size << 8, 1 << 10), float(n)) for n, size in enumerate(sizes)}
    torch.save(tensors, tmp_path / "large.pt")
    torch.save({"t": torch.ones(2)}, tmp_path / "small.pt")
    for case in CASES:
        for size in ("small", "large"):
            first = case.partition("-")[0]
            convert(tmp_path / f"{size}.pt", tmp_path / f"{size}-{first}", first)
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", MEASURE, str(tmp_path), *CASES]
    done = subprocess.run(code, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # A part of 4 MiB, buffers, and the interpreter's own growth come on top.
    rises = dict(zip(CASES, map(int, done.stdout.split()), strict=True))
    assert all(rise <= largest + 12 for rise in rises.values()), rises
