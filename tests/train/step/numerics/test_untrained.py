"""Global batches without a trained token: no step is made of them, on any number of ranks, with any options.

What such a run must do is computed by plain PyTorch on the batches that have trained tokens.
"""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardwright.engine import RankGroup
from shardwright.engine.compat import local_of
from shardwright.train.config import Config
from shardwright.train.data.dataset import Dataset, _check_validated
from shardwright.train.data.samples.loader import Loader, Share
from shardwright.train.data.samples.packing import pack
from shardwright.train.data.samples.stream import Part, Source, Stream
from shardwright.train.data.tokens.tokenizers import Bytes
from shardwright.train.data.tokens.tokens import Tokens
from shardwright.train.errors import UserError
from shardwright.train.models.build import build_model
from shardwright.train.step.account.conclusion import counts_of_incidents, incidents_in_words
from shardwright.train.step.trainer import Trainer
from tests.support import multirank
from tests.support.matrix import select, together
from tests.train.kit.jobs import HYBRID, steps_in
from tests.train.kit.parallel import take_steps
from tests.train.step.numerics.kit import Run, job, lines_of, weight_of

G, S = 4, 8
"""Samples of a step, and their tokens."""
ENGINES: list[dict[str, Any]] = [
    {"engine": "ddp"},
    {"strategy": "zero1"},
    {"strategy": "zero3", "memory": "arena"},
    {"strategy": "zero3", "layout": "ragged"},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"train": {"accumulate": "hold"}},
    {"optimizer": {"in_backward": True}, "train": {"max_norm": 0.0}},
    {"fault": {"on_spike": "skip", "spike_window": 4, "spike_sigmas": 1e6}},
    {"fault": {"verify_every": 2}},
    {"activations": {"checkpoint": "full"}},
    {"fault": {"check": "after_step"}, "checkpoint": {"every": 0}},
]


def dataset_of(config: Config, seed: int, part: float = 0.15) -> Dataset:
    """Documents of one sample each. About one in seven has trained tokens, so some batches and many ranks have none."""
    numbers = np.random.default_rng(seed)
    count = 40
    flags = numbers.random(count) < part
    flags[:2] = True, False
    ids = numbers.integers(0, 256, count * (S + 1), dtype=np.uint8)
    trained = np.repeat(flags, S + 1).astype(np.uint8)
    trained[:: S + 1] = 0
    tokens = Tokens(ids, np.arange(1, count + 1) * (S + 1), trained, "documents")
    source = Source("documents", (Part(tokens, pack(tokens, S, "none", separate=False)),))
    return Dataset(Bytes(), Stream([source], [1.0], config.run.seed, separate=False), None, "sha")


def configuration(engine: dict[str, Any], options: dict[str, Any]) -> Config:
    sections: dict[str, Any] = {
        "train": {"steps": 6, "global_batch": G, "micro_batch": 1, "seq_len": S},
        "data": {"packing": "none", "workers": 0},
        "model": {"tied_embeddings": False},
    }
    for name, values in options.items():
        sections[name] = {**sections.get(name, {}), **values}
    return job({"strategy": "zero3", **engine}, **sections)


def trained_batches(dataset: Dataset, steps: int) -> list[int]:
    """The first samples of the global batches of so many steps."""
    firsts, first = [], 0
    while len(firsts) < steps:
        if dataset.train.trained(first, G):
            firsts.append(first)
        first += G
    return firsts


