"""Models of transformers that compute their own loss, in chunks."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh


def qwen(tied: bool = True) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
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


def _whole_gradients(model: nn.Module, plain: nn.Module, tokens: torch.Tensor) -> None:
    """Assert that a call has the loss and the gradients of a model that computes whole logits."""
    expected = plain(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad and (p.grad is None) == (q.grad is None), name
        # The sums of the chunks have another order.
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.extensive("imports transformers")
@pytest.mark.parametrize("by_file", [False, True])
def test_a_copy_trains_itself(by_file: bool) -> None:
    plain = qwen()
    model = sw.chunk_causal_lm_loss(copy.deepcopy(plain), chunks=3)
    if by_file:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    _whole_gradients(twin, plain, torch.arange(24).view(2, 12))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.extensive("imports transformers")
def test_labels_by_position_are_chunked() -> None:
    model, tokens = sw.chunk_causal_lm_loss(qwen(), chunks=3), torch.arange(24).view(2, 12)
    names = list(inspect.signature(model.forward).parameters)
    arguments = [tokens, *[None] * (names.index("labels") - 1), tokens]
    output = model(*arguments)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(input_ids=tokens, labels=tokens).loss)
    assert model(tokens).logits is not None


@pytest.mark.extensive("imports transformers")
def test_a_second_call_changes_the_chunks() -> None:
    model, tokens = sw.chunk_causal_lm_loss(qwen(), chunks=3), torch.arange(24).view(2, 12)
    forward = model.forward
    sw.chunk_causal_lm_loss(model, chunks=2)
    assert model.forward is forward and forward.chunks == 2
    _whole_gradients(model, qwen(), tokens)
    assert model(input_ids=tokens).logits is not None


@pytest.mark.extensive("imports transformers and peft")
@pytest.mark.parametrize("chunked_first", [False, True])
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_adapters_of_peft(chunked_first: bool, target: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    tokens = torch.arange(24).view(2, 12)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    plain = adapted(qwen(tied=False)).train()
    if chunked_first:
        model = adapted(sw.chunk_causal_lm_loss(qwen(tied=False), chunks=3))
    else:
        model = sw.chunk_causal_lm_loss(adapted(qwen(tied=False)), chunks=3)
    _whole_gradients(model.train(), plain, tokens)
    assert model(input_ids=tokens).logits is not None
