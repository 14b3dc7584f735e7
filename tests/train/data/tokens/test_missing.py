"""Errors where an optional package is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.train.data.sources.documents import DataFiles, documents
from shardwright.train.data.tokens import chat
from shardwright.train.data.tokens.tokenizers import open_tokenizer
from shardwright.train.errors import UserError


def rows(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1")
    list(documents(DataFiles((str(folder / "a.parquet"),))))


def file_of_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    open_tokenizer(str(folder))


def template(folder: Path) -> None:
    chat.check_template("{{ messages }}", "here")


def name(folder: Path) -> None:
    open_tokenizer("me/tiny")


def address(folder: Path) -> None:
    list(documents(DataFiles(("s3://box/a.txt",))))


@pytest.mark.parametrize(
    ("package", "need", "message"),
    [
        ("pyarrow", rows, ".parquet files need pyarrow, which is not installed; install the extra data"),
        ("tokenizers", file_of_a_tokenizer, "package tokenizers, which is not installed; install the extra data"),
        ("jinja2", template, "need the package jinja2, which is not installed; install the extra data"),
        ("huggingface_hub", name, "found nothing at me/tiny here, and models of the hub need huggingface_hub"),
        ("fsspec", address, "expected a file system for s3:// that is installed, found none for s3://box/a.txt"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    need: Callable[[Path], None],
    message: str,
) -> None:
    for module in [each for each in sys.modules if each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        need(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
