"""Hostile and damaged checkpoints: one clear error or a right load, nothing executed, nothing changed, little memory.

``SHARDWRIGHT_HOSTILE_SEED`` and ``SHARDWRIGHT_HOSTILE`` choose other cases and their number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import struct
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwright as sw
from shardwright.checkpoint import INDEX, Damaged, save_state
from shardwright.checkpoint.dcp.containers import Container, value_of
from shardwright.checkpoint.dcp.metadata import parse_metadata
from shardwright.checkpoint.format.index import (
    Chunk,
    Index,
    StoredFile,
    StoredTensor,
    StoredValue,
    digest_of_chunks,
    index_text,
    parse_index,
)
from shardwright.checkpoint.storage.local_store import LocalStore
from shardwright.engine import RankGroup
from tests.checkpoint.kit.children import run_into
from tests.checkpoint.kit.hostile import put_index, read_index, repair
from tests.checkpoint.kit.states import load_state
from tests.support.payloads import Payload, saved_with
from tests.support.pool import forkserver


@pytest.mark.extensive("hundreds of damaged files")
def test_hostile_checkpoints(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHARDWRIGHT_HOSTILE_SEED", "0"))
    count = int(os.environ.get("SHARDWRIGHT_HOSTILE", "500"))
    start, half = forkserver().Process, count // 2
    halves = [(0, half), (half, count - half)]
    files = [tmp_path / f"{first}.json" for first, _ in halves]
    children = [
        start(target=run_into, args=(file, seed, range(first, first + number)))
        for file, (first, number) in zip(files, halves, strict=True)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    results = [json.loads(file.read_text()) for file in files]
    assert [broken for each in results for broken in each["broken"]] == []
    assert sum(number for each in results for number in each["counts"].values()) == count
    kinds = {kind for each in results for kind in each["counts"]}
    assert any(kind.endswith("loaded") for kind in kinds) and any(kind.endswith("error") for kind in kinds)


# -- pickles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"Nr\xff\xff\xff\x7f.",  # a memo of 32 GB
        b"Np%d\n." % 2**40,
        b"})" + b"\x85" * 3_000_000 + b"Ns.",  # the hash of the key is deeper than the stack
        b"})" + b"q\xf0h\xf0\x86" * 60 + b"Ns.",  # the hash of the key takes 2**60 steps
        b"\x8e" + struct.pack("<Q", 2**40) + b".",
        b"\x96" + struct.pack("<Q", 2**40) + b".",
        b"\x8f(K\x01\x90.",
        b"",
        b"N",
        b"0.",
        b"h\x00.",
        b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    ],
    ids=range(13),
)
def test_short_pickles_take_little(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"\.metadata"):
        parse_metadata(data)


def test_a_list_of_parts_is_not_used_again_and_again(tmp_path: Path) -> None:
    """A hundred thousand bytes would become ten million parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["a"]
    entry.chunks *= 3000
    metadata.state_dict_metadata = {str(n): entry for n in range(3000)}
    with pytest.raises(Damaged, match="9,000,000 parts of tensors do not fit"):
        parse_metadata(pickle.dumps(metadata))


# -- the index ---------------------------------------------------------------------------------------------------------


