"""`[train] float8`: torchao's products in float8, emulated on the CPU, against torch's FSDP2; and what is refused."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from shardwright.train.config import Config
from shardwright.train.errors import UserError
from shardwright.train.parallel.float8 import check_float8
from shardwright.train.step import loading
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.trainer import Trainer
from tests.support.pool import multirank
from tests.train.kit.jobs import tiny
from tests.train.kit.parallel import take_steps
from tests.train.parallel.kit.float8 import emulated
from tests.train.parallel.kit.tensor_parallel import trainer


def job(engine: str = "shardwright", **train: Any) -> Config:
    return tiny(
        train={"max_norm": 0.0, "global_batch": 4, **train},
        parallel={"engine": engine, "param_dtype": "bfloat16"},
    )


def weights(job: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() for name, tensor in job.model.state_dict().items()}


@pytest.mark.extensive("each recipe")
@multirank(2)
@pytest.mark.parametrize(
    ("recipe", "backend"), [("tensorwise", "none"), ("tensorwise", "aot_eager"), ("rowwise", "none")]
)
def test_steps_equal_those_of_fsdp2(
    rank: int, world_size: int, tmp_path: Path, recipe: str, backend: str
) -> None:
    """Losses, weights and the number of collectives. A job without float8 goes on from the checkpoint."""
    torch._dynamo.reset()
    found = []
    with emulated():
        for engine in ("fsdp2", "shardwright"):
            mine = trainer(job(engine, float8=recipe, compile=backend), rank, world_size)
            losses = [loss for loss, _ in take_steps(mine, 2)]
            counts = (0, 0)
            if backend == "none":  # the counter's mode is nothing that torch can compile
                with CommDebugMode() as comm:
                    losses += [loss for loss, _ in take_steps(mine, 1)]
                gathers = sum(n for op, n in comm.get_comm_counts().items() if "allgather" in str(op))
                counts = gathers, comm.get_total_counts() - gathers
            found.append((losses, counts, weights(mine)))
    torch._dynamo.reset()
    theirs, ours = found
    assert ours[:2] == theirs[:2]
    for name, weight in ours[2].items():
        assert type(weight) is torch.Tensor
        assert torch.equal(weight, theirs[2][name]), name
    folder = checkpoint.save(tmp_path, mine.model, mine.optimizer, mine.position)
    other = trainer(job(), rank, world_size)
    other.position = loading.load(folder, other.model, other.optimizer).position
    for name, weight in weights(other).items():
        assert torch.equal(weight, ours[2][name]), name


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": {"param_dtype": "float32"}}, "parallel.param_dtype: expected 'bfloat16'"),
        ({"parallel": {"engine": "fsdp1"}}, "train.float8: expected 'none' with parallel.engine 'fsdp1'"),
        (
            {"parallel": {"tensor": 2}},
            "parallel.tensor: expected 1 with train.float8 = 'tensorwise', found 2",
        ),
        ({"parallel": {"expert": 2}}, "parallel.expert: expected 1"),
        ({"parallel": {"offload": "cpu"}}, "parallel.offload: expected 'none'"),
        ({"parallel": {"full_precision_in_eval": True}}, "parallel.full_precision_in_eval: expected false"),
        ({"optimizer": {"name": "muon"}}, "optimizer.name: expected 'adamw'"),
        ({"train": {"cuda_graph": True}}, "train.cuda_graph: expected false"),
        ({"train": {"seq_len": 33, "micro_batch": 1}}, "expected 'none' with 33 tokens in a micro-batch"),
    ],
)
def test_what_does_not_go_together(sections: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {
        "train": {"float8": "tensorwise"},
        "parallel": {"engine": "shardwright", "param_dtype": "bfloat16"},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    with pytest.raises(ValueError, match=told):
        tiny(**given)


def test_devices_without_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(float8="rowwise")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"found none; install the extra float8"):
        check_float8(config.train.float8, "cuda")
    check_float8(job().train.float8, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"expected a GPU of capability 8.9 or more .*, found the CPU"):
        check_float8(config.train.float8, "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match=r"found NVIDIA A100 of capability 8.0"):
        check_float8(config.train.float8, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_float8(config.train.float8, "cuda")


@multirank(1)
def test_sizes_that_float8_cannot_have_are_refused(rank: int, world_size: int) -> None:
    with emulated(), pytest.raises(UserError, match=r"found 40 x 32 of 'feed_forward.w1'"):
        config = job(float8="rowwise")
        model = config.model.model_copy(update={"ffn_dim": 40})
        trainer(config.model_copy(update={"model": model}), rank, world_size)


def _alive() -> int:
    """Bytes of all memories that tensors of this process have. Tensors that are made of others have none."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [each for each in gc.get_objects() if type(each) in plain and not each.is_meta]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@multirank(2)
def test_weights_are_there_once(rank: int, world_size: int) -> None:
    sizes = []
    with emulated():
        for recipe in ("none", "tensorwise"):
            before = _alive()
            mine = trainer(job(float8=recipe), rank, world_size)
            sizes.append(_alive() - before)
            del mine
    assert sizes[1] <= 1.05 * sizes[0], sizes
