"""One layer on one device: adapters, dropout, merge."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from shardwright.train.finetune.adapters import (
    adapt,
    adapted_layers,
    merge,
    set_samples,
    skipped_flops,
    trained_names,
    uncalled_layers,
)
from shardwright.train.finetune.layers import Dropout
from tests.train.finetune.kit import LLAMA, build, logits_of, loss_of, randomised, settings, tokens


@pytest.mark.parametrize("kind", ["llama", "hybrid", "transformers"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_new_adapters_change_nothing(kind: str, method: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    plain, model = build(kind), build(kind, settings(method=method))
    assert torch.equal(logits_of(model(tokens(0))), logits_of(plain(tokens(0))))
    randomised(model)
    assert not torch.allclose(logits_of(model(tokens(0))), logits_of(plain(tokens(0))), atol=1e-3)


def test_adapters_are_drawn_from_their_seed_alone() -> None:
    def drawn(seed: int, other: int) -> torch.Tensor:
        layer = nn.Sequential(nn.Linear(6, 4))
        torch.manual_seed(other)
        before = torch.get_rng_state()
        adapt(layer, settings(), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return layer[0].lora_a.detach()  # type: ignore[return-value, operator, union-attr]

    assert torch.equal(drawn(5, 0), drawn(5, 1))
    assert not torch.equal(drawn(5, 0), drawn(6, 0))


def test_an_adapted_layer_computes_its_formula() -> None:
    layer = nn.Sequential(nn.Linear(6, 4))
    adapt(layer, settings(rslora=True), seed=0)
    randomised(layer)
    x, own = torch.randn(5, 6), layer[0]
    expected = F.linear(x, own.weight, own.bias) + (x @ own.lora_a.T @ own.lora_b.T) * (7 / 3**0.5)  # type: ignore[operator]
    torch.testing.assert_close(layer(x), expected)
    assert isinstance(own, nn.Linear) and "rank=3" in repr(own)


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_dropout_of_a_token_is_the_same_in_chunks(chunks: int) -> None:
    head = nn.Sequential(nn.Linear(6, 4))
    adapt(head, settings(dropout=0.5), seed=0)
    randomised(head)
    set_samples(head, torch.tensor([5, 9]), part=1)
    hidden, targets = torch.randn(2, 5, 6), torch.randint(0, 4, (2, 5))
    expected = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten(), reduction="none")
    _, losses = sw.chunked_cross_entropy(hidden, head, targets, chunks=chunks)
    torch.testing.assert_close(losses.flatten(), expected)
    with torch.no_grad():
        _, losses = sw.chunked_cross_entropy(hidden, head, targets, chunks=chunks)
    torch.testing.assert_close(losses.flatten(), expected)


def test_dora_is_a_direction_times_a_length() -> None:
    layer = nn.Sequential(nn.Linear(6, 4))
    adapt(layer, settings(method="dora"), seed=0)
    own = randomised(layer)[0]
    whole = own.weight + own.lora_b @ own.lora_a * (7 / 3)
    x = torch.randn(5, 6, requires_grad=True)
    weight = own.lora_magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True).detach()
    expected = F.linear(x, weight, own.bias)
    torch.testing.assert_close(layer(x), expected)
    names = [own.lora_a, own.lora_b, own.lora_magnitude, x]
    for ours, theirs in zip(
        torch.autograd.grad(layer(x).square().sum(), names),
        torch.autograd.grad(expected.square().sum(), names),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_folds_adapters_into_plain_layers(method: str, dtype: str) -> None:
    own = settings(method=method, base_dtype=dtype)
    model = randomised(build("llama", own))
    classes = {name: type(module) for name, module in build("llama").named_modules()}
    expected = {}
    for name, layer in adapted_layers(model):
        whole = layer.weight.double() + layer.lora_b.double() @ layer.lora_a.double() * (7 / 3)
        if layer.lora_magnitude is not None:
            whole *= (layer.lora_magnitude.double() / whole.norm(dim=1))[:, None]
        expected[f"{name}.weight"] = whole
    logits = model(tokens(0)) if dtype == "float32" else None
    merge(model)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    state = model.state_dict()
    assert state.keys() == build("llama").state_dict().keys()
    for name, weight in expected.items():
        assert state[name].dtype == getattr(torch, dtype)
        # Rounded once: at most half of the last bit from the exact value, beside float32's own rounding.
        torch.testing.assert_close(
            state[name].double(), weight, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6
        )
    if logits is not None:
        torch.testing.assert_close(model(tokens(0)), logits, rtol=1e-4, atol=1e-4)


def test_frozen_matrices_get_the_base_dtype() -> None:
    model = build(
        "hybrid", settings(base_dtype="bfloat16", train_also=["output.weight"]), tied_embeddings=False
    )
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["layers.0.mixer.in_proj.weight"] is torch.bfloat16
    assert dtypes["layers.0.mixer.a_log"] is dtypes["norm.weight"] is torch.float32
    assert dtypes["output.weight"] is dtypes["layers.0.mixer.in_proj.lora_a"] is torch.float32
    tied = build("llama", settings(base_dtype="bfloat16"), tied_embeddings=True)
    assert tied.output.weight is tied.tok_embeddings.weight


def test_dropout_depends_on_the_sample_alone() -> None:
    dropout = Dropout(0.25, seed=3)
    dropout.set_samples(torch.arange(40, 48))
    whole = dropout(torch.ones(8, 50, 64), 2)
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert abs((whole == 0).float().mean().item() - 0.25) < 0.01  # 25,600 draws: three deviations are 0.008
    for first in (40, 44):
        dropout.set_samples(torch.arange(first, first + 4))
        assert torch.equal(dropout(torch.ones(4, 50, 64), 2), whole[first - 40 : first - 36])
        assert torch.equal(dropout(torch.ones(200, 64), 2).view(4, 50, 64), whole[first - 40 : first - 36])
    # Samples, tokens, channels and layers are unlike one another.
    kept = (whole != 0).float()
    for one, other in ((kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept[..., 0], kept[..., 1])):
        assert 0.5 < (one == other).float().mean() < 0.75  # 0.625 where they are independent
    dropout.set_samples(torch.arange(40, 48))
    assert 0.6 < (dropout(torch.ones(8, 50, 64), 3) == whole).float().mean() < 0.65
    assert 0.6 < (Dropout.kept(_with(4), torch.Size((8, 50, 64)), 2) == (whole != 0)).float().mean() < 0.65


def _with(seed: int) -> Dropout:
    dropout = Dropout(0.25, seed)
    dropout.set_samples(torch.arange(40, 48))
    return dropout


@pytest.mark.parametrize("kind", ["full", "ops"])
def test_recomputed_activations_see_the_same_dropout(kind: str) -> None:
    own = settings(dropout=0.3)
    plain, model = (randomised(build("llama", own)) for _ in range(2))
    checkpoint_blocks(model.blocks(), kind)
    for number in range(2):
        assert torch.equal(loss_of(plain, number), loss_of(model, number))
        loss_of(plain, number).backward()
        loss_of(model, number).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad)), name
    plain.eval()
    assert torch.equal(plain(tokens(0)), plain(tokens(0)))
    without = copy.deepcopy(plain)
    for _, layer in adapted_layers(without):
        layer.dropout = None
    assert torch.equal(plain(tokens(0)), without(tokens(0)))  # none in evaluation


def test_dropout_without_samples_is_an_error() -> None:
    model = build("llama", settings(dropout=0.1))
    with pytest.raises(RuntimeError, match="before set_samples"):
        model(tokens(0))
    set_samples(model, torch.arange(2))
    model(tokens(0))


@pytest.mark.extensive("compiled graphs")
def test_compiled_blocks_with_dropout_are_one_graph() -> None:
    own = settings(dropout=0.3)
    plain, model = (randomised(build("llama", own)) for _ in range(2))
    for block in model.blocks():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for number in range(2):
        torch.testing.assert_close(loss_of(model, number), loss_of(plain, number))


def test_layers_that_are_not_called_are_found() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) @ self.two.weight

    model = Direct()
    adapt(model, settings(targets=["one", "two"]), seed=0)
    model(torch.randn(2, 4))
    assert uncalled_layers(model) == ["two"]


def test_frozen_layers_compute_no_gradient_of_their_weights() -> None:
    model = build("llama", settings(train_also=["output.weight"]))
    blocks = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and name.startswith("layers.") and "lora" not in name
    )
    assert skipped_flops(model) == 2 * blocks
    assert skipped_flops(build("llama")) == 0
    assert LLAMA.n_layers == 2 and all("lora" in n or n == "output.weight" for n in trained_names(model))
