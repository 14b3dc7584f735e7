"""`[parallel] tensor` and `expert` of the hybrid model, against plain PyTorch on the whole global batch."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.engine.compat import MissingCompilerError
from shardwright.engine.model import pools
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.models import hugging_face
from shardwright.train.models.build import build_model
from shardwright.train.models.native.hybrid import Hybrid, MixtureOfExperts
from shardwright.train.models.native.styles import SummedParts, rows_of, spread_experts
from shardwright.train.models.offers import tensor_plan
from shardwright.train.parallel import recipe
from shardwright.train.parallel.checks import check_ranks
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.trainer import Trainer
from tests.support.matrix import select, together
from tests.support.pool import multirank, world_mesh
from tests.train.kit.hybrid import TINY, whole_loss
from tests.train.kit.jobs import tiny, train_step
from tests.train.kit.parallel import next_step
from tests.train.kit.text import batch, random_text
from tests.train.parallel.kit.tensor_parallel import trainer

MODEL: dict[str, Any] = {
    "kind": "hybrid", "pattern": "ME*-", "mtp_pattern": "E", "dim": 32, "n_layers": None, "n_heads": 4,
    "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 64, "mamba_heads": 4, "mamba_head_dim": 8, "mamba_groups": 2,
    "mamba_state": 6, "chunk_size": 16, "n_experts": 4, "top_k": 2, "expert_dim": 32, "shared_dim": 24,
    "max_seq_len": 64, "tied_embeddings": True, "balance_weight": 0.1,
}  # fmt: skip
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


def job(**sections: Any) -> Config:
    """The values of `parallel` may be given without its name."""
    given = {name: sections.pop(name, {}) for name in ("model", "train", "activations", "optimizer")}
    return tiny(
        **given
        | {
            "model": MODEL | given["model"],
            "train": {"micro_batch": 2, "global_batch": 8, "max_norm": 0.2} | given["train"],
            "parallel": {"engine": "shardwright"} | sections,
        }
    )


def name_of(value: Any) -> str:
    return "tensor {}, expert {}".format(*value) if isinstance(value, tuple) else str(value)


def plain_model(config: Config) -> Hybrid:
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, 256)
    assert isinstance(model, Hybrid)
    return model


def plain_steps(config: Config, text: Any, count: int) -> list[tuple[float, float]]:
    """Loss with all weighted parts, and gradient norm."""
    model = plain_model(config)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == wanted], "weight_decay": 0.1 * wanted}
        for wanted in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    results = []
    for step in range(count):
        loss = whole_loss(model, *batch(text, 0, step * 8, 8, 32))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results


def steps(mine: Trainer, count: int) -> list[tuple[float, float]]:
    results = []
    for _ in range(count):
        found = train_step(mine)
        whole = found.loss + 0.1 * found.auxiliary["balance"] + 0.3 * found.auxiliary["mtp"]
        results.append((whole, found.agreed.norm))
    return results


def gradients(mine: Trainer) -> dict[str, torch.Tensor]:
    """Whole ones of the job's next step, which is not taken."""
    with recipe.parallel_loss(mine.world.dims):
        mine.forward_backward(*next_step(mine))
    found = {}
    for name, p in mine.model.named_parameters():
        assert p.grad is not None, name
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
    mine.optimizer.zero_grad()
    return found


def check_gradients(mine: Trainer, dtype: torch.dtype, tolerance: float) -> None:
    plain = plain_model(mine.config).to(dtype)
    whole_loss(plain, *batch(random_text(), 0, 0, 8, 32)).backward()
    found = gradients(mine)
    assert found.keys() == dict(plain.named_parameters()).keys()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        error = (found[name] - p.grad.float()).norm() / p.grad.float().norm()
        assert error < tolerance, (name, error)


ROWS = select(
    itertools.product(
        [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)],
        ["per_parameter", "ragged"],
        ["float32", "bfloat16"],
        ["communicate", "hold"],
    ),
    lambda row, strength: [row[0], *together(strength, *(n > 1 for n in row[0]), *row[1:])],
)


@pytest.mark.extensive("each mesh", but=("tensor 2, expert 2-*",))
@multirank(4)
@pytest.mark.parametrize(("ranks", "layout", "dtype", "accumulate"), ROWS, ids=name_of)
def test_training_equals_the_plain_model(
    rank: int, world_size: int, ranks: tuple[int, int], layout: str, dtype: str, accumulate: str
) -> None:
    """Losses, gradients and norms; also with groups of heads that ranks share, and with what is computed again."""
    tensor, expert = ranks
    config = job(
        tensor=tensor,
        expert=expert,
        layout=layout,
        param_dtype=dtype,
        model={"mamba_groups": 1 if ranks == (2, 2) else 2},
        train={"accumulate": accumulate, "micro_batch": tensor},  # two of them
        activations={"checkpoint": "ops" if layout == "ragged" else "none"},
    )
    check_ranks(config, world_size)
    mine = trainer(config, rank, world_size)
    # bf16 has 8 bits, and tokens between two experts may fall to either, which are few to each.
    narrow = dtype == "bfloat16"
    check_gradients(mine, torch.bfloat16 if narrow else torch.float32, 0.2 if narrow else 2e-5)
    for found, wanted in zip(steps(mine, 2), plain_steps(config, random_text(), 2), strict=True):
        assert found == pytest.approx(wanted, rel=3e-2 if narrow else 2e-4)


