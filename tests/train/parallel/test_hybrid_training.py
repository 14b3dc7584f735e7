"""The hybrid model sharded, through the trainer and through the command line, against the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.train.commands.layouts import alike, units_of
from shardwright.train.config import Config
from shardwright.train.models.build import build_model
from shardwright.train.models.native.hybrid import HYBRID_PRESETS, Hybrid, MixtureOfExperts
from shardwright.train.parallel.world import World
from shardwright.train.step.evaluation import validate
from shardwright.train.step.trainer import Trainer
from tests.support import multirank, world_mesh
from tests.train.kit import jobs
from tests.train.kit.hybrid import tiny, tokens, whole_loss
from tests.train.kit.jobs import train_step
from tests.train.kit.parallel import dataset_of
from tests.train.kit.text import batch as batch_of, random_text

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

    def watched(self: Any, x: Any, weight: Any, expert: torch.Tensor, fill: int = 0) -> torch.Tensor:
        chosen.append(set(expert.flatten().tolist()))
        return routed(self, x, weight, expert, fill)

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
    world = World.of(config.parallel, rank, world_size, torch.device("cpu"))
    return Trainer(config, world, dataset_of(config))


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
        loss = whole_loss(plain, *batch_of(random_text(), 0, step * 8, 8, 32))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        found = train_step(job)
        whole = found.loss + 0.01 * found.auxiliary["balance"] + 0.3 * found.auxiliary["mtp"]
        # Float32 in another order, amplified by steps at a high rate; routing near a tie may fall otherwise.
        assert whole == pytest.approx(loss.item(), rel=2e-5)
        assert found.agreed.norm == pytest.approx(norm.item(), rel=5e-4)
    assert validate(job).loss > 0


@multirank(2)
def test_bfloat16_agrees_with_fsdp2(rank: int, world_size: int) -> None:
    results = []
    for engine in ("shardwright", "fsdp2"):
        config = jobs.tiny(model=HYBRID_JOB, parallel={"engine": engine, "param_dtype": "bfloat16"})
        job = trainer(config, rank, world_size)
        steps = [train_step(job) for _ in range(3)]
        results.append([(step.loss, step.agreed.norm, *step.auxiliary.values()) for step in steps])
    for ours, theirs in zip(*results, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)  # bf16 has 8 bits


@multirank(2)
@pytest.mark.parametrize(("name", "layout"), [("muon", "ragged"), ("adamw8bit", 32)])
def test_other_optimizers_take_it(rank: int, world_size: int, name: str, layout: str | int) -> None:
    config = jobs.tiny(
        model=HYBRID_JOB, optimizer={"name": name}, parallel={"engine": "shardwright", "layout": layout}
    )
    job = trainer(config, rank, world_size)
    losses = [train_step(job).loss for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_of_unequal_sizes(tied: bool) -> None:
    model = tiny(pattern="M*E-MM", tied_embeddings=tied)
    head = "tok_embeddings, norm, output" if tied else "norm, output"
    names = [
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "layers.4..5 (2 units)",
        "mtp",
        head,
    ]
    assert [name for name, _ in alike(units_of(model))] == names[tied:]
    with torch.device("meta"):
        debug = Hybrid(HYBRID_PRESETS["debug"])
    sizes = [sum(p.numel() for p in block.parameters()) for block in debug.blocks()]
    assert len(set(sizes)) >= 5 and max(sizes) > 5 * min(sizes)


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
