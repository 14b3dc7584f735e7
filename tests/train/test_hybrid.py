"""The hybrid model against plain re-computations that share no code with it, sharded and through the trainer."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwright as sw
from shardwright.train.config import Config, ModelConfig, load_config
from shardwright.train.data import Corpus
from shardwright.train.data import batch as batch_of
from shardwright.train.errors import UserError
from shardwright.train.layouts import alike, units_of
from shardwright.train.loop import Trainer
from shardwright.train.models.build import build_model
from shardwright.train.models.hybrid import (
    HYBRID_PRESETS,
    Block,
    Extras,
    Hybrid,
    MixtureOfExperts,
    imbalance,
)
from shardwright.train.models.scan import selective_scan
from shardwright.train.stop import StopRequest
from shardwright.train.world import World, make_mesh
from tests.support import multirank, world_mesh
from tests.train import jobs
from tests.train.kit.hybrid import TINY, tiny, tokens, whole_loss


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


@pytest.mark.parametrize(("top_k", "shared"), [(1, 0), (2, 12), (5, 12)])
def test_experts_equal_a_loop_over_tokens(top_k: int, shared: int) -> None:
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


def test_experts_that_no_token_chose_have_gradients_of_zero() -> None:
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


# ------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("debug", 826_392),
        ("150M", 151_057_472),
        ("9B", 8_888_227_328),  # 27 Mamba-2, 25 dense and 4 attention layers
    ],
)
def test_presets_have_their_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Hybrid(HYBRID_PRESETS[preset])
    assert model.num_params() == parameters == HYBRID_PRESETS[preset].parameters
    assert ModelConfig.model_validate({"kind": "hybrid", "preset": preset}).shape() == HYBRID_PRESETS[preset]


@pytest.mark.parametrize(
    "changes", [{}, {"tied_embeddings": False}, {"mtp_pattern": ""}, {"shared_dim": 0, "pattern": "EM"}]
)
def test_parameters_are_counted_without_building(changes: dict[str, Any]) -> None:
    assert tiny(**changes).num_params() == replace(TINY, **changes).parameters


def test_flops_are_those_torch_counts() -> None:
    # One token more for the first prediction: then both heads see 64 and 63, and 64 is a multiple of the chunk.
    changes = {"mtp_pattern": "", "vocab_size": 64, "chunk_size": 16}
    for pattern, tolerance in (("-", 0), ("E", 0), ("*", 0), ("M", 0.02)):
        model, c = tiny(pattern=pattern, **changes), replace(TINY, pattern=pattern, **changes)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, 64))
        found = counter.get_total_flops()
        if pattern == "E" and "grouped" not in str(counter.get_flop_counts()):
            found += 64 * 2 * 2 * c.top_k * c.dim * c.expert_dim  # grouped_mm is not in the counter's table
        if pattern == "*" and "attention" not in str(counter.get_flop_counts()):
            found += 2 * 2 * 64 * 64 * c.n_heads * c.head_dim
        # Of Mamba-2 the pass from chunk to chunk is left out, and masked zeros are counted by both.
        assert model.flops_per_token(64) * 64 / 3 == pytest.approx(found, rel=tolerance), pattern


def test_flops_count_the_second_prediction() -> None:
    plain, further = tiny(mtp_pattern=""), tiny(mtp_pattern="-")
    more = 2 * 16 * 16 + 2 * 16 * 24 + 16 * 50
    assert further.flops_per_token(32) == plain.flops_per_token(32) + 6 * more


def test_gradients_reach_every_parameter() -> None:
    model = tiny()
    whole_loss(model, tokens(4, 40), tokens(4, 40, seed=2)).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


def test_extras_leave_the_logits_alone() -> None:
    model, x = tiny(), tokens()
    logits, extras = model(x, extras=True)
    assert torch.equal(logits, model(x))
    assert extras.imbalance_B.shape == (2,) and extras.mtp_logits_BSV.shape == (2, 15, 50)
    assert tiny(pattern="M-", mtp_pattern="")(x, extras=True)[1] == Extras(None, None)
    assert tiny(pattern="M-", mtp_pattern="").auxiliary == {}
    assert tiny().auxiliary == {"balance": 0.01, "mtp": 0.3}


def test_no_logits_know_later_tokens() -> None:
    model, first = tiny(chunk_size=4), tokens()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 7) % TINY.vocab_size
    (before, extras), (after, others) = model(first, extras=True), model(second, extras=True)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-2)
    # The head that predicts one token further sees one token further.
    torch.testing.assert_close(
        extras.mtp_logits_BSV[:, :8], others.mtp_logits_BSV[:, :8], rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(extras.mtp_logits_BSV[:, 8], others.mtp_logits_BSV[:, 8], atol=1e-2)


def test_second_prediction_is_of_the_token_after_the_next() -> None:
    model, x, y = tiny(), tokens(3, 12), tokens(3, 12, seed=2)
    _, extras = model(x, extras=True)
    sums = Hybrid.auxiliary_sums(extras, y)
    probabilities = extras.mtp_logits_BSV.log_softmax(-1)
    each = [-probabilities[b, s, y[b, s + 1]].item() for b in range(3) for s in range(11)]
    assert sums["mtp"].item() == pytest.approx(sum(each) * 12 / 11, rel=1e-5)
    assert sums["balance"].item() == pytest.approx(12 * extras.imbalance_B.sum().item(), rel=1e-6)


def test_tied_weights_are_one_parameter() -> None:
    model = tiny()
    assert model.output.weight is model.tok_embeddings.weight
    assert tiny(tied_embeddings=False).num_params() == model.num_params() + 50 * 16
    twin = copy.deepcopy(model)
    assert twin.output.weight is twin.tok_embeddings.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_on_meta_gets_the_same_weights_later(tied: bool) -> None:
    with torch.device("meta"):
        model = Hybrid(replace(TINY, tied_embeddings=tied))
    with pytest.raises(RuntimeError, match=r"found \d+ on the meta device .*to_empty"):
        model.init_weights()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    direct = tiny(tied_embeddings=tied)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), direct.parameters(), strict=True))
    assert torch.equal(model(tokens()), direct(tokens()))


def test_initial_steps_and_decays_are_those_of_mamba_2() -> None:
    mixer = tiny(mamba_heads=400, mamba_head_dim=1).layers[0].mixer
    steps, decay = F.softplus(mixer.dt_bias), mixer.a_log.exp()
    # 400 draws, even in the logarithm: a hundredth of the range at either end is met nearly surely.
    assert 0.001 <= steps.min() < 0.0012 and 0.085 < steps.max() <= 0.1001
    assert 1 <= decay.min() < 1.5 and 15.5 < decay.max() <= 16.001


def test_bfloat16_weights_work() -> None:
    model = tiny().bfloat16()
    logits, extras = model(tokens(), extras=True)
    assert logits.dtype == torch.bfloat16 and extras.imbalance_B.dtype == torch.float32
    whole_loss(model, tokens(), tokens(seed=2)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # 8 bits, over five layers.
    torch.testing.assert_close(logits.float(), tiny()(tokens()), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    plain, recomputed = tiny(), tiny()
    for block in recomputed.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
    for model in (plain, recomputed):
        whole_loss(model, tokens(), tokens(seed=2)).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        # Where a tensor is used twice, the inner backward of the reentrant mode adds in another order.
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5 * reentrant, atol=1e-7 * reentrant)


# ------------------------------------------------------------------------------
# Sharded


def shard(model: Hybrid, world_size: int, **options: Any) -> Any:
    mesh = world_mesh(world_size)
    for block in model.blocks():
        sw.fully_shard(block, mesh=mesh, **options)
    sw.fully_shard(model.head(), mesh=mesh, **options)
    return sw.fully_shard(model, mesh=mesh, **options)


@multirank(2)
@pytest.mark.parametrize(
    ("layout", "reshard"), [("per_parameter", True), ("ragged", True), ("ragged", False)]
)
def test_sharded_training_equals_the_plain_model(
    rank: int, world_size: int, layout: str, reshard: bool
) -> None:
    """Also where each rank's tokens go to experts of their own: one distinct token each, one expert per token."""
    changes: dict[str, Any] = {"top_k": 1, "n_experts": 8, "mtp_pattern": "*E", "balance_weight": 0.1}
    plain, model = tiny(**changes), tiny(**changes)
    sharded = shard(model, world_size, layout=layout, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    optimizers[1] = sw.fully_shard_optimizer(optimizers[1])
    chosen: list[set[int]] = []  # of the plain model, on what each rank sees
    routed = MixtureOfExperts.routed

    def watched(self: Any, x: Any, weight: Any, expert: torch.Tensor) -> torch.Tensor:
        chosen.append(set(expert.flatten().tolist()))
        return routed(self, x, weight, expert)

    for step in range(3):
        # A sequence of one token repeated: nearly all its places choose the same expert of the first such layer.
        batches = [
            (torch.full((2, 12), 7 * step + 20 * r), tokens(2, 12, seed=9 * step + r)) for r in range(2)
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        MixtureOfExperts.routed = watched  # type: ignore[method-assign]
        try:
            losses = [whole_loss(plain, *one) for one in batches]
        finally:
            MixtureOfExperts.routed = routed  # type: ignore[method-assign]
        (sum(losses, torch.zeros(())) / 2).backward()
        whole_loss(sharded, *batches[rank]).backward()
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert q.grad is not None, name
            whole = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            # Sums in another order.
            torch.testing.assert_close(whole, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
    # Two layers of experts a model, each run for both ranks' tokens: some experts only one rank used, some none.
    pairs = [
        (chosen[4 * step + layer], chosen[4 * step + 2 + layer]) for step in range(3) for layer in range(2)
    ]
    assert any(one - other and other - one for one, other in pairs)
    assert any(len(one | other) < 8 for one, other in pairs)


def trainer(config: Config, rank: int, world_size: int) -> Trainer:
    text = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    mesh = make_mesh(config.parallel, "cpu", world_size)
    world = World(rank, world_size, torch.device("cpu"), mesh)
    return Trainer(config, world, Corpus(text[:3000], text[3000:], "random"))


HYBRID_JOB: dict[str, Any] = {
    "kind": "hybrid", "pattern": "M*E-", "mtp_pattern": "E", "dim": 32, "n_layers": None, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 16, "ffn_dim": 62, "mamba_heads": 2, "mamba_head_dim": 16, "mamba_state": 8, "chunk_size": 16,
    "n_experts": 4, "top_k": 2, "expert_dim": 16, "shared_dim": 24, "max_seq_len": 64,
}  # fmt: skip


@multirank(2)
@pytest.mark.parametrize(
    ("engine", "tied"),
    [("shardwright", True), ("shardwright", False), ("fsdp2", True), ("fsdp1", True), ("ddp", False)],
)
def test_trainer_trains_like_a_plain_model(rank: int, world_size: int, engine: str, tied: bool) -> None:
    config = jobs.tiny(
        model={**HYBRID_JOB, "tied_embeddings": tied},
        train={"global_batch": 8, "micro_batch": 2, "max_norm": 0.2},
        parallel={"engine": engine},
    )
    torch.manual_seed(config.run.seed)
    plain = build_model(config.model, 256)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    job = trainer(config, rank, world_size)
    for step in range(3):
        # The whole global batch at once: the loss must not depend on how sequences are spread.
        loss = whole_loss(plain, *batch_of(job.corpus, 0, step * 8, 8, 32))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        found = job.train_step(StopRequest())
        whole = found.loss + 0.01 * found.auxiliary["balance"] + 0.3 * found.auxiliary["mtp"]
        # Float32 in another order, amplified by steps at a high rate; routing near a tie may fall otherwise.
        assert whole == pytest.approx(loss.item(), rel=2e-5)
        assert found.grad_norm == pytest.approx(norm.item(), rel=5e-4)
    assert job.validate() > 0


@multirank(2)
def test_bfloat16_agrees_with_fsdp2(rank: int, world_size: int) -> None:
    results = []
    for engine in ("shardwright", "fsdp2"):
        config = jobs.tiny(model=HYBRID_JOB, parallel={"engine": engine, "param_dtype": "bfloat16"})
        job = trainer(config, rank, world_size)
        steps = [job.train_step(StopRequest()) for _ in range(3)]
        results.append([(step.loss, step.grad_norm, *step.auxiliary.values()) for step in steps])
    for ours, theirs in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)  # bf16 has 8 bits


@multirank(2)
@pytest.mark.parametrize(("name", "layout"), [("muon", "ragged"), ("adamw8bit", 32)])
def test_other_optimizers_take_it(rank: int, world_size: int, name: str, layout: str | int) -> None:
    config = jobs.tiny(
        model=HYBRID_JOB, optimizer={"name": name}, parallel={"engine": "shardwright", "layout": layout}
    )
    job = trainer(config, rank, world_size)
    losses = [job.train_step(StopRequest()).loss for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_of_unequal_sizes(tied: bool) -> None:
    model = tiny(pattern="M*E-MM", tied_embeddings=tied)
    head = "tok_embeddings, norm, output" if tied else "norm, output"
    names = ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4..5 (2 units)", "mtp", head, "root"]
    assert [name for name, _ in alike(units_of(model))] == names[: 8 - tied]
    with torch.device("meta"):
        debug = Hybrid(HYBRID_PRESETS["debug"])
    sizes = [sum(p.numel() for p in block.parameters()) for block in debug.blocks()]
    assert len(set(sizes)) >= 5 and max(sizes) > 5 * min(sizes)


# ------------------------------------------------------------------------------
# From a configuration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'pattern = "MXM"',
            "pattern: expected characters out of 'M' (Mamba-2), '*' (attention), 'E' (mixture of experts), "
            "'-' (dense MLP), found 'X'",
        ),
        ('pattern = ""', "pattern: expected at least one layer, found none"),
        ('mtp_pattern = "|"', "mtp_pattern: expected characters out of"),
        ("pattern = 3", "pattern: expected a string, found 3 (an integer)"),
        ("top_k = 9", "top_k: expected at most n_experts = 8, found 9"),
        ("n_kv_heads = 3", "n_kv_heads: expected a divisor of n_heads = 4, found 3"),
        ("mamba_groups = 3", "mamba_groups: expected a divisor of mamba_heads = 4, found 3"),
        ("expert_dim = 12", "expert_dim: expected a multiple of 8 where the pattern has experts ('E'), found 12"),
        ("shared_dim = -1", "shared_dim: expected an integer >= 0, found -1 (an integer)"),
        ("n_layers = 3", "n_layers: kind 'hybrid' has none; expected it with kind 'llama' only, found 3"),
        ("rope_theta = 3", "rope_theta: kind 'hybrid' has none; expected it with kind 'llama' only, found 3.0"),
        ('preset = "8B"', "preset: expected one of debug, 150M, 9B with kind 'hybrid', found '8B'"),
        ("top_q = 2", "unknown key model.top_q; did you mean model.top_k?"),
    ],
)  # fmt: skip
def test_mistake_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nkind = "hybrid"\n{text}\n')
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = str(caught.value).removeprefix(f"{path}: ").removeprefix("model.")
    assert message.startswith(expected) and "\n" not in message


