"""Files of weights: what the library safetensors and torch write is read, the other way round, and damage is told."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import open_stored
from shardwright.checkpoint.pretrained.files import SAFETENSORS_DTYPES, SafetensorsFile


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, none and no dimension, and names that are no identifiers."""
    generator = torch.Generator().manual_seed(0)
    made = {
        f"a.{name}": torch.rand(3, 5, generator=generator).mul(9).to(d)
        for name, d in SAFETENSORS_DTYPES.items()
    }
    return {**made, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "ünï/code": torch.ones(1)}


def write(file: Path, content: dict[str, torch.Tensor]) -> Path:
    writer = SafetensorsFile(file, {key: (t.shape, t.dtype) for key, t in content.items()})
    for key in reversed(list(content)):
        writer.write(key, content[key])
    writer.close()
    return file


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype
        and one[k].shape == other[k].shape
        and torch.equal(one[k].reshape(-1).view(torch.uint8), other[k].reshape(-1).view(torch.uint8))
        for k in one
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    return {key: stored.view() for key, stored in open_stored(path).items()}


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs the library safetensors to compare with")
    content = tensors()
    assert same(library.load_file(write(tmp_path / "ours.safetensors", content)), content)
    with library.safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    library.save_file(content, tmp_path / "theirs.safetensors")
    assert same(read(tmp_path / "theirs.safetensors"), content)


def test_elements_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    content = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.rand(2, 3), "c": torch.rand(4).double()}
    header, data = {}, b""
    for key, tensor in content.items():
        raw = bytes(tensor.view(torch.uint8).flatten().tolist())
        name = {torch.uint8: "U8", torch.float32: "F32", torch.float64: "F64"}[tensor.dtype]
        place = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert same(read(tmp_path / "a.safetensors"), content)


@pytest.mark.parametrize("name", ["new.pt", "new.bin", "old.pth"])
def test_files_of_torch_save_are_read(tmp_path: Path, name: str) -> None:
    content = {**tensors(), "strided": torch.rand(4, 6).t()[1:]}
    if old := name.startswith("old"):  # it knows no dtypes that came later
        content = {
            key: t for key, t in content.items() if not key.startswith(("a.U16", "a.U32", "a.U64", "a.F8"))
        }
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not old)
    assert same(read(tmp_path / name), content)


