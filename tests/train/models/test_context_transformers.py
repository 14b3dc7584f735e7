"""Models of transformers on ranks that divide each sample, against the model itself with whole samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardwright as sw
from shardwright.context import Split, gather, shard
from shardwright.train.errors import UserError
from shardwright.train.models.hf.context import Divided, check_divides, use_attention
from tests.support import multirank, world_mesh
from tests.train.models.kit import packed as kit
from tests.train.models.kit.architectures import made

pytest.importorskip("transformers", reason="needs transformers")

DIVIDED = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox",
    "phi3", "olmo2", "mixtral", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "gpt_oss", "opt",
]  # fmt: skip


MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8,
    },
}  # fmt: skip
REFUSED = {
    "mamba": "tokens see others, or their positions, outside of attention",
    "mamba2": "outside of attention",
    "jamba": "forward of a small model",
    "bamba": "outside of attention",
    "nemotron_h": "outside of attention",
    "falcon": "AttentionInterface",
    "llama4_text": r"chunked attention \(attention_chunk_size = 8\) is missing",
}


def built(kind: str, **changes: Any) -> Any:
    return made(kind, **MORE.get(kind, {}) | changes).eval()


def divided(model: Any, world_size: int) -> tuple[Any, Divided]:
    state = Divided(Split(world_mesh(world_size)))
    use_attention(model, state)
    return model, state


def logits_of(model: Any, state: Divided, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """The logits of whole samples, which all ranks have."""
    own = shard(tokens, state.split)
    logits: Tensor = model(input_ids=own, use_cache=False, **state.arguments(own, documents)).logits
    return gather(logits, state.split)


@pytest.mark.extensive("each architecture", but=("llama-2*", "gpt_oss-2*", "gemma2-2*"))
@multirank(2, 4)
@pytest.mark.parametrize("kind", DIVIDED)
def test_logits_and_gradients_are_those_of_the_model(rank: int, world_size: int, kind: str) -> None:
    tokens = kit.tokens(256)
    plain, model = built(kind), built(kind)
    wanted = plain(input_ids=tokens, use_cache=False).logits
    model, state = divided(model, world_size)
    found = logits_of(model, state, tokens)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    targets = tokens.roll(-1, 1)
    F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    (F.cross_entropy(found.flatten(0, 1), targets.flatten()) / world_size).backward()
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            dist.all_reduce(own.grad)
            torch.testing.assert_close(
                own.grad, other.grad, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.extensive("each architecture", but=("llama-*", "gpt_oss-*", "gemma2-*"))
@pytest.mark.parametrize("separates", [False, True])
@pytest.mark.parametrize("kind", DIVIDED)
def test_small_models_show_that_ranks_may_divide_samples(kind: str, separates: bool) -> None:
    check_divides(built(kind).config, 2, separates)


@pytest.mark.extensive("each architecture", but=("mamba", "falcon"))
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_mix_tokens_elsewhere_are_refused(kind: str) -> None:
    with pytest.raises(
        UserError, match=f"parallel.context: expected 1 for model type '{kind}', found 2; "
    ) as error:
        check_divides(built(kind).config, 2, False)
    print(error.value)


@multirank(2)
def test_positions_of_packed_documents_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    mesh, tokens = world_mesh(world_size), kit.tokens(256)[:1]
    model = sw.context_parallel(made("llama", attn_implementation="sdpa"), mesh)
    length = tokens.shape[1]
    places = torch.arange(length)[None]
    own = shard(tokens, Split(mesh))
    model(input_ids=own, position_ids=sw.context.shard(places, mesh), use_cache=False)
    for border in (length // 2, length // 2 + 3, 3):
        packed = torch.cat([places[:, :border], places[:, : length - border]], 1)
        with pytest.raises(
            RuntimeError, match="forward of LlamaForCausalLM got position_ids that do not go on by one"
        ):
            model(input_ids=own, position_ids=sw.context.shard(packed, mesh), use_cache=False)
