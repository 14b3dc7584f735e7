"""Validations and saves of plans, beside those of real runs."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoint import SHARED, state_to_save
from shardwright.checkpoint.asynchronous.staging import SaveJob, SharedMemory, stage
from shardwright.checkpoint.save.plan import SavePlan
from shardwright.checkpoint.storage.locations import store_of
from shardwright.engine import RankGroup
from shardwright.engine.compat import absent_ranks
from shardwright.planner import SAVE, VALIDATION, Program, as_values, judge, known_devices
from shardwright.train.config import Config
from shardwright.train.config.plans.cache_key import cache_key
from shardwright.train.extend import TrainerHook
from shardwright.train.parallel.world import World
from shardwright.train.planning.absent_data import AbsentData
from shardwright.train.planning.programs import program_of, stages_checkpoints
from shardwright.train.step.evaluation import validate
from shardwright.train.step.hooks import hooks_of
from shardwright.train.step.numerics.detect import fault_of_state
from shardwright.train.step.saving import checkpoint
from shardwright.train.step.trainer import Trainer
from tests.support.pool import WorkerPools, run_case
from tests.train.kit.jobs import train_step
from tests.train.planning.kit import config_of, peak_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Right(TrainerHook):
    """Looks at a logit."""

    validation_metrics = ("first",)

    def validate(self, logits: Tensor, targets: Tensor) -> Mapping[str, Any]:
        return {"first": (logits[0, 0, 0], 1)}


HOOK = f'run.hooks=["{__name__}:Right"]'
ASYNCHRONOUS = "checkpoint.asynchronous=true checkpoint.every=10"
ROWS: dict[str, str] = {
    "logits of a hook": f"parallel.layout=ragged {HOOK}",
}
MORE: dict[str, str] = {
    "one short validation": "validation.batches=1 train.micro_batch=4 parallel.param_dtype=bfloat16",
    "zero3": "",
    "zero1": "parallel.strategy=zero1",
    "ddp": f"parallel.strategy=ddp {HOOK}",
    "arena": "parallel.memory=arena",
    "full": f"activations.checkpoint=full {HOOK}",
    "lora": "finetune.method=lora",
    "adamw8bit": "optimizer.name=adamw8bit",
    "tensor": f"parallel.tensor=2 {HOOK}",
    "fsdp2": f"parallel.engine=fsdp2 {HOOK}",
    "in backward": "optimizer.in_backward=true train.max_norm=0",
    "float32 in eval": "parallel.param_dtype=bfloat16 parallel.full_precision_in_eval=true",
    "keeps parameters": f"parallel.reshard_after_forward=never {HOOK}",
    "verified": "fault.verify_every=2",
}
SAVES: dict[str, str] = {
    "ragged, asynchronous": f"parallel.layout=ragged {ASYNCHRONOUS}",
}
MORE_SAVES: dict[str, str] = {
    "zero3": "",
    "zero3, asynchronous": ASYNCHRONOUS,
    "zero1, asynchronous": f"parallel.strategy=zero1 {ASYNCHRONOUS}",
    "ddp, asynchronous": f"parallel.strategy=ddp {ASYNCHRONOUS}",
    "element, asynchronous": f"parallel.layout=element {ASYNCHRONOUS}",
    "lora, asynchronous": f"finetune.method=lora model.dim=768 {ASYNCHRONOUS}",
    "muon, asynchronous": f"optimizer.name=muon {ASYNCHRONOUS}",
    "adamw8bit, asynchronous": f"optimizer.name=adamw8bit {ASYNCHRONOUS}",
    "tensor, asynchronous": f"parallel.tensor=2 {ASYNCHRONOUS}",
    "fsdp2, asynchronous": f"parallel.engine=fsdp2 {ASYNCHRONOUS}",
    "in backward": "optimizer.in_backward=true train.max_norm=0",
}


def validation_in(config: Config) -> int:
    """Bytes of torch's allocator at the peak of a validation after two steps, above its begin. The other rank does not
    exist."""
    data: Any = AbsentData.of(config, 2)
    with absent_ranks(2):
        world = World.of(config.parallel, 0, 2, torch.device("cpu"))
        trainer = Trainer(config, world, data, hooks=hooks_of(config.run.hooks))
        for _ in range(2):
            train_step(trainer)
        gc.collect()
        peak = peak_of(lambda: (fault_of_state(trainer.state), validate(trainer)))
        trainer.close()
    return peak


def save_in(rank: int, world_size: int, config: Config, folder: Path) -> None:
    """Save after two steps, and write the first rank's bytes: the peak above its begin, and the copy."""
    world = World.of(config.parallel, rank, world_size, torch.device("cpu"))
    data: Any = AbsentData.of(config, world_size)
    trainer = Trainer(config, world, data)
    for _ in range(2):
        train_step(trainer)
    gc.collect()
    figures: dict[str, int] = {}
    action: Callable[[], object]
    if config.checkpoint.asynchronous:
        memory = SharedMemory()
        action = functools.partial(stage_part, trainer, memory, folder)
    else:
        state = trainer.model, trainer.optimizer, trainer.position
        action = functools.partial(checkpoint.save, folder, *state)
    figures[SAVE] = peak_of(lambda: (fault_of_state(trainer.state), action()))
    if config.checkpoint.asynchronous:
        figures["staging"] = memory.nbytes
        memory.close()
    trainer.close()
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))


