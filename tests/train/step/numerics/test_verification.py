"""Silent corruption: bits that a test flips in weights, gradients and state are found, with rank, unit and parameter.

Without a flip verification finds nothing and changes no number, with every engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from shardwright.engine import units_of
from shardwright.train.errors import UserError
from shardwright.train.step.numerics.verifying import CorruptionError
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.train.kit.jobs import steps_in, trainer
from tests.train.kit.parallel import take_steps
from tests.train.step.numerics.kit import Run, after_step, job, part_of, weight_of

CLEAN: dict[str, dict[str, dict[str, Any]]] = {
    "zero3": {},
    "zero1, accumulated locally": {"parallel": {"strategy": "zero1"}, "train": {"accumulate": "hold"}},
    "zero2, ragged, Muon": {
        "parallel": {"strategy": "zero2", "layout": "ragged"},
        "optimizer": {"name": "muon"},
    },
    "element, arena": {"parallel": {"layout": "element", "memory": "arena"}},
    "in backward": {"optimizer": {"in_backward": True}, "train": {"max_norm": 0.0}},
    "8 bits": {"parallel": {"layout": 256}, "optimizer": {"name": "adamw8bit"}, "model": {"dim": 32}},
    "bfloat16": {"parallel": {"param_dtype": "bfloat16", "reshard_after_forward": "never"}},
    "offloaded": {"parallel": {"offload": "cpu"}},
    "ddp": {"parallel": {"engine": "ddp"}},
    "fsdp1": {"parallel": {"engine": "fsdp1"}},
    "fsdp2": {"parallel": {"engine": "fsdp2"}},
}
CLEAN_ON_4: dict[str, dict[str, dict[str, Any]]] = {
    "hsdp": {"parallel": {"strategy": "hsdp", "replicas": 2}},
    "hfsdp": {"parallel": {"strategy": "hfsdp", "replicas": 2}},
    "tensor": {"parallel": {"tensor": 2}, "model": {"n_kv_heads": 2}},
    "hsdp, in backward": {
        "parallel": {"strategy": "hsdp", "replicas": 2},
        "optimizer": {"in_backward": True},
        "train": {"max_norm": 0.0},
    },
}


def sections(case: dict[str, dict[str, Any]], verify_every: int, **more: dict[str, Any]) -> Any:
    return job(**{**case, "fault": {"verify_every": verify_every}, **more})


def check_undisturbed(cases: dict[str, Any], rank: int, world_size: int, **more: Any) -> None:
    for name, case in cases.items():
        plain = take_steps(trainer(sections({**case, **more}, 0), rank, world_size), 2)
        assert take_steps(trainer(sections({**case, **more}, 1), rank, world_size), 2) == plain, name


@pytest.mark.extensive("each step is computed twice")
@multirank(2)
def test_a_verified_run_is_the_same_run(rank: int, world_size: int) -> None:
    check_undisturbed(CLEAN, rank, world_size)


@pytest.mark.extensive("each mesh")
@multirank(4)
def test_a_verified_run_on_meshes_is_the_same_run(rank: int, world_size: int) -> None:
    for name, case in CLEAN_ON_4.items():
        train = {"global_batch": 16, **case.get("train", {})}
        check_undisturbed({name: {**case, "train": train}}, rank, world_size)


# -- flips -------------------------------------------------------------------------------------------------------------


def flip(tensor: Tensor, element: int = 5, bit: int = 12) -> None:
    """Change a bit in memory, as a fault does: torch does not notice."""
    bits = tensor.detach().numpy().reshape(-1).view(np.int32)
    bits[element] ^= 1 << bit


def in_step(job: Trainer, number: int, action: Callable[[], None], after: bool = False) -> None:
    """Call `action` before or after the work of step `number`, counted from 1; with verification after its trial."""
    work, calls = job.forward_backward, 0

    def act(*tensors: Tensor) -> Tensor:
        nonlocal calls
        if job.position.step + 1 == number:
            calls += 1
            if calls == 2 and not after:
                action()
        sums = work(*tensors)
        if calls == 2 and after and job.position.step + 1 == number:
            action()
        return sums

    job.forward_backward = act


WEIGHT, UNIT = "layers.0.attention.wq.weight", "layers.0"


GATHERED = rf"gathered weights of {WEIGHT} \(unit {UNIT}\)"


def flip_weight(job: Trainer) -> None:
    """Flip a bit of a shard, between the trial and the step."""
    in_step(job, 2, lambda: flip(part_of(weight_of(job, WEIGHT))))


def flip_replica(job: Trainer) -> None:
    """Flip a bit of a replica, after the first step."""
    after_step(job, 1, lambda: flip(part_of(weight_of(job, WEIGHT))))


def flip_state(job: Trainer) -> None:
    def act() -> None:
        flip(part_of(job.optimizer.state[weight_of(job, WEIGHT)]["exp_avg_sq"]))

    after_step(job, 1, act)


def flip_counter(job: Trainer) -> None:
    after_step(job, 1, lambda: flip(job.optimizer.state[weight_of(job, WEIGHT)]["step"], 0, 22))


def flip_gradient(job: Trainer) -> None:
    """A reduced one."""
    in_step(job, 2, lambda: flip(part_of(weight_of(job, WEIGHT).grad)), after=True)


def flip_own_gradient(job: Trainer) -> None:
    """Before it is reduced."""
    full = next(
        p.full for unit in units_of(job.model) for p in unit.parameters if p.sharded is weight_of(job, WEIGHT)
    )

    active = False

    def change(gradient: Tensor) -> Tensor:
        if active:
            gradient = gradient.clone()
            flip(gradient)
        return gradient

    def act() -> None:
        nonlocal active
        active = True

    full.register_hook(change)
    in_step(job, 2, act)


def flip_gathered(job: Trainer) -> None:
    """Full weights that stay until the optimizer's step."""
    p = next(
        p for unit in units_of(job.model) for p in unit.parameters if p.sharded is weight_of(job, WEIGHT)
    )
    in_step(job, 2, lambda: flip(p.view), after=True)


