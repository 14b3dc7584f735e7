"""A trainer on the simulated device. Only processes of `on_sim` import this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwright.train.launch.signals import StopRequest
from shardwright.train.parallel.world import World
from shardwright.train.step import reduction, trainer as trainers
from shardwright.train.step.trainer import Trainer
from tests.support.sim import Sim, load
from tests.train.kit.datasets import byte_dataset
from tests.train.kit.jobs import tiny
from tests.train.kit.text import random_text

#: Steps after which a step is like those after it, with `[fault] check = "after_step"` too.
BEFORE = 7


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
        for _ in range(BEFORE):
            self.step()
        with self.sim.waits(by_function=True) as found:
            work()
        return found

    def operations_of_a_step(self) -> int:
        """Tasks that a step queues on this rank."""
        before = self.sim.extension.queued()
        self.step()
        return int(self.sim.extension.queued() - before)

    def lead(self) -> int:
        """Tasks that this rank has queued after the sums of a step, when the host waits for them."""
        leads: list[int] = []
        summed: dict[int, int] = {}
        plain, read = reduction.add_up, reduction.Reduction.read

        def adds(*given: Any) -> Any:
            made = plain(*given)
            summed[id(made.part)] = self.sim.extension.queued()
            return made

        def reads(self_: Any, clock: Any) -> Any:
            leads.append(self.sim.extension.queued() - summed[id(self_.part)])
            return read(self_, clock)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainers, "add_up", adds)
            for _ in range(2):
                if summed:
                    patch.setattr(reduction.Reduction, "read", reads)
                self.step()
        return leads[-1]


@contextmanager
def trainer_on_sim(settings: dict[str, Any], rank: int, world_size: int, seed: int = 0) -> Iterator[JobOnSim]:
    """A trainer of `settings`, whose work runs later, in the order of `seed`; 0: at once. It has two micro-batches on
    one rank, one on each of two."""
    sim = load()
    sim.join_groups()
    train = {"max_norm": 1.0, "micro_batch": 4, **settings.get("train", {})}
    parallel = {"engine": "shardwright", **settings.get("parallel", {})}
    config = tiny(**{**settings, "train": train, "parallel": parallel})
    text = random_text()
    dataset = byte_dataset(config, bytes(text.train.tolist()), bytes(text.validation.tolist()), text.sha256)
    with sim.running(seed):
        world = World.of(config.parallel, rank, world_size, sim.device)
        trainer = Trainer(config, world, dataset)
        try:
            yield JobOnSim(sim, trainer)
        finally:
            trainer.close()