@pytest.mark.parametrize("text", ['pattern = "M"', "head_dim = 3", "top_k = 2", 'preset = "9B"'])
def test_keys_of_the_hybrid_are_refused_for_a_llama(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[model]\n{text}\n")
    with pytest.raises(
        UserError, match=r"^\S+: model\.(\w+: kind 'llama' has none; .*|preset: .* kind 'llama'), found "
    ):
        load_config(path)


def test_a_second_prediction_needs_a_second_token(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[model]\nkind = "hybrid"\n[train]\nseq_len = 1\n')
    with pytest.raises(
        UserError, match=r"train.seq_len: expected at least 2 with a model.mtp_pattern, found 1"
    ):
        load_config(path)
    load_config(path, [("model.mtp_pattern", "")])


@pytest.mark.parametrize("preset", HYBRID_PRESETS)
def test_resolved_configuration_names_every_number_and_means_the_same(tmp_path: Path, preset: str) -> None:
    values = {"kind": "hybrid", "preset": preset, "n_heads": 80, "mtp_pattern": "-"}
    config = Config.model_validate({"model": values})
    path = tmp_path / "job.toml"
    path.write_text(config.resolved().to_toml())
    resolved = load_config(path)
    assert resolved == config.resolved() and resolved.model.shape() == config.model.shape()
    assert all(getattr(resolved.model, name) is not None for name in vars(resolved.model.shape()))


# ------------------------------------------------------------------------------
# Through the command line


def hybrid_job(folder: Path) -> Path:
    keys = "\n".join(
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in HYBRID_JOB.items()
        if value is not None
    )
    head, _, tail = jobs.TINY.partition("[model]")
    return jobs.config_file(folder, f"{head}[model]\n{keys}\n[train]{tail.partition('[train]')[2]}")


def test_train_resume_generate_and_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.cli import main

    path, whole, cut = hybrid_job(tmp_path), tmp_path / "whole", tmp_path / "cut"
    assert jobs.train_here(path, "--run.dir", whole) == 0
    assert jobs.train_here(path, "--run.dir", cut, "--train.steps", "5") == 0
    assert jobs.train_here(path, "--resume", cut) == 0
    records = jobs.records(whole)
    assert jobs.losses(cut) == jobs.losses(whole)
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert records[-1]["mtp_loss"] < records[0]["mtp_loss"] and 1 <= records[0]["balance_loss"] < 4
    capsys.readouterr()
    assert main(["generate", str(whole), "--prompt", "The for", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("The for")
    assert main(["layout", str(path), "--world-size", "2"]) == 0
    assert "mtp: 10 parameters" in capsys.readouterr().out