def stage_part(trainer: Trainer, memory: SharedMemory, folder: Path) -> None:
    """An asynchronous save, up to the moment at which the writer process begins."""
    extra = {"position": trainer.position.stored()}
    ranks = RankGroup()
    state = state_to_save(trainer.model, trainer.optimizer, extra, True, False, ranks)
    plan = SavePlan.of(state, ranks, shared=SHARED)
    stage(SaveJob(store_of(folder / "step"), ranks.rank, False, plan.own, plan.contents, True), memory)


def planned(program: Program) -> dict[str, int]:
    """The same figures of a plan."""
    figures = {}
    for start, name in program.phase_starts():
        if name in (VALIDATION, SAVE):
            live = sum(each.nbytes for each in program.live(start) if not each.on_host)
            figures[name] = program.peaks()[name][0] - live
    verdict = judge(program, known_devices()["h100"], 2)
    return figures | verdict.host


def compare_validations(words: str, part: float = 0.005) -> None:
    config = config_of(words)
    real, plan = validation_in(config), planned(program_of(config, 2, "cpu"))[VALIDATION]
    assert abs(plan - real) <= part * real, (plan, real)


def compare_saves(words: str, pools: WorkerPools, folder: Path) -> None:
    # Against weights of 24 MB the messages of a save, which ranks exchange in tensors of the host, count little.
    config = config_of(f"model.dim=512 model.ffn_dim=1024 train.seq_len=64 validation.every=0 {words}")
    run_case(pools, save_in, 2, 120, config=config, folder=folder)
    real = json.loads((folder / "figures.json").read_text())
    program = program_of(config, 2, "cpu")
    plan = planned(program)
    live = sum(each.nbytes for each in program.live() if not each.on_host)
    assert abs(plan[SAVE] - real[SAVE]) <= 0.01 * live, (plan, real, live)
    assert plan.get("staging") == real.get("staging"), (plan, real)


@pytest.mark.parametrize("words", ROWS.values(), ids=ROWS)
def test_a_plan_has_the_peak_of_a_validation(words: str) -> None:
    compare_validations(words)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", MORE.values(), ids=MORE)
def test_a_plan_has_the_peak_of_a_validation_with_each_setting(words: str) -> None:
    compare_validations(words)


@pytest.mark.parametrize("words", SAVES.values(), ids=SAVES)
def test_a_plan_has_the_memory_of_a_save(words: str, worker_pools: WorkerPools, tmp_path: Path) -> None:
    compare_saves(words, worker_pools, tmp_path)


@pytest.mark.extensive("each setting")
@pytest.mark.parametrize("words", MORE_SAVES.values(), ids=MORE_SAVES)
def test_a_plan_has_the_memory_of_a_save_with_each_setting(
    words: str, worker_pools: WorkerPools, tmp_path: Path
) -> None:
    compare_saves(words, worker_pools, tmp_path)


def test_the_phases_of_a_verdict_and_the_host_of_a_save() -> None:
    plain, staged = (
        judge(program_of(config_of(words), 2), known_devices()["h100"], 2)
        for words in ("validation.every=0", ASYNCHRONOUS)
    )
    assert list(plain.parts) == ["step", SAVE] and list(staged.parts) == ["step", VALIDATION, SAVE]
    assert (plain.host, plain.peak.nbytes, plain.usage.reserved) == (
        {}, staged.peak.nbytes, staged.usage.reserved,
    )  # fmt: skip
    # Weights and two moments in float32; tables of positions are no part of a checkpoint.
    exact = 3 * plain.exact["optimizer"] / 2
    assert exact <= staged.host["staging"] <= exact + (3 << 20)
    assert as_values(staged)["phases"][SAVE]["host_bytes"] == staged.host["staging"]
    assert str(staged).splitlines()[-2].startswith("host")


def test_only_saves_before_the_last_one_copy_to_the_host() -> None:
    words = ("", "checkpoint.every=300", "checkpoint.every=299", "checkpoint.every=0")
    configs = [config_of(f"checkpoint.asynchronous=true train.steps=300 {each}") for each in words]
    assert [stages_checkpoints(each) for each in configs] == [True, False, True, False]
    assert not stages_checkpoints(config_of("checkpoint.every=7"))


def test_the_key_of_a_plan_has_validations_and_saves() -> None:
    words = ("", "validation.every=0", "checkpoint.every=7", "checkpoint.asynchronous=true")
    keys = [cache_key(config_of(each), 2, "cuda") for each in words]
    assert None not in keys and len(set(keys)) == len(keys)
    assert cache_key(config_of(HOOK), 2, "cuda") is None
    assert cache_key(config_of(f"{HOOK} validation.every=0"), 2, "cuda") is not None


@pytest.mark.extensive("each compiles its blocks")
@pytest.mark.parametrize("words", ["", "parallel.param_dtype=bfloat16 parallel.layout=ragged"])
def test_a_plan_has_the_peak_of_a_validation_with_compiled_blocks(words: str) -> None:
    compare_validations(f"train.compile=inductor {words}", 0.03)
