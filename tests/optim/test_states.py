"""State of optimizers, by a generated matrix: each optimizer with each dtype policy, saved, loaded and read.

Reading state never changes a later step: a run that reads has the same bits as its twin that does not.
"""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import shardwright as sw
from tests.engine.kit.models import full
from tests.support import multirank, seed_all
from tests.support.matrix import select, together

BFLOAT = torch.bfloat16
#: By name: how it is made, whether it takes gradients of another dtype, whether it may step in backward.
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool, bool]] = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), False, True),
    "adamw foreach": (lambda ps: torch.optim.AdamW(ps, lr=1e-2), False, True),
    "adamw tensor lr": (lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2)), False, True),
    "adamw8bit": (lambda ps: sw.AdamW8bit(ps, lr=1e-2), True, True),
    "muon": (lambda ps: sw.optim.Muon(ps, lr=1e-2), False, False),
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=1e-2), True, True),
    "sgd momentum": (lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1), True, True),
    "dampened": (lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.5), True, True),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=1e-2), False, True),
    "rprop": (lambda ps: torch.optim.Rprop(ps, lr=1e-2), False, True),
    "nadam": (lambda ps: torch.optim.NAdam(ps, lr=1e-2), False, True),
}
POLICIES: dict[str, sw.PrecisionPolicy] = {
    "float32": sw.PrecisionPolicy(),
    "bfloat16": sw.PrecisionPolicy(param_dtype=BFLOAT, reduce_dtype=torch.float32),
    "gradients": sw.PrecisionPolicy(param_dtype=BFLOAT, grad_dtype=BFLOAT),
    "accumulated": sw.PrecisionPolicy(param_dtype=BFLOAT, accumulate_dtype=torch.float32),
    "one parameter": sw.PrecisionPolicy(
        per_parameter=lambda name, p: sw.PrecisionPolicy(grad_dtype=BFLOAT) if name.endswith("bias") else None
    ),
}
SHARDINGS: dict[str, dict[str, Any]] = {
    "per_parameter": {},
    "ragged": {"layout": sw.Ragged(2)},
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
}
WRAPS: dict[str, Callable[[Any], Any]] = {
    "sharded": sw.fully_shard_optimizer,
    "in backward": sw.optim.in_backward,
    "plain": lambda optimizer: optimizer,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.unused = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def build(optimizer: str, policy: str, sharding: str, wrap: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    options = {"mp_policy": POLICIES[policy], **SHARDINGS[sharding]}
    sw.fully_shard(model.up, **options)
    sw.fully_shard(model, **options)
    return model, WRAPS[wrap](OPTIMIZERS[optimizer][0](list(model.named_parameters())))


def legal(optimizer: str, policy: str, wrap: str) -> bool:
    _, any_gradient, in_backward = OPTIMIZERS[optimizer]
    if policy in ("gradients", "one parameter") and not any_gradient:
        return False
    if wrap == "plain" and optimizer in ("muon", "adamw8bit"):
        return False  # they need a step on local tensors
    return in_backward or wrap != "in backward"


CASES = [
    (optimizer, policy, wrap)
    for optimizer, policy, wrap in itertools.product(OPTIMIZERS, POLICIES, WRAPS)
    if legal(optimizer, policy, wrap)
]


def backward(model: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model(torch.randn(4, 6, generator=generator)).float().square().mean().backward()


def step(model: Any, optimizer: Any, number: int, middle: Callable[[], None] = lambda: None) -> None:
    """Two micro-batches, of which the first is held."""
    model.set_requires_gradient_sync(False)
    backward(model, 2 * number)
    middle()
    model.set_requires_gradient_sync(True)
    backward(model, 2 * number + 1)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: Any) -> list[torch.Tensor]:
    return [full(p).detach().clone() for p in model.parameters()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


WHOLE = StateDictOptions(full_state_dict=True, strict=False)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
#: What reads: of the model, the optimizer and a folder.
READS: dict[str, Callable[[Any, Any, str], Any]] = {
    "get_optimizer_state_dict": lambda m, o, f: get_optimizer_state_dict(m, o),
    "of full state": lambda m, o, f: get_optimizer_state_dict(m, o, options=FULL),
    "flat": lambda m, o, f: get_optimizer_state_dict(
        m, o, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
    "get_state_dict": lambda m, o, f: get_state_dict(m, o),
    "get_model_state_dict": lambda m, o, f: get_model_state_dict(m, options=FULL),
    "state_dict": lambda m, o, f: m.state_dict(),
    "optimizer.state_dict": lambda m, o, f: o.state_dict(),
    "memory_report": lambda m, o, f: sw.memory_report(m),
    "stream_weights": lambda m, o, f: list(sw.stream_weights(m)),
    "deepcopy": lambda m, o, f: copy.deepcopy(m),
    "full_tensor": lambda m, o, f: weights(m),
    "save_checkpoint": lambda m, o, f: sw.save_checkpoint(f, m, o, overwrite=True),
    "dcp.save": lambda m, o, f: dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True)), checkpoint_id=f + "-dcp"
    ),
}


def read_unsharded(model: Any, optimizer: Any, folder: str) -> None:
    with sw.unsharded(model):
        assert sum(p.sum().item() for p in model.parameters()) is not None


READS["unsharded"] = read_unsharded


def folder_of(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.mark.extensive("each sharding at each moment", but=("held-zero1-*",))
@multirank(2, timeout=240)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("moment", ["before", "held", "after"])
def test_reads_change_no_later_step(
    rank: int, world_size: int, tmp_path: Path, sharding: str, moment: str
) -> None:
    """Each reader with a third of the optimizers and policies; over the moments and shardings every pair occurs."""
    wrong = []
    turn = list(SHARDINGS).index(sharding) + 4 * ["before", "held", "after"].index(moment)
    for number, (optimizer, policy, wrap) in enumerate(CASES):
        name = list(READS)[(number + turn) % len(READS)]
        if number % 6 != turn % 6:
            continue

        def run(read: Callable[[Any, Any, str], Any] | None) -> list[torch.Tensor]:
            model, o = build(optimizer, policy, sharding, wrap)  # noqa: B023
            seed_all(rank)

            def now() -> None:
                if read is not None:
                    read(model, o, folder_of(tmp_path))

            if moment == "after":
                step(model, o, 0)
            if moment != "held":
                now()
            step(model, o, 1, now if moment == "held" else lambda: None)
            step(model, o, 2)
            return weights(model)

        where = f"{name}, {moment}: {optimizer}, {policy}, {wrap}, {sharding}"
        try:
            found = run(READS[name])
        except Exception as error:
            wrong.append(f"{where}: {error}")
            continue
        if not equal(found, run(None)):
            wrong.append(f"{where}: the read changed a later step")
    assert not wrong, "\n".join(wrong)


WAYS = ("checkpoint", "torch", "torch, full", "dcp")


@functools.cache
def saved_rows() -> list[tuple[str, ...]]:
    """Each optimizer with each policy in each way, and every other pair of settings."""
    rows = [
        (*case, way, *rest)
        for case, way, rest in itertools.product(
            CASES, WAYS, itertools.product(SHARDINGS, ("before", "after"))
        )
        # torch's function fails for an optimizer without state, sharded or not
        if (case[0], way) != ("sgd", "torch, full")
    ]
    return select(rows, lambda row, strength: [*together(strength, *row), ("state", row[0], row[1], row[3])])


@pytest.mark.extensive(
    "each sharding at each moment", but=("before-ragged-*", "after-per_parameter-*", "before-ddp-*")
)
@multirank(2, timeout=240)
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_state_is_saved_and_loaded(
    rank: int, world_size: int, tmp_path: Path, sharding: str, moment: str
) -> None:
    """A new model and optimizer take the state, and go on with the same bits."""
    ways: dict[str, Callable[[Any, Any, Any, Any], None]] = {
        "checkpoint": through_checkpoint,
        "torch": lambda m, o, n, q: set_optimizer_state_dict(
            n, q, copy.deepcopy(get_optimizer_state_dict(m, o)), options=StateDictOptions(strict=False)
        ),
        "torch, full": lambda m, o, n, q: set_optimizer_state_dict(
            n, q, copy.deepcopy(get_optimizer_state_dict(m, o, options=WHOLE)), options=WHOLE
        ),
        "dcp": through_dcp,
    }
    assert tuple(ways) == WAYS
    wrong = []
    for optimizer, policy, wrap, name, *rest in saved_rows():
        if rest == [sharding, moment]:
            way = ways[name]
            where = f"{name}, {moment}: {optimizer}, {policy}, {wrap}, {sharding}"
            model, o = build(optimizer, policy, sharding, wrap)
            if moment == "after":
                step(model, o, 0)
            other, q = build(optimizer, policy, sharding, wrap)
            other.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
            try:
                if name in ("checkpoint", "dcp"):
                    folder = tmp_path / "state"
                    way(model, o, other, (q, folder))
                    if rank == 0:
                        shutil.rmtree(folder, ignore_errors=True)
                    dist.barrier()
                else:
                    way(model, o, other, q)
                for each, its in ((model, o), (other, q)):
                    step(each, its, 1)
            except Exception as error:
                wrong.append(f"{where}: {error}")
                continue
            # torch casts state to the parameter's dtype, which only our optimizers undo.
            cast = wrap == "plain" and policy in ("gradients", "one parameter")
            exact = (moment == "after" or name == "checkpoint") and not cast
            if exact and not equal(weights(model), weights(other)):
                wrong.append(f"{where}: the loaded state is another")
    assert not wrong, "\n".join(wrong)


def through_checkpoint(model: Any, optimizer: Any, other: Any, rest: Any) -> None:
    into, folder = rest
    sw.save_checkpoint(str(folder), model, optimizer, overwrite=True)
    sw.load_checkpoint(str(folder), other, into)


def through_dcp(model: Any, optimizer: Any, other: Any, rest: Any) -> None:
    into, folder = rest
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=str(folder))
    room = {"optimizer": get_optimizer_state_dict(other, into)}
    # torch makes state for every parameter, also for those that had no gradient at the save.
    dcp.load(room, checkpoint_id=str(folder), planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(other, into, room["optimizer"], options=StateDictOptions(strict=False))
