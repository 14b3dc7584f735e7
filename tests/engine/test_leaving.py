"""A rank that leaves a step by an exception: it keeps its own, the others hear whose it was, and all may go on."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.engine.construct import UNIT
from tests.engine.models import full
from tests.support import multirank, world_mesh


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def shard(plain: Any, **options: Any) -> Any:
    model = copy.deepcopy(plain)
    for i in (0, 2):
        sw.fully_shard(model[i], **options)
    return sw.fully_shard(model, **options)


def loss_of(model: Any, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def check_step(model: Any, plain: Any, rank: int, world_size: int, what: Any = "") -> None:
    """The next step is exact, and a collective of the user's pairs with that of the others."""
    model.zero_grad()
    loss_of(model, rank).backward()
    plain.zero_grad()
    sum(loss_of(plain, r) / world_size for r in range(world_size)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, msg=lambda m: f"{what}: {m}")
    model.zero_grad()
    flag = torch.ones(1)
    dist.all_reduce(flag)
    assert flag == world_size, what


@contextmanager
def failing(module: nn.Module, where: str, error: BaseException) -> Iterator[None]:
    """Raise in the module's forward, or in backward when it comes to its output."""

    def hook(_: Any, args: Any, output: torch.Tensor) -> None:
        if where == "forward":
            raise error
        output.register_hook(fail)

    def fail(_: Any) -> None:
        raise error

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@multirank(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_the_others_hear_whose_error_it_was(rank: int, world_size: int, strategy: str) -> None:
    """Where ranks meet before it: in forward if weights are gathered there."""
    plain = build()
    model = shard(plain, strategy=strategy)
    check_step(model, plain, rank, world_size)
    last = world_size - 1
    for error in (ValueError("this batch is bad"), KeyboardInterrupt(), RuntimeError("shapes do not fit")):
        for where, module in (("forward", model[4]), ("backward", model[0])):
            if where == "forward" and strategy != "zero3":
                continue
            if rank == last:
                with failing(module, where, error), pytest.raises(type(error)) as caught:
                    loss_of(model, rank).backward()
                assert caught.value is error
            else:
                text = type(error).__name__ + (f": {error}" if str(error) else "")
                match = rf"diverged: .*rank {last} has left the {where} of unit 0 \('Sequential'\) by {text}"
                with pytest.raises(RuntimeError, match=match):
                    loss_of(model, rank).backward()
            check_step(model, plain, rank, world_size, (error, where))


@multirank(4)
def test_on_a_mesh_of_two_dimensions(rank: int, world_size: int) -> None:
    """Those that share no axis with the rank that left hear of it from those that do."""
    plain = build()
    model = shard(plain, strategy="hsdp", mesh=world_mesh(2, 2))
    check_step(model, plain, rank, world_size)
    if rank == 3:
        with failing(model[0], "backward", ValueError("bad")), pytest.raises(ValueError, match="bad"):
            loss_of(model, rank).backward()
    else:
        with pytest.raises(RuntimeError, match=r"diverged: .*has left the backward"):
            loss_of(model, rank).backward()
    check_step(model, plain, rank, world_size)


@multirank(2)
def test_errors_that_all_ranks_raise_alike_are_their_own(rank: int, world_size: int) -> None:
    plain = build()
    model = shard(plain)
    for where, module in (("forward", model[4]), ("backward", model[0])):
        with failing(module, where, ValueError("bad")), pytest.raises(ValueError, match="bad"):
            loss_of(model, rank).backward()
        check_step(model, plain, rank, world_size, where)


@multirank(2)
def test_what_a_signals_handler_raises_is_not_taken_for_a_lost_rank(rank: int, world_size: int) -> None:
    """A RuntimeError, as of a worker of a DataLoader that was killed, while this rank waits for the others."""

    def handler(*_: Any) -> None:
        raise RuntimeError("a worker was killed")

    plain = build()
    model = shard(plain)
    check_step(model, plain, rank, world_size)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(3):
            if rank == 0:
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                with pytest.raises(RuntimeError, match=r"^a worker was killed$"):
                    loss_of(model, rank).backward()
                timer.join()
            else:
                threading.Event().wait(0.6)  # meanwhile the other waits in its first gather
                with pytest.raises(
                    RuntimeError, match=r"rank 0 has left the forward .* by RuntimeError: a worker"
                ):
                    loss_of(model, rank).backward()
            check_step(model, plain, rank, world_size)
    finally:
        signal.signal(signal.SIGUSR1, before)


class Interrupt(KeyboardInterrupt):
    """What a test raises at a line of the engine."""


@contextmanager
def interrupted_at(n: int) -> Iterator[list[int]]:
    """Raise before the ``n``-th line of the engine that runs inside; yields how many there were."""
    count = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "/shardwright/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == n:
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@multirank(2, timeout=120.0)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_an_interrupt_anywhere_in_a_step_leaves_the_ranks_in_order(
    rank: int, world_size: int, strategy: str
) -> None:
    """Between the agreement and the collective above all: the others count on it."""
    plain = build()
    model = shard(plain, strategy=strategy)
    check_step(model, plain, rank, world_size)
    (comm,) = getattr(model, UNIT).ranks.every
    meeting = comm.meeting
    before = meeting.number
    with interrupted_at(0) as lines:
        loss_of(model, rank).backward()
    meetings = meeting.number - before
    total = torch.tensor(lines)
    dist.broadcast(total, 1)
    for n in range(1, int(total), 53):
        begun, before, where = False, meeting.number, ""
        for _ in range(3):  # as a loop that goes on
            model.zero_grad()
            try:
                with interrupted_at(n if rank == 1 and not begun else 0):
                    begun = True
                    loss_of(model, rank).backward()
                break
            except Interrupt as error:
                where = str(error)
                if meeting.number - before == meetings:
                    break  # the last line was on the way out: the other rank has made this step
            except RuntimeError as error:
                assert "diverged" in str(error), error
        check_step(model, plain, rank, world_size, (n, where))
