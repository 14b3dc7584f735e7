"""Models of transformers and of users with everything that the trainer offers, on two ranks.

Rows are generated. Each one gives the losses and weights of the plain model after three steps, or is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.parallel.checks import check_device, check_ranks
from shardwright.train.step.evaluation import check_model
from tests.support import multirank
from tests.support.matrix import everything, generate
from tests.train.kit.jobs import tiny, trainer
from tests.train.kit.parallel import take_steps
from tests.train.kit.text import batch, random_text
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import NATIVE

pytest.importorskip("transformers", reason="needs transformers")

STEPS, RANKS = 3, 2
AXES: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "mixtral", "balanced", "user"),
    "strategy": ("zero3", "zero2", "zero1", "ddp"),
    "layout": ("per_parameter", "ragged", "element", 4),
    "memory": ("dynamic", "double_buffer", "max_pool", "arena"),
    "reshard_after_forward": ("default", "always", "never"),
    "offload": ("none", "optimizer", "cpu"),
    "compile": ("none", "eager", "aot_eager", "inductor"),
    "checkpoint": ("none", "full", "layers", "ops", "budget"),
    "accumulate": ("none", "hold", "communicate"),
}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    """Two settings that are refused together, or whose kind of memory does not fit."""
    pair = {one: a, other: b}
    keeps = pair.get("reshard_after_forward") == "never" or pair.get("strategy") in ("zero1", "zero2")
    unlike = pair.get("model") == "user" or pair.get("reshard_after_forward") == "always"
    return (
        (pair.get("checkpoint") == "budget" and pair.get("compile", "inductor") != "inductor")
        or (pair.get("reshard_after_forward") == "always" and pair.get("strategy", "zero3") != "zero3")
        or (pair.get("memory") in ("double_buffer", "max_pool") and keeps)
        or (pair.get("memory") == "double_buffer" and unlike)
    )


ROWS = generate(AXES, excluded, 3 if everything() else 2)
ENGINES = ("ddp", "fsdp1", "fsdp2")
OTHER_ROWS = generate(
    {"engine": ENGINES, **{key: AXES[key] for key in ("model", "compile", "checkpoint", "accumulate")}},
    lambda one, a, other, b: (
        excluded(one, a, other, b) or (a == "fsdp1" and other == "compile" and b != "none")
    ),
    2,
)


def config_of(row: dict[str, Any], folder: Path) -> Config:
    """The job of a row. A mixture of experts also has its balance loss."""
    model = {"kind": "hf", "path": str(folder / row["model"]), "weights": "random"}
    if row["model"] == "user":
        model = {"kind": "python", "target": "tests.train.models.kit.user_module:Module"}
    keys = (
        "strategy",
        "layout",
        "memory",
        "reshard_after_forward",
        "offload",
        "engine",
        "tensor",
        "expert",
        "param_dtype",
    )
    hold = row.get("accumulate", "none")
    return tiny(
        model={**dict.fromkeys(NATIVE), **model},
        train={
            "seq_len": 16, "global_batch": 4, "micro_batch": 2 if hold == "none" else 1,
            "accumulate": "communicate" if hold == "none" else hold,
            **{key: row[key] for key in ("compile", "float8", "cuda_graph") if key in row},
        },
        activations={"checkpoint": row.get("checkpoint", "none")},
        parallel={"engine": "shardwright", **{key: row[key] for key in keys if key in row}},
        optimizer={"warmup_steps": 0, "eps": 1e-3},  # Adam makes large steps of the rounding of tiny gradients
    )  # fmt: skip


def plain(config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch, with the micro-batches of the ranks one after another."""
    train = config.train
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, 256)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == wide], "weight_decay": 0.1 * wide}
        for wide in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=(0.9, 0.95), eps=config.optimizer.eps)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(
            random_text(), 0, step * train.global_batch, train.global_batch, train.seq_len
        )
        losses.append(0.0)
        for x, y in zip(inputs.split(train.micro_batch), targets.split(train.micro_batch), strict=True):
            out = model(x, extras=True) if model.auxiliary else (model(x), None)
            loss = F.cross_entropy(out[0].flatten(0, 1), y.flatten(), reduction="sum")
            losses[-1] += loss.item() / targets.numel()
            if model.auxiliary:
                loss = loss + model.auxiliary["balance"] * model.auxiliary_sums(out[1], y)["balance"]
            (loss / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def folders(rank: int, folder: Path) -> None:
    if rank == 0:
        folder_with("llama", folder / "llama")
        folder_with("mixtral", folder / "mixtral")
        folder_with("mixtral", folder / "balanced", output_router_logits=True, router_aux_loss_coef=0.1)
    dist.barrier()


def check(config: Config, rank: int, world_size: int) -> None:
    losses, weights = plain(config)
    check_ranks(config, world_size)
    job = trainer(config, rank, world_size)
    check_model(job)
    found = [loss for loss, _ in take_steps(job, STEPS)]
    assert found == pytest.approx(losses, rel=1e-4)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(job.model, options=options)
    distance = sum(
        (state[name] - weight).double().square().sum().item()
        for name, weight in weights.items()
        if name in state
    )
    length = sum(weight.double().square().sum().item() for weight in weights.values())
    assert math.sqrt(distance / length) < 1e-5, math.sqrt(distance / length)


PARTS = 6


def run_rows(rows: list[dict[str, Any]], rank: int, world_size: int, folder: Path) -> None:
    folders(rank, folder)
    for row in rows:
        torch._dynamo.reset()
        try:
            check(config_of(row, folder), rank, world_size)
        except Exception as error:
            raise AssertionError(f"{row}: {type(error).__name__}: {error}") from error
    torch._dynamo.reset()


@pytest.mark.extensive("architectures of transformers")
@multirank(RANKS, timeout=300)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_row_trains_like_the_plain_model(rank: int, world_size: int, part: int, tmp_path: Path) -> None:
    run_rows(ROWS[part::PARTS], rank, world_size, tmp_path)


@pytest.mark.extensive("each engine")
@multirank(RANKS, timeout=300)
@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_train_like_the_plain_model(
    rank: int, world_size: int, engine: str, tmp_path: Path
) -> None:
    run_rows([row for row in OTHER_ROWS if row["engine"] == engine], rank, world_size, tmp_path)


#: What is refused, and the line that says so.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "budget": ({"checkpoint": "budget", "compile": "aot_eager"}, "activations.checkpoint: expected train.compile ="),
    "always": ({"strategy": "zero2", "reshard_after_forward": "always"}, "strategy 'zero2' keeps parameters whole"),
    "fsdp1": ({"engine": "fsdp1", "compile": "eager"}, "train.compile: expected 'none' with parallel.engine 'fsdp1'"),
    "one rank": ({"engine": "none"}, "parallel.engine: the engine 'none' runs on exactly 1 rank, found 2"),
    "tensor": ({"tensor": 2}, "parallel.tensor: expected 1 with model.kind"),
    "expert": ({"expert": 2}, "parallel.expert: expected 1 with model.kind"),
    "float8": ({"float8": "rowwise", "param_dtype": "bfloat16"}, "train.float8: (expected a GPU of|.*needs torchao)"),
    "graph": ({"cuda_graph": True}, "train.cuda_graph: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("model", ["llama", "user"])
def test_what_is_refused_is_one_line_before_anything_is_allocated(
    tmp_path: Path, model: str, name: str
) -> None:
    row, message = REFUSED[name]
    if model == "llama":
        folder_with("llama", tmp_path / "llama")
    with pytest.raises((UserError, ValueError), match=message) as found:
        config = config_of({"model": model, **row}, tmp_path)
        check_ranks(config, RANKS)
        check_device(config.train, "cpu")
    assert isinstance(found.value, ValidationError) or "\n" not in str(found.value)


@multirank(RANKS)
@pytest.mark.extensive("each kind", but=("max_pool-2ranks",))
@pytest.mark.parametrize("memory", ["double_buffer", "max_pool"])
def test_kinds_of_memory_that_do_not_fit(rank: int, world_size: int, memory: str, tmp_path: Path) -> None:
    """Slots of one size, or slots that never become free. No parameter has memory yet."""
    folders(rank, tmp_path)
    row = {"model": "llama", "memory": memory, "reshard_after_forward": "always"}
    message = f"parallel.memory: found '{memory}', which does not work with this model"
    if memory == "max_pool":
        row |= {"strategy": "zero1", "reshard_after_forward": "never"}
        message = "parallel.memory: expected 'arena' or 'dynamic' with parallel.strategy 'zero1'"
    with pytest.raises(UserError, match=message):
        trainer(config_of(row, tmp_path), rank, world_size)
