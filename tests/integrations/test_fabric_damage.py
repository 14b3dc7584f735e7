"""Damaged and hostile checkpoints of Fabric: no code in them runs, and every rank raises one ordinary error."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import INDEX
from shardwright.checkpoint.format.index import index_text, parse_index
from tests.integrations.kit import TIMEOUT
from tests.support import multirank
from tests.support.payloads import Payload, code_of_the_system, saved_with
from tests.train.kit.damage import DAMAGES, on_first_rank, restored, stored_file

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)

#: Of the trainer's checkpoints all of them are tried.
SOME = ("missing", "cut off", "flipped", "of another step", "a link to another step", "a pipe")


@multirank(2, timeout=TIMEOUT)
def test_damage_is_one_error_on_every_rank(rank: int, world_size: int, tmp_path: Path) -> None:
    from tests.integrations.fabrics import fabric_of, full, set_up, train

    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    fabric.save(tmp_path / "other", state)
    train(fabric, model, optimizer, range(1))
    state["step"] = 2
    fabric.save(tmp_path / "checkpoint", state)
    folder = tmp_path / "checkpoint"
    on_first_rank(lambda: shutil.copytree(folder, tmp_path / "pristine"))
    names = (".metadata", "__0_0.distcp", "__1_0.distcp", "__values.distcp", "index.json")
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
    model.load_state_dict(
        {name: torch.zeros_like(v) for name, v in model.state_dict().items() if name != "_extra_state"},
        strict=False,
    )
    for name in names:
        for kind in SOME:
            if (name, kind) == ("index.json", "missing"):  # then it is a folder of torch's, with no digests
                continue
            damage = DAMAGES[kind]
            on_first_rank(lambda d=damage, n=name: d(folder / n, tmp_path / "other" / n))
            with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=r"checkpoint") as caught:
                fabric.load(folder, state)
            text = str(caught.value)
            # An index of another step fits none of the files: the first that differs is named.
            assert any(each in text for each in (names if name == "index.json" else [name])), (kind, text)
            assert text.startswith("The checkpoint ")
            on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    assert not any(full(p).any() for p in model.parameters())  # nothing was changed before all was compared
    fabric.load(folder, state)
    assert all(full(p).any() for p in model.parameters())


@multirank(2, timeout=TIMEOUT)
def test_pickles_in_our_folders_are_not_opened(rank: int, world_size: int, tmp_path: Path) -> None:
    """Torch's reader needs two of them. Ours compares them, and reads neither if their digests fit, too."""
    from tests.integrations.fabrics import fabric_of, set_up

    evidence = tmp_path / "evidence"
    fabric = fabric_of()
    model, _ = set_up(fabric)
    state = {"model": model, "step": 1}
    folder = tmp_path / "checkpoint"
    fabric.save(folder, state)
    on_first_rank(lambda: shutil.copytree(folder, tmp_path / "pristine"))
    planted = {
        ".metadata": code_of_the_system(evidence),
        "__values.distcp": saved_with({"step": Payload(evidence)}),
    }

    def plant(name: str, digest_fits: bool) -> None:
        (folder / name).write_bytes(planted[name])
        if digest_fits:
            index = parse_index((folder / INDEX).read_bytes())
            file = stored_file(folder / name)
            text = index_text(dataclasses.replace(index, files={**index.files, name: file}))
            (folder / INDEX).write_text(text)

    for name in planted:
        on_first_rank(lambda n=name: plant(n, False))
        for options in ({}, {"weights_only": False}):
            with pytest.raises(ValueError, match=rf"{name} holds .* bytes, .* expected"):
                fabric.load(folder, state, **options)
        on_first_rank(lambda n=name: plant(n, True))
        state["step"] = 0
        fabric.load(folder, state, weights_only=False)
        assert state["step"] == 1
        on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    assert not evidence.exists()


@multirank(2, timeout=TIMEOUT)
def test_code_in_files_does_not_run(rank: int, world_size: int, tmp_path: Path) -> None:
    """In full checkpoints and files of weights."""
    from tests.integrations.fabrics import fabric_of, set_up

    evidence, full_file = tmp_path / "evidence", tmp_path / "full"
    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    called = r"names tests\.support\.payloads\._run, which .* it was not called"
    # One file, in all the ways to read it; torch's own default may be changed by a variable of the environment.
    on_first_rank(lambda: full_file.write_bytes(saved_with({"model": Payload(evidence, {})})))
    single = fabric_of().setup(nn.Sequential(nn.Linear(3, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        for load in (
            lambda: fabric.load(full_file, state),
            lambda: fabric.load(full_file),
            lambda: fabric.load_raw(full_file, single),
            lambda: fabric.load(full_file, state, weights_only=True),
        ):
            with pytest.raises((ValueError, RuntimeError), match=called):
                load()
            assert not evidence.exists()
    on_first_rank(lambda: full_file.write_bytes(code_of_the_system(evidence)))
    with pytest.raises((ValueError, RuntimeError), match=r"cannot read it|cannot be read"):
        fabric.load(full_file, state)
    assert not evidence.exists()
    # Who says that a file is trusted has it read so.
    on_first_rank(lambda: full_file.write_bytes(saved_with({"step": Payload(evidence, 4)})))
    assert fabric.load(full_file, weights_only=False) == {"step": 4}
    dist.barrier()
    assert evidence.exists()
