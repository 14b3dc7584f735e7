"""`[parallel] keep_float32` and `grad_dtype`: what modules and the optimizer see, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.train.errors import UserError
from tests.support.pool import multirank
from tests.train.kit.jobs import tiny
from tests.train.kit.parallel import take_steps
from tests.train.parallel.kit.activations import KINDS
from tests.train.parallel.kit.tensor_parallel import trainer

LOW = {"engine": "shardwright", "param_dtype": "bfloat16"}


@pytest.mark.extensive("each dtype", but=("1-2ranks",))
@multirank(2)
@pytest.mark.parametrize("tensor", [1, 2])
def test_chosen_parameters_keep_float32(rank: int, world_size: int, tensor: int) -> None:
    kind = "hybrid" if tensor == 1 else "llama"
    patterns = ["*norm.weight"] if tensor == 2 else ["*norm.weight", "*.router.*", "*.a_log"]
    config = tiny(
        model={**KINDS[kind], "n_kv_heads": 2 if tensor == 2 else 1},
        train={"micro_batch": 1},
        parallel={**LOW, "tensor": tensor, "keep_float32": patterns},
    )
    job = trainer(config, rank, world_size)
    seen: dict[str, torch.dtype] = {}

    def look(module: Any, inputs: Any) -> None:
        for name, p in module.named_parameters():
            seen[f"{names[module]}{name}"] = p.dtype

    names = {m: f"{name}." for name, m in job.model.named_modules() if name.count(".") == 1}
    for module in names:
        module.register_forward_pre_hook(look)
    losses = [loss for loss, _ in take_steps(job, 2)]
    wide = {name for name, dtype in seen.items() if dtype is torch.float32}
    assert wide == {n for n in seen if n.endswith(("norm.weight", "router.weight", "a_log"))}
    assert wide < set(seen)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"keep_float32": ()})})
    plain = [loss for loss, _ in take_steps(trainer(config, rank, world_size), 2)]
    assert losses == pytest.approx(plain, rel=1e-2)
    assert losses != plain


@multirank(2)
def test_gradients_in_bfloat16(rank: int, world_size: int) -> None:
    found = []
    for dtype in ("auto", "bfloat16"):
        config = tiny(
            train={"micro_batch": 2, "global_batch": 8},
            optimizer={"name": "adamw8bit"},
            parallel={**LOW, "layout": 64, "grad_dtype": dtype},
        )
        job = trainer(config, rank, world_size)
        dtypes = set()
        step = job.optimizer.step

        def looked(job: Any = job, dtypes: Any = dtypes, step: Any = step) -> None:
            dtypes.update(p.grad.dtype for p in job.model.parameters())
            step()

        job.optimizer.step = looked  # type: ignore[method-assign,assignment]
        found.append([loss for loss, _ in take_steps(job, 2)])
        assert dtypes == {torch.float32 if dtype == "auto" else torch.bfloat16}
    assert found[0] == pytest.approx(found[1], rel=1e-2)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": {"engine": "fsdp2", "grad_dtype": "bfloat16"}}, "only the engine shardwright"),
        ({"parallel": {**LOW, "grad_dtype": "bfloat16"}}, "optimizer.name 'adamw', which takes only float32"),
        (
            {"parallel": {**LOW, "grad_dtype": "bfloat16", "accumulate_dtype": "float32"}},
            "expected 'auto' or accumulate_dtype, 'float32'",
        ),
        (
            {"parallel": {"engine": "shardwright", "keep_float32": ["*"]}},
            "no patterns with param_dtype 'float32'",
        ),
    ],
)
def test_what_does_not_go_together(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny(**sections)


@multirank(1)
@pytest.mark.parametrize(
    ("pattern", "told"),
    [("*.norms.*", "matches none of tok_embeddings.weight"), ("*w*", "also matches 'tok_embeddings.weight'")],
)
def test_patterns_are_checked(rank: int, world_size: int, pattern: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trainer(tiny(parallel={**LOW, "keep_float32": [pattern]}), rank, world_size)
