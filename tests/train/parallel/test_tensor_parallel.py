"""`[parallel] tensor`: tensor and sequence parallelism with a cross-entropy of cut logits, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.models.sampling import sample
from shardwright.train.parallel.checks import check_ranks
from shardwright.train.step import loading
from shardwright.train.step.evaluation import validate
from shardwright.train.step.saving import checkpoint
from tests.support.pool import multirank
from tests.train.kit.jobs import tiny
from tests.train.kit.parallel import plain_steps, take_steps
from tests.train.kit.text import batch, random_text
from tests.train.parallel.kit.tensor_parallel import trainer

STEPS = 3


def job(tensor: int = 2, model: dict[str, Any] | None = None, **options: Any) -> Config:
    return tiny(
        model={"n_kv_heads": 2, **(model or {})},
        train={"micro_batch": 1, "global_batch": 8},
        parallel={"engine": "shardwright", "tensor": tensor, **options},
    )


@pytest.mark.extensive("each engine and layout", but=("hsdp-*",))
@multirank(4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "ragged", "reshard_after_forward": "always", "model": {"tied_embeddings": True}},
        {"strategy": "hsdp", "replicas": 2, "memory": "arena"},
        {"strategy": "zero1", "layout": "element"},
        {"engine": "fsdp2"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_steps_equal_plain_ones(rank: int, world_size: int, options: dict[str, Any]) -> None:
    config = job(**options)
    mine = trainer(config, rank, world_size)
    for found, wanted in zip(take_steps(mine, STEPS), plain_steps(config, STEPS), strict=True):
        assert found == pytest.approx(wanted, rel=2e-4)


@pytest.mark.extensive("many compiled graphs")
@multirank(2)
def test_compiled_blocks(rank: int, world_size: int) -> None:
    """Nothing changes but the order of sums, and one graph does for blocks that keep activations and for others."""
    torch._dynamo.reset()
    plain = job()
    compiled = plain.model_copy(
        update={
            "train": plain.train.model_copy(update={"compile": "aot_eager"}),
            "activations": plain.activations.model_copy(update={"checkpoint": "layers"}),
        }
    )
    wanted = take_steps(trainer(plain, rank, world_size), STEPS)
    mine = trainer(compiled, rank, world_size)
    for found, expected in zip(take_steps(mine, STEPS), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert mine.recompiles.graphs == 1
    torch._dynamo.reset()


@pytest.mark.extensive("a training of many steps")
@multirank(4)
def test_bf16_stays_near_float32(rank: int, world_size: int) -> None:
    wide = trainer(job(), rank, world_size)
    narrow = trainer(job(param_dtype="bfloat16"), rank, world_size)
    for (loss, norm), (other, other_norm) in zip(take_steps(wide, 2), take_steps(narrow, 2), strict=True):
        assert loss == pytest.approx(other, rel=2e-2)
        assert norm == pytest.approx(other_norm, rel=5e-2)


@multirank(4)
@pytest.mark.parametrize("vocab_size", [256, 261])
def test_validation_counts_every_window_once(rank: int, world_size: int, vocab_size: int) -> None:
    """Also with a vocabulary that two ranks do not divide."""
    config = job(model={"vocab_size": vocab_size})
    torch.manual_seed(config.run.seed)
    plain = build_model(config.model, 256)
    windows = config.validation.batches * config.train.global_batch
    inputs, targets = batch(random_text(), 0, 0, windows, config.train.seq_len, split="validation")
    with torch.no_grad():
        wanted = F.cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
    assert validate(trainer(config, rank, world_size)).loss == pytest.approx(wanted.item(), rel=1e-5)


@multirank(4)
def test_samples_equal_those_of_the_plain_model(rank: int, world_size: int) -> None:
    config = job(tensor=2)
    torch.manual_seed(config.run.seed)
    plain = build_model(config.model, 256)
    mine = trainer(config, rank, world_size)
    options: dict[str, Any] = {"count": 5, "temperature": 0.0, "top_k": 0, "seed": 0, "context": 8}
    prompt = torch.arange(5)
    wanted = sample(plain, prompt, device=torch.device("cpu"), **options)
    assert sample(mine.model, prompt, device=torch.device("cpu"), multiple=2, **options) == wanted


@pytest.mark.extensive("both ways")
@multirank(4)
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_runs_go_on_with_another_tensor(
    rank: int, world_size: int, tmp_path: Path, first: int, second: int
) -> None:
    """Three steps at once, or two and, from their checkpoint, a third on another mesh."""
    whole = take_steps(trainer(job(tensor=2), rank, world_size), 3)
    one = trainer(job(tensor=first, layout="ragged"), rank, world_size)
    take_steps(one, 2)
    folder = checkpoint.save(tmp_path, one.model, one.optimizer, one.position)
    other = trainer(job(tensor=second), rank, world_size)
    other.position = loading.load(folder, other.model, other.optimizer).position
    assert take_steps(other, 1)[0] == pytest.approx(whole[2], rel=2e-4)


@pytest.mark.parametrize(
    ("ranks", "sections", "told"),
    [
        (3, {}, "parallel.tensor: expected a divisor of the number of ranks, 3, found 2"),
        (
            2,
            {"model": {"n_kv_heads": 1}},
            "model.n_kv_heads: expected a multiple of parallel.tensor = 2, found 1",
        ),
        (2, {"model": {"ffn_dim": 63}}, "model.ffn_dim: expected a multiple"),
        (2, {"train": {"seq_len": 31}}, "train.seq_len: expected a multiple"),
        (
            2,
            {"optimizer": {"name": "muon"}},
            "optimizer.name: expected 'adamw' with parallel.tensor = 2, found 'muon'",
        ),
        (
            2,
            {"train": {"cuda_graph": True}},
            "train.cuda_graph: expected false with parallel.tensor = 2, found true",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ranks: int, sections: dict[str, Any], told: str) -> None:
    given = {"model": {"n_kv_heads": 2}, "parallel": {"engine": "shardwright", "tensor": 2}}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    with pytest.raises(UserError, match=told):
        check_ranks(tiny(**given), ranks)


def test_engines_without_it_refuse() -> None:
    with pytest.raises(
        ValueError, match=r"train.compile: expected 'none' .* the embedding would get no gradient"
    ):
        tiny(parallel={"engine": "fsdp2", "tensor": 2}, train={"compile": "inductor"})
    with pytest.raises(ValueError, match="tensor: engine 'ddp' has no tensor parallelism"):
        tiny(parallel={"engine": "ddp", "tensor": 2})
