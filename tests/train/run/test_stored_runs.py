"""Runs that commit 8879734 has written resume, and go on with the bits of the run that it continued itself.

`fixtures/NAME.zip` has the folder of a run of four steps, its text, and in `continued.json` the steps 5 to 8 and the
digests of the checkpoint of step 8, as that commit computed them. The files never change: what a user has on disk
does not change either. Where torch computes the bits of the machine that wrote them, losses, weights, optimizer and
generators are compared in bits; elsewhere losses, norms and validations with a tolerance.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.checkpoint import INDEX
from shardwright.checkpoint.format.index import parse_index
from tests.train.kit.jobs import ranks, train_here

FIXTURES = Path(__file__).parent / "fixtures"


def arithmetic() -> str:
    """A digest of a few products and functions: equal where torch computes the same bits."""
    values = torch.arange(4096, dtype=torch.float32).sin().view(16, 256).requires_grad_()
    weights = torch.arange(65536, dtype=torch.float32).cos().view(256, 256).requires_grad_()
    hidden = F.silu(F.rms_norm(values @ weights, (256,)))
    attended = F.scaled_dot_product_attention(
        *(hidden.view(2, 8, 4, 64).transpose(1, 2),) * 3, is_causal=True
    )
    F.cross_entropy(attended.reshape(16, 256) @ weights, torch.arange(16)).backward()
    assert values.grad is not None and weights.grad is not None
    parts = [values.grad, weights.grad, *torch.linalg.qr(weights.detach())]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in parts)).hexdigest()


def digests(checkpoint: Path) -> dict[str, str]:
    """A digest of all tensors of each part of a checkpoint, and of the generators of torch and Python."""
    index = parse_index((checkpoint / INDEX).read_bytes())
    found: dict[str, Any] = {}
    for name, tensor in sorted(index.tensors.items()):
        if not name.endswith(".numpy"):  # of which nothing depends on whether it was imported
            parts = sorted((chunk.offsets, chunk.sizes, chunk.sha256) for chunk in tensor.chunks)
            found.setdefault(name.partition(".")[0], []).append((name, str(tensor.dtype), parts))
    return {part: hashlib.sha256(repr(each).encode()).hexdigest() for part, each in found.items()}


def records(run: Path) -> list[dict[str, Any]]:
    """Records of the steps after the fourth, without figures of time and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "lr", "grad_norm", "validation_loss")
    return [{key: line[key] for key in keys if line[key] is not None} for line in lines if line["step"] > 4]


@pytest.mark.parametrize("name", ["one_rank", "two_ranks", "muon"])
def test_a_run_of_8879734_resumes_with_its_bits(name: str, tmp_path: Path) -> None:
    shutil.unpack_archive(FIXTURES / f"{name}.zip", tmp_path)
    run, expected = tmp_path / "run", json.loads((tmp_path / "continued.json").read_text())
    config = run / "config.toml"
    config.write_text(config.read_text().replace("FOLDER", str(tmp_path)))
    command = ("train", config, "--resume", run, "--train.steps", "8", "--run.sample_tokens", "0")
    if name == "one_rank":
        assert train_here(*command[1:]) == 0
    else:
        assert ranks(2, *command) == [(0, ""), (0, "")]
    found = records(run)
    if arithmetic() == expected["arithmetic"]:
        assert found == expected["records"]
        assert digests(run / "checkpoints" / "step-8") == expected["digests"]
    assert [each["step"] for each in found] == [5, 6, 7, 8]
    for mine, theirs in zip(found, expected["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
