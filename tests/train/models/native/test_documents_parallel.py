"""Documents of one sample with layers cut over tensor-parallel ranks, and with experts spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import shardwright as sw
from shardwright.activations import compile_blocks
from shardwright.train.models.native.hybrid import Hybrid, MixtureOfExperts
from shardwright.train.models.native.llama import Llama, LlamaConfig
from shardwright.train.models.native.styles import spread_experts
from shardwright.train.parallel.recipe import cut_layers
from tests.support.pool import multirank, world_mesh
from tests.train.kit.hybrid import TINY
from tests.train.models.kit import packed as kit

SHAPES = {
    "llama": LlamaConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=50, max_seq_len=kit.LENGTH
    ),
    "hybrid": replace(TINY, n_heads=4, n_kv_heads=2, tied_embeddings=False),
    "shared groups": replace(TINY, pattern="M", mtp_pattern="M", mamba_groups=1, tied_embeddings=False),
}
DOCUMENT = (0, 1)


def built(name: str) -> Any:
    torch.manual_seed(0)
    shape = SHAPES[name]
    model: Any = Llama(shape) if isinstance(shape, LlamaConfig) else Hybrid(shape)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def found(model: Any, inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The logits of the document, the loss over it, and the gradients of that."""
    model.zero_grad()
    with loss_parallel():
        logits, extras = model(inputs, extras=True, documents=kit.documents())
        targets = kit.targets(inputs, DOCUMENT)
        losses: Any = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (losses.full_tensor() if isinstance(losses, DTensor) else losses).sum()
        if extras is not None:
            loss = loss + sum(model.auxiliary_sums(extras, targets).values())
        loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return full(logits)[kit.places(DOCUMENT)], loss.detach(), gradients


def check_like_plain(model: Any, plain: Any) -> None:
    inputs = kit.tokens(50)
    logits, loss, gradients = found(model, inputs)
    expected_logits, expected_loss, expected = found(plain, inputs)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=2e-3)
    others = kit.with_other_tokens(inputs, DOCUMENT, 50)
    same_logits, same_loss, _ = found(model, others)
    assert torch.equal(same_logits, logits)
    assert torch.equal(same_loss, loss)


@multirank(2)
@pytest.mark.parametrize("name", SHAPES)
def test_cut_layers_keep_documents_apart(rank: int, world_size: int, name: str) -> None:
    model = built(name)
    cut_layers(model, init_device_mesh("cpu", (world_size,)))
    check_like_plain(model, built(name))


@pytest.mark.extensive("compiled graphs")
@multirank(2)
def test_compiled_cut_layers_keep_documents_apart(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    model = built("llama")
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("shard", "tensor"))
    cut_layers(model, mesh["tensor"])
    mesh = mesh["shard"]
    compile_blocks(model.blocks(), "aot_eager")
    for block in model.blocks():
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    check_like_plain(model, built("llama"))
    torch._dynamo.reset()


@multirank(2)
def test_spread_experts_keep_documents_apart(rank: int, world_size: int) -> None:
    """Rows of all ranks meet at an expert: the bits of one rank's document do not depend on the other rank's tokens."""
    name = "hybrid"
    model = Hybrid(replace(SHAPES[name], n_experts=4))  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("expert",))
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            spread_experts(module, mesh)
    inputs = kit.tokens(50, seed=rank)
    logits = model(inputs, documents=kit.documents())[kit.places(DOCUMENT)]
    others = kit.with_other_tokens(inputs, DOCUMENT, 50)
    assert torch.equal(model(others, documents=kit.documents())[kit.places(DOCUMENT)], logits)


@multirank(2)
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_sharded_models_keep_documents_apart(rank: int, world_size: int, name: str) -> None:
    """The engine hands `documents` to the blocks as they are, and gathers weights for each as always."""
    plain, model = built(name), built(name)
    mesh = world_mesh(world_size)
    for block in model.blocks():
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    inputs = kit.tokens(50)
    logits, loss, gradients = found(model, inputs)
    expected_logits, expected_loss, expected = found(plain, inputs)
    assert torch.equal(logits, expected_logits)
    assert torch.equal(loss, expected_loss)
    for parameter_name, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter_name], gradient, rtol=1e-5, atol=1e-6)
