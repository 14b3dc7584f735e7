"""The ``.metadata`` file is data: nothing in it runs, what torch writes is read as torch reads it, damage is named."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.checkpoint import Damaged, StateTensor
from shardwright.checkpoint.dcp.entries import tensors_of
from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.load.checkpoints import checkpoint_at
from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.engine import RankGroup
from tests.checkpoint.kit.states import load_state
from tests.support.payloads import Payload, code_of_the_system, runs, saved_with


def metadata_of(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...], **fields: Any
) -> Metadata:
    """The metadata of one tensor in these chunks, offsets and sizes, in one file."""
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
    )
    places = {
        MetadataIndex("model.w", offsets, number): _StorageInfo("__0_0.distcp", 8 * number, 8)
        for number, (offsets, _) in enumerate(chunks)
    }
    places[MetadataIndex("step")] = _StorageInfo("__1_0.distcp", 0, 5)
    values: dict[str, Any] = {
        "state_dict_metadata": {"model.w": entry, "step": BytesStorageMetadata()},
        "planner_data": {"model.w": ("model", "w"), "step": ("steps", 0)},
        "storage_data": places,
        "storage_meta": StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1"),
        "version": "1.0.0",
    }
    return Metadata(**{**values, **fields})


HALVES = [((0, 0), (2, 3)), ((2, 0), (2, 3))]


def test_everything_that_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    state = {
        "model": {
            f"{dtype}": torch.zeros(3, 2).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)
        },
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "others": {"step": 3, "list": [1, {"deep": "text"}], "none": None, "nothing": {}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    expected = pickle.loads((tmp_path / ".metadata").read_bytes())
    found = parse_metadata((tmp_path / ".metadata").read_bytes())
    for name, entry in expected.state_dict_metadata.items():
        ours = found.state_dict_metadata[name]
        assert type(ours) is type(entry)
        if isinstance(entry, TensorStorageMetadata):  # of its properties the dtype alone is read
            assert (ours.size, ours.chunks) == (entry.size, entry.chunks)  # type: ignore[union-attr]
            assert ours.properties.dtype == entry.properties.dtype  # type: ignore[union-attr]
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    assert found.planner_data == expected.planner_data
    assert found.version == expected.version
    for index, place in found.storage_data.items():
        theirs = expected.storage_data[index]
        assert (place.relative_path, place.offset, place.length) == (
            theirs.relative_path,
            theirs.offset,
            theirs.length,
        )
    assert found.storage_data.keys() == expected.storage_data.keys()
    loaded: dict[str, Any] = {
        "model": {name: torch.ones_like(value) for name, value in state["model"].items()},  # type: ignore[attr-defined]
        "scalar": torch.tensor(0.0),
        "empty": torch.ones(0, 4),
        "others": {"step": 0, "list": [0, {"deep": ""}], "none": 1, "nothing": {}},
    }
    content = load_state(tmp_path, loaded, RankGroup(alone=True))
    assert content["others"] | {"nothing": {}} == state["others"]  # torch stores no empty dict
    assert loaded["scalar"] == 2.5
    assert all(not value.float().any() for value in loaded["model"].values())


def test_nothing_in_metadata_runs(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    planted = Payload(evidence)
    of_entry = metadata_of(HALVES, (4, 3))
    of_entry.state_dict_metadata["model.w"].size = planted  # type: ignore[assignment]
    of_key = metadata_of(HALVES, (4, 3), storage_data={planted: _StorageInfo("__0_0.distcp", 0, 8)})
    attacks = {
        "in place of it": code_of_the_system(evidence),
        "whole": pickle.dumps(planted),
        "a field": pickle.dumps(metadata_of(HALVES, (4, 3), planner_data=planted)),
        "another field": pickle.dumps(metadata_of(HALVES, (4, 3), storage_meta=planted)),
        "an unknown field": pickle.dumps(_with_attribute("loaded_by", planted)),
        "an entry": pickle.dumps(of_entry),
        "a key": pickle.dumps(of_key),
        "old protocol": pickle.dumps(metadata_of(HALVES, (4, 3), version=planted), protocol=0),
        "after the end of a list": pickle.dumps([metadata_of(HALVES, (4, 3)), planted]),
    }
    for name, data in attacks.items():
        assert runs(lambda data=data: pickle.loads(data), evidence), name
        with pytest.raises(Damaged, match=r"names .*, which no checkpoint uses; it was not called"):
            parse_metadata(data)
        assert not evidence.exists(), name


def _with_attribute(name: str, value: Any) -> Metadata:
    metadata = metadata_of(HALVES, (4, 3))
    setattr(metadata, name, value)
    return metadata


def test_names_on_the_list_are_inert() -> None:
    """Calling them, giving them other state or attributes changes no class: not torch's, and not the next file's."""
    sound = pickle.dumps(metadata_of(HALVES, (4, 3)))
    module = b"ctorch.distributed.checkpoint.metadata\n"
    for data in (
        module + b"Metadata\n}S'version'\nS'9'\nsb.",  # state given to the class itself
        module + b"Metadata\n(N}S'from_file'\nI1\nstb.",  # the same by its slots
        b"ctorch\nSize\n(N}S'from_file'\nI1\nstb.",
        b"ctorch\nfloat32\n}S'from_file'\nI1\nsb.",
        module + b"Metadata\n(I1\nI2\ntR.",
        b"ctorch\nload\n.",
        b"ctorch.distributed.checkpoint\nmetadata.Metadata\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0bfloat32.real\x93.",
        b"ctorch.serialization\n_get_layout\n(S'os'\ntR.",
        b"Pelsewhere\n.",
        b"\x82\x01.",
    ):
        with pytest.raises(Damaged, match=r"\.metadata"):
            parse_metadata(data)
        assert not hasattr(Metadata, "from_file") and not hasattr(torch.Size, "from_file")
        assert Metadata({}).version is None
        assert parse_metadata(sound).state_dict_metadata["model.w"].size == (4, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("chunks", "size", "expected"),
    [
        ([((0, 0), (2, 3))], (4, 3), "missing or stored twice"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], (4, 3), "outside its shape"),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], (4, 3), "missing or stored twice"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], (4, 3), "missing or stored twice"),
        ([((0,), (2,))], (2, 1), "outside its shape"),
        ([((), ()), ((), ())], (), "missing or stored twice"),
        ([], (), "missing or stored twice"),
    ],
)
def test_parts_that_do_not_make_the_tensor_are_named(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], size: tuple[int, ...], expected: str
) -> None:
    """torch loads such a checkpoint, and what is missing keeps its old values."""
    with pytest.raises(Damaged, match=rf"model\.w.*{expected}"):
        parse_metadata(pickle.dumps(metadata_of(chunks, size)))


def test_parts_in_any_grid_are_sound() -> None:
    for chunks, size in (
        (HALVES, (4, 3)),
        (HALVES[::-1], (4, 3)),
        ([((r, c), (2, 1)) for r in (0, 2) for c in range(3)], (4, 3)),
        ([((0, 0), (1, 3)), ((1, 0), (1, 2)), ((1, 2), (3, 1)), ((2, 0), (2, 2))], (4, 3)),
        ([((0, 0), (0, 3)), ((0, 0), (4, 3))][1:], (4, 3)),
        ([((), ())], ()),
        ([], (0, 3)),
    ):
        metadata = metadata_of(chunks, size)
        assert parse_metadata(pickle.dumps(metadata)).state_dict_metadata == metadata.state_dict_metadata, (
            chunks
        )


def test_names_of_files_stay_in_the_folder_and_extensions_are_refused() -> None:
    for name in ("../other", "/etc/passwd", "a/b", "..", "", "a\0b", "a\\b"):
        places = {MetadataIndex("w"): _StorageInfo(name, 0, 8)}
        data = pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data=places))
        with pytest.raises(Damaged, match="expected the name of a file in the checkpoint"):
            parse_metadata(data)
    for place, expected in (
        (_StorageInfo("a", 0, 8, ["stream.zstd"]), "extensions"),
        (_StorageInfo("a", -1, 8), "an offset as an integer >= 0"),
        (_StorageInfo("a", 0, True), "a length as an integer >= 0"),
        (_StorageInfo(b"a", 0, 8), "as str, found bytes"),  # type: ignore[arg-type]
    ):
        data = pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data={MetadataIndex("w"): place}))
        with pytest.raises(Damaged, match=expected):
            parse_metadata(data)
    with pytest.raises(Damaged, match="'w' has a part that is not in any file"):
        parse_metadata(pickle.dumps(Metadata({"w": BytesStorageMetadata()}, storage_data={})))


def test_any_damaged_bytes_are_damage_and_nothing_else() -> None:
    """Cut off anywhere, and with bits flipped: read as something sound, or Damaged."""
    whole = pickle.dumps(metadata_of(HALVES, (4, 3)))
    generator = random.Random(0)
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 1, 1, 4))):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(data))
    read = 0
    for data in damaged:
        try:
            parse_metadata(data)
            read += 1  # such as another save_id, which nobody reads
        except Damaged as problem:
            assert ".metadata" in str(problem)
    assert read < len(damaged) / 2


def test_values_that_are_no_tensors_run_nothing(tmp_path: Path) -> None:
    """torch's planner unpickles them; a folder with sound metadata may hold anything in their place."""
    evidence = tmp_path / "evidence"
    folder = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.zeros(2), "x": Payload(evidence)}, checkpoint_id=folder, no_dist=True)

        def with_torch() -> None:
            dcp.load({"w": torch.ones(2), "x": None}, checkpoint_id=folder, no_dist=True)

        assert runs(with_torch, evidence)
    metadata = parse_metadata((folder / ".metadata").read_bytes())
    with pytest.raises(Damaged, match=r"'x' names tests.support.payloads._run, which"):
        load_state(folder, {"w": torch.ones(2), "x": None}, RankGroup(alone=True))
    assert not evidence.exists()
    # And where metadata calls it a tensor, of the same bytes.
    place = metadata.storage_data[MetadataIndex("w", (0,))]
    data = bytearray((folder / place.relative_path).read_bytes())
    planted = saved_with(Payload(evidence))
    assert len(planted) <= place.length + (len(data) - place.length)
    (folder / place.relative_path).write_bytes(planted + bytes(len(data)))
    whole = type(place)(place.relative_path, 0, len(planted))
    metadata.storage_data[MetadataIndex("w", (0,))] = whole
    assert runs(lambda: torch.load(io.BytesIO(planted), weights_only=False), evidence)
    wanted = {"w": StateTensor("w", ("w",), torch.ones(2))}
    with pytest.raises(Damaged):
        tensors_of(LocalStore(folder), metadata, wanted)
    assert not evidence.exists()


def test_metadata_of_single_ranks_is_never_read(tmp_path: Path) -> None:
    """torch falls back to them, by pickle, where .metadata cannot be read."""
    evidence = tmp_path / "evidence"
    (tmp_path / "__0.metadata").write_bytes(code_of_the_system(evidence))
    for content in (None, b"damaged"):
        if content is not None:
            (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises((Damaged, FileNotFoundError)):
            checkpoint_at(tmp_path)
    assert not evidence.exists()
