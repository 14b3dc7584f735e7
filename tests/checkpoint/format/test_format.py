"""The form of files: containers of tensors, plain values, boxes that make up a tensor, and the index."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import INDEX, Damaged
from shardwright.checkpoint.format.archive import ALIGNMENT, container, host_bytes
from shardwright.checkpoint.format.boxes import check_coverage
from shardwright.checkpoint.format.index import parse_index
from shardwright.checkpoint.format.values import decoded, encoded
from tests.checkpoint.kit.states import bits

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 3), (2, 3, 5)], ids=str)
def test_torch_reads_the_container(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    data, _held = host_bytes(tensor)
    head, tail = container(dtype, shape, data)
    whole = head + bytes(data) + tail
    assert len(head) % ALIGNMENT == len(whole) % ALIGNMENT == 0
    assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None
    for weights_only in (True, False):
        read = torch.load(io.BytesIO(whole), weights_only=weights_only)
        assert read.dtype == dtype and read.shape == shape and read.is_contiguous()
        assert bits(read) == bits(tensor)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(10**30), 0.1, -0.0, math.inf, "é\n", b"\0\xff", [], {}, (), (1, [2, (3,)]), {"a": {"b": None}},
        {3: 4, (1, 2): "x", None: 0}, {"!": "float", "is": "nan"}, torch.Size([2, 3]), torch.bfloat16,
        Counter({3: 1}), OrderedDict(a=1),
        torch.device("cpu"),
    ],
    ids=repr,
)  # fmt: skip
def test_values_return_as_they_were(value: Any) -> None:
    text = json.dumps(encoded(value, "it"), allow_nan=False)
    read = decoded(json.loads(text))
    assert read == value and type(read) is type(value) and repr(read) == repr(value)


def test_not_a_number_returns() -> None:
    assert math.isnan(decoded(encoded(math.nan, "it")))


@pytest.mark.parametrize(
    ("boxes", "fits"),
    [
        ([((0, 0), (2, 3))], True),
        ([((0, 0), (1, 3)), ((1, 0), (1, 3))], True),
        ([((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2))], True),
        ([((0, 0), (1, 3))], False),
        ([((0, 0), (1, 3)), ((0, 0), (1, 3))], False),
        ([((0, 0), (2, 3)), ((1, 0), (0, 3))], True),
        ([((0, 0), (2, 2)), ((0, 1), (1, 2))], False),
        ([((0, 0), (2, 4))], False),
        ([((0,), (2,))], False),
        ([], False),
    ],
)
def test_coverage(boxes: list[Any], fits: bool) -> None:
    if fits:
        check_coverage("w", (2, 3), boxes)
    else:
        with pytest.raises(Damaged, match="'w'"):
            check_coverage("w", (2, 3), boxes)


def test_coverage_of_many_columns_is_quick() -> None:
    check_coverage("w", (7, 20_000), [((0, column), (7, 1)) for column in range(20_000)])


def test_each_changed_byte_of_an_index_is_noticed(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2), extra={"x": 1}, generators=False)
    text = (tmp_path / "c" / INDEX).read_bytes()
    assert parse_index(text).values["extra"].value == {"x": 1}
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        with pytest.raises(Damaged, match=r"index\.json"):
            parse_index(bytes(changed))
    for length in range(0, len(text), 7):
        with pytest.raises(Damaged):
            parse_index(text[:length])
