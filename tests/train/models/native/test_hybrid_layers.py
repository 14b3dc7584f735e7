"""The hybrid model's scan, Mamba layer and experts against plain re-computations that share no code with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.train.models.native import hybrid
from shardwright.train.models.native.hybrid import Block, MixtureOfExperts, imbalance
from shardwright.train.models.native.mamba import selective_scan
from tests.train.kit.hybrid import TINY, tiny


def layer(kind: str, seed: int = 0, **changes: object) -> Block:
    """One layer with weights large enough to matter."""
    model = tiny(seed, pattern=kind, mtp_pattern="", **changes)
    for parameter in model.layers.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    block = model.layers[0]
    assert isinstance(block, Block)
    return block


# ------------------------------------------------------------------------------
# The scan


def recurrence(x: Any, dt: Any, a: Any, b: Any, c: Any) -> torch.Tensor:
    """Token after token in float64: h = exp(dt a) h + dt x B, y = C h."""
    x, dt, a, b, c = (t.detach().double() for t in (x, dt, a, b, c))
    per_group = x.shape[2] // b.shape[2]
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[-1], dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        b_t, c_t = b[:, t].repeat_interleave(per_group, 1), c[:, t].repeat_interleave(per_group, 1)
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = decay * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b_t)
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c_t))
    return torch.stack(outputs, 1)


def scan_inputs(length: int, groups: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    draw = partial(torch.randn, generator=generator)
    dt = F.softplus(draw(2, length, 4) - 2)
    a = -16 * torch.rand(4, generator=generator)
    return [draw(2, length, 4, 3), dt, a, draw(2, length, groups, 5), draw(2, length, groups, 5)]


@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 4), (16, 4), (17, 4), (23, 1), (50, 64), (130, 32), (300, 100)]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scan_is_the_recurrence(length: int, chunk: int, groups: int) -> None:
    inputs = scan_inputs(length, groups)
    # Values are of order one; float32 sums of up to a chunk of them.
    torch.testing.assert_close(
        selective_scan(*inputs, chunk).double(), recurrence(*inputs), rtol=1e-5, atol=1e-5
    )


def test_gradients_of_the_scan_are_those_of_the_recurrence() -> None:
    inputs = [t.double().requires_grad_() for t in scan_inputs(19)]
    weights = torch.randn(2, 19, 4, 3, dtype=torch.float64)

    def slow(x: Any, dt: Any, a: Any, b: Any, c: Any) -> torch.Tensor:
        b, c = (t.repeat_interleave(2, 2) for t in (b, c))
        state, total = x.new_zeros(2, 4, 3, 5), x.new_zeros(())
        for t in range(19):
            state = torch.exp(dt[:, t] * a)[..., None, None] * state
            state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
            total = total + (torch.einsum("bhpn,bhn->bhp", state, c[:, t]) * weights[:, t]).sum()
        return total

    expected = torch.autograd.grad(slow(*inputs), inputs)
    found = torch.autograd.grad((selective_scan(*inputs, 4).double() * weights).sum(), inputs)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)  # float32 inside


def test_extreme_decays_stay_finite() -> None:
    x, dt, a, b, c = scan_inputs(40)
    dt, a = (50 * dt).requires_grad_(), (100 * a).requires_grad_()
    y = selective_scan(x, dt, a, b, c, 16)
    torch.testing.assert_close(y.double(), recurrence(x, dt, a, b, c), rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert dt.grad is not None and dt.grad.isfinite().all()
    assert a.grad is not None and a.grad.isfinite().all()


def test_scan_computes_in_float32_under_autocast_and_from_bfloat16() -> None:
    inputs = scan_inputs(33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selective_scan(*inputs, 8), selective_scan(*inputs, 8).float())
        torch.testing.assert_close(
            selective_scan(*inputs, 8).double(), recurrence(*inputs), rtol=1e-5, atol=1e-5
        )
    rounded = [t.bfloat16() for t in inputs]
    found = selective_scan(*rounded, 8)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, selective_scan(*(t.float() for t in rounded), 8).bfloat16())


# ------------------------------------------------------------------------------
# Layers


def test_mamba_layer_equals_a_plain_computation() -> None:
    block, c = layer("M", norm_eps=1e-3), replace(TINY, norm_eps=1e-3)
    w = {name: p.detach().double() for name, p in block.mixer.named_parameters()}
    x = torch.randn(2, 21, 16)
    z = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * block.norm.weight.double()
    gate, mixed, dt = (z @ w["in_proj.weight"].T).split([24, 24 + 20, 4], -1)
    shifted = torch.cat((torch.zeros(2, 3, 44, dtype=torch.float64), mixed), 1)
    mixed = sum(shifted[:, k : k + 21] * w["conv_weight"][:, 0, k] for k in range(4)) + w["conv_bias"]
    mixed = mixed * mixed.sigmoid()
    u, b, c_ = mixed[..., :24].view(2, 21, 4, 6), mixed[..., 24:34], mixed[..., 34:]
    dt = torch.log1p(torch.exp(dt + w["dt_bias"]))
    y = recurrence(u, dt, -torch.exp(w["a_log"]), b.view(2, 21, 2, 5), c_.view(2, 21, 2, 5))
    y = (y + w["skip"][:, None] * u).flatten(2) * gate * gate.sigmoid()
    halves = y.view(2, 21, 2, 12)
    y = (halves / (halves.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()).flatten(2) * w["norm_weight"]
    found = block(x)[0] - x
    torch.testing.assert_close(found.double(), y @ w["out_proj.weight"].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("top_k", "shared"), [(1, 0), (2, 12), (5, 12)])
def test_experts_equal_a_loop_over_tokens(
    top_k: int, shared: int, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_has_grouped_kernel", lambda rows: kernel)
    experts = layer("E", top_k=top_k, shared_dim=shared).mixer
    assert isinstance(experts, MixtureOfExperts)
    x = torch.randn(2, 9, 16)
    expected = torch.zeros_like(x)
    for b in range(2):
        for s in range(9):
            token = x[b, s]
            probability = torch.softmax(experts.router.weight @ token, 0)
            for expert in probability.argsort(descending=True)[:top_k].tolist():
                hidden = (token @ experts.up[expert]).clamp(min=0) ** 2
                expected[b, s] += probability[expert] * (hidden @ experts.down[expert])
            if experts.shared is not None:
                hidden = (experts.shared.up.weight @ token).clamp(min=0) ** 2
                expected[b, s] += experts.shared.down.weight @ hidden
    torch.testing.assert_close(experts(x)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [True, False])
def test_experts_that_no_token_chose_have_gradients_of_zero(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_has_grouped_kernel", lambda rows: kernel)
    experts = layer("E", top_k=1).mixer
    assert isinstance(experts, MixtureOfExperts)
    x = torch.randn(1, 1, 16)
    chosen = int((experts.router.weight @ x[0, 0]).argmax())
    experts(x)[0].square().sum().backward()
    for parameter in (experts.up, experts.down):
        assert parameter.grad is not None
        used = parameter.grad.abs().amax((1, 2)) > 0
        assert used.tolist() == [number == chosen for number in range(5)]


def test_imbalance_is_switch_s_formula_of_each_sequence() -> None:
    probability = torch.rand(3, 7, 4).softmax(-1)
    chosen = probability.topk(2, -1).indices
    for b, found in enumerate(imbalance(probability, chosen)):
        part = [sum(int(e) == i for e in chosen[b].flatten()) / 14 for i in range(4)]
        mean = [float(probability[b, :, i].mean()) for i in range(4)]
        assert float(found) == pytest.approx(
            4 * sum(f * p for f, p in zip(part, mean, strict=True)), rel=1e-6
        )
    even = torch.full((1, 4, 4), 0.25)
    assert imbalance(even, torch.arange(4).view(1, 4, 1)).item() == 1
    one = F.one_hot(torch.zeros(1, 6, dtype=torch.long), 4).float()
    assert imbalance(one, torch.zeros(1, 6, 1, dtype=torch.long)).item() == 4


@pytest.mark.parametrize("kind", ["M", "*", "E", "-"])
def test_later_tokens_do_not_change_what_a_layer_makes_of_earlier_ones(kind: str) -> None:
    block, first = layer(kind), torch.randn(2, 20, 16)
    second = first.clone()
    second[:, 11:] = torch.randn(2, 9, 16)
    before, after = block(first)[0], block(second)[0]
    # Not always bit by bit: the sizes of the products depend on all tokens where they are sorted by expert.
    torch.testing.assert_close(before[:, :11], after[:, :11], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[:, 11:], after[:, 11:], atol=1e-2)


@pytest.mark.parametrize("kind", ["M", "*"])
def test_earlier_tokens_reach_later_ones(kind: str) -> None:
    block, first = layer(kind), torch.randn(1, 20, 16)
    second = first.clone()
    second[:, 2] += 1
    assert (block(first)[0] - block(second)[0])[:, 12:].abs().max() > 1e-6
