"""Operations of a token in models of transformers, against torch's counter on the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.finetune.adapters import adapt
from shardwright.train.models.build import model_of
from shardwright.train.models.hf import flops
from shardwright.train.models.hf.documents import unnoticed
from shardwright.train.models.hf.flops import count_by_kinds
from shardwright.train.step.model_facts import ModelFacts
from tests.train.kit.jobs import tiny
from tests.train.models.kit.foreign import NATIVE
from tests.train.models.table.small import causal_types, save_config, small_config

transformers = pytest.importorskip("transformers", reason="needs transformers")

#: Their traces in a test of the first tier: a plain one, heads wider than the model, experts, latent attention,
#: recurrent layers, positions in a table, and a window.
FEW = ("llama", "qwen3", "gpt_oss", "qwen3_moe", "deepseek_v3", "mamba2", "gpt2", "gemma3_text", "falcon")


def job(path: Path, length: int, **finetune: Any) -> Config:
    return tiny(
        model={**dict.fromkeys(NATIVE), "kind": "hf", "path": str(path), "weights": "random"},
        train={"seq_len": length, "global_batch": 4, "micro_batch": 1},
        finetune=finetune,
    )


def counted_by_torch(config: Any, length: int, model: Any = None) -> float:
    """Return the operations of a token in the real model, whose attention and experts are plain products."""
    if model is None:
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).train()
    tokens = torch.randint(3, 200, (1, length), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / length


def facts(config: Config) -> ModelFacts:
    model = model_of(config.model.shape())
    adapt(model, config.finetune, 0)
    return ModelFacts.of(model, config.model, config.train.seq_len)


def compare(kind: str, folder: Path, length: int) -> float:
    """The relative difference."""
    with unnoticed():
        config = small_config(kind)
        save_config(config, folder / kind)
        own = facts(job(folder / kind, length)).flops_per_token
        return own / counted_by_torch(config, length) - 1


@pytest.mark.parametrize("kind", FEW)
def test_operations_are_those_that_torch_counts(kind: str, tmp_path: Path) -> None:
    # No token is beyond a window, of which torch counts the products that are masked, too.
    assert abs(compare(kind, tmp_path, 8)) < 0.01


@pytest.mark.extensive("architectures of transformers")
@pytest.mark.parametrize("part", range(4))
def test_operations_of_every_architecture(part: int, tmp_path: Path) -> None:
    wrong = {}
    for kind in causal_types()[part::4]:
        try:
            with unnoticed():
                small_config(kind)
        except ValueError:
            continue
        try:
            difference = compare(kind, tmp_path, 8)
        except (UserError, ValidationError):
            continue  # refused, as encoders are
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error
        if abs(difference) > 0.01:
            wrong[kind] = f"{difference:+.1%}"
    assert not wrong


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text"])
def test_longer_samples_are_not_traced_whole(kind: str, tmp_path: Path) -> None:
    length = 48
    with unnoticed():
        config = small_config(kind)
        save_config(config, tmp_path / kind)
        own = facts(job(tmp_path / kind, length)).flops_per_token
        wanted = counted_by_torch(config, length)
        if kind == "gemma3_text":  # of whose masked products torch counts all
            local = sum(each == "sliding_attention" for each in config.layer_types)
            wanted -= 12 * local * config.num_attention_heads * config.head_dim * (length - 8)
    assert own == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_frozen_weights_have_no_gradients_to_count(kind: str, tmp_path: Path) -> None:
    """Packed experts, too."""
    with unnoticed():
        config = small_config(kind)
        save_config(config, tmp_path / kind)
        settings = job(tmp_path / kind, 8, method="lora", rank=1, targets=["q_proj"])
        own = facts(settings).flops_per_token
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model.set_experts_implementation("eager")
        adapt(model, settings.finetune, 0)
        wanted = counted_by_torch(config, 8, model.train())
        alone = facts(job(tmp_path / kind, 8)).flops_per_token
    # What is before the first adapter needs no gradient.
    assert own == pytest.approx(wanted, rel=0.06) and own < 0.8 * alone


DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 9},
    "gemma3_text": {
        "num_hidden_layers": 14,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2 + ["sliding_attention"] * 2,
    },
    "deepseek_v3": {"num_hidden_layers": 17, "first_k_dense_replace": 3},
}


@pytest.mark.extensive("a count of all layers of each", but=("llama-*", "gemma3_text-*"))
@pytest.mark.parametrize(("kind", "method"), [*((kind, "full") for kind in DEEP), ("llama", "lora")])
def test_layers_of_a_kind_are_counted_once(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep model has the operations that a count of all its layers has, from counts of few layers."""
    with unnoticed():
        config = small_config(kind)
        for key, value in DEEP[kind].items():
            setattr(config, key, value)
        save_config(config, tmp_path / kind)
        wanted = job(tmp_path / kind, 40, **({"method": "lora", "rank": 1} if method == "lora" else {}))
        found: list[int] = []
        plain = flops.flops_of_sample

        def counted(build: Any, *others: Any) -> float:
            found.append(build().config.num_hidden_layers)
            return plain(build, *others)

        monkeypatch.setattr(flops, "flops_of_sample", counted)
        own = facts(wanted).flops_per_token
        assert max(found) < config.num_hidden_layers
        flops.flops_of_model.cache_clear()
        monkeypatch.setattr(flops, "count_by_kinds", lambda *_: None)
        assert own == facts(wanted).flops_per_token


def test_layers_that_add_more_each_are_not_counted_by_kind() -> None:
    """As where each layer attends to all layers before it."""
    kinds = ["a"] * 20
    assert count_by_kinds(kinds, lambda kept: 5.0 + 3 * len(kept)) == 65
    assert count_by_kinds(kinds, lambda kept: 5.0 + len(kept) ** 2) is None
    assert count_by_kinds(kinds, lambda kept: None) is None
    assert count_by_kinds(["a", "b", "a"], lambda kept: 0.0) is None  # few layers are counted as they are
    mixed = ["d", "d", *"mf" * 14]
    prices = {"d": 1.0, "m": 10.0, "f": 100.0}

    def count(kept: Any) -> float | None:  # the dense layers are the first two of each model
        return sum(prices[mixed[i]] for i in kept) if [*kept[:2]] == [0, 1] else None

    assert count_by_kinds(mixed, count) == sum(map(prices.__getitem__, mixed))
