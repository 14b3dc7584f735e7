"""Numbers that go wrong in a step, and the run that goes on: compared with plain PyTorch on the samples that stay."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.engine import RankGroup, plain_name, units_of
from shardwright.engine.compat import local_of
from shardwright.train.config import FaultConfig
from shardwright.train.report.jsonl import read_records
from shardwright.train.run.metrics import recorded_step
from shardwright.train.run.past import Past
from shardwright.train.run.position import Position
from shardwright.train.step.numerics.detect import FaultError, is_spike
from shardwright.train.step.saving.saves import Saves
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.support.matrix import select, together
from tests.train.kit.jobs import steps_in, trainer
from tests.train.kit.parallel import next_step, take_steps
from tests.train.step.numerics.kit import (
    G,
    Plant,
    Run,
    after_step,
    in_gradients,
    job,
    lines_of,
    on_samples,
    part_of,
    plain_losses,
    weight_of,
)

ENGINES: list[dict[str, Any]] = [
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"strategy": "zero1"},
    {"strategy": "zero2", "layout": "ragged"},
    {"strategy": "zero3", "memory": "arena"},
    {"strategy": "zero3", "layout": "element"},
    {"strategy": "zero3", "offload": "cpu"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_norm": 0.0},
    {"accumulate": "hold"},
    {"accumulate": "hold", "max_norm": 0.0},
]
ACTIONS = ["skip", "rewind", "stop"]
KINDS = ["loss", "gradients", "weight", "spike"]
WEIGHT = "layers.0.attention.wq.weight"


def makes_sense(world_size: int, engine: int, options: int, action: str, kind: str) -> bool:
    name = ENGINES[engine].get("engine")
    if (name == "fsdp2" and world_size == 1) or (
        name in ("ddp", "fsdp2") and "accumulate" in OPTIONS[options]
    ):
        return False
    return kind != "spike" or action != "stop"


MATRIX = select(
    [
        row
        for row in itertools.product((2, 3, 1), range(len(ENGINES)), range(len(OPTIONS)), ACTIONS, KINDS)
        if makes_sense(*row)
    ],
    lambda row, strength: together(strength, *row),
)


def planted(kind: str, rank: int) -> Plant | None:
    """The fault in the fourth step, on one rank."""
    if kind == "gradients":
        return in_gradients(3 * G, math.nan, rank)
    if kind == "weight":
        return None
    return on_samples(3 * G, 50.0) if kind == "spike" else on_samples(3 * G, math.inf, rank)


def spoil_weight(job: Trainer) -> int:
    """Make an element of a weight infinite after the third step, on the last rank that has elements of it."""
    weight = part_of(weight_of(job, WEIGHT))
    last = max(rank for rank, size in enumerate(RankGroup().all_gather(weight.numel())) if size)

    def spoil() -> None:
        with torch.no_grad():
            weight.view(-1)[2] = math.inf

    if job.world.rank == last:
        after_step(job, 3, spoil)
    return last


@pytest.mark.extensive("each number of ranks", but=("2ranks",))
@multirank(1, 2, 3)
def test_wrong_numbers_are_answered_with_every_engine(rank: int, world_size: int, tmp_path: Path) -> None:
    """One rank's loss, gradients or weights are wrong in the fourth step, or the loss is a spike: all ranks answer
    alike."""
    for number, (ranks, engine, options, action, kind) in enumerate(MATRIX):
        if ranks != world_size:
            continue
        where = f"{ENGINES[engine]} {OPTIONS[options]} {action} {kind}"
        last = world_size - 1
        fault = {"on_spike": action, "spike_window": 4, "spike_sigmas": 30.0}
        fault = fault if kind == "spike" else {"on_non_finite": action}
        config = job(ENGINES[engine], train=OPTIONS[options], fault=fault)
        run = Run(tmp_path / str(number), config, rank, world_size, planted(kind, last))
        if kind == "weight":
            last = spoil_weight(run.trainer)
        if action == "rewind":  # step 2 is saved
            assert run.go() == [n * G for n in range(6)], where
            firsts, newest = [0, 1, 4, 5], 4
            past = Past(((2 * G, 4 * G),), rewinds=1)
        elif action == "skip" and kind != "weight":
            assert run.go() == [n * G for n in range(5)], where
            firsts, newest = [0, 1, 2, 4], 4
            past = Past(((3 * G, 4 * G),), skips=1)
        else:
            with pytest.raises(FaultError) as error:
                run.go()
            words = {"weight": f"weight {WEIGHT} .*on rank {last} .*newest checkpoint is of step 2"}
            saved = "after step 3 is saved"
            words["loss"] = f"loss of rank {last} is not finite.*{saved}"
            name = config.parallel.engine
            rank_in_words = (
                "computed it is not known" if name == "fsdp2" else f"on rank {last}, which computed it"
            )
            rank_in_words = rank_in_words if world_size > 1 else "on rank 0"
            words["gradients"] = f"gradient of output.weight.* the first one in .*{rank_in_words}.*{saved}"
            assert re.search(f"step 4: .*{words[kind]}", str(error.value)), f"{where}: {error.value}"
            firsts, newest, past = [0, 1, 2], 2 if kind == "weight" else 3, Past()
        assert replace(run.trainer.position.past, losses=()) == past, where
        assert run.trainer.position == Position(
            len(firsts), (firsts[-1] + 1) * G, run.trainer.position.past
        ), where
        if rank == 0:
            records = lines_of(run)
            assert [line["step"] for line in records] == list(range(1, len(firsts) + 1)), where
            expected = plain_losses(config, [first * G for first in firsts])
            # Float32 sums in another order, over four steps of a high rate.
            assert [line["loss"] for line in records] == pytest.approx(expected, rel=1e-4), where
            events = lines_of(run, event=True)
            assert [event["incident"]["action"] for event in events] == ([] if newest < 4 else [action]), (
                where
            )
            assert steps_in(run.folder.checkpoints)[0] == newest, where


# -- what is named -----------------------------------------------------------------------------------------------------


def in_gradient(job: Trainer, value: float) -> None:
    """Make an element of this rank's own gradient wrong in the second step. The loss stays finite."""
    if job.config.parallel.engine == "shardwright":
        full = next(
            p.full
            for unit in units_of(job.model)
            for p in unit.parameters
            if f"{unit.name}.{p.name}".endswith(WEIGHT)
        )
    else:
        full = next(p for name, p in job.model.named_parameters() if plain_name(name, job.model) == WEIGHT)

    def change(gradient: torch.Tensor) -> torch.Tensor:
        wrong = torch.zeros_like(gradient)
        (wrong if type(wrong) is torch.Tensor else wrong._local_tensor).view(-1)[3] = value
        return gradient + wrong if job.position.step == 1 else gradient

    full.register_hook(change)


