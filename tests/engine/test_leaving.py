"""A rank that leaves a step by an exception: it keeps its own, the others hear whose it was, and all may go on."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.comm_hooks import PowerSGD
from shardwright.engine import UNIT
from shardwright.engine.compat.autograd import queue_callback
from shardwright.engine.model import root
from tests.engine.kit.interrupts import Interrupt, interrupted_at
from tests.engine.kit.meetings import fresh_meetings
from tests.engine.kit.models import full, shard_layers, three_layers
from tests.engine.kit.surface import Boom, fail
from tests.support import multirank, world_mesh
from tests.support.matrix import everything


def loss_of(model: Any, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    return model(x).square().mean()  # type: ignore[no-any-return]


def check_step(model: Any, plain: Any, rank: int, world_size: int, what: Any = "") -> None:
    """The next step is exact, and a collective of the user's pairs with the others' collective."""
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
    plain = three_layers()
    model = shard_layers(plain, strategy=strategy)
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
    plain = three_layers()
    model = shard_layers(plain, strategy="hsdp", mesh=world_mesh(2, 2))
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
    plain = three_layers()
    model = shard_layers(plain)
    for where, module in (("forward", model[4]), ("backward", model[0])):
        with failing(module, where, ValueError("bad")), pytest.raises(ValueError, match="bad"):
            loss_of(model, rank).backward()
        check_step(model, plain, rank, world_size, where)


@multirank(2)
def test_what_a_signals_handler_raises_is_not_taken_for_a_lost_rank(rank: int, world_size: int) -> None:
    """A RuntimeError, as of a worker of a DataLoader that was killed, while this rank waits for the others."""

    def handler(*_: Any) -> None:
        raise RuntimeError("a worker was killed")

    plain = three_layers()
    model = shard_layers(plain)
    check_step(model, plain, rank, world_size)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(3):
            if rank == 0:
                timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
                with pytest.raises(RuntimeError, match=r"^a worker was killed"):
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


@pytest.mark.extensive("each place of a step")
@multirank(2, timeout=120.0)
@pytest.mark.parametrize(("strategy", "way"), [("zero3", "gloo"), ("ddp", "pages")])
def test_an_interrupt_anywhere_in_a_step_leaves_the_ranks_in_order(
    rank: int, world_size: int, strategy: str, way: str
) -> None:
    """Between the agreement and the collective above all: the others count on it."""
    with fresh_meetings(way):
        check_interrupts(rank, world_size, strategy)


def check_interrupts(rank: int, world_size: int, strategy: str) -> None:
    plain = three_layers()
    model = shard_layers(plain, strategy=strategy)
    check_step(model, plain, rank, world_size)
    (comm,) = getattr(model, UNIT).ranks.every
    meeting = comm.meeting
    before = meeting.number
    with interrupted_at(0) as lines:
        loss_of(model, rank).backward()
    meetings = meeting.number - before
    total = torch.tensor(lines[0])
    dist.broadcast(total, 1)
    for n in (*range(1, int(total), 53), *range(int(total) - 60, int(total), 2)):
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


PARTS = {
    "counters": "/weights/ledger.py",
    "slabs": "/memory/",
    "weights": "/engine/weights/",
    "units": "/engine/unit/",
}
LEASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2-arena": {"strategy": "zero2", "memory": "arena"},
    "ragged-max_pool": {"layout": "ragged", "memory": "max_pool"},
}


@pytest.mark.extensive("each line", but=["counters-zero3-one-*"])
@multirank(2, timeout=300.0)
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("how", LEASES)
@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_at_any_line_after_an_optimizers_step(
    rank: int, world_size: int, part: str, how: str, who: str
) -> None:
    """The optimizer has changed the shards, so counters and slabs change, too. The retried step is exact."""
    plain = three_layers()
    model: Any = copy.deepcopy(plain)
    of_units = {key: value for key, value in LEASES[how].items() if key != "memory"}  # memory is the root's
    for layer in (model[0], model[2]):
        sw.fully_shard(layer, **of_units)
    sw.fully_shard(model, **LEASES[how])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]

    def step() -> None:
        for m in (model, plain):
            m.zero_grad()
        loss_of(model, rank).backward()
        sum(loss_of(plain, r) / world_size for r in range(world_size)).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(3):
        step()
    meeting = getattr(model, UNIT).ranks.every[0].meeting
    before = meeting.number
    with interrupted_at(0, PARTS[part]) as lines:
        loss_of(model, rank).backward()
    meetings, places = meeting.number - before, [lines]
    dist.broadcast_object_list(places, 1)
    total, *firsts = places[0]
    for n in range(1, total + 1) if everything() else firsts:
        step()
        before, begun, where = meeting.number, False, ""
        for _ in range(4):
            model.zero_grad()
            try:
                with interrupted_at(n if (rank == 1 or who == "all") and not begun else 0, PARTS[part]):
                    begun = True
                    loss_of(model, rank).backward()
                break
            except Interrupt as error:
                where = str(error)
                if meeting.number - before == meetings:
                    break  # on the way out
            except RuntimeError as error:
                assert "diverged" in str(error), (n, where, error)
        check_step(model, plain, rank, world_size, (n, where))


@pytest.mark.extensive("each moment")
@multirank(2, timeout=120.0)
def test_an_interrupt_while_ranks_find_each_others_pages_leaves_them_in_order(
    rank: int, world_size: int
) -> None:
    """At any line of the meetings of a model's first steps."""
    plain = three_layers()
    check_step(shard_layers(plain, strategy="ddp"), plain, rank, world_size)
    with fresh_meetings():
        model = shard_layers(plain, strategy="ddp")
        with interrupted_at(0, "/shardwright/engine/comm/") as lines:
            loss_of(model, rank).backward()
        meetings = getattr(model, UNIT).ranks.every[0].meeting.number
    total = torch.tensor(lines[0])
    dist.broadcast(total, 1)
    assert int(total) > 300
    for n in range(1, int(total), 7):
        with fresh_meetings():
            model, begun = shard_layers(plain, strategy="ddp"), False
            (comm,) = getattr(model, UNIT).ranks.every
            for _ in range(3):
                model.zero_grad()
                try:
                    with interrupted_at(n if rank == 1 and not begun else 0, "/shardwright/engine/comm/"):
                        begun = True
                        loss_of(model, rank).backward()
                    break
                except Interrupt:
                    if comm.meeting.number == meetings:
                        break  # on the way out
                except RuntimeError as error:
                    assert "diverged" in str(error), error
            check_step(model, plain, rank, world_size, n)