def test_folders_with_an_index_or_a_single_file_are_read(tmp_path: Path) -> None:
    content = {"a": torch.rand(2), "b": torch.rand(3), "c": torch.rand(1)}
    (folder := tmp_path / "indexed").mkdir()
    torch.save({}, folder / "training_args.bin")  # safetensors go first
    write(folder / "one.safetensors", {"a": content["a"], "b": content["b"]})
    write(folder / "two.safetensors", {"c": content["c"], "b": torch.zeros(9)})
    places = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": places}))
    assert same(read(folder), content) and same(read(index), content)
    (single := tmp_path / "single").mkdir()
    torch.save(content, single / "weights.pt")
    assert same(read(single), content)
    (torch_files := tmp_path / "torch").mkdir()
    for key, name in (("a", "pytorch_model-1.bin"), ("b", "pytorch_model-2.bin")):
        torch.save({key: content[key]}, torch_files / name)
    map_of = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    (torch_files / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": map_of}))
    assert same(read(torch_files), {"a": content["a"], "b": content["b"]})


class Unknown:
    """A class that no file of weights may bring."""


def damaged(folder: Path) -> dict[str, tuple[Path, type[Exception], str]]:
    good = write(folder / "good.safetensors", {"a": torch.rand(4, 4), "b": torch.rand(2)}).read_bytes()
    header = json.loads(good[8 : 8 + struct.unpack("<Q", good[:8])[0]])

    def file(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    def with_header(name: str, entry: Any) -> Path:
        text = json.dumps({**header, "a": entry}).encode()
        return file(name, struct.pack("<Q", len(text)) + text + bytes(72))

    def saved(name: str, content: Any) -> Path:
        torch.save(content, folder / name)
        return folder / name

    def index(name: str, content: Any) -> Path:
        return file(f"{name}.safetensors.index.json", json.dumps(content).encode())

    several = folder / "several"
    several.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        write(several / name, {"a": torch.zeros(1)})
    entry = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    return {
        "cut off": (file("cut.safetensors", good[:-1]), ValueError, "header does not fit"),
        "empty": (file("none.safetensors", b""), ValueError, "0 bytes that do not begin"),
        "no header": (file("text.safetensors", b"<html>not found</html>"), ValueError, "do not begin with the length"),
        "no json": (file("json.safetensors", struct.pack("<Q", 4) + b"nono" + good), ValueError, "header does not fit"),
        "dtype": (with_header("f6.safetensors", entry | {"dtype": "F6"}), ValueError, "dtype 'F6' is not supported"),
        "shape": (with_header("shape.safetensors", entry | {"shape": [4, 5]}), ValueError, "header does not fit"),
        "beyond": (
            with_header("beyond.safetensors", entry | {"data_offsets": [64, 128]}), ValueError, "bytes 64 to 128"
        ),
        "pickle": (saved("pickle.pt", {"a": Unknown()}), ValueError, r"torch.load cannot .*weights_only=True"),
        "nested": (saved("nested.pt", {"model": {}, "a": torch.ones(1)}), ValueError, r"other values: 'model'\. Save"),
        "list": (saved("list.pt", [torch.ones(1)]), ValueError, "other values: list"),
        "damaged pt": (file("damaged.pt", b"PK\x03\x04 no"), ValueError, "torch.load cannot read"),
        "kind": (file("weights.npz", b""), ValueError, r"expected a file ending in \.safetensors"),
        "nothing": (folder / "nothing", FileNotFoundError, "expected a file or a folder of weights"),
        "no weights": (folder.parent / "hollow", FileNotFoundError, "expected model.safetensors.index.json, or"),
        "several": (several, ValueError, r"expected one index or one file of weights, found a\.safe.*, b\.safe"),
        "index": (index("list", [1]), ValueError, 'expected JSON with a "weight_map"'),
        "outside": (index("up", {"weight_map": {"a": "../up.safetensors"}}), ValueError, "names of files beside it"),
        "file": (index("no", {"weight_map": {"a": "no.safetensors"}}), FileNotFoundError, "missing: no.safetensors"),
        "key": (index("key", {"weight_map": {"x": "good.safetensors"}}), ValueError, "the index names for them: x"),
    }  # fmt: skip


def test_damage_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "files").mkdir()
    for what, (path, kind, said) in damaged(tmp_path / "files").items():
        with pytest.raises(kind, match=said) as told:
            open_stored(path)
        assert str(path) in str(told.value), what


def header(shape: object, offsets: object, key: str = "a") -> str:
    return json.dumps({key: {"dtype": "F32", "shape": shape, "data_offsets": offsets}})[1:-1]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([header([4], [0, 16]), header([4], [16, 32])], "'a' more than once"),
        ([header([4], [0, 16]), header([6], [8, 32], "b")], "'b' begins at byte 8"),
        ([header([4], [16, 32])], "'a' begins at byte 16"),
        ([header([4], [0, 16])], "end at byte 16 of 32"),
        ([header([-2, -4], [0, 32])], "not all whole numbers"),
        ([header([8.0], [0, 32])], "not all whole numbers"),
        ([header([True, 8], [0, 32])], "not all whole numbers"),
        ([header([8], [0.0, 32.0])], "not all whole numbers"),
        ([header([2**32, 2**32], [0, 0]), header([8], [0, 32], "b")], "at bytes 0 to 0"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(
    tmp_path: Path, entries: list[str], said: str
) -> None:
    text = ("{" + ",".join(entries) + "}").encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    with pytest.raises(ValueError, match=said):
        open_stored(tmp_path / "a.safetensors")


def test_nesting_without_end_is_damage(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="does not fit a complete safetensors file"):
        open_stored(tmp_path / "a.safetensors")


def test_sparse_tensors_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="sparse, or hold no values: 'a'"):
        open_stored(tmp_path / "a.pt")


def test_conjugates_are_written_as_what_they_are(tmp_path: Path) -> None:
    content = {"a": torch.view_as_complex(torch.rand(2, 3, 2)).conj()}
    assert torch.equal(read(write(tmp_path / "a.safetensors", content))["a"], content["a"])
