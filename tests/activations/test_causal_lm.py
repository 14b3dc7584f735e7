"""Models of transformers that compute their own loss, in chunks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


def qwen() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).float()


@pytest.mark.extensive("a model of transformers on every rank")
@multirank(2)
@pytest.mark.parametrize("items", [None, 7])
def test_losses_and_gradients_are_those_of_whole_logits(
    rank: int, world_size: int, items: int | None
) -> None:
    model = qwen()
    tokens = torch.arange(rank, rank + 24).view(2, 12) % 50
    labels = tokens.where(tokens % 5 != 0, -100)
    plain = copy.deepcopy(model)
    expected = plain(input_ids=tokens, labels=labels, num_items_in_batch=items)
    expected.loss.backward()
    sw.wrap.auto_wrap(model, sw.wrap.by_class(type(model.model.layers[0])), mesh=world_mesh(world_size))
    sw.chunk_causal_lm_loss(model, chunks=3)
    output = model(input_ids=tokens, labels=labels, num_items_in_batch=items)
    assert output.logits is None and output[0] is output.loss
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        mean = q.grad.clone()
        torch.distributed.all_reduce(mean)
        # The sums of the chunks have another order.
        torch.testing.assert_close(full(p.grad), mean / world_size, atol=1e-6, rtol=1e-4, msg=name)
    assert model(input_ids=tokens).logits.shape == (2, 12, 50)
    model.eval()
    evaluated = model(input_ids=tokens, labels=labels, num_items_in_batch=items)
    assert evaluated.logits is not None
    torch.testing.assert_close(evaluated.loss, output.loss)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got a Linear with the loss None.*chunked_cross_entropy"):
        sw.chunk_causal_lm_loss(nn.Linear(2, 2))
