"""Offload with other features: each does to a model that is offloaded what it does to one that is not, to the bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.comm_hooks import Compressed, Int8Blocks, PowerSGD
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.engine.kit.offload import adamw, assert_same
from tests.engine.kit.offload_state import STATE, assert_equal
from tests.engine.kit.subclasses import KINDS, backward, whole, wrapped
from tests.support import multirank
from tests.support.stand_in import stand_in_device

BF16 = torch.bfloat16
#: What is offloaded, and where the optimizer steps.
WAYS = {
    "all": (sw.CPUOffloadPolicy(), sw.fully_shard_optimizer),
    "all, in backward": (sw.CPUOffloadPolicy(), sw.optim.in_backward),
    "state": (STATE, sw.fully_shard_optimizer),
    "state, in backward": (STATE, sw.optim.in_backward),
}
Run = Callable[[Model, Any, int, Path], Any]


def step(model: Model, optimizer: Any, rank: int, number: int) -> None:
    """Make one step. The loop never calls ``step`` of an optimizer in backward: what has not arrived is stepped where
    it is needed."""
    batch = tokens(number, 0, rank)
    loss_of(model(batch), batch).backward()
    if not hasattr(optimizer, "leave_backward"):
        optimizer.step()
    optimizer.zero_grad()


def evaluated(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    """In full precision."""
    found = []
    for number in range(4):
        step(model, optimizer, rank, number)
        model.eval()
        with torch.no_grad():
            found.append(model(tokens(number, 5, rank)).clone())
        model.train()
    return found


def edited(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    found = []
    for number in range(4):
        step(model, optimizer, rank, number)
        with sw.unsharded(model, writeback=True), torch.no_grad():
            model.blocks[0].up.weight[:3] *= 0.5
            model.head.weight.data[-1] = 0.25
            found += [p.detach().clone() for p in model.parameters()]
    return found


def edited_gradients(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    for number in range(3):
        batch = tokens(number, 0, rank)
        loss_of(model(batch), batch).backward()
        with sw.unsharded(model, writeback=True, with_grads=True), torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.grad[-1] *= 2.0
        optimizer.step()
        optimizer.zero_grad()


def recomputed(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    for number in range(3):
        step(model, optimizer, rank, number)


class Around(Model):
    """The checkpoint is outside of the units, of either kind."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.blocks[0], self.embed(tokens), use_reentrant=True)
        h = checkpoint(self.blocks[1], h, use_reentrant=False)
        return self.head(self.norm(h))


def recomputed_around(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    for number in range(3):
        step(model, optimizer, rank, number)


def compressed(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    return hooked(model, optimizer, rank, Compressed(Int8Blocks(8), error_feedback=True))


def thin(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    return hooked(model, optimizer, rank, PowerSGD(1))


def hooked(model: Model, optimizer: Any, rank: int, hook: Any) -> Any:
    """A hook that feeds lost parts of gradients back, also from a checkpoint."""
    model.set_gradient_comm_hook(hook)
    for number in range(2):
        step(model, optimizer, rank, number)
    kept = copy.deepcopy(hook.state_dict())
    step(model, optimizer, rank, 2)
    hook.load_state_dict(copy.deepcopy(kept))
    for number in range(3, 5):
        step(model, optimizer, rank, number)
    return kept


def saved(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    """In the middle of training, without a call of step before it."""

    def states() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    for number in range(3):
        step(model, optimizer, rank, number)
    dcp.save(states(), checkpoint_id=path)
    values = [full(p).clone() for p in model.parameters()]
    step(model, optimizer, rank, 4)
    state = states()
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(map(torch.equal, values, (full(p) for p in model.parameters())))
    for number in range(5, 8):
        step(model, optimizer, rank, number)


def pretrained(model: Model, optimizer: Any, rank: int, path: Path) -> Any:
    """Into a model that has trained, and out of it."""
    step(model, optimizer, rank, 0)
    if rank == 0:
        path.mkdir()
        torch.save(build(seed=5).state_dict(), path / "weights.pt")
    dist.barrier()
    sw.load_pretrained(model, path / "weights.pt")
    step(model, optimizer, rank, 2)
    sw.save_pretrained(model, path / "out")
    step(model, optimizer, rank, 4)
    sw.load_pretrained(model, path / "out")
    step(model, optimizer, rank, 1)


CASES: list[tuple[Run, str]] = [
    (evaluated, "all"),
    (evaluated, "all, in backward"),
    (evaluated, "state, in backward"),
    (edited, "all, in backward"),
    (edited, "state"),
    (edited_gradients, "all"),
    (recomputed, "all, in backward"),
    (recomputed, "state, in backward"),
    (recomputed_around, "all"),
    (recomputed_around, "state"),
    (compressed, "all"),
    (compressed, "state, in backward"),
    (thin, "all, in backward"),
    (thin, "state"),
    (saved, "all, in backward"),
    (saved, "state, in backward"),
    (pretrained, "all, in backward"),
    (pretrained, "state"),
]


@pytest.mark.extensive(
    "each event with each kind of offload",
    but=(
        "saved-all, in*",
        "edited-state-*",
        "evaluated-all-*",
        "thin-state-*",
        "pretrained-state-*",
        "compressed-all-*",
    ),
)
@multirank(2)
@pytest.mark.parametrize(("run", "way"), CASES)
def test_as_without_offload(rank: int, world_size: int, run: Run, way: str, tmp_path: Path) -> None:
    found = [tmp_path if rank == 0 else None]
    dist.broadcast_object_list(found)
    results, models, states = [], [], []
    policy, wrap = WAYS[way]
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext():
            precision = sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=run is evaluated)
            torch.manual_seed(0)
            model = shard(
                Around() if run is recomputed_around else Model(),
                mp_policy=precision if run is evaluated else sw.MixedPrecisionPolicy(),
                offload_policy=policy if offloads else sw.OffloadPolicy(),
            )
            optimizer = wrap(adamw(model))
            results.append(run(model, optimizer, rank, found[0] / str(offloads)))
            models.append(model)
            states.append(optimizer.state_dict())
    assert_equal(*results)
    assert_same(*models)
    assert_equal(*states)


@multirank(2)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_gather_themselves(rank: int, world_size: int, kind: type[Any]) -> None:
    models = []
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext():
            options = {"offload_policy": sw.CPUOffloadPolicy() if offloads else sw.OffloadPolicy()}
            model, _ = wrapped("shardwright", kind, **options)
            optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            for micro in range(3):
                backward(model, rank, micro)
                optimizer.step()
                optimizer.zero_grad()
            models.append([whole(p) for p in model.parameters()])
    assert all(map(torch.equal, *models))
    with stand_in_device():  # of which the optimizer makes state of their class
        model, _ = wrapped("shardwright", kind, offload_policy=STATE)
        optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        backward(model, rank)
        with pytest.raises(ValueError, match=f"keeps state as {kind.__name__}, a tensor subclass"):
            optimizer.step()
