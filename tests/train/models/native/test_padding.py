"""Losses beside the cross-entropy with padding: they count trained tokens, wherever a sample ends."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.train.errors import UserError
from shardwright.train.models.build import model_of
from shardwright.train.models.hf import transformers_model
from shardwright.train.models.native.hybrid import Hybrid
from shardwright.train.models.packed import IGNORED, within_trained
from shardwright.train.parallel.model_conflicts import check_model_goes_with
from tests.train.kit.jobs import HYBRID, config_file, records, tiny, train_here
from tests.train.models.kit.architectures import folder_with, made
from tests.train.models.kit.foreign import NATIVE

DATA = {"packing": "none", "validation_fraction": 0.0}


def job(folder: Path, model: dict[str, Any]) -> Path:
    """Documents of 6 to 22 tokens, one in each sample."""
    draw = random.Random(0)
    rows = [{"text": "".join(draw.choices("abcdefgh ", k=draw.randint(6, 22)))} for _ in range(24)]
    text = folder / "documents.jsonl"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny(
        run={"sample_tokens": 0},
        model=model,
        train={"steps": 3, "seq_len": 24, "global_batch": 4, "micro_batch": 2},
        validation={"every": 0},
        data={**DATA, "source": str(text), "cache": str(folder / "cache")},
    )
    return config_file(folder, config.to_toml())


def means(folder: Path) -> list[float]:
    """All losses of all steps."""
    names = ("loss", "balance_loss", "mtp_loss")
    return [record[name] for record in records(folder) for name in names if record[name] is not None]


def test_of_the_hybrid_they_do_not_count_padding(tmp_path: Path) -> None:
    file = job(tmp_path, HYBRID)
    assert train_here(file, "--run.dir", tmp_path / "plain") == 0
    expected = means(tmp_path / "plain")
    assert len(expected) == 9
    assert train_here(file, "--run.dir", tmp_path / "longer", "--train.seq_len", "40") == 0
    assert means(tmp_path / "longer") == pytest.approx(expected, rel=1e-5)


@pytest.mark.extensive("transformers")
def test_of_transformers_they_do_not_count_padding(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    folder = folder_with("mixtral", tmp_path / "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    model = {**dict.fromkeys(NATIVE), "kind": "hf", "path": str(folder)}
    file = job(tmp_path, model)
    assert train_here(file, "--run.dir", tmp_path / "plain") == 0
    expected = means(tmp_path / "plain")
    assert train_here(file, "--run.dir", tmp_path / "longer", "--train.seq_len", "40") == 0
    assert means(tmp_path / "longer") == pytest.approx(expected, rel=1e-5) and len(expected) == 6
    assert train_here(file, "--run.dir", tmp_path / "one", "--train.micro_batch", "1") == 0
    # A mean over the tokens of a micro-batch.
    assert means(tmp_path / "one")[::2] != pytest.approx(expected[::2], rel=1e-6)


def test_the_balance_loss_is_that_of_transformers_with_a_mask() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    model = made("mixtral", output_router_logits=True)
    tokens = torch.randint(3, 256, (3, 12))
    targets = tokens.roll(-1, 1)
    targets[0, 5:], targets[1, :4], targets[2] = IGNORED, IGNORED, IGNORED  # padding, a prompt, nothing
    mask = within_trained(targets)
    assert mask.sum(1).tolist() == [5, 12, 0]
    theirs = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False)
    function = transformers_model.balance_loss(type(model))
    assert function is not None
    plain = model(input_ids=tokens, use_cache=False).router_logits
    routing = transformers_model.Routing(function, 2, plain)
    trained = 5 + 8
    found = transformers_model.HuggingFaceModel.auxiliary_sums(routing, targets)["balance"]
    real = mask.flatten()
    wanted = function(tuple(each[real] for each in plain), 4, 2)
    torch.testing.assert_close(found, wanted * trained)
    assert theirs.aux_loss.isfinite()
    none = transformers_model.HuggingFaceModel.auxiliary_sums(routing, torch.full_like(targets, IGNORED))[
        "balance"
    ]
    assert none.item() == 0
    none.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_losses_of_untrained_tokens_without_documents() -> None:
    """A window of text with a prompt inside: both losses are means over the trained tokens of each sequence."""
    config = tiny(model=HYBRID)
    model = model_of(config.model.shape())
    tokens = torch.randint(0, 256, (2, 12))
    targets = tokens.roll(-1, 1)
    whole = Hybrid.auxiliary_sums(model(tokens, extras=True)[1], targets)
    one = [
        Hybrid.auxiliary_sums(model(t, extras=True)[1], y)
        for t, y in zip(tokens.split(1), targets.split(1), strict=True)
    ]
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(each[name] for each in one))
    targets[0, :6], targets[1] = IGNORED, IGNORED
    half = Hybrid.auxiliary_sums(model(tokens, extras=True)[1], targets)
    torch.testing.assert_close(half["balance"], one[0]["balance"] / 2)
    assert 0 < half["mtp"] < whole["mtp"]


def test_graphs_need_a_constant_amount_of_padding() -> None:
    config = tiny(
        model=HYBRID,
        data=DATA,
        validation={"every": 0},
        train={"cuda_graph": True},
        parallel={"engine": "shardwright"},
    )
    with pytest.raises(UserError, match=r"train.cuda_graph: expected false with data.packing 'none'"):
        check_model_goes_with(config, model_of(config.model.shape()))


def test_a_class_with_another_balance_loss_is_refused() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import DogeForCausalLM, LlamaForCausalLM

    assert transformers_model.balance_loss(LlamaForCausalLM) is None
    with pytest.raises(
        UserError, match="found the one of DogeForCausalLM; set output_router_logits to false"
    ):
        transformers_model.balance_loss(DogeForCausalLM)
