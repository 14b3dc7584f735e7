"""Every function that takes the location of a checkpoint or model: a URL of a folder here is this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint import (
    check_writable,
    convert_checkpoint as convert,
    folder_or_url,
    list_checkpoints,
    remove_checkpoint,
)

FORMS: dict[str, Callable[[Path], str | Path]] = {
    "text": str,
    "path": Path,
    "file": lambda path: f"file://{path}",
    "local": lambda path: f"local://{path}",
}


@pytest.mark.parametrize("form", FORMS)
def test_all_functions_take_the_same_locations(tmp_path: Path, form: str) -> None:
    def at(name: str) -> str | Path:
        return FORMS[form](tmp_path / name)

    saved, read = nn.Linear(3, 2), nn.Linear(3, 2)
    check_writable(at("c"))
    sw.save_checkpoint(at("c"), saved, generators=False)
    assert set(os.listdir(tmp_path / "c")) == {".metadata", "__0_0.distcp", "__values.distcp", "index.json"}
    sw.save_checkpoint(at("c"), saved, generators=False, overwrite=True)
    assert folder_or_url(at("c")) == tmp_path / "c"
    assert list_checkpoints(at("")) == ["c"]
    assert sw.open_checkpoint(at("c")).path == str(tmp_path / "c")
    sw.load_checkpoint(at("c"), read, generators=False)
    assert torch.equal(saved.weight, read.weight)
    convert(at("c"), at("d"), "dcp")
    convert(at("d"), at("e.safetensors"), "safetensors")
    sw.save_pretrained(saved, at("m"))
    for name in ("e.safetensors", "m"):
        read = nn.Linear(3, 2)
        sw.load_pretrained(read, at(name))
        assert torch.equal(saved.weight, read.weight)
    for name in ("c", "d"):
        remove_checkpoint(at(name))
    assert sorted(os.listdir(tmp_path)) == ["e.safetensors", "m"]


def test_models_are_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (sw.save_pretrained, sw.load_pretrained):
        with pytest.raises(ValueError, match="memory://a/b: models are written to folders of this machine"):
            use(nn.Linear(2, 2), "memory://a/b")  # type: ignore[operator]
    assert os.listdir(tmp_path) == []


def test_what_is_no_checkpoint_is_not_removed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    sw.save_checkpoint(tmp_path / "run" / "step-1", model)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    (tmp_path / "empty").mkdir()
    for name, found in {
        "run": "a folder with step-1;", "thesis": "a folder with chapter.txt;", "thesis/chapter.txt": "another file",
        "step-1": "found nothing",
    }.items():  # fmt: skip
        for path in (tmp_path / name, f"file://{tmp_path / name}"):
            with pytest.raises(OSError, match=f"expected a checkpoint, .*{found}"):
                remove_checkpoint(path)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "one"
    sw.load_checkpoint(tmp_path / "run" / "step-1", model)
    (tmp_path / "run" / "step-1" / "index.json").unlink()  # damaged
    for name in ("run/step-1", "empty"):
        remove_checkpoint(tmp_path / name)
        assert not (tmp_path / name).exists()