@pytest.mark.extensive("each place of a gradient")
@multirank(2)
def test_the_gradient_and_its_rank_are_named(rank: int, world_size: int, tmp_path: Path) -> None:
    """The rank that computed it, not the one that stores its part; also too large for the norm. Clipping leaves it."""
    first = "the first one in the order of backward, is not finite on rank 1, which computed it"
    for number, engine in enumerate([{"engine": "ddp"}, {"strategy": "zero3"}, {"layout": "ragged"}]):
        name = WEIGHT if "engine" in engine else rf"{WEIGHT} \(unit layers.0\)"
        for place, (value, words) in enumerate(
            (
                (math.nan, rf"found loss \d\.\d+, norm nan; gradient of {name}, {first}"),
                (math.inf, rf"norm (inf|nan); gradient of {name}, {first}"),
                (
                    1e30,
                    "norm inf; computed again, all gradients are finite on all ranks before they are reduced; the "
                    rf"largest, .*e\+\d\d, is the gradient of {name} on rank 1",
                ),
            )
        ):
            config = job(engine, train={"max_norm": (number + place) % 2})
            folder = tmp_path / f"{number} {value}"
            run = Run(folder, config, rank, world_size)
            if rank == 1:
                in_gradient(run.trainer, value)
            with pytest.raises(FaultError, match=words) as error:
                run.go()
            assert "after step 1 is saved" in str(error.value)
            if place != number:
                continue
            # What is saved is the state before: it resumes as if nothing had happened.
            again = Run(folder, config, rank, world_size).resume()
            assert again.go() == [n * G for n in range(1, 4)]
            if rank == 0:
                expected = plain_losses(config, [n * G for n in range(4)])
                assert [line["loss"] for line in lines_of(again)] == pytest.approx(expected, rel=1e-4)