@pytest.mark.extensive("each strategy", but=("2-hsdp*",))
@multirank(4)
@pytest.mark.parametrize(
    "options",
    [
        {"tensor": 2, "engine": "fsdp2"},
        {"expert": 2, "strategy": "hsdp", "replicas": 2, "memory": "arena"},
        {"expert": 2, "strategy": "zero1", "reshard_after_forward": "never"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_other_strategies(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if options.get("engine") == "fsdp2" and torch.__version__.startswith("2.11."):
        pytest.skip(
            "torch 2.11's FSDP2 gathers a module that a forward uses twice only in the first micro-batch"
        )
    config = job(**options)
    check_ranks(config, world_size)
    check_gradients(trainer(config, rank, world_size), torch.float32, 2e-5)


@pytest.mark.extensive("many compiled graphs")
@multirank(2)
def test_compiled_blocks(rank: int, world_size: int) -> None:
    """Parts of layers, exchanges of rows and groups that ranks share are in a block's one graph."""
    torch._dynamo.reset()
    model = {"pattern": "ME", "mtp_pattern": "", "mamba_groups": 1}
    plain, compiled = (
        trainer(job(tensor=2, param_dtype="bfloat16", model=model, train={"compile": how}), rank, world_size)
        for how in ("none", "aot_eager")
    )
    wanted = [train_step(plain) for _ in range(2)]
    found = [train_step(compiled) for _ in range(2)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.loss, one.agreed.norm) == pytest.approx((other.loss, other.agreed.norm), rel=1e-3)
    assert compiled.recompiles.graphs == 2
    torch._dynamo.reset()


@pytest.mark.extensive("each pair of meshes")
@multirank(4)
@pytest.mark.parametrize(("first", "second"), [((1, 1), (2, 1)), ((2, 2), (1, 4))], ids=name_of)
def test_runs_go_on_with_other_ranks(
    rank: int, world_size: int, tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Two steps and, from their checkpoint, a third on another mesh, or all on the first one."""
    one, other = (
        trainer(job(tensor=tensor, expert=expert, layout=layout), rank, world_size)
        for (tensor, expert), layout in ((first, "per_parameter"), (second, "ragged"))
    )
    steps(one, 2)
    folder = checkpoint.save(tmp_path, one.model, one.optimizer, one.position)
    other.position = loading.load(folder, other.model, other.optimizer).position
    assert steps(other, 1)[0] == pytest.approx(steps(one, 1)[0], rel=2e-4)
    plain = plain_model(one.config)
    loading.load_weights(folder, plain)  # as `shardwright generate` does
    text = batch(random_text(), 0, 0, 8, 32)[0]
    one.position = loading.load(folder, one.model, one.optimizer).position
    with torch.no_grad():
        logits = one.model(text)
    torch.testing.assert_close(logits.full_tensor() if first[0] > 1 else logits, plain(text))


@multirank(4)
def test_hugging_face_names(rank: int, world_size: int, tmp_path: Path) -> None:
    mine = trainer(job(tensor=2, expert=2, layout="ragged"), rank, world_size)
    plain = plain_model(mine.config)
    names = {"key_map": hugging_face.key_map(plain.config)}
    sw.save_pretrained(mine.model, tmp_path, config=hugging_face.config_json(plain.config), **names)
    wanted = [p.detach().clone() for p in plain.parameters()]
    for p in plain.parameters():
        p.data.zero_()
    sw.load_pretrained(plain, tmp_path, **names)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), wanted, strict=True))
    for p in mine.model.parameters():
        torch.nn.init.zeros_(p)
    sw.load_pretrained(mine.model, tmp_path, **names)
    for p, q in zip(mine.model.parameters(), wanted, strict=True):
        assert torch.equal(p.full_tensor(), q)


@multirank(4)
def test_ranks_whose_experts_no_token_chose(rank: int, world_size: int) -> None:
    """And those whose tokens all go to one expert of another rank."""
    mesh = world_mesh(4, names=("expert",))
    config = replace(TINY, n_experts=8, top_k=1)
    torch.manual_seed(0)
    plain = MixtureOfExperts(config)
    plain.draw(0.02)
    plain.router.weight.data *= 20
    mine = copy.deepcopy(plain)
    spread_experts(mine, mesh)
    inputs = [(torch.ones(1, 6, 16) * (1 + r % 2)).requires_grad_() for r in range(4)]
    outputs = [plain(x)[0] for x in inputs]
    sum(y.square().sum() for y in outputs).backward()
    own = inputs[rank].detach().clone().requires_grad_()
    y = mine(own)[0]
    y.square().sum().backward()
    torch.testing.assert_close(y, outputs[rank])
    torch.testing.assert_close(own.grad, inputs[rank].grad)
    for name in ("up", "down"):
        found, wanted = getattr(mine, name).grad, getattr(plain, name).grad
        torch.testing.assert_close(found.full_tensor(), wanted)
        assert (wanted.abs().amax((1, 2)) > 0).sum() == 1, "one expert for all"


@pytest.mark.parametrize(("groups", "ranks"), [(4, 2), (2, 2), (1, 2), (1, 4), (2, 8), (8, 8)])
def test_every_row_of_a_projection_is_computed_with(groups: int, ranks: int) -> None:
    config = replace(TINY, mamba_heads=8, mamba_groups=groups)
    style = tensor_plan(config)["layers.0.mixer"]
    assert isinstance(style, SummedParts)
    sections = style.sections["in_proj.weight"]
    parts = [rows_of(sections, rank, ranks) for rank in range(ranks)]
    own = replace(config, mamba_heads=8 // ranks, mamba_groups=max(1, groups // ranks))
    assert all(len(rows) == own.mamba_in_dim and rows == sorted(set(rows)) for rows in parts)
    assert set().union(*parts) == set(range(config.mamba_in_dim))
    heads = config.mamba_dim // ranks  # channels of a rank's heads: the first of its rows
    assert [rows[0] for rows in parts] == [rank * heads for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "sections", "told"),
    [
        (4, {"expert": 3}, "parallel.expert: expected a divisor of the number of ranks .*, 4, found 3"),
        (8, {"expert": 8}, "parallel.expert: expected a divisor of model.n_experts, 4, found 8"),
        (4, {"expert": 4, "strategy": "hsdp", "replicas": 2}, "share a replica, 2, found 4"),
        (4, {"expert": 2, "model": {"pattern": "M", "mtp_pattern": ""}}, "for a model without experts, found 2"),
        (4, {"expert": 2, "optimizer": {"name": "muon"}}, "optimizer.name: expected 'adamw' with parallel.expert"),
        (4, {"expert": 2, "train": {"compile": "eager"}}, "train.compile: expected 'none' with parallel.expert"),
        (4, {"expert": 2, "train": {"cuda_graph": True}}, "train.cuda_graph: expected false with parallel.expert"),
        (8, {"expert": 4, "reshard_after_forward": 4}, "that have the same experts, 2, found 4"),
        (2, {"tensor": 2, "model": {"mamba_heads": 3, "mamba_groups": 1}}, "model.mamba_heads: expected a multiple"),
        (8, {"tensor": 4, "model": {"mamba_heads": 12, "mamba_groups": 3}}, "model.mamba_groups: expected a multiple"),
        (2, {"tensor": 2, "model": {"expert_dim": 24}}, "model.expert_dim: .* of 8 x parallel.tensor = 16, found 24"),
        (2, {"tensor": 2, "model": {"shared_dim": 25}}, "model.shared_dim: expected a multiple"),
        (2, {"tensor": 2, "model": {"ffn_dim": 63}}, "model.ffn_dim: expected a multiple of parallel.tensor = 2"),
        (2, {"tensor": 2, "train": {"seq_len": 31}}, "train.seq_len: expected a multiple"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(ranks: int, sections: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_ranks(job(**sections), ranks)


def test_sizes_of_layers_that_there_are_none_of_do_not_matter() -> None:
    check_ranks(job(tensor=2, model={"pattern": "M", "mtp_pattern": "", "ffn_dim": 63}), 2)


def test_other_engines_and_models_have_no_experts_to_spread() -> None:
    with pytest.raises(ValueError, match="expert: expected 1 with engine 'fsdp2', found 2"):
        job(expert=2, engine="fsdp2")
    with pytest.raises(UserError, match="expert: expected 1 for a model without experts"):
        check_ranks(tiny(parallel={"engine": "shardwright", "expert": 2}), 2)


@multirank(1)
def test_units_of_different_sizes_refuse_two_buffers(rank: int, world_size: int) -> None:
    with pytest.raises(
        UserError, match=r"parallel.memory: found 'double_buffer', which does not work with this model"
    ):
        trainer(job(memory="double_buffer", param_dtype="bfloat16"), rank, world_size)


@multirank(1)
def test_without_a_compiler_on_torch_2_11_the_key_is_named(rank: int, world_size: int) -> None:
    """torch 2.11 is replaced by its error: this torch may need no compiler."""

    def fail() -> None:
        raise MissingCompilerError("there is no C++ compiler")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "prepare_to_swap_memory", fail)
        for memory in ("arena", "max_pool", "double_buffer"):
            message = rf"parallel.memory: found '{memory}'. there is no C\+\+ compiler"
            with pytest.raises(UserError, match=message):
                trainer(job(memory=memory), rank, world_size)
        trainer(job(memory="dynamic"), rank, world_size)