def steps_with_one_failure(model: Any, rank: int, fail: list[bool], step: Any = None) -> None:
    """Rank 0 fails in one of five steps, after ranks have met. Both raise in that step and in no other."""
    for number in range(5):
        fail[0] = number == 2 and rank == 0
        if number == 2:
            with pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"bad|diverged"):
                (step or loss_of)(model, rank).backward()
        else:
            (step or loss_of)(model, rank).backward()
        model.zero_grad()
        dist.barrier()  # it pairs with the other's: the group's collectives are in order


def failing_on_demand(module: nn.Module, where: str) -> list[bool]:
    fail = [False]

    def backward(gradient: torch.Tensor) -> None:
        if fail[0]:
            raise ValueError("bad")

    def forward(_: Any, args: Any, output: torch.Tensor) -> None:
        if where == "forward":
            backward(output)
        else:
            output.register_hook(backward)

    module.register_forward_hook(forward)
    return fail


@multirank(2)
@pytest.mark.parametrize("place", [0, 2])
def test_reductions_in_a_group_of_their_own(rank: int, world_size: int, place: int) -> None:
    """The others may wait there, where none has met since the step began."""
    model = shard_layers(three_layers())
    model.set_separate_reduce_scatter_group(True)
    steps_with_one_failure(model, rank, failing_on_demand(model[place], "backward"))


@multirank(2, 3)
@pytest.mark.parametrize("where", ["forward", "backward", "unshard"])
def test_the_last_meeting_of_a_step_fails(rank: int, world_size: int, where: str) -> None:
    """The others hear of the failure where all axes meet. Groups of single units then have it once from every rank."""
    plain = three_layers()
    model = shard_layers(copy.deepcopy(plain))
    model[0].set_separate_reduce_scatter_group(True)
    check_step(model, plain, rank, world_size)
    for _ in range(2):
        with pytest.raises((Boom, RuntimeError)):
            if where == "unshard" and rank == 0:
                with sw.unsharded(model):
                    pass
            elif where == "forward" and rank == 0:
                with failing(model[2], "forward", Boom()):
                    loss_of(model, rank)
            elif where == "backward" and rank == 0:
                handle = model[0].weight.register_post_accumulate_grad_hook(fail)
                try:
                    loss_of(model, rank).backward()
                finally:
                    handle.remove()
            else:
                loss_of(model, rank).backward()
        for _ in range(2):
            with pytest.raises(Boom), failing(model[1], "forward", Boom()):
                loss_of(model, rank)
        check_step(model, plain, rank, world_size)


@multirank(2)
@pytest.mark.parametrize(("strategy", "place"), [("ddp", 0), ("zero3", 0), ("zero3", 2)])
def test_gradient_hooks_of_several_collectives(rank: int, world_size: int, strategy: str, place: int) -> None:
    """One may be in the middle of them while another leaves."""
    model = shard_layers(three_layers(), strategy=strategy)
    model.set_gradient_comm_hook(PowerSGD(1))
    steps_with_one_failure(model, rank, failing_on_demand(model[place], "backward"))
    loss_of(model, rank).backward()
    grads = torch.cat([full(p.grad).flatten() for p in model.parameters()])
    theirs = [torch.empty_like(grads) for _ in range(world_size)]
    dist.all_gather(theirs, grads)
    assert torch.equal(*theirs)


