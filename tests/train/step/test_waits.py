"""Where the host waits for the device in a step of the trainer: once, between the norm and the optimizer's step."""

from __future__ import annotations

import itertools
import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.train.launch.signals import StopRequest
from tests.support import multirank
from tests.support.effects import HOST_WAITS
from tests.train.kit.jobs import HYBRID, tiny, trainer

#: Functions that read numbers only of tensors of the CPU. There ``one_hot`` looks for wrong indices.
CPU_ONLY = ("in imbalance",)


class Waits(TorchDispatchMode):
    """Collects the places where the host reads numbers of tensors, or puts new ones on a device and waits for that."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.places: list[str] = []
        tolist, tensor = torch.Tensor.tolist, torch.tensor
        patches.setattr(torch.Tensor, "tolist", lambda t: (self._note("tolist"), tolist(t))[1])

        def made(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is not None:
                self._note("torch.tensor on a device")
            return tensor(*args, device=device, **options)

        patches.setattr(torch, "tensor", made)

    def _note(self, what: str) -> None:
        where = next(
            frame.name for frame in reversed(traceback.extract_stack()) if "shardwright/" in frame.filename
        )
        self.places.append(f"{what} in {where}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in HOST_WAITS:
            self._note(func._schema.name)
        return func(*args, **(kwargs or {}))


MODELS: dict[str, dict[str, Any]] = {"llama": {}, "with an auxiliary loss": HYBRID}


@multirank(1)
def test_the_host_waits_once_in_a_step(rank: int, world_size: int) -> None:
    for engine, norm, micro_batch, model in itertools.product(
        ("none", "shardwright"), (0.0, 1.0), (4, 8), MODELS
    ):
        job = trainer(
            tiny(
                model=MODELS[model],
                train={"max_norm": norm, "micro_batch": micro_batch},
                parallel={"engine": engine},
            ),
            rank,
            world_size,
        )
        with pytest.MonkeyPatch.context() as patches, Waits(patches) as waits:
            stop = StopRequest()
            job.train_step(stop)  # prepares the optimizer
            waits.places.clear()
            job.train_step(stop)
        job.close()
        places = [place for place in waits.places if not place.endswith(CPU_ONLY)]
        assert places == ["tolist in read"], f"{engine}, max_norm {norm}, {model}, {places}"
