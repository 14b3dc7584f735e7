"""The hybrid model as a whole: sizes, flops, predictions, initial weights, and its configuration."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardwright.train.config import Config, ModelConfig, load_config
from shardwright.train.errors import UserError
from shardwright.train.models.native.hybrid import HYBRID_PRESETS, Extras, Hybrid
from tests.train.kit.hybrid import TINY, tiny, tokens, whole_loss

# ------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("debug", 826_392),
        ("150M", 151_057_472),
        ("9B", 8_888_227_328),  # 27 Mamba-2, 25 dense and 4 attention layers
    ],
)
def test_presets_have_their_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Hybrid(HYBRID_PRESETS[preset])
    assert model.num_params() == parameters == HYBRID_PRESETS[preset].parameters
    assert ModelConfig.model_validate({"kind": "hybrid", "preset": preset}).shape() == HYBRID_PRESETS[preset]


@pytest.mark.parametrize(
    "changes", [{}, {"tied_embeddings": False}, {"mtp_pattern": ""}, {"shared_dim": 0, "pattern": "EM"}]
)
def test_parameters_are_counted_without_building(changes: dict[str, Any]) -> None:
    assert tiny(**changes).num_params() == replace(TINY, **changes).parameters


def test_flops_are_those_torch_counts() -> None:
    # One token more for the first prediction: then both heads see 64 and 63, and 64 is a multiple of the chunk.
    changes = {"mtp_pattern": "", "vocab_size": 64, "chunk_size": 16}
    for pattern, tolerance in (("-", 0), ("E", 0), ("*", 0), ("M", 0.02)):
        model, c = tiny(pattern=pattern, **changes), replace(TINY, pattern=pattern, **changes)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, 64))
        found = counter.get_total_flops()
        if pattern == "E" and "grouped" not in str(counter.get_flop_counts()):
            found += 64 * 2 * 2 * c.top_k * c.dim * c.expert_dim  # grouped_mm is not in the counter's table
        if pattern == "*" and "attention" not in str(counter.get_flop_counts()):
            found += 2 * 2 * 64 * 64 * c.n_heads * c.head_dim
        # Of Mamba-2 the pass from chunk to chunk is left out, and masked zeros are counted by both.
        assert model.flops_per_token(64) * 64 / 3 == pytest.approx(found, rel=tolerance), pattern


def test_flops_count_the_second_prediction() -> None:
    plain, further = tiny(mtp_pattern=""), tiny(mtp_pattern="-")
    more = 2 * 16 * 16 + 2 * 16 * 24 + 16 * 50
    assert further.flops_per_token(32) == plain.flops_per_token(32) + 6 * more


def test_gradients_reach_every_parameter() -> None:
    model = tiny()
    whole_loss(model, tokens(4, 40), tokens(4, 40, seed=2)).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


def test_extras_leave_the_logits_alone() -> None:
    model, x = tiny(), tokens()
    logits, extras = model(x, extras=True)
    assert torch.equal(logits, model(x))
    assert extras.imbalance_B.shape == (2,) and extras.mtp_logits_BSV.shape == (2, 15, 50)
    assert tiny(pattern="M-", mtp_pattern="")(x, extras=True)[1] == Extras(None, None)
    assert tiny(pattern="M-", mtp_pattern="").auxiliary == {}
    assert tiny().auxiliary == {"balance": 0.01, "mtp": 0.3}


def test_no_logits_know_later_tokens() -> None:
    model, first = tiny(chunk_size=4), tokens()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 7) % TINY.vocab_size
    (before, extras), (after, others) = model(first, extras=True), model(second, extras=True)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-2)
    # The head that predicts one token further sees one token further.
    torch.testing.assert_close(
        extras.mtp_logits_BSV[:, :8], others.mtp_logits_BSV[:, :8], rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(extras.mtp_logits_BSV[:, 8], others.mtp_logits_BSV[:, 8], atol=1e-2)


def test_second_prediction_is_of_the_token_after_the_next() -> None:
    model, x, y = tiny(), tokens(3, 12), tokens(3, 12, seed=2)
    _, extras = model(x, extras=True)
    sums = Hybrid.auxiliary_sums(extras, y)
    probabilities = extras.mtp_logits_BSV.log_softmax(-1)
    each = [-probabilities[b, s, y[b, s + 1]].item() for b in range(3) for s in range(11)]
    assert sums["mtp"].item() == pytest.approx(sum(each) * 12 / 11, rel=1e-5)
    assert sums["balance"].item() == pytest.approx(12 * extras.imbalance_B.sum().item(), rel=1e-6)


def test_tied_weights_are_one_parameter() -> None:
    model = tiny()
    assert model.output.weight is model.tok_embeddings.weight
    assert tiny(tied_embeddings=False).num_params() == model.num_params() + 50 * 16
    twin = copy.deepcopy(model)
    assert twin.output.weight is twin.tok_embeddings.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_gets_the_same_weights_later(tied: bool) -> None:
    with torch.device("meta"):
        model = Hybrid(replace(TINY, tied_embeddings=tied))
    with pytest.raises(RuntimeError, match=r"found \d+ on the meta device .*to_empty"):
        model.init_weights()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    direct = tiny(tied_embeddings=tied)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))
    assert torch.equal(model(tokens()), direct(tokens()))


def test_initial_steps_and_decays_are_those_of_mamba_2() -> None:
    mixer = tiny(mamba_heads=400, mamba_head_dim=1).layers[0].mixer
    steps, decay = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    # 400 draws, even in the logarithm: a hundredth of the range at either end is met nearly surely.
    assert 0.001 <= steps.min() < 0.0012 and 0.085 < steps.max() <= 0.1001
    assert 1 <= decay.min() < 1.5 and 15.5 < decay.max() <= 16.001


def test_bfloat16_weights_work() -> None:
    model = tiny().bfloat16()
    logits, extras = model(tokens(), extras=True)
    assert logits.dtype == torch.bfloat16 and extras.imbalance_B.dtype == torch.float32
    whole_loss(model, tokens(), tokens(seed=2)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # 8 bits, over five layers.
    torch.testing.assert_close(logits.float(), tiny()(tokens()), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    plain, recomputed = tiny(), tiny()
    for block in recomputed.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
    for model in (plain, recomputed):
        whole_loss(model, tokens(), tokens(seed=2)).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        # Where a tensor is used twice, the inner backward of the reentrant mode adds in another order.
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5 * reentrant, atol=1e-7 * reentrant)


# ------------------------------------------------------------------------------
# From a configuration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'pattern = "MXM"',
            "pattern: expected only the characters 'M' (Mamba-2), '*' (attention), 'E' (mixture of experts), "
            "'-' (dense MLP), found 'X'",
        ),
        ('pattern = ""', "pattern: expected at least one layer, found none"),
        ('mtp_pattern = "|"', "mtp_pattern: expected only the characters"),
        ("pattern = 3", "pattern: expected a string, found 3 (an integer)"),
        ("top_k = 9", "top_k: expected at most n_experts = 8, found 9"),
        ("n_kv_heads = 3", "n_kv_heads: expected a divisor of n_heads = 4, found 3"),
        ("mamba_groups = 3", "mamba_groups: expected a divisor of mamba_heads = 4, found 3"),
        ("expert_dim = 12", "expert_dim: expected a multiple of 8 if the pattern has experts ('E'), found 12"),
        ("shared_dim = -1", "shared_dim: expected an integer >= 0, found -1 (an integer)"),
        ("n_layers = 3", "n_layers: kind 'hybrid' has none; expected it with kind 'llama' only, found 3"),
        ("rope_theta = 3", "rope_theta: kind 'hybrid' has none; expected it with kind 'llama' only, found 3.0"),
        ('preset = "8B"', "preset: expected one of debug, 150M, 9B with kind 'hybrid', found '8B'"),
        ("top_q = 2", "unknown key model.top_q; did you mean model.top_k?"),
    ],
)  # fmt: skip
def test_mistake_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nkind = "hybrid"\n{text}\n')
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = str(caught.value).removeprefix(f"{path}: ").removeprefix("model.")
    assert message.startswith(expected) and "\n" not in message


@pytest.mark.parametrize("text", ['pattern = "M"', "head_dim = 3", "top_k = 2", 'preset = "9B"'])
def test_keys_of_the_hybrid_are_refused_for_a_llama(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[model]\n{text}\n")
    with pytest.raises(
        UserError, match=r"^\S+: model\.(\w+: kind 'llama' has none; .*|preset: .* kind 'llama'), found "
    ):
        load_config(path)


def test_a_second_prediction_needs_a_second_token(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nkind = "hybrid"\n[train]\nseq_len = 1\n')
    with pytest.raises(
        UserError, match=r"train.seq_len: expected at least 2 with a model.mtp_pattern, found 1"
    ):
        load_config(path)
    load_config(path, [("model.mtp_pattern", "")])


@pytest.mark.parametrize("preset", HYBRID_PRESETS)
def test_resolved_configuration_names_every_number_and_means_the_same(tmp_path: Path, preset: str) -> None:
    values = {"kind": "hybrid", "preset": preset, "n_heads": 80, "mtp_pattern": "-"}
    config = Config.model_validate({"model": values})
    path = tmp_path / "job.toml"
    path.write_text(config.resolved().to_toml())
    resolved = load_config(path)
    assert resolved == config.resolved() and resolved.model.shape() == config.model.shape()
    assert all(getattr(resolved.model, name) is not None for name in vars(resolved.model.shape()))
