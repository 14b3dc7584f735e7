"""Small models with adapters, and steps of a plain one to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.train.config import FinetuneConfig
from shardwright.train.config.shapes.presets import LlamaConfig
from shardwright.train.extend import LanguageModel
from shardwright.train.finetune.adapters import adapt, set_samples
from shardwright.train.models.build import model_of
from tests.train.kit.hybrid import TINY

LLAMA = LlamaConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=46, vocab_size=64, max_seq_len=64
)  # a width that no number of ranks divides
HYBRID = replace(TINY, vocab_size=64, mtp_pattern="")
BATCH, LENGTH = 2, 12


class Transformers(LanguageModel):
    """A model of transformers as the trainer calls models."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig as Config

        values: dict[str, Any] = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
        }  # fmt: skip
        self.inner = AutoModelForCausalLM.from_config(Config(**{**values, **changes}))

    def blocks(self) -> list[nn.Module]:
        return list(self.inner.model.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def settings(**values: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"method": "lora", "rank": 3, "alpha": 7.0, **values})


def build(kind: str, own: FinetuneConfig | None = None, **changes: Any) -> Any:
    """A model of this kind; with adapters, if settings are given."""
    torch.manual_seed(0)
    if kind == "transformers":
        model: Any = Transformers(**changes)
    else:
        model = model_of(replace({"llama": LLAMA, "hybrid": HYBRID}[kind], **changes))
    if own is not None:
        adapt(model, own, seed=5)
    return model


def randomised(model: nn.Module, seed: int = 9) -> Any:
    """The model with other values in all trained parameters, so that adapters change something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


def tokens(number: int, length: int = LENGTH, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, 64, (batch, length + 1), generator=generator)


def logits_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def loss_of(model: Any, number: int) -> Tensor:
    """Mean loss of batch `number`, whose samples have the numbers that follow from it."""
    set_samples(model, torch.arange(number * BATCH, (number + 1) * BATCH))
    batch = tokens(number)
    logits = logits_of(model(batch[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


class InPrecision(nn.Module):
    """Computes with copies of a plain model's weights in another dtype; gradients reach the weights themselves."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, tokens: Tensor) -> Any:
        weights = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, (tokens,), tie_weights=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)


def plain_steps(
    model: nn.Module, steps: int, ranks: int, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses, and gradients by name, of steps over the batches of all ranks on one device."""
    optimizer, computed = optimizer_of(model), InPrecision(model, dtype)
    losses, gradients = [], []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(computed, step * ranks + rank) / ranks
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients
