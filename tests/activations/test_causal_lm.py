"""Models of transformers that compute their own loss, in chunks."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from tests.engine.kit.models import full
from tests.support import multirank, world_mesh
from tests.support.matrix import everything, generate


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


def ForCausalLMLoss(logits: Any, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """The loss of transformers, by its name."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.float().view(-1, vocab_size), targets.flatten(), ignore_index=-100)


class Small(nn.Module):
    """A model with the loss and the outputs of transformers, without it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.loss_function = ForCausalLMLoss

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.tokens(input_ids).tanh())
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=50)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("trained", ["some", "none"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_loss_without_targets_is_that_of_whole_logits(trained: str, gradients: bool) -> None:
    """The mean of no losses is NaN. Its gradients are zeros, which a run can leave out or take part in."""
    torch.manual_seed(0)
    plain = Small()
    model = sw.chunk_causal_lm_loss(copy.deepcopy(plain), chunks=3)
    tokens = torch.arange(24).view(2, 12)
    labels = tokens if trained == "some" else torch.full_like(tokens, -100)
    with torch.set_grad_enabled(gradients):
        expected, found = plain(tokens, labels), model(tokens, labels)
    assert "logits" not in found
    torch.testing.assert_close(found["loss"], expected["loss"], equal_nan=True)
    assert found["loss"].requires_grad == gradients
    if gradients:
        for each in (expected, found):
            each["loss"].backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert other.grad.isfinite().all()
            torch.testing.assert_close(own.grad, other.grad)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got a Linear with the loss None.*chunked_cross_entropy"):
        sw.chunk_causal_lm_loss(nn.Linear(2, 2))


POLICY = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "kept": {"reshard_after_forward": False},
    "zero2": {"strategy": "zero2"},
    "zero1": {"strategy": "zero1", "layout": "ragged"},
    "ragged": {"layout": "ragged"},
}
AXES: dict[str, tuple[Any, ...]] = {
    "shards": tuple(SHARDS),
    "head": ("tied", "untied", "unit"),
    "order": ("chunks first", "shards first"),
    "dtype": ("float32", "bfloat16"),
    "blocks": ("plain", "checkpoint", "reentrant", "ops", "compiled"),
    "call": ("loss", "items", "tuple", "evaluated", "without gradients", "without targets", "twice"),
}
ROWS = generate(AXES, lambda one, a, other, b: False, *((3, 0) if everything() else (2, 0)))


def _sharded(row: dict[str, Any], model: Any, mesh: DeviceMesh) -> Any:
    options = SHARDS[row["shards"]] | ({"mp_policy": POLICY} if row["dtype"] == "bfloat16" else {})
    blocks = row["blocks"]
    if blocks in ("checkpoint", "reentrant"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": blocks == "reentrant"}
        )
        if blocks == "reentrant":
            model.enable_input_require_grads()
    elif blocks == "ops":
        checkpoint_blocks(model.model.layers, "ops")
    elif blocks == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    for module in (*model.model.layers, *([model.lm_head] if row["head"] == "unit" else [])):
        sw.fully_shard(module, mesh=mesh, **options)
    return sw.fully_shard(model, mesh=mesh, **options)


def _loss_and_gradients(row: dict[str, Any], model: Any, rank: int, chunked: bool) -> list[Any]:
    tokens = torch.arange(rank, rank + 24).view(2, 12) % 50
    labels = tokens.where(tokens % 5 != 0, -100)
    call = row["call"]
    if call == "without targets" and rank == 0:
        labels = torch.full_like(labels, -100)
    more = {"items": {"num_items_in_batch": torch.tensor(9)}, "tuple": {"return_dict": False}}.get(call, {})
    model.train(call != "evaluated")
    found: list[Any] = []
    for last in (False, True) if call == "twice" else (True,):
        model.set_requires_gradient_sync(last)
        with torch.set_grad_enabled(call != "without gradients"):
            output = model(input_ids=tokens, labels=labels, use_cache=False, **more)
        if chunked and call != "evaluated":
            assert call == "tuple" or output.logits is None
        found.append(output[0].detach().float())
        if call != "without gradients":
            output[0].backward()
    return found + [None if p.grad is None else full(p.grad).float() for p in model.parameters()]


@pytest.mark.extensive("models of transformers on every rank")
@multirank(2, timeout=300)
@pytest.mark.parametrize("head", AXES["head"])
def test_chunks_train_like_whole_logits_beside_other_settings(rank: int, world_size: int, head: str) -> None:
    for row in (each for each in ROWS if each["head"] == head):
        torch._dynamo.reset()
        model = qwen(head == "tied")
        whole, chunked = copy.deepcopy(model), model
        if row["order"] == "chunks first":
            sw.chunk_causal_lm_loss(chunked, chunks=3)
        whole, chunked = (_sharded(row, each, world_mesh(world_size)) for each in (whole, chunked))
        if row["order"] == "shards first":
            sw.chunk_causal_lm_loss(chunked, chunks=3)
        expected = _loss_and_gradients(row, whole, rank, chunked=False)
        found = _loss_and_gradients(row, chunked, rank, chunked=True)
        # Sums of another order: of chunks in float32, and their roundings to bfloat16.
        near = {"atol": 2e-6, "rtol": 1e-4} if row["dtype"] == "float32" else {"atol": 1e-2, "rtol": 3e-2}
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda m, r=row: f"{r}: {m}", **near)


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