@multirank(2)
def test_wrong_weights_and_state_are_not_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    """They go wrong in the update before a save, where no loss shows it yet."""
    for number, (state, action) in enumerate([(False, "stop"), (True, "skip"), (True, "rewind")]):
        config = job(fault={"on_non_finite": action})
        run = Run(tmp_path / str(number), config, rank, world_size)
        weight = weight_of(run.trainer, WEIGHT)

        def spoil(run: Run = run, weight: Any = weight, state: bool = state) -> None:
            with torch.no_grad():
                part_of(run.trainer.optimizer.state[weight]["exp_avg"] if state else weight).view(-1)[2] = (
                    math.inf
                )

        if rank == 1:
            after_step(run.trainer, 4, spoil)
        if action == "rewind":
            assert run.go() == [n * G for n in range(6)]
            assert run.trainer.position.past.left_out == ((2 * G, 4 * G),)
            if rank == 0:
                expected = plain_losses(config, [n * G for n in (0, 1, 4, 5)])
                assert [line["loss"] for line in lines_of(run)] == pytest.approx(expected, rel=1e-4)
            continue
        what = "optimizer state 'exp_avg' of" if state else "weight"
        words = rf"step 4: .* {what} {WEIGHT} \(unit layers.0\) has 1 value on rank 1 .*newest checkpoint is of step 2"
        with pytest.raises(FaultError, match=words):
            run.go()
        assert steps_in(run.folder.checkpoints) == [2]