@multirank(2)
def test_one_exception_through_several_models(rank: int, world_size: int) -> None:
    """A teacher inside the student's forward: the others hear of it once."""
    plain = three_layers()
    teacher, student = shard_layers(three_layers()), shard_layers(plain)
    fail = failing_on_demand(teacher[2], "forward")

    def step(model: Any, rank: int) -> torch.Tensor:
        def hook(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + teacher(args[0].detach()[:, :6]).sum()

        handle = model[0].register_forward_hook(hook)
        try:
            return loss_of(model, rank)
        finally:
            handle.remove()

    steps_with_one_failure(student, rank, fail, step)
    check_step(student, plain, rank, world_size)


@multirank(2)
@pytest.mark.parametrize("what", ["reads a number", "calls a unit"])
def test_one_rank_does_more_within_a_forward(rank: int, world_size: int, what: str) -> None:
    """All raise in that step, and the next is in order: the guess of its order is not made of that step."""
    plain = three_layers()
    model = shard_layers(plain)
    alone = [False]

    def more(_: Any, args: Any) -> None:
        if not alone[0]:
            return
        if what == "calls a unit":
            model[2](args[0])
        else:
            model[2].weight.norm().item()

    model[0].register_forward_pre_hook(more)
    for number in range(4):
        alone[0] = number == 1 and rank == 0
        if number == 1:
            with pytest.raises(RuntimeError, match="diverged"):
                loss_of(model, rank).backward()
        else:
            check_step(model, plain, rank, world_size, number)
        model.zero_grad()
        dist.barrier()


@multirank(2)
def test_orders_are_forgotten_on_all_ranks_wherever_they_hear_of_a_failure(
    rank: int, world_size: int
) -> None:
    """One is at the end of a forward, the other in the middle. Then a forward in which a unit is left out."""
    plain = three_layers()
    model = shard_layers(plain, strategy="zero2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    check_step(model, plain, rank, world_size)
    loss_of(model, rank).backward()
    with pytest.raises(RuntimeError, match="diverged"):
        if rank == 0:
            optimizer.step()
        loss_of(model, rank).backward()
        loss_of(model, rank).backward()
    model.zero_grad()
    model.load_state_dict(before)  # the ranks are of one age again
    unit, model._modules["2"] = model[2], nn.Identity()
    with torch.no_grad():
        loss_of(model, rank)
    model._modules["2"] = unit
    check_step(model, plain, rank, world_size)


@multirank(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_kept_weights_that_one_rank_has_lost_cost_one_step(rank: int, world_size: int, strategy: str) -> None:
    """No optimizer step comes between, so nothing else makes the ranks gather. They have not met in that forward."""
    plain = three_layers()
    model = shard_layers(plain, strategy=strategy)
    check_step(model, plain, rank, world_size)
    for module in (model[0], model[4]):
        if rank == 1:
            with failing(module, "forward", ValueError("bad")), pytest.raises(ValueError, match="bad"):
                loss_of(model, rank)
        with suppress(RuntimeError):  # this rank's forward has met the other's next one
            loss_of(model, rank).backward()
        check_step(model, plain, rank, world_size, module)


@multirank(2)
def test_unlike_guesses_cost_one_step(rank: int, world_size: int) -> None:
    """They come where an interrupt on one rank has kept it from remembering an order."""
    plain = three_layers()
    model = shard_layers(plain)
    check_step(model, plain, rank, world_size)
    if rank == 0:
        for order in getattr(model, UNIT).root._order._last.values():
            order[-2:] = reversed(order[-2:])
    with pytest.raises(RuntimeError, match="diverged"):
        loss_of(model, rank).backward()
    model.zero_grad()
    for number in range(2):
        check_step(model, plain, rank, world_size, number)


@multirank(2)
def test_a_failed_backward_is_over_while_autograd_holds_its_callback(rank: int, world_size: int) -> None:
    """As an accelerator's thread of autograd may do for a moment, on one rank longer than on another."""
    plain = three_layers()
    model = shard_layers(plain, mesh=world_mesh(world_size))
    held: list[Any] = []

    def queue(task: Any) -> None:
        if rank == 0:
            held.append(task)
        queue_callback(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "queue_callback", queue)
        with failing(model[0], "backward", Boom()), pytest.raises(Boom):
            loss_of(model, rank).backward()
    assert len(held) == (rank == 0)
    check_step(model, plain, rank, world_size)
