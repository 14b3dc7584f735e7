"""Plans of the trainer's steps against the allocator's events of real steps, as rank 0 of a group without other ranks.

The real step runs the CPU's kernels. The plan runs none. Both run the same trainer.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardwright._torch import absent_ranks, local_of
from shardwright.planner.program import Program
from shardwright.train.config import Config, load_config
from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.planning import STEP, AbsentData, AbsentStream, program_of
from shardwright.train.step.trainer import Trainer

EXAMPLES = Path(__file__).parents[3] / "examples"
LLAMA: dict[str, str] = {
    "plain": "",
    "bf16": "parallel.param_dtype=bfloat16 parallel.reduce_dtype=float32",
    "ragged": "parallel.layout=ragged",
    "zero1": "parallel.strategy=zero1",
    "arena": "parallel.memory=arena",
    "full": "activations.checkpoint=full",
    "micro-batches": "train.micro_batch=2",
    "lora": "finetune.method=lora",
}
MORE: dict[str, str] = {
    "ops": "activations.checkpoint=ops",
    "layers": "activations.checkpoint=layers",
    "zero2": "parallel.strategy=zero2",
    "ddp": "parallel.strategy=ddp",
    "element": "parallel.layout=element",
    "double_buffer": "parallel.memory=double_buffer",
    "max_pool": "parallel.memory=max_pool",
    "in backward": "optimizer.in_backward=true train.max_norm=0",
    "communicate": "train.micro_batch=2 train.accumulate=communicate",
    "always": "parallel.reshard_after_forward=always",
    "never": "parallel.reshard_after_forward=never",
    "prefetch": "parallel.prefetch=2",
    "muon": "optimizer.name=muon",
    "adamw8bit": "optimizer.name=adamw8bit",
    "dora": "finetune.method=dora",
    "tensor": "parallel.tensor=2",
    "fsdp2": "parallel.engine=fsdp2",
    "longer": "train.seq_len=512 train.micro_batch=2",
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def config_of(words: str, example: str = "llama_debug") -> Config:
    overrides = [cast(tuple[str, str], tuple(word.split("=", 1))) for word in words.split()]
    return load_config(EXAMPLES / f"{example}.toml", [*overrides, ("data.workers", "0")], ranks=2)


def real_step(config: Config) -> tuple[int, dict[str, int]]:
    """Bytes at the peak of the second step above those at its begin, and bytes of each group of tensors that stay."""
    stream = AbsentStream(config.train.seq_len, separate=False)
    data: Any = AbsentData(stream, config.model.shape().vocab_size)
    with absent_ranks(2):
        trainer = Trainer(config, World.of(config.parallel, 0, 2, torch.device("cpu")), data)
        trainer.train_step(StopRequest())
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer.train_step(StopRequest())
        kept = {
            "parameters": _bytes([*trainer.model.parameters(), *trainer.model.buffers()]),
            "optimizer": _bytes([t for state in trainer.optimizer.state.values() for t in _tensors(state)]),
        }
        trainer.close()
        del trainer
    gc.collect()
    events: Any = profiled.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        top = max(top, now)
    return top, kept


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for each in tensors:
        local = local_of(each) if hasattr(each, "_local_tensor") else each
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for each in values for t in _tensors(each)]


def planned_step(program: Program) -> tuple[int, dict[str, int]]:
    """The same figures of the last step of a plan."""
    *_, start = (i for i, name in program.phase_starts() if name == STEP)
    live = sum(each.nbytes for each in program.live(start))
    kept: dict[str, int] = {}
    for each in program.live():
        group = program.owners[each.owner].group
        kept[group] = kept.get(group, 0) + each.nbytes
    return program.peak(start).nbytes - live, kept


def compare(words: str) -> None:
    config = config_of(words)
    real, real_kept = real_step(config)
    planned, kept = planned_step(program_of(config, 2, "cpu"))
    assert abs(planned - real) <= 0.001 * real, f"{words}: {planned} bytes planned, {real} measured"
    for group, nbytes in real_kept.items():
        assert kept.get(group, 0) == nbytes, (
            f"{words}: {group}: {kept.get(group, 0)} planned, {nbytes} measured"
        )


@pytest.mark.parametrize("words", LLAMA.values(), ids=LLAMA)
def test_a_plan_has_the_peak_of_the_step(words: str) -> None:
    compare(words)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", MORE.values(), ids=MORE)
def test_a_plan_has_the_peak_of_the_step_with_each_setting(words: str) -> None:
    compare(words)


def test_a_plan_for_a_gpu_has_streams_and_its_attention() -> None:
    program = program_of(config_of(LLAMA["bf16"]), 2)
    assert any("_scaled_dot_product_flash_attention" in owner.what for owner in program.owners)
    assert {"compute", "gather", "reduce"} <= {getattr(each, "stream", "") for each in program.events}
    peak = program.peak(next(i for i, name in program.phase_starts() if name == "forward"))
    assert peak.phase == "backward"
    assert re.fullmatch(r"(losses|llama|decoder)\.py:\d+", peak.owner.line)
    assert {"parameters", "optimizer", "slabs", "activations"} <= set(peak.by_group())
