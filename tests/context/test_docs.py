"""The examples of context parallelism in docs/parallelism.md run, on two ranks of the CPU in place of eight GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from tests.support import multirank

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
VOCABULARY, WIDTH = 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(sw.context.positions(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(x)  # type: ignore[no-any-return]


def examples() -> list[str]:
    _, _, page = PAGE.read_text().partition("### In your own loop")
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    places = {'"cuda"': '"cpu"', "(2, 4)": "(1, 2)", "(8,)": "(2,)", "losses * 8": "losses * 2"}
    for wanted, given in places.items():
        assert wanted in found[0]
        found[0] = found[0].replace(wanted, given)
    return found


@pytest.mark.extensive("imports transformers on every rank")
@multirank(2)
def test_examples_run(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {
        "sw": sw, "torch": torch, "F": F, "init_device_mesh": init_device_mesh, "model": model, "tokens": tokens,
        "trained_tokens_of_all_samples": 16,
    }  # fmt: skip
    own_loop, of_transformers = examples()
    exec(compile(own_loop, str(PAGE), "exec"), names)
    F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, atol=1e-6, rtol=1e-5)  # type: ignore[union-attr]
    transformers = pytest.importorskip("transformers")
    names["AutoModelForCausalLM"], names["inputs"] = transformers.AutoModelForCausalLM, tokens[:, :-1]
    names["config"] = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    exec(compile(of_transformers, str(PAGE), "exec"), names)
    assert names["logits"].shape == (2, 4, VOCABULARY)
