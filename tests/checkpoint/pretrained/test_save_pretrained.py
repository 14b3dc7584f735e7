"""Saving: whole folders or none, no rank that holds the model, and nothing lost on the way back."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.checkpoint import Joined, Slice, Stacked, Transposed, open_stored
from shardwright.checkpoint.pretrained import save_pretrained
from shardwright.engine import RaggedTensor
from tests.checkpoint.kit.calls import renames_alone
from tests.checkpoint.kit.models import LAYOUTS, source_model
from tests.engine.kit.models import build, shard
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh


def contents(path: Path) -> dict[str, torch.Tensor]:
    return {key: stored.view().clone() for key, stored in open_stored(path).items()}


CASES = [
    (at, layout)
    for at, layout in zip(
        [*on("zero3", (3,), (4,)), *on("zero1", (2,)), *on("ddp", (2,)), *on("hsdp", (2, 2)), *on("hfsdp", (2, 2))],
        ["shard_1", "element", "row", "per_parameter", "per_parameter", "row"],
        strict=True,
    )
]  # fmt: skip


@on_meshes(CASES, timeout=60)
def test_what_is_saved_is_the_whole_model(
    rank: int, world_size: int, at: On, layout: str, tmp_path: Path
) -> None:
    model = shard(source_model(), mesh=at.mesh, strategy=at.strategy, **LAYOUTS[layout])
    config = {"model_type": "none", "width": 7}
    sw.save_pretrained(model, tmp_path / "new" / "saved", max_shard_size="1 KiB", config=config)
    found, expected = contents(tmp_path / "new" / "saved"), source_model().state_dict()
    del expected["head.weight"]  # tied: written once
    assert list(found) and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    names = sorted(p.name for p in (tmp_path / "new" / "saved").iterdir())
    count = len(names) - 2
    assert names == [
        "config.json",
        *(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)),
        "model.safetensors.index.json",
    ]
    assert json.loads((tmp_path / "new" / "saved" / "config.json").read_text()) == config
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["saved"]
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()  # and the model is as it was


def live() -> dict[int, int]:
    """Address and bytes of the memory of all plain tensors of this process."""
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if (
            issubclass(kind, torch.Tensor)
            and not isinstance(thing, (DTensor, RaggedTensor))
            and not thing.is_meta
        ):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return found


@multirank(4)
def test_no_rank_ever_holds_more_than_one_parameter(rank: int, world_size: int, tmp_path: Path) -> None:
    """Live bytes wherever a tensor was gathered or is about to be written, in this very process."""
    layers = [nn.Linear(64, 96 + 8 * (i % 5), bias=False) for i in range(16)]
    model = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
    for layer in layers:
        sw.fully_shard(layer, mesh=world_mesh(4), layout="ragged")
    largest = max(layer.weight.numel() for layer in layers) * 4
    total = sum(layer.weight.numel() for layer in layers) * 4
    gc.collect()
    before, seen = live(), []

    def count() -> None:
        seen.append(sum(n for address, n in live().items() if before.get(address) != n))

    whole, write = save_pretrained._whole, save_pretrained._FolderWriter.write

    def gathered(held: Any) -> torch.Tensor:
        result = whole(held)
        count()
        return result

    def written(self: Any, group: Any, tensors: Any) -> None:
        count()
        write(self, group, tensors)
        count()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_pretrained, "_whole", gathered)
        patch.setattr(save_pretrained._FolderWriter, "write", written)
        sw.save_pretrained(model, tmp_path / "saved", max_shard_size="64 KB", dtype=torch.bfloat16)
    assert len(seen) == (48 if rank == 0 else 16)
    # The backend may still hold what the last gather was made of.
    assert largest <= max(seen) <= 2.5 * largest, (seen, largest)
    assert total > 12 * largest
    assert len(contents(tmp_path / "saved")) == 16


@multirank(2)
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    model = shard(source_model(), mesh=world_mesh(2))
    sw.save_pretrained(model, tmp_path / "saved")
    before = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}

    def full_disk(self: Any, key: str, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_pretrained.SafetensorsFile, "write", full_disk)
        with pytest.raises(RuntimeError if rank else OSError, match="No space left"):
            sw.save_pretrained(model, tmp_path / "saved", overwrite=True)
        patch.undo()
        patch.setattr(os, "rename", full_disk)
        with pytest.raises(RuntimeError if rank else TypeError):
            sw.save_pretrained(model, tmp_path / "other")
    with pytest.raises(
        RuntimeError if rank else FileExistsError, match="not empty; pass another folder, or overwrite"
    ):
        sw.save_pretrained(model, tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}
    dist.barrier()
    with torch.no_grad():
        model.norm.bias.add_(1)
    (tmp_path / f".saved.{'0a' * 8}.partial").mkdir(exist_ok=True)  # of a process that was killed
    sw.save_pretrained(model, tmp_path / "saved", overwrite=True, max_shard_size=300)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert "model.safetensors" not in os.listdir(tmp_path / "saved")
    assert torch.equal(contents(tmp_path / "saved")["norm.bias"], source_model().norm.bias + 1)


def test_refusals_come_before_anything_is_written(tmp_path: Path) -> None:
    model = source_model()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "file").write_text("")
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with sw.deferred_init():
        deferred = nn.Linear(2, 2)
    complex_ = nn.Linear(1, 1, bias=False, dtype=torch.complex128)
    for error, said, thing, path, options in (
        (ValueError, "hold no values yet.*: weight, bias", empty, "new", {}),
        (ValueError, "hold no values yet.*: weight, bias", deferred, "new", {}),
        (ValueError, r"'weight' has torch.complex128, which safetensors cannot store", complex_, "new", {}),
        (
            ValueError,
            r"max_shard_size must be bytes.*got '5 parsec'",
            model,
            "new",
            {"max_shard_size": "5 parsec"},
        ),
        (ValueError, r"max_shard_size must be bytes.*got 0", model, "new", {"max_shard_size": 0}),
        (ValueError, "dtype must be a floating-point dtype", model, "new", {"dtype": torch.int8}),
        (ValueError, r"'scale', .* share the key 'x'", model, "new", {"key_map": lambda name: "x"}),
        (ValueError, r"does not fit 'scale': .* cannot be permuted", model, "new", {"key_map": Transposed}),
        (FileExistsError, "not empty; pass another", model, "mine", {}),
        (FileExistsError, "other files than a saved model: notes.txt", model, "mine", {"overwrite": True}),
        (FileExistsError, "expected a folder, or none yet, found a file", model, "file", {}),
    ):
        with pytest.raises(error, match=said):
            sw.save_pretrained(thing, tmp_path / path, **options)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@multirank(2)
def test_tensors_are_written_in_other_forms_and_read_back(rank: int, world_size: int, tmp_path: Path) -> None:
    key_map = {
        "embed.weight": Transposed("wte"),
        "blocks.0.up.weight": Joined((Transposed("up.a"), Transposed("up.b"))),
        "blocks.1.up.weight": Stacked(tuple(f"row.{i}" for i in range(12))),
        "blocks.0.norm.weight": Slice("norms", 0, 7),
        "norm.weight": Slice("norms", 14, 7),
        "blocks.1.norm.weight": Slice("norms", 7, 7),
        "blocks.0.down.weight": Slice("downs", 12, 12, dim=1),
        "blocks.1.down.weight": Slice("downs", 0, 12, dim=1),
        "head.bias": None,
    }
    plain = build()
    model = shard(build(), mesh=world_mesh(2), layout="ragged")
    sw.save_pretrained(model, tmp_path / "saved", key_map=key_map, dtype=torch.float64)
    found = contents(tmp_path / "saved")
    state = {k: v.double() for k, v in plain.state_dict().items()}
    assert torch.equal(found["wte"], state["embed.weight"].T)
    assert torch.equal(found["up.b"], state["blocks.0.up.weight"][6:].T)
    assert torch.equal(found["row.11"], state["blocks.1.up.weight"][11])
    names = ("blocks.0.norm", "blocks.1.norm", "norm")
    assert torch.equal(found["norms"], torch.cat([state[f"{name}.weight"] for name in names]))
    downs = [state[f"blocks.{i}.down.weight"] for i in (1, 0)]
    assert torch.equal(found["downs"], torch.cat(downs, dim=1))
    assert "head.bias" not in found
    other = shard(build(1), mesh=world_mesh(2))
    sw.load_pretrained(other, tmp_path / "saved", key_map=key_map)
    for (name, p), q in zip(other.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), build(1).head.bias if name == "head.bias" else q), name
    whole = build(1)
    key_map["norm.weight"] = Slice("norms", 15, 7)
    with pytest.raises(
        ValueError, match=r"'norms', but their slices leave gaps, overlap or do not begin at 0"
    ):
        sw.save_pretrained(whole, tmp_path / f"never{rank}", key_map=key_map)


def test_the_old_folder_comes_back_if_the_last_step_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.save_pretrained(nn.Linear(2, 2), tmp_path / "saved")
    rename, calls = os.rename, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(*args)

    monkeypatch.setattr(os, "rename", interrupted)
    with renames_alone(), pytest.raises(KeyboardInterrupt):
        sw.save_pretrained(nn.Linear(3, 3), tmp_path / "saved", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert contents(tmp_path / "saved")["weight"].shape == (2, 2)


class Counting(nn.Linear):
    """A layer with extra state, or with none to speak of."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state


def test_extra_state_that_is_not_written_is_named(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    states = ({"batches": 3}, torch.ones(1), None, torch.empty(0, dtype=torch.uint8))
    sw.save_pretrained(nn.Sequential(*map(Counting, states[2:])), tmp_path / "without")
    assert not recwarn.list
    with pytest.warns(UserWarning, match="the extra state of '0', '1' "):
        sw.save_pretrained(nn.Sequential(*map(Counting, states)), tmp_path / "with")
