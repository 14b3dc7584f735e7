"""The Llama model against formulas and plain re-computations that share no code with it."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwright.train.config import ModelConfig
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.models.native.llama import (
    PRESETS,
    Block,
    Llama,
    LlamaConfig,
    Rope,
    RopeScaling,
    rope_frequencies,
)
from tests.support import multirank, world_mesh

TINY = LlamaConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=50, max_seq_len=64)


def tiny(seed: int = 0, **changes: object) -> Llama:
    torch.manual_seed(seed)
    return Llama(replace(TINY, **changes))  # type: ignore[arg-type]


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------
# Sizes


def formula(c: LlamaConfig) -> int:
    attention = 2 * c.dim * c.dim + 2 * c.dim * (c.dim // c.n_heads) * c.n_kv_heads
    block = attention + 3 * c.dim * c.ffn_dim + 2 * c.dim
    return c.n_layers * block + c.dim + c.vocab_size * c.dim * (1 if c.tied_embeddings else 2)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("debug", 951_424),
        ("150M", 151_544_832),
        # As published with the models.
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[preset])
    assert model.num_params() == parameters == formula(PRESETS[preset]) == PRESETS[preset].parameters


def test_every_preset_can_be_chosen_and_is_counted() -> None:
    for preset in PRESETS:
        assert ModelConfig.model_validate({"preset": preset}).shape() == PRESETS[preset]


def test_flops_follow_the_matrices_and_the_attention() -> None:
    model = tiny()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in n)
    assert model.flops_per_token(64) == 6 * matrices + 12 * TINY.n_layers * TINY.dim * 64
    # A tied matrix is still multiplied with once.
    assert tiny(tied_embeddings=True).flops_per_token(64) == model.flops_per_token(64)


# ------------------------------------------------------------------------------
# The forward pass


def plain_llama(model: Llama, tokens_BS: torch.Tensor) -> torch.Tensor:
    """The same function in float64: complex rotation, explicit softmax, repeated keys and values."""
    c = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters(remove_duplicate=False)}
    B, S = tokens_BS.shape
    K, half = c.dim // c.n_heads, c.dim // c.n_heads // 2

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[name]

    frequencies = c.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(
        torch.ones(S, half, dtype=torch.float64), torch.outer(torch.arange(S).double(), frequencies)
    )

    def heads(x: torch.Tensor, name: str, rotate: bool) -> torch.Tensor:
        y = (x @ w[name].T).view(B, S, -1, K).transpose(1, 2)
        if rotate:
            z = torch.complex(y[..., :half], y[..., half:]) * turn
            y = torch.cat((z.real, z.imag), -1)
        return y.repeat_interleave(c.n_heads // y.shape[1], dim=1)

    x = w["tok_embeddings.weight"][tokens_BS]
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    for layer in range(c.n_layers):
        a, f = f"layers.{layer}.attention", f"layers.{layer}.feed_forward"
        h = norm(x, f"layers.{layer}.attention_norm.weight")
        q, k, v = (
            heads(h, f"{a}.wq.weight", True),
            heads(h, f"{a}.wk.weight", True),
            heads(h, f"{a}.wv.weight", False),
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(K)).masked_fill(future, -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, S, -1) @ w[f"{a}.wo.weight"].T
        h = norm(x, f"layers.{layer}.ffn_norm.weight")
        gate = h @ w[f"{f}.w1.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[f"{f}.w3.weight"].T)) @ w[f"{f}.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_a_plain_computation(kv_heads: int, tied: bool) -> None:
    model = tiny(n_kv_heads=kv_heads, tied_embeddings=tied)
    for parameter in model.parameters():  # Norm weights other than one, and blocks that matter.
        parameter.data += 0.1 * torch.randn_like(parameter)
    logits = model(tokens())
    assert logits.shape == (2, 16, TINY.vocab_size) and logits.dtype == torch.float32
    # Float32 round-off over three blocks against float64.
    torch.testing.assert_close(logits.double(), plain_llama(model, tokens()), rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    model = tiny(tied_embeddings=True)
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=2).flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, first = tiny(), tokens()
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 7) % TINY.vocab_size
    before, after = model(first), model(second)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_a_sequence_beyond_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most max_seq_len = 64 tokens, found 65"):
        tiny()(tokens(length=65))


# ------------------------------------------------------------------------------
# Rotary embeddings


def test_scaled_frequencies_follow_llama_3_1() -> None:
    config = PRESETS["1B"]
    scaling = config.rope_scaling
    assert scaling is not None
    expected, bands = [], set()
    for i in range(config.head_dim // 2):  # One at a time, in wavelengths, as the reference tells it.
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_max_seq_len / scaling.high_freq_factor:
            bands.add("kept")
        elif wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
            bands.add("stretched")
            frequency /= scaling.factor
        else:
            bands.add("blended")
            smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        expected.append(frequency)
    assert bands == {"kept", "stretched", "blended"}
    torch.testing.assert_close(rope_frequencies(config), torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_factor_of_one_leaves_the_frequencies() -> None:
    scaled = replace(TINY, rope_scaling=RopeScaling(factor=1.0))
    torch.testing.assert_close(rope_frequencies(scaled), rope_frequencies(TINY), rtol=1e-6, atol=0)


def test_rotated_products_depend_on_distance_only() -> None:
    model = tiny()
    rope = Rope(model.rope_cos, model.rope_sin)
    q, k = torch.randn(2, 1, 1, 1, TINY.head_dim).expand(2, 1, TINY.max_seq_len, 1, TINY.head_dim)
    products = rope.rotate(q)[0, :, 0] @ rope.rotate(k)[0, :, 0].T
    for distance in (0, 5, 40):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_bfloat16_inputs_are_rotated_in_float32() -> None:
    model = tiny()
    x = torch.randn(1, 64, 4, TINY.head_dim).bfloat16()
    rope = Rope(model.rope_cos, model.rope_sin)
    rotated = rope.rotate(x)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope.rotate(x.float()).bfloat16())


def test_tables_are_float32_whatever_the_weights_are_and_stay_out_of_checkpoints() -> None:
    model = tiny()
    cos = model.rope_cos.clone()
    model.bfloat16()
    assert model.output.weight.dtype == torch.bfloat16 and model(tokens()).dtype == torch.bfloat16
    assert torch.equal(model.rope_cos, cos)
    assert not [name for name in model.state_dict() if "rope" in name]
    half = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(tiny().rope_cos, cos)
    finally:
        torch.set_default_dtype(half)


@multirank(2)
def test_sharding_with_bfloat16_leaves_the_tables_alone(rank: int, world_size: int) -> None:
    model = tiny()
    cos = model.rope_cos.clone()
    seen: list[torch.dtype] = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    for block in model.layers:
        assert isinstance(block, Block)
        fully_shard(block, mesh=world_mesh(2), mp_policy=policy)
        block.attention.register_forward_pre_hook(
            lambda _, args: seen.extend([args[0].dtype, args[1].cos_S1K.dtype])
        )
    fully_shard(model, mesh=world_mesh(2), mp_policy=policy)
    logits = model(tokens(seed=rank))
    assert logits.dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.float32] * TINY.n_layers
    assert torch.equal(model.rope_cos, cos)


# ------------------------------------------------------------------------------
# Initial weights


def test_initial_weights_have_the_stated_spread() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(256, 3, 4, 2, 512, 1000, 16))
    cut = 0.98658  # Standard deviation of a unit normal cut at three.
    expected = {"tok_embeddings.weight": 1.0, "output.weight": 256**-0.5}
    for i in range(3):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            expected[f"layers.{i}.{name}.weight"] = 0.02
        for name in ("attention.wo", "feed_forward.w2"):
            expected[f"layers.{i}.{name}.weight"] = 0.02 / math.sqrt(2 * (i + 1))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones(256)), name
        else:
            std = expected.pop(name)
            assert parameter.abs().max() <= 3 * std, name
            # The smallest matrix has 32,768 elements: its spread is known to 0.4%; five times that.
            assert parameter.std().item() == pytest.approx(cut * std, rel=0.02), name
    assert not expected


def test_the_seed_decides_the_weights() -> None:
    first, again, other = tiny(3).state_dict(), tiny(3).state_dict(), tiny(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


def test_tied_weights_are_one_parameter() -> None:
    model = tiny(tied_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.num_params() == tiny().num_params() - TINY.vocab_size * TINY.dim
    assert model.output.weight.std().item() == pytest.approx(TINY.dim**-0.5, rel=0.1)
    twin = copy.deepcopy(model)
    assert twin.output.weight is twin.tok_embeddings.weight


def test_weights_on_the_meta_device_are_refused() -> None:
    with torch.device("meta"):
        model = Llama(TINY)
    with pytest.raises(RuntimeError, match=r"found \d+ on the meta device .*to_empty"):
        model.init_weights()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_gets_the_same_weights_later(tied: bool) -> None:
    config = replace(TINY, tied_embeddings=tied, rope_scaling=RopeScaling())
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    direct = tiny(tied_embeddings=tied, rope_scaling=RopeScaling())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))
    assert torch.equal(model(tokens()), direct(tokens()))


def test_a_short_training_lowers_the_loss() -> None:
    model, x = tiny(), tokens(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(TINY.vocab_size) + 0.5, abs=0.5)
    assert losses[-1] < losses[0] - 1


# ------------------------------------------------------------------------------
# From a configuration


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(UserError, match="expected at least the tokenizer's 256, found 255"):
        build_model(ModelConfig(vocab_size=255), vocab_size=256)


def test_a_larger_vocabulary_is_kept() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(preset="debug", vocab_size=300, n_layers=1), vocab_size=256)
    assert model.output.weight.shape == (300, 128) and len(model.layers) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 36}, "dim: expected a multiple of 2 x n_heads = 8"),
        ({"n_kv_heads": 3}, "n_kv_heads: expected a divisor of n_heads = 4"),
        ({"n_layers": 0}, "n_layers: expected at least 1"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)  # type: ignore[arg-type]