def plain_run(config: Config, dataset: Dataset, firsts: list[int]) -> tuple[list[float], torch.nn.Module]:
    """Losses and the model of plain steps on the global batches that begin with these samples."""
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, 256)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == m] for m in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, first in enumerate(firsts):
        batch = dataset.train.batch(first, G)
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.rate(step, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def makes_sense(engine: int, options: int) -> bool:
    only_ours = "optimizer" in OPTIONS[options] or "accumulate" in OPTIONS[options].get("train", {})
    return not (only_ours and "engine" in ENGINES[engine])


MATRIX = select(
    [
        row
        for row in itertools.product((1, 2), range(len(ENGINES)), range(len(OPTIONS)), range(3))
        if makes_sense(row[1], row[2])
    ],
    lambda row, strength: together(strength, *row),
)


@pytest.mark.extensive("both numbers of ranks", but=("2ranks",))
@multirank(1, 2)
def test_no_step_is_made_of_a_batch_without_a_trained_token(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    for number, (ranks, engine, options, seed) in enumerate(MATRIX):
        if ranks != world_size:
            continue
        where = f"{ENGINES[engine]} {OPTIONS[options]} {seed}"
        config = configuration(ENGINES[engine], OPTIONS[options])
        dataset = dataset_of(config, seed)
        firsts = trained_batches(dataset, config.train.steps)
        stop = firsts[-1] + G
        untrained = stop // G - len(firsts)
        assert untrained, where
        expected, plain = plain_run(config, dataset, firsts)
        run = Run(tmp_path / str(number), config, rank, world_size, dataset=dataset)
        run.go()
        position = run.trainer.position
        assert (position.step, position.samples) == (6, stop), where
        assert (position.past.untrained, position.past.skips) == (untrained, 0), where
        assert position.past.samples_left_out == untrained * G, where
        if config.fault.losses_kept:
            assert position.past.losses == pytest.approx(expected[-4:], rel=1e-4), where
        for name, weight in plain.named_parameters():
            own = weight_of(run.trainer, name)
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            # Float32 sums in another order, over six steps.
            torch.testing.assert_close(own.detach(), weight.detach(), rtol=1e-3, atol=2e-5, msg=where)
        if rank == 0:
            records, events = lines_of(run), lines_of(run, event=True)
            assert [line["loss"] for line in records] == pytest.approx(expected, rel=1e-4), where
            assert [line["samples"] for line in records] == [first + G for first in firsts], where
            assert {event["incident"]["action"] for event in events} == {"untrained"}, where
            ranges = [event["incident"]["samples"] for event in events]
            assert sum(end - begin for begin, end in ranges) == untrained * G, where
            assert "without a trained token" in " ".join(run.lines), where
            results = counts_of_incidents(run.trainer)
            assert results["untrained_batches"] == untrained, where
            assert f"{untrained} global batch" in incidents_in_words(results)[0], where


@pytest.mark.extensive("a run and its resume for each setting")
@multirank(2)
def test_a_resume_repeats_no_batch_and_forgets_none(rank: int, world_size: int, tmp_path: Path) -> None:
    """Killed before each step: equal weights, positions and lines."""
    config = configuration({}, {"checkpoint": {"every": 1}, "fault": {"on_non_finite": "skip"}})

    def plant(job: Trainer, sums: torch.Tensor) -> torch.Tensor:
        return sums * (math.nan if job.position.samples == bad else 1.0)

    dataset = dataset_of(config, 1)
    bad = trained_batches(dataset, 3)[-1]
    whole = Run(tmp_path / "whole", config, rank, world_size, plant, dataset)
    kills: list[Path] = []

    def copy() -> None:
        if RankGroup().run_on_first(lambda: steps_in(whole.folder.checkpoints)):
            kills.append(tmp_path / f"killed {len(kills)}")
            if rank == 0:
                shutil.copytree(whole.folder.path, kills[-1])

    whole.go(copy)
    past = whole.trainer.position.past
    assert past.untrained > 1 and past.skips == 1 and len(kills) == 6
    weights = [local_of(p).clone() for p in whole.trainer.model.parameters()]
    for kill in kills:
        again = Run(kill, config, rank, world_size, plant, dataset).resume()
        again.go()
        assert again.trainer.position == whole.trainer.position, kill
        assert all(map(torch.equal, weights, map(local_of, again.trainer.model.parameters()))), kill
        if rank == 0:
            assert [line["loss"] for line in lines_of(again)] == [line["loss"] for line in lines_of(whole)]
            assert lines_of(again, event=True) == lines_of(whole, event=True), kill


@pytest.mark.extensive("runs in each setting")
@multirank(2)
def test_losses_beside_the_cross_entropy_skip_the_same_batches(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Experts with a balance loss and a head for the token after the next: sharded as replicated."""
    losses = []
    for number, engine in enumerate([{"engine": "ddp"}, {"strategy": "zero3"}]):
        config = configuration(engine, {"model": {**HYBRID, "tied_embeddings": True}})
        dataset = dataset_of(config, 2)
        run = Run(tmp_path / str(number), config, rank, world_size, dataset=dataset)
        losses.append(take_steps(run.trainer, 4))
        run.trainer.close()
        assert run.trainer.position.samples == trained_batches(dataset, 4)[-1] + G
    for one, other in zip(*losses, strict=True):
        assert one == pytest.approx(other, rel=1e-4) and one[0] > 0


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_loader_gives_as_many_steps_with_trained_tokens_as_asked(workers: int) -> None:
    config = configuration({"engine": "none"}, {"run": {"seed": 3}})
    dataset = dataset_of(config, 0)
    with Loader(dataset.train, Share(G, 1), stop=5 * G, workers=workers) as loader:
        steps = list(loader)
    assert [step.first for step in steps if step.trained] == trained_batches(dataset, 5)
    assert [step.first for step in steps] == [n * G for n in range(len(steps))]


def test_a_validation_without_a_trained_token_is_an_error() -> None:
    config = configuration({"engine": "none"}, {"validation": {"every": 2, "batches": 1}})
    source = dataset_of(config, 0, part=0.0).train.sources[0]
    streams = (Stream([source], [1.0], seed, separate=False) for seed in itertools.count())
    stream = next(each for each in streams if not each.trained(0, G))
    with pytest.raises(UserError, match=r"validation.batches: expected trained tokens in the first 4 valid"):
        _check_validated(config.for_data, stream)
