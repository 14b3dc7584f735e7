"""Documents of one sample in transformers models: kept apart to the bit, or refused by a computation."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.train.errors import UserError
from shardwright.train.models.hf.documents import Separation, separation_of
from tests.train.models.kit import packed as kit
from tests.train.models.kit.packed import PLACES, Belongings, belongings, differing

transformers = pytest.importorskip("transformers", minversion="5")

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

#: By model type, what its small config has beside or instead of `BASE`.
KEPT_APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        **MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
    },
    "phi3": {},
    "gpt_oss": {**EXPERTS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "jamba": {**EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "rwkv": {"attention_hidden_size": 32},
}  # fmt: skip
#: One of these keys is in the small config of each model with experts.
HAS_EXPERTS = {"num_local_experts", "num_experts", "n_routed_experts"}
#: The gradient of an expert is a sum over its rows, which stand elsewhere where other tokens choose it, too.
OF_EXPERTS = (
    "experts.gate_up_proj",
    "experts.down_proj",
    "experts.gate_up_proj_bias",
    "experts.down_proj_bias",
)


def config_of(kind: str, attention: str = "sdpa") -> Any:
    values = {**BASE, **KEPT_APART.get(kind, {}), **REFUSED.get(kind, {})}
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = attention
    return config


def built(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=config._attn_implementation
    )
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float()


def loss_of(returned: Any, targets: Tensor) -> tuple[Tensor, Tensor, None]:
    return kit.cross_entropy(returned.logits, targets), returned.logits, None


def pairs(
    kind: str, attention: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Belongings, Belongings]]:
    """The values of each of several documents, beside two lots of other tokens in all other documents."""
    if (kind, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no such attention with sinks")
    config = config_of(kind, attention)
    documents, positions = kit.documents().to(device), kit.positions().to(device)
    arguments = separation_of(config).arguments(documents, positions, dtype)
    model, inputs = built(config).to(device, dtype).eval(), kit.tokens(64)
    embedding = model.get_input_embeddings()
    run = functools.partial(model, **arguments)
    for document in PLACES:
        others = kit.with_other_tokens(inputs, document, 64)
        one, two = (
            belongings(model, embedding, run, loss_of, tokens.to(device), document)
            for tokens in (inputs, others)
        )
        yield one, two


@pytest.mark.extensive("architectures of transformers", but=("llama-*", "gpt2-*", "mixtral-*"))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KEPT_APART)
def test_other_documents_change_no_bit(kind: str, attention: str) -> None:
    for number, (one, two) in enumerate(pairs(kind, attention)):
        assert differing(one, two, OF_EXPERTS) == [], PLACES[number]


@pytest.mark.parametrize("kind", KEPT_APART)
def test_a_document_among_others_is_as_if_alone(kind: str) -> None:
    config = config_of(kind, "eager" if kind == "gpt_oss" else "sdpa")
    arguments = separation_of(config).arguments(kit.documents(), kit.positions())
    model, inputs = built(config).eval(), kit.tokens(64)
    together = model(input_ids=inputs, **arguments).logits
    for document in PLACES:
        own = kit.places(document)
        alone = model(input_ids=inputs[own].unsqueeze(0), use_cache=False).logits[0]
        torch.testing.assert_close(together[own], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_with_a_state_are_refused(kind: str) -> None:
    with pytest.raises(UserError) as caught:
        separation_of(config_of(kind, "eager"))
    message = str(caught.value)
    assert message.startswith(
        f"data.document_mask: expected false for model type '{kind}', found true; in a small"
    )
    assert "the tokens of one document change the logits of another" in message
    assert "data.packing" in message and "\n" not in message


@pytest.mark.extensive("architectures of transformers")
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "intermediate_size": 14336, "vocab_size": 128256, "head_dim": 128}),
        ("qwen3_moe", {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
                       "num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
                       "moe_intermediate_size": 1536, "intermediate_size": 12288, "head_dim": 128}),
        ("gemma3_text", {"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16,
                         "num_key_value_heads": 8, "vocab_size": 262208, "head_dim": 256, "sliding_window": 1024,
                         "intermediate_size": 15360}),
        ("gpt2", {}),
        ("deepseek_v3", {}),
        ("mixtral", {}),
        ("phi3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_published_sizes_are_looked_at_in_small_ones(kind: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **values)
    assert separation_of(config) == Separation(positions=True, mask="none")


def test_looking_leaves_no_trace() -> None:
    config = config_of("llama")
    before = config.to_dict()
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    verbosity = transformers.utils.logging.get_verbosity()
    torch.set_default_dtype(torch.float64)
    try:
        separation_of(config)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert config.to_dict() == before
    assert transformers.utils.logging.get_verbosity() == verbosity


def test_other_attention_is_refused() -> None:
    config = config_of("llama", "flash_attention_2")
    with pytest.raises(UserError, match="only in sdpa and eager attention, found flash_attention_2"):
        separation_of(config)


def test_a_model_that_forgets_its_arguments_is_refused() -> None:
    """The class is a user's own, which a list of names could not know."""

    class Deaf(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.inner = built(config)

        def forward(self, input_ids: Tensor, **ignored: Any) -> Any:
            return self.inner(input_ids=input_ids)

    with pytest.raises(UserError, match="change the logits of another"):
        separation_of(config_of("llama"), Deaf)


def test_a_model_that_cannot_be_built_is_refused() -> None:
    def fails(config: Any) -> Any:
        raise RuntimeError("two\nlines")

    with pytest.raises(
        UserError, match=r"no small model of its kind can be built .* \(RuntimeError: two lines\)"
    ):
        separation_of(config_of("llama"), fails)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_masks_of_four_dimensions_keep_documents_apart(kind: str, attention: str) -> None:
    """The way of models that do not look for documents in positions."""
    model, inputs = built(config_of(kind, attention)).eval(), kit.tokens(64)
    masks = Separation(True, "boolean" if attention == "sdpa" else "additive")
    found = model(input_ids=inputs, **masks.arguments(kit.documents())).logits
    wanted = model(input_ids=inputs, **Separation(True, "none").arguments(kit.documents())).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_mask_of_ones_would_mix_documents() -> None:
    """Why the arguments have none: transformers then does not look for documents."""
    model, inputs, document = built(config_of("llama")).eval(), kit.tokens(64), (0, 1)
    others = kit.with_other_tokens(inputs, document, 64)
    arguments = {
        **Separation(True, "none").arguments(kit.documents()),
        "attention_mask": torch.ones_like(inputs),
    }
    one, two = (
        model(input_ids=tokens, **arguments).logits[kit.places(document)] for tokens in (inputs, others)
    )
    assert not torch.allclose(one, two, rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------------------------------------------------
# On a GPU


def check_apart_on(device: str, kind: str, attention: str, dtype: torch.dtype) -> None:
    """Logits and gradients of embedded tokens. An expert's matrices may get another kernel for another number of rows,
    which depends on the other documents: there a GPU may round otherwise."""
    rows_vary = device != "cpu" and bool(HAS_EXPERTS & KEPT_APART[kind].keys())
    rounding = {"rtol": 0.0, "atol": 0.0}
    if rows_vary:
        rounding = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    with kit.deterministic():
        for one, two in pairs(kind, attention, device, dtype):
            torch.testing.assert_close(one.logits, two.logits, **rounding)
            torch.testing.assert_close(one.embedded, two.embedded, **rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_check_for_a_gpu_runs_on_the_cpu(kind: str, dtype: torch.dtype) -> None:
    check_apart_on("cpu", kind, "sdpa", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KEPT_APART)
def test_other_documents_change_no_bit_on_a_gpu(kind: str, attention: str, dtype: torch.dtype) -> None:
    check_apart_on("cuda", kind, attention, dtype)