@multirank(2)
def test_an_optimizer_in_backward_can_only_stop_or_rewind(rank: int, world_size: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": {"in_backward": True}, "train": {"max_norm": 0.0}}
    wrong = on_samples(3 * G, math.nan, 1)
    run = Run(tmp_path / "stop", job(**settings), rank, world_size, wrong)
    words = (
        r"step 4: .* norm not known; weight tok_embeddings.weight .*not saved.*newest checkpoint is of step 2"
    )
    with pytest.raises(FaultError, match=words):
        run.go()
    assert steps_in(run.folder.checkpoints) == [2]
    config = job(fault={"on_non_finite": "rewind"}, **settings)
    run = Run(tmp_path / "rewind", config, rank, world_size, wrong)
    assert run.go() == [n * G for n in range(6)]
    if rank == 0:
        expected = plain_losses(config, [n * G for n in (0, 1, 4, 5)])
        assert [line["loss"] for line in lines_of(run)] == pytest.approx(expected, rel=1e-4)
    # A wrong gradient shows in the loss of a later step, or before a save. Attention may hide it for a step.
    for every, words in (
        (4, r"step [34]: .*found loss nan, norm not known; weight"),
        (2, f"step 2: .*; weight {WEIGHT}"),
    ):
        config = job(checkpoint={"every": every}, **settings)
        run = Run(tmp_path / f"gradient {every}", config, rank, world_size)
        in_gradient(run.trainer, math.nan)
        with pytest.raises(FaultError, match=f"{words} .*there is no checkpoint"):
            run.go()


# -- bounds ------------------------------------------------------------------------------------------------------------


def from_sample(first: int) -> Plant:
    return lambda job, sums: sums * math.nan if job.position.samples >= first else sums


@pytest.mark.extensive("runs with many faults")
@multirank(2)
def test_skips_in_a_row_and_rewinds_are_bounded(rank: int, world_size: int, tmp_path: Path) -> None:
    config = job(fault={"on_non_finite": "skip", "max_skips": 3})
    run = Run(tmp_path / "skips", config, rank, world_size, from_sample(2 * G))
    words = r"3 steps before it were skipped, too.*after step 2 is saved.*with a larger fault.max_skips$"
    with pytest.raises(FaultError, match=words):
        run.go()
    assert run.trainer.position == Position(2, 5 * G, Past(((2 * G, 5 * G),), 3, 3))
    again = Run(tmp_path / "skips", config, rank, world_size, from_sample(2 * G)).resume()
    assert again.trainer.position == run.trainer.position
    with pytest.raises(FaultError, match="3 steps before it"):  # a restart is not a way around
        again.go()
    if rank == 0:
        assert [line["step"] for line in lines_of(again)] == [1, 2]
        assert [line["incident"]["samples"] for line in lines_of(again, event=True)] == [
            [n * G, (n + 1) * G] for n in (2, 3, 4)
        ]
    config = job(fault={"on_non_finite": "rewind", "max_rewinds": 2})
    run = Run(tmp_path / "rewinds", config, rank, world_size, from_sample(3 * G))
    words = r"the run has gone back 2 times already.*after step 2 is saved.*fault.max_rewinds more often$"
    with pytest.raises(FaultError, match=words):
        run.go()
    assert run.trainer.position.past.rewinds == 2
    if rank == 0:  # each rewind keeps the line of the one before
        assert [line["incident"]["from_step"] for line in lines_of(run, event=True)] == [3, 2]
        assert recorded_step(run.folder.metrics_file) == 2
    again = Run(tmp_path / "rewinds", config, rank, world_size, from_sample(9 * G)).resume()
    assert again.go() == [5 * G, 6 * G]
    if rank == 0:
        assert [line["step"] for line in lines_of(again)] == [1, 2, 3, 4]
        assert len(lines_of(again, event=True)) == 2
        assert len(read_records(run.folder.metrics_file)) == 4
    run = Run(tmp_path / "early", config, rank, world_size, from_sample(G))
    words = r"no checkpoint of step 1 or before .*after step 1 is saved.*with a smaller checkpoint.every$"
    with pytest.raises(FaultError, match=words):
        run.go()


@pytest.mark.extensive("runs with many faults")
@multirank(2)
def test_a_rewind_goes_back_far_enough_and_drops_what_is_newer(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    settings = {"on_non_finite": "rewind", "rewind_steps": 2}
    config = job(train={"steps": 5}, checkpoint={"every": 1, "keep": 1}, fault=settings)
    run = Run(tmp_path, config, rank, world_size, on_samples(4 * G, math.nan))
    with pytest.MonkeyPatch.context() as patch:
        there: list[list[int]] = []
        plain = Saves.forget_after
        patch.setattr(
            Saves,
            "forget_after",
            lambda *arguments: (plain(*arguments), there.append(steps_in(run.folder.checkpoints)))[0],
        )
        assert run.go() == [n * G for n in range(8)]
    assert there == [[2]]  # not 3 and 4: a resume would take them
    if rank == 0:
        assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4, 5]
        expected = plain_losses(config, [n * G for n in (0, 1, 5, 6, 7)])
        assert [line["loss"] for line in lines_of(run)] == pytest.approx(expected, rel=1e-4)
        dropped = run.folder.dropped_metrics_file.read_text().splitlines()
        assert [json.loads(line)["step"] for line in dropped] == [3, 4]


# -- a resume is exact -------------------------------------------------------------------------------------------------


@pytest.mark.extensive("a run and its resume for each kind of fault")
@multirank(2)
def test_a_resume_goes_on_as_if_nothing_had_happened(rank: int, world_size: int, tmp_path: Path) -> None:
    """After a skip, a rewind and a spike, killed before each step: equal weights, equal samples left out."""

    def plant(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
        return sums * {3: math.nan, 6: 50.0, 9: math.inf}.get(job.position.samples // G, 1.0)

    config = job(
        train={"steps": 8},
        checkpoint={"every": 2},
        fault={"on_non_finite": "skip", "on_spike": "rewind", "spike_window": 6, "spike_sigmas": 20.0},
    )
    whole = Run(tmp_path / "whole", config, rank, world_size, plant)
    kills: set[Path] = set()

    def copy() -> None:
        """The files that a kill before this step leaves. Only the last one with the same checkpoints and incidents."""
        steps, past = (
            RankGroup().run_on_first(lambda: steps_in(whole.folder.checkpoints)),
            whole.trainer.position.past,
        )
        if steps:
            kept = tmp_path / f"killed with {steps}, {past.skips}, {past.rewinds}"
            kills.add(kept)
            if rank == 0:
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(whole.folder.path, kept)

    whole.go(copy)
    expected = Past(((3 * G, 4 * G), (5 * G, 7 * G), (9 * G, 10 * G)), 2, 0, 1)
    assert replace(whole.trainer.position.past, losses=()) == expected
    assert len(whole.trainer.position.past.losses) == 6
    weights = [local_of(p).clone() for p in whole.trainer.model.parameters()]
    assert len(kills) == 6, kills
    for kill in sorted(kills):
        again = Run(kill, config, rank, world_size, plant).resume()
        again.go()
        assert again.trainer.position == whole.trainer.position, kill
        assert all(map(torch.equal, weights, map(local_of, again.trainer.model.parameters()))), kill
        if rank == 0:
            assert untimed(lines_of(again)) == untimed(lines_of(whole)), kill
            assert lines_of(again, event=True) == lines_of(whole, event=True), kill


def untimed(records: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [(record["step"], record["loss"], record["samples"]) for record in records]


def test_a_past_is_stored_and_what_is_none_is_refused() -> None:
    past = Past(((3, 6), (9, 12)), 2, 1, 4, (1.5, 0.25))
    assert Past.from_stored(past.stored()) == past
    assert Past().stored() == {} and Past.from_stored({}) == Past()
    for key, value in (
        ("left_out", [[3, 3]]), ("left_out", [[4, 9], [2, 3]]), ("left_out", [[1]]), ("left_out", None),
        ("left_out", [[-3, 3]]), ("skips", -1), ("rewinds", 1.0), ("skips_in_a_row", True), ("losses", [math.nan]),
        ("losses", [1]), ("losses", 3), ("more", 1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            Past.from_stored({**past.stored(), key: value})


# -- spikes ------------------------------------------------------------------------------------------------------------


def test_a_spike_is_above_the_mean_by_standard_deviations() -> None:
    settings = FaultConfig(on_spike="skip", spike_window=8, spike_sigmas=3.0)
    losses = [2.0, 2.5, 1.5, 2.25, 1.75]
    limit = float(
        torch.tensor(losses, dtype=torch.float64).mean() + 3 * torch.tensor(losses, dtype=torch.float64).std()
    )
    assert not is_spike(limit * (1 - 1e-12), losses, settings) and is_spike(
        limit * (1 + 1e-12), losses, settings
    )
    assert not is_spike(1e9, losses[:3], settings)  # fewer than half of the window
    assert not is_spike(1e9, losses, FaultConfig())


# -- the cost ----------------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of torch's collectives by name."""
    calls: Counter[str] = Counter()
    names = ["all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            plain = getattr(dist, name)
            patch.setattr(
                dist, name, lambda *a, plain=plain, name=name, **k: (calls.update([name]), plain(*a, **k))[1]
            )
        yield calls


@multirank(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_has_one_reduction_beside_those_of_its_work(
    rank: int, world_size: int, in_backward: bool
) -> None:
    """Whatever is looked at: a step that is not verified agrees in the reduction of the losses alone."""
    config = job(
        optimizer={"in_backward": in_backward},
        train={"max_norm": 0.0},
        fault={"on_non_finite": "rewind", "on_spike": "rewind", "verify_every": 50},
    )
    run = trainer(config, rank, world_size)
    take_steps(run, 2)
    with counted() as step:
        take_steps(run, 1)
    arguments = next_step(run)
    with counted() as work:
        run.forward_backward(*arguments)
        run.clip_gradients()
    run.optimizer.step()
    assert step - work == Counter(all_reduce=1)
    assert work["all_reduce"] == (0 if in_backward else 1)  # of the norm
