"""`[activations] offload`: losses and weights have the bits of the job without it, for each kind of model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardwright.activations import offload
from shardwright.activations.offload import ActivationOffload
from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.parallel import activations
from shardwright.train.parallel.checks import check_ranks
from tests.support import multirank
from tests.support.matrix import generate
from tests.train.kit.jobs import tiny, trainer
from tests.train.kit.parallel import take_steps
from tests.train.models.kit.architectures import folder_with
from tests.train.models.kit.foreign import NATIVE
from tests.train.parallel.kit.activations import KINDS

AXES: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "hybrid", "user"),
    "way": (("none", "blocks"), ("full", "inputs"), ("layers", "inputs"), ("layers", "blocks"), ("ops", "blocks")),
    "compile": ("none", "aot_eager"),
    "engine": ("shardwright", "fsdp2", "ddp"),
    "strategy": ("zero3", "zero2", "ddp"),
    "layout": ("per_parameter", "ragged"),
    "memory": ("dynamic", "arena", "max_pool"),
    "tensor": (1, 2),
    "expert": (1, 2),
    "param_dtype": ("float32", "bfloat16"),
    "accumulate": ("communicate", "hold"),
    "in_backward": (False, True),
}  # fmt: skip
OWN = {"strategy": "zero3", "layout": "per_parameter", "memory": "dynamic", "expert": 1, "in_backward": False}


def excluded(one: str, a: Any, other: str, b: Any) -> bool:
    pair = {one: a, other: b}
    return (
        (pair.get("engine", "shardwright") != "shardwright" and any(pair.get(key, v) != v for key, v in OWN.items()))
        or (pair.get("engine") == "ddp" and pair.get("tensor") == 2)
        or (pair.get("memory") == "max_pool" and pair.get("strategy", "zero3") != "zero3")
        or (pair.get("tensor") == 2 and (pair.get("model") == "user" or pair.get("expert") == 2))
        or (pair.get("expert") == 2 and (pair.get("model", "hybrid") != "hybrid" or pair.get("compile") == "aot_eager"))
        or (pair.get("model") == "hybrid" and pair.get("compile") == "aot_eager")
    )  # fmt: skip


def config_of(row: dict[str, Any], path: str = "") -> Config:
    kinds: dict[str, dict[str, Any]] = {
        name: keys | {"n_kv_heads": 2}
        for name, keys in KINDS.items()  # which tensor parallelism divides
    } | {
        "user": {
            **dict.fromkeys(NATIVE),
            "kind": "python",
            "target": "tests.train.models.kit.user_module:Module",
        },
        "hf": {**dict.fromkeys(NATIVE), "kind": "hf", "path": path, "weights": "random"},
    }
    checkpoint, offloaded = row["way"]
    return tiny(
        model=kinds[row["model"]],
        activations={"checkpoint": checkpoint, "offload": offloaded},
        parallel={
            key: row[key]
            for key in ("engine", "strategy", "layout", "memory", "tensor", "expert", "param_dtype")
            if key not in OWN or row["engine"] == "shardwright"
        },
        train={
            "global_batch": 8, "micro_batch": 2, "accumulate": row["accumulate"], "compile": row["compile"],
            **({"max_norm": 0.0} if row["in_backward"] else {}),
        },
        optimizer={"in_backward": row["in_backward"]},
    )  # fmt: skip


def trained(config: Config, rank: int, world_size: int) -> tuple[list[Any], dict[str, Any], int]:
    """Losses and norms, weights, and bytes of the host's buffers."""
    torch._dynamo.reset()
    check_ranks(config, world_size)
    job = trainer(config, rank, world_size)
    figures = take_steps(job, 3)
    weights = get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
    owners = [getattr(m.__dict__.get("forward"), "func", None) for m in job.model.modules()]
    offloads = {o.__self__ for o in owners if isinstance(getattr(o, "__self__", None), ActivationOffload)}
    return figures, weights, sum(each.host_bytes for each in offloads)


def check(row: dict[str, Any], rank: int, world_size: int, path: str = "") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SMALLEST", 1)
        config = config_of(row, path)
        plain = config.model_copy(
            update={"activations": config.activations.model_copy(update={"offload": "none"})}
        )
        expected, weights, nothing = trained(plain, rank, world_size)
        figures, found, nbytes = trained(config, rank, world_size)
    assert nothing == 0 < nbytes
    assert figures == expected
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def name_of(row: Any) -> str:
    return "-".join("+".join(v) if isinstance(v, tuple) else str(v) for v in row.values())


ROWS = generate(AXES, excluded, 2)


@pytest.mark.extensive(
    "each pair of settings", but=("llama-full+inputs-none-*", "hybrid-layers+inputs-none-*")
)
@multirank(2)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bits_are_those_of_the_job_without_offload(rank: int, world_size: int, row: dict[str, Any]) -> None:
    check(row, rank, world_size)


@pytest.mark.extensive("a model of transformers")
@multirank(2)
@pytest.mark.parametrize("way", AXES["way"], ids="+".join)
@pytest.mark.parametrize("compile", AXES["compile"])
def test_models_of_transformers(
    rank: int, world_size: int, way: tuple[str, str], compile: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    if rank == 0:
        folder_with("llama", tmp_path / "llama")
    dist.barrier()
    row = {name: values[0] for name, values in AXES.items()}
    row |= {"model": "hf", "way": way, "compile": compile}
    check(row, rank, world_size, str(tmp_path / "llama"))


@multirank(1)
def test_too_little_memory_of_the_host_is_a_mistake_of_the_user(rank: int, world_size: int) -> None:
    row = {name: values[0] for name, values in AXES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "SMALLEST", 1)
        patch.setattr(offload.Host, "bytes_for_rank", lambda self: 5000)
        job = trainer(config_of(row), rank, world_size)
        with pytest.raises(
            UserError, match=r"activations.offload: The activations of 4 blocks need about .* bytes"
        ):
            take_steps(job, 1)
        job.close()
