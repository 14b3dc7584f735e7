"""Damaged and hostile checkpoints of Fabric: no code in them runs, and every rank raises one ordinary error."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support import multirank
from tests.support.payloads import Payload, code_of_the_system, plant_beside, saved_with
from tests.train.damage import DAMAGES, on_first_rank, restored

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs the extra lightning"
)

#: Importing Lightning on the first case of a rank can take longer than a case may.
TIMEOUT = 180

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
    names = (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt", "checksums.json")
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
    model.load_state_dict(
        {name: torch.zeros_like(v) for name, v in model.state_dict().items() if name != "_extra_state"},
        strict=False,
    )
    for name in names:
        for kind in SOME:
            if (name, kind) == ("checksums.json", "missing"):
                continue
            damage = DAMAGES[kind]
            on_first_rank(lambda d=damage, n=name: d(folder / n, tmp_path / "other" / n))
            with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=r"checkpoint") as caught:
                fabric.load(folder, state)
            text = str(caught.value)
            # Checksums of another step fit none of the files: the first that differs is named.
            assert any(each in text for each in (names if name == "checksums.json" else [name])), (kind, text)
            on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    assert not any(full(p).any() for p in model.parameters())  # nothing was changed before all was compared
    on_first_rank(
        lambda: DAMAGES["a link to the same"](folder / names[1], folder)
    )  # as model hubs keep files
    fabric.load(folder, state)
    on_first_rank(lambda: restored(folder, tmp_path / "pristine"))
    # Without checksums, as torch's own writer leaves it, what torch meets is an ordinary error, too.
    on_first_rank((folder / "checksums.json").unlink)
    fabric.load(folder, state)
    assert all(full(p).any() for p in model.parameters())
    on_first_rank(
        lambda: (folder / "__1_0.distcp").write_bytes(bytes((folder / "__1_0.distcp").stat().st_size))
    )
    with pytest.raises(ValueError, match=r"could not read it"):
        fabric.load(folder, state)


@multirank(2, timeout=TIMEOUT)
def test_code_in_checkpoints_does_not_run(rank: int, world_size: int, tmp_path: Path) -> None:
    """In metadata, in values that are no tensors, in meta.pt, in full checkpoints and files of weights."""
    from tests.integrations.fabrics import fabric_of, set_up

    evidence = tmp_path / "evidence"
    fabric = fabric_of()
    model, optimizer = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    folder, full_file = tmp_path / "checkpoint", tmp_path / "full"
    fabric.save(folder, state)
    fabric_of(state_dict_type="full").save(full_file, state)
    on_first_rank(lambda: shutil.copytree(folder, tmp_path / "pristine"))

    def refused(attack: Any, expected: str, **options: Any) -> None:
        on_first_rank(attack)
        with pytest.raises((ValueError, RuntimeError), match=expected):
            fabric.load(folder, state, **options)
        assert not evidence.exists()
        on_first_rank(lambda: restored(folder, tmp_path / "pristine"))

    def unsealed(action: Any) -> Any:
        def attack() -> None:
            (folder / "checksums.json").unlink()
            action()

        return attack

    called = r"names tests\.support\.payloads\._run, which .* it was not called"
    refused(unsealed(lambda: plant_beside(folder / ".metadata", evidence)), called, weights_only=False)
    refused(lambda: (folder / ".metadata").write_bytes(code_of_the_system(evidence)), "not called|SHA-256")
    planted = saved_with({"step": Payload(evidence)})
    refused(unsealed(lambda: (folder / "meta.pt").write_bytes(planted)), called)
    refused(
        lambda: (folder / "meta.pt").write_bytes(planted), "meta.pt holds .* bytes|meta.pt is not the file"
    )
    # A value of the model's extra state.
    model.module.seen = {"batches": Payload(evidence), "last": torch.zeros(2)}
    fabric.save(folder, state)
    model.module.seen = {"batches": 0, "last": torch.zeros(2)}
    with pytest.raises(ValueError, match=rf"'model\._extra_state\.batches' {called}"):
        fabric.load(folder, state)
    assert not evidence.exists()
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


@multirank(2, timeout=TIMEOUT)
def test_folders_of_torch_itself_are_read(rank: int, world_size: int, tmp_path: Path) -> None:
    """Saved without us, read without pickle: parameters under their names, also with values that are no tensors."""
    from tests.integrations.fabrics import assert_same_model, fabric_of, plain_model, set_up

    fabric = fabric_of(layout="ragged")
    model, _ = set_up(fabric, seed=8)
    plain = plain_model(seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "torch")
    fabric.load(tmp_path / "torch", {"model": model})
    assert_same_model(model, plain)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "torch" / ".metadata", weights_only=True)
