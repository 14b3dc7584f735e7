"""The trainer with each optimizer: it learns, resumes bit for bit, and refuses what does not go together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.train.kit.jobs import config_file, losses, ranks, tiny, train_here

MUON = ("--optimizer.name", "muon")
EIGHT = ("--optimizer.name", "adamw8bit")


def test_muon_learns_and_resumes_bit_for_bit_and_on_two_ranks(tmp_path: Path) -> None:
    config, whole, cut, grown = (
        config_file(tmp_path),
        *(tmp_path / name for name in ("whole", "cut", "grown")),
    )
    sharded = (*MUON, "--parallel.engine", "shardwright", "--parallel.layout", "ragged")
    assert train_here(config, *sharded, "--run.dir", whole) == 0
    assert losses(whole)[-1] < 0.9 * losses(whole)[0]
    assert train_here(config, *sharded, "--run.dir", cut, "--train.steps", "3") == 0
    shutil.copytree(cut, grown)
    assert train_here(config, *sharded, "--resume", cut) == 0
    assert losses(cut) == losses(whole)
    assert ranks(2, "train", config, *sharded, "--resume", grown) == [(0, ""), (0, "")]
    assert losses(grown) == pytest.approx(losses(whole), rel=1e-2)  # Newton-Schulz is in bfloat16


@pytest.mark.extensive("runs on several numbers of ranks")
def test_adamw8bit_learns_as_adamw_and_resumes_bit_for_bit_on_other_ranks(tmp_path: Path) -> None:
    """Rows have 32 elements here, so that 8 of them are a block."""
    config, whole, cut, grown, adamw = (
        config_file(tmp_path),
        *(tmp_path / name for name in ("whole", "cut", "grown", "adamw")),
    )
    here = ("--parallel.engine", "shardwright", "--parallel.layout", "8")
    assert train_here(config, *here, *EIGHT, "--run.dir", whole) == 0
    assert train_here(config, *here, "--run.dir", adamw) == 0
    assert losses(whole) != losses(adamw)
    assert losses(whole) == pytest.approx(losses(adamw), rel=1e-2)
    assert train_here(config, *here, *EIGHT, "--run.dir", cut, "--train.steps", "3") == 0
    shutil.copytree(cut, grown)
    assert train_here(config, *here, *EIGHT, "--resume", cut) == 0
    assert losses(cut) == losses(whole)
    assert ranks(2, "train", config, *here, *EIGHT, "--resume", grown) == [(0, ""), (0, "")]
    assert losses(grown) == pytest.approx(losses(whole), rel=1e-4)  # gradients are summed in another order


def test_a_layout_that_cuts_blocks_is_refused(tmp_path: Path) -> None:
    here = ("--parallel.engine", "shardwright", "--model.dim", "36", "--model.n_heads", "1")
    (status, said), *_ = ranks(
        3,
        "train",
        config_file(tmp_path),
        *here,
        *EIGHT,
        "--run.dir",
        tmp_path / "run",
        "--train.global_batch",
        "12",
    )
    assert (
        status != 0
        and "parallel.layout: found 'per_parameter'" in said
        and "blocks of 256 consecutive elements" in said
    )


def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = config_file(tmp_path), tmp_path / "run"
    assert train_here(config, "--run.dir", folder, "--train.steps", "2") == 0
    capsys.readouterr()
    assert train_here(config, "--resume", folder, *MUON) != 0
    said = capsys.readouterr().err
    assert "expected the optimizer's momentum_buffer of layers.0." in said and "optimizer.name" in said


def test_keys_of_another_optimizer_and_engines_without_whole_matrices_are_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"momentum: optimizer 'adamw' does not have this key; expected 0.95, found 0.5"
    ):
        tiny(optimizer={"momentum": 0.5})
    tiny(optimizer={"momentum": 0.5, "name": "muon"})
    with pytest.raises(ValidationError, match=r"expected 'adamw' with parallel.engine 'fsdp2', found 'muon'"):
        tiny(optimizer={"name": "muon"}, parallel={"engine": "fsdp2"})


@pytest.mark.extensive("runs in each setting")
def test_in_backward_and_offload_change_no_loss(tmp_path: Path) -> None:
    """Two micro-batches a step, and a run that is resumed."""
    config, plain, whole, cut = (
        config_file(tmp_path),
        *(tmp_path / name for name in ("plain", "whole", "cut")),
    )
    here = ("--parallel.engine", "shardwright", "--train.max_norm", "0")
    new = (*here, "--optimizer.in_backward", "true", "--parallel.offload", "cpu")
    assert train_here(config, *here, "--run.dir", plain) == 0
    assert train_here(config, *new, "--run.dir", whole) == 0
    assert losses(whole) == losses(plain)
    assert '"grad_norm": null' in (whole / "metrics.jsonl").read_text()
    assert train_here(config, *new, "--run.dir", cut, "--train.steps", "3") == 0
    assert train_here(config, *new, "--resume", cut) == 0
    assert losses(cut) == losses(plain)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"train": {"max_norm": 1.0}}, r"train.max_norm: expected 0 with optimizer.in_backward, found 1.0"),
        ({"parallel": {"engine": "fsdp2"}}, "only the engine shardwright steps in backward"),
        ({"optimizer": {"name": "muon"}}, "in_backward: expected false with optimizer 'muon'"),
        (
            {"train": {"max_norm": 0, "cuda_graph": True}},
            "train.cuda_graph: expected false with optimizer.in_b",
        ),
    ],
)
def test_what_in_backward_excludes(sections: dict[str, dict[str, object]], told: str) -> None:
    settings = {
        **sections,
        "optimizer": {"in_backward": True, **sections.get("optimizer", {})},
        "parallel": {"engine": "shardwright", **sections.get("parallel", {})},
    }
    with pytest.raises(ValidationError, match=told):
        tiny(**settings)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": {"engine": "fsdp2", "offload": "cpu"}}, "offload: expected 'none' with engine 'fsdp2'"),
        (
            {"parallel": {"offload": "cpu"}, "train": {"cuda_graph": True}},
            "parallel.offload: expected 'none'",
        ),
    ],
)
def test_what_offload_excludes(sections: dict[str, dict[str, object]], told: str) -> None:
    settings = {**sections, "parallel": {"engine": "shardwright", **sections["parallel"]}}
    with pytest.raises(ValidationError, match=told):
        tiny(**settings)
