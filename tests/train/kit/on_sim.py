"""A trainer on the simulated device. Only processes of `on_sim` import this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.step.trainer import Trainer
from tests.support.sim import Sim, load
from tests.train.kit.datasets import byte_dataset
from tests.train.kit.jobs import tiny
from tests.train.kit.text import random_text


@dataclass
class JobOnSim:
    """A trainer on the device of this process."""

    sim: Sim
    trainer: Trainer
    stop: StopRequest = field(default_factory=StopRequest)

    def step(self) -> Any:
        return self.trainer.train_step(self.stop)

    def waits_of(self, work: Callable[[], object]) -> Counter[str]:
        """The waits of the host in `work`, after steps that make the state: what, and in which function of the
        package. Functions of the streams stand for their callers."""
        for _ in range(3):
            self.step()
        with self.sim.waits(by_function=True) as found:
            work()
        return found


@contextmanager
def trainer_on_sim(settings: dict[str, Any], rank: int, world_size: int) -> Iterator[JobOnSim]:
    """A trainer of `settings`, whose work runs at once. It has two micro-batches on one rank, one on each of two."""
    sim = load()
    sim.join_groups()
    train = {"max_norm": 1.0, "micro_batch": 4, **settings.get("train", {})}
    parallel = {"engine": "shardwright", **settings.get("parallel", {})}
    config = tiny(**{**settings, "train": train, "parallel": parallel})
    text = random_text()
    dataset = byte_dataset(config, bytes(text.train.tolist()), bytes(text.validation.tolist()), text.sha256)
    with sim.running(0):
        world = World.of(config.parallel, rank, world_size, sim.device)
        trainer = Trainer(config, world, dataset)
        try:
            yield JobOnSim(sim, trainer)
        finally:
            trainer.close()
