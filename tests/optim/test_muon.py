"""sw.Muon on plain models: which parameter gets which rule, and the numbers of torch's own two optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.train.models.native.llama import Llama, LlamaConfig
from tests.engine.kit.models import build


def names(optimizer: sw.Muon) -> dict[bool, list[str]]:
    return {group["muon"]: group["param_names"] for group in optimizer.param_groups}


def test_names_decide() -> None:
    model = build()
    chosen = names(sw.Muon(model.named_parameters()))
    assert chosen[True] == [f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("up", "down")]
    assert {"embed.weight", "head.weight", "head.bias", "blocks.0.norm.weight"} <= set(chosen[False])
    llama = Llama(
        LlamaConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16, vocab_size=11, max_seq_len=8)
    )
    chosen = names(sw.Muon(llama.named_parameters()))
    assert {"tok_embeddings.weight", "output.weight", "norm.weight"} <= set(chosen[False])
    assert len(chosen[True]) == 7 and all(name.startswith("layers.0.") for name in chosen[True])
    inside = {"h.0.output.weight": True, "h.3.attn.head.weight": True, "lm_head.weight": False, "wte.weight": False,
              "model.embed_tokens.weight": False, "score.weight": False, "header.weight": True}  # fmt: skip
    chosen = names(sw.Muon([(name, nn.Parameter(torch.zeros(2, 2))) for name in inside]))
    assert chosen == {flag: [n for n, f in inside.items() if f is flag] for flag in (True, False)}


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_steps": 3, "momentum": 0.8, "weight_decay": 0.3},
                                     {"adjust_lr_fn": "match_rms_adamw"}])  # fmt: skip
def test_steps_equal_torchs_two_optimizers(options: dict[str, Any]) -> None:
    model = build()
    other = copy.deepcopy(model)
    adamw = {"lr": 0.003, "betas": (0.8, 0.9), "weight_decay": 0.2}
    ours = sw.Muon(model.named_parameters(), lr=0.02, adamw=adamw, **options)
    matrices = [p for n, p in other.named_parameters() if n in names(ours)[True]]
    rest = [p for n, p in other.named_parameters() if n in names(ours)[False]]
    theirs = [torch.optim.Muon(matrices, lr=0.02, **options), torch.optim.AdamW(rest, **adamw)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, *theirs)]
    for step in range(4):
        for i, (p, q) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=generator) if (i + step) % 5 else None
            q.grad = None if p.grad is None else p.grad.clone()
        ours.step()
        for optimizer in theirs:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_groups_state_and_closures() -> None:
    model = build()
    matrices = [p for n, p in model.named_parameters() if "up.weight" in n]
    rest = [p for n, p in model.named_parameters() if "up.weight" not in n]
    groups = [{"params": matrices, "muon": True, "lr": 0.5}, {"params": rest, "muon": False, "eps": 1e-4}]
    optimizer = sw.Muon(groups, lr=0.1, adamw={"lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.2]
    assert "betas" not in optimizer.param_groups[0] and "momentum" not in optimizer.param_groups[1]
    assert optimizer.param_groups[1]["eps"] == 1e-4

    def closure() -> float:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return 7.0

    assert optimizer.step(closure) == 7.0
    other = sw.Muon([{"params": matrices, "muon": True}, {"params": rest, "muon": False}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.5
    assert set(other.state[matrices[0]]) == {"momentum_buffer"} and "exp_avg" in other.state[rest[0]]
    assert torch.equal(
        other.state[matrices[0]]["momentum_buffer"], optimizer.state[matrices[0]]["momentum_buffer"]
    )
    copied = copy.deepcopy(optimizer)
    copied.step()


def test_what_cannot_be_decided_is_refused() -> None:
    model = build()
    with pytest.raises(
        ValueError, match=r"matrix of shape \(11, 7\) has no name.* Pass model.named_parameters\(\)"
    ):
        sw.Muon(model.parameters())
    sw.Muon([p for p in model.parameters() if p.ndim == 1])
    with pytest.raises(
        ValueError, match=r"parameter 'norm.weight' of shape \(7,\) is in a group with muon=True"
    ):
        sw.Muon([{"params": [("norm.weight", model.norm.weight)], "muon": True}])
    with pytest.raises(ValueError, match=r"group has lr and both matrices for Muon and parameters for AdamW"):
        sw.Muon([{"params": list(model.named_parameters()), "lr": 0.1}])
    with pytest.raises(ValueError, match=r'"muon" of a parameter group must be True or False, got 1'):
        sw.Muon([{"params": list(model.named_parameters()), "muon": 1}])
    with pytest.raises(ValueError, match=r"momentum should be >= 0"):
        sw.Muon(model.named_parameters(), momentum=-1.0)
    with pytest.raises(TypeError, match=r"momentum"):
        sw.Muon(model.named_parameters(), adamw={"momentum": 0.9})