def saved(folder: Path, **extra: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(folder, model, optimizer, extra=extra)
    return model, optimizer


def refused(folder: Path, match: str, **extra: Any) -> None:
    """Loading is an error, and changes neither model nor optimizer nor generators."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.tolist(), model.bias.tolist(), torch.get_rng_state().tolist()
    with pytest.raises(ValueError, match=match) as caught:
        sw.load_checkpoint(folder, model, optimizer, extra=extra)
    assert "\n" not in str(caught.value)
    assert (model.weight.tolist(), model.bias.tolist(), torch.get_rng_state().tolist()) == before
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1


def test_states_of_generators_are_examined_first(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    content = read_index(tmp_path / "c")
    part = content["tensors"]["generators.rank0.torch"][3]
    with open(tmp_path / "c" / sorted(content["files"])[part[2]], "r+b") as stream:
        stream.seek(part[5])
        stream.write(b"\xff" * 64)
    repair(tmp_path / "c", content)
    put_index(tmp_path / "c", content)
    refused(tmp_path / "c", ": generators: the state of a random generator cannot be restored")


def test_generators_without_states_are_refused() -> None:
    from shardwright.checkpoint.training.generators import check_generator_states

    for states in ({}, {"torch": {}}, [], {"torch": torch.zeros(3)}):
        with pytest.raises(Damaged, match=r"^generators: "):
            check_generator_states(states)  # type: ignore[arg-type]


def test_a_position_beyond_numpys_numbers_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    from shardwright.checkpoint import generator_states
    from shardwright.checkpoint.training.generators import check_generator_states

    states = generator_states()
    check_generator_states(states)
    states["numpy"][-1] = 10**6
    with pytest.raises(Damaged, match="position 1000000 of numpy's generator"):
        check_generator_states(states)


BOTH = ["weight", "bias"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"param_groups": 3}, "expected the groups of an optimizer"),
        (
            {"param_groups": []},
            "weight is a parameter of this optimizer, and of no optimizer in the checkpoint",
        ),
        ({"param_groups": [{"params": BOTH, "lr": "high"}]}, r"param_groups\[0\]\.lr is str, expected float"),
        ({"param_groups": [{"params": ["weight"]}]}, "bias is a parameter of this optimizer, and of no"),
        ({"param_groups": [{"lr": 0.1}]}, "expected the groups of an optimizer, each with its parameters"),
        ({"param_groups": [{"params": BOTH, "betas": [0.1]}]}, r"betas is list, expected tuple"),
    ],
)
def test_values_of_the_optimizer_are_examined_first(tmp_path: Path, value: Any, problem: str) -> None:
    saved(tmp_path / "c")
    content = read_index(tmp_path / "c")
    content["values"] = {
        name: each for name, each in content["values"].items() if each[0][0] != "optimizer"
    } | {f"optimizer.{key}": [["optimizer", key], each] for key, each in value.items()}
    put_index(tmp_path / "c", content)
    refused(tmp_path / "c", problem)


def test_extras_are_restored_before_tensors(tmp_path: Path) -> None:
    class Picky:
        state = 1

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]

    saved(tmp_path / "c", one=[5], two={"state": 2})
    refused(tmp_path / "c", "has no extra 'three'; it has 'one', 'two'", three=Picky())
    good = Picky()
    refused(tmp_path / "c", "extra 'one' cannot be restored by its Picky", two=good, one=Picky())
    assert good.state == 1


def sealed_index(content: dict[str, Any], encoding: str = "utf-8") -> bytes:
    body = (json.dumps(content)[:-1] + ", ").encode(encoding)
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def test_indices_that_no_save_writes(tmp_path: Path) -> None:
    saved(tmp_path / "c", deep=1)
    sound = read_index(tmp_path / "c")
    parse_index(sealed_index(sound))
    deep: Any = 1
    for _ in range(120):
        deep = [deep]
    keys = ["a"] * 200
    for change, problem in (
        ({"values": {"extra": [["extra"], deep]}}, "at most 100 values deep"),
        ({"values": {".".join(keys): [keys, 1]}}, "at most 100 keys inside one another, found 200"),
        ({"values": {"model": [["model"], 1]}}, "is inside a tensor or value"),
        ({"tensors": {"t": [["t"], "quint8", [0]]}}, "'t' has the unknown dtype 'quint8'"),
        (
            {"files": {"x" * 5000: [0, "0" * 64, False]}},
            r"^index\.json: expected the name of a file .{1,500}$",
        ),
    ):
        with pytest.raises(Damaged, match=problem):
            parse_index(sealed_index({**sound, **change}))
    with pytest.raises(Damaged, match=r"no readable index\.json"):
        parse_index(sealed_index(sound, "utf-16-be"))
    with pytest.raises(ValueError, match=r"more than 100 values deep"):
        save_state(tmp_path / "d", {"extra": {"deep": deep}})


def test_a_state_that_is_a_list_is_refused(tmp_path: Path) -> None:
    ranks = RankGroup(alone=True)
    save_state(tmp_path / "c", {"a": 1})
    index = parse_index((tmp_path / "c" / INDEX).read_bytes())
    values = {"0": StoredValue((0,), 1)}
    (tmp_path / "c" / INDEX).write_text(index_text(dataclasses.replace(index, values=values)))
    with pytest.raises(Damaged, match="expected the state as dict, found list"):
        load_state(tmp_path / "c", {}, ranks)


def test_memory_is_taken_only_for_what_is_on_disk(tmp_path: Path) -> None:
    """A short file whose index says that it holds 8 TiB, and a sparse one that is so long."""
    length = 1 << 43
    index = Index(
        "0", 1, {"extra.big": StoredTensor(("extra", "big"), torch.uint8, (length,), (
            Chunk((0,), (length,), "__0_0.distcp", 0, length, 0, "0" * 64),
        ))}, {"optimizer": StoredValue(("optimizer",), {})},
        {"__0_0.distcp": StoredFile(length, digest_of_chunks(["0" * 64]), True)},
    )  # fmt: skip
    (tmp_path / INDEX).write_text(index_text(index))
    (tmp_path / "__0_0.distcp").write_bytes(b"short")
    refused(tmp_path, r"__0_0\.distcp holds 5 bytes, 8,796,093,022,208 expected")
    try:
        os.truncate(tmp_path / "__0_0.distcp", length)
    except OSError:
        pytest.skip("the file system has no files of 8 TiB")
    refused(tmp_path, "there is no memory for 'extra.big', which holds 8,796,093,022,208 bytes")


def test_the_index_alone_is_read(tmp_path: Path) -> None:
    """It wins over ``.metadata``; without it our files are damaged."""
    model, _ = saved(tmp_path / "c")
    content = read_index(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "evidence")))
    repair(tmp_path / "c", content)
    put_index(tmp_path / "c", content)
    other = nn.Linear(3, 2)
    sw.load_checkpoint(tmp_path / "c", other)
    assert torch.equal(other.weight, model.weight) and not (tmp_path / "evidence").exists()
    (tmp_path / "c" / INDEX).unlink()
    refused(tmp_path / "c", r"index\.json is missing beside __values\.distcp")


def test_the_end_of_a_huge_description_is_read_first(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    os.truncate(tmp_path / "c" / INDEX, 1 << 31)
    refused(tmp_path / "c", r"no readable index\.json: its end is missing")


# -- torch's folders ---------------------------------------------------------------------------------------------------


def test_torchs_tensors_in_any_order_of_memory(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "t": torch.arange(12.0).view(3, 4).t(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "view": torch.arange(10)[2:5],
        "wide": torch.arange(6).to(torch.uint16),
        "small": torch.ones(3, dtype=torch.float8_e4m3fn),
        "conj": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(3),
        "values": {"a": [1, (2.5, None)], "b": "text"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    read = {name: torch.zeros_like(each) for name, each in state.items() if torch.is_tensor(each)}
    values = load_state(tmp_path / "c", {**read, "values": 0}, RankGroup(alone=True))
    assert values["values"] == state["values"]
    assert all(torch.equal(read[name].double(), state[name].double()) for name in read if name != "conj")
    assert torch.equal(read["conj"], state["conj"])


def test_records_that_grow_are_refused(tmp_path: Path) -> None:
    import io
    import zipfile

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    for data, problem in (
        (stream.getvalue(), "compressed record 'archive/data.pkl'"),
        (saved_with(bytearray(3)), "names bytearray"),
        (
            saved_with(Payload(tmp_path / "evidence")),
            "which is not a tensor or plain value; it was not called",
        ),
        (b"PK\3\4", "no readable container"),
    ):
        (tmp_path / "file").write_bytes(data)
        with closing(LocalStore(tmp_path).open("file")) as reader, pytest.raises(Damaged, match=problem):
            value_of(Container(reader, "file", 0, len(data)), "it")
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("name", ["x" * 9000, "two\nlines"])
def test_what_a_pickle_would_call_is_one_short_line(name: str) -> None:
    with pytest.raises(Damaged, match="it was not called") as caught:
        parse_metadata(b"\x80\x04" + pickle.dumps(name, 4)[2:-1] + b"\x8c\x03run\x93.")
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()