def flip_buffer(job: Trainer) -> None:
    buffer = next(job.model.buffers())
    after_step(job, 1, lambda: flip(buffer))


Case = tuple[dict[str, Any], Callable[[Trainer], None], str]
REPLICAS = {"strategy": "hsdp", "replicas": 2}
ON_3: list[Case] = [
    ({}, flip_weight, rf"parameter {WEIGHT} \(unit {UNIT}\): rank 1 has other bits the second time"),
    ({}, flip_own_gradient, rf"own gradient of {WEIGHT} \(unit {UNIT}\): rank 1 has other bits"),
    ({"layout": "ragged"}, flip_own_gradient, rf"own gradient of {WEIGHT} \(unit {UNIT}\): rank 1 has other bits"),
    ({}, flip_gradient, rf"gradient of {WEIGHT} \(unit {UNIT}\): rank 1 has other bits the second time"),
    ({}, flip_counter, rf"optimizer state 'step' of {WEIGHT} \(unit {UNIT}\): rank 1 differs from ranks 0, 2"),
    ({}, flip_buffer, r"buffer \S+: rank 1 differs from ranks 0, 2"),
    ({"engine": "ddp"}, flip_replica, rf"parameter {WEIGHT}: rank 1 differs from ranks 0, 2"),
    ({"engine": "ddp"}, flip_state, rf"optimizer state 'exp_avg_sq' of {WEIGHT}: rank 1 differs from ranks 0, 2"),
    ({"engine": "ddp"}, flip_gradient, rf"gradient of {WEIGHT}: rank 1 has other bits the second time"),
    ({"strategy": "ddp"}, flip_replica, rf"parameter {WEIGHT} \(unit {UNIT}\): rank 1 differs from ranks 0, 2"),
    ({"strategy": "zero1"}, flip_gathered, rf"{GATHERED}: rank 1 differs from ranks 0, 2"),
    ({"strategy": "zero2"}, flip_gathered, rf"{GATHERED}: rank 1 differs from ranks 0, 2"),
]  # fmt: skip
ON_2: list[Case] = [
    ({"strategy": "zero1"}, flip_gathered, rf"{GATHERED}: rank 1 differs from rank 0"),
    ({"strategy": "ddp"}, flip_state, rf"optimizer state 'exp_avg_sq' of {WEIGHT} \(unit {UNIT}\): ranks 0, 1 differ"),
]  # fmt: skip
ON_4: list[Case] = [
    (REPLICAS, flip_replica, rf"parameter {WEIGHT} \(unit {UNIT}\): ranks 1, 3 differ from one another"),
    (REPLICAS, flip_state, rf"optimizer state 'exp_avg_sq' of {WEIGHT} \(unit {UNIT}\): ranks 1, 3 differ"),
    (REPLICAS, flip_own_gradient, rf"own gradient of {WEIGHT} \(unit {UNIT}\): rank 1 has other bits"),
]  # fmt: skip


def check_flips(cases: list[Case], rank: int, world_size: int, folder: Path, train: dict[str, Any]) -> None:
    for number, (parallel, plant, words) in enumerate(cases):
        config = job(parallel, train=train, fault={"verify_every": 2}, checkpoint={"every": 1})
        run = Run(folder / str(number), config, rank, world_size)
        if rank == 1:
            plant(run.trainer)
        with pytest.raises(CorruptionError) as error:
            run.go()
        assert re.search(words, str(error.value)), f"{parallel}: {error.value}"
        assert "rank 1 on " in str(error.value)
        assert run.trainer.position.step < 2
        # A copy that changes after the first step must not be saved with that step.
        assert steps_in(run.folder.checkpoints) in ([], [1])
        run.trainer.close()


@pytest.mark.extensive("three ranks")
@multirank(3)
def test_flipped_bits_are_found_and_named(rank: int, world_size: int, tmp_path: Path) -> None:
    check_flips(ON_3, rank, world_size, tmp_path, {})


@multirank(2)
def test_flipped_bits_are_found_on_two_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    check_flips(ON_2, rank, world_size, tmp_path, {})


@pytest.mark.extensive("each mesh")
@multirank(4)
def test_flipped_bits_of_replicas_are_found(rank: int, world_size: int, tmp_path: Path) -> None:
    check_flips(ON_4, rank, world_size, tmp_path, {"global_batch": 16})


@multirank(2)
def test_operations_that_are_not_deterministic_are_a_mistake_of_the_user(rank: int, world_size: int) -> None:
    """Every rank has other gradients each time."""
    run = trainer(sections({}, 1), rank, world_size)
    sums, calls = run.losses.sums, 0

    def noisy(batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sums(batch) * (1 + calls * 1e-3)

    run.losses.sums = noisy  # type: ignore[method-assign]
    with pytest.raises(UserError, match="other gradients each time it is computed, on every rank"):
        take_steps(run, 1)
    run.close()
