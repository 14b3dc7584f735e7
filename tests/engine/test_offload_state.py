"""Optimizer state alone in the CPU's memory: it passes through the device unit by unit, and changes no bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import shardwright as sw
from shardwright.engine import Host
from shardwright.engine.comm import DeviceStreams
from shardwright.engine.compat import local_of
from shardwright.optim.companion import sharded_companion
from tests.engine.kit import simulated
from tests.engine.kit.models import Model, build, loss_of, shard, tokens
from tests.engine.kit.offload import adamw, assert_same, counted
from tests.engine.kit.offload_state import STATE, assert_equal, train
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import units_of
from tests.support import multirank
from tests.support.fake import fake_ranks
from tests.support.matrix import select, together
from tests.support.races import Simulator
from tests.support.stand_in import stand_in_device
from tests.support.storages import Storages

pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

WRAPS = {"step": sw.fully_shard_optimizer, "in backward": sw.optim.in_backward}


class Counting(torch.optim.SGD):
    """State that is no tensor, tensors in containers, tensors that each step makes anew, and a number per group."""

    def shard_needs(self, p: torch.Tensor) -> int:
        return 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        name="mine", seen=0, history=[torch.zeros_like(p)], mean={"of": [p.grad * 0]}
                    )
                state["seen"] += 1
                state["history"] = [p.grad.clone(), state["history"][0]]
                state["mean"]["of"][0].lerp_(p.grad, 1 / state["seen"])
                p.sub_(state["mean"]["of"][0] + state["history"][1], alpha=group["lr"] * group["calls"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW8bit": lambda ps: sw.AdamW8bit(ps, lr=0.01, block_size=16, min_size=16),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),  # whose state is there before the first step
    "Counting": lambda ps: Counting(ps, lr=0.01),
}


class Row(NamedTuple):
    at: On
    layout: str
    memory: str
    optimizer: str
    accumulation: str
    way: str


def rows() -> list[Row]:
    at = [*on("zero1", (2, 2)), *on("zero2", (3,)), *on("zero3", (1,), (4,)), *on("hsdp", (2, 2))]
    memory = ["dynamic", "arena"]
    optimizers = [name for name in OPTIMIZERS if name != "AdamW8bit"]
    product = itertools.product(
        at, ["per_parameter", "ragged"], memory, optimizers, ["none", "not last"], WRAPS
    )
    return select([Row(*row) for row in product], shows)


def shows(row: Row, strength: int) -> Iterator[Hashable]:
    if strength > 2:
        yield from together(strength, *row)
    yield from ((row.optimizer, row.way), (row.at, row.accumulation), (row.layout, row.memory, row.way))


@on_meshes(rows())
def test_bits_of_the_run_without_offload(rank: int, world_size: int, at: On, layout: str, memory: str,
                                         optimizer: str, accumulation: str, way: str) -> None:  # fmt: skip
    models, states = [], []
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext():
            options: dict[str, Any] = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout}
            options["offload_policy"] = STATE if offloads else sw.OffloadPolicy()
            model = build()
            for block in model.blocks:
                sw.fully_shard(block, **options)
            sw.fully_shard([model.norm, model.head], **options)
            sw.fully_shard(model, memory=memory, **options)
            made = WRAPS[way](OPTIMIZERS[optimizer](model.parameters()))
            rates = torch.optim.lr_scheduler.ExponentialLR(made, 0.7)
            for step in range(3):
                train(model, made, rank, 1, accumulation, first=step)
                rates.step()
            models.append(model)
            states.append(made.state_dict())
    assert_same(*models)
    assert_equal(*states)


@multirank(2)
def test_state_in_blocks(rank: int, world_size: int) -> None:
    models = []
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            for module in model:
                if not isinstance(module, nn.ReLU):
                    sw.fully_shard(
                        module, layout=sw.Ragged(1), offload_policy=STATE if offloads else sw.OffloadPolicy()
                    )
            optimizer = sw.fully_shard_optimizer(OPTIMIZERS["AdamW8bit"](model.parameters()))
            for step in range(3):
                if step == 2:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                torch.manual_seed(step + 10 * rank)
                model(torch.randn(3, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
    assert_same(*models)


# -- memory ----------------------------------------------------------------------------------------------------------


def state_bytes(model: nn.Module, moments: int) -> list[int]:
    """The bytes of state of each unit with parameters, on this rank: moments in float32, each on 16 bytes."""
    return [
        moments * sum(-(-4 * p.local.numel() // 16) * 16 for p in unit.parameters)
        for unit in units_of(model)
        if unit.parameters
    ]


@pytest.mark.extensive("each setting", but=("1-*",))
@multirank(2)
@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("buffers", [1, 3])
def test_the_device_holds_two_units_state_at_most(rank: int, world_size: int, way: str, buffers: int) -> None:
    """However many units there are, how many are being reduced at once, and whether their state is new."""
    for layers in (2, 5):
        with stand_in_device():
            model = shard(Model(layers=layers), offload_policy=STATE)
            model.set_reduce_scatter_max_input_buffers(buffers)
            optimizer = WRAPS[way](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True))
            sizes = sorted(state_bytes(model, 1))

            def label(frame: Any) -> str:
                maker = frame.f_code.co_name if frame is not None else ""
                return "made by the step" if maker in ("__call__", "step_unit") else "other"

            with Storages(label) as made:
                made.begin()
                train(model, optimizer, rank, 1)
            with counted() as most:
                train(model, optimizer, rank, 2, first=1)
            # The optimizer's own memory has no padding.
            assert 0 < made.peak.kinds["made by the step"] <= sizes[-1] + sizes[-2]
            assert most[False, "optimizer state"] == sizes[-1] + sizes[-2]
            host_state = sharded_companion(optimizer).host_state
            assert host_state is not None
            assert not [slab for slab in host_state._owner.slabs if slab.leased]


@multirank(1)
def test_the_next_units_state_comes_up_while_one_is_stepped(rank: int, world_size: int) -> None:
    """And goes down after it."""
    events: list[str] = []
    with stand_in_device(), pytest.MonkeyPatch.context() as patch:
        model = shard(build(), offload_policy=STATE)
        optimizer = sw.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train(model, optimizer, rank, 1)
        names = {
            id(local_of(p)): unit.name
            for unit in units_of(model)
            for p in (q.sharded for q in unit.parameters)
        }
        owners = {
            id(local_of(optimizer.state[p]["momentum_buffer"])): names[id(local_of(p))]
            for p in model.parameters()
        }
        up, down, plain = Host.copy_up, Host.copy_down, torch.optim.SGD.step.__wrapped__

        def stepped(self: Any, *given: Any) -> Any:
            events.append(f"step {names[id(self.param_groups[0]['params'][0])]}")
            return plain(self, *given)

        patch.setattr(
            Host,
            "copy_up",
            lambda self, to, of: (events.append(f"up {owners[id(of[0])]}"), up(self, to, of))[1],
        )
        patch.setattr(
            Host,
            "copy_down",
            lambda self, to, of: (events.append(f"down {owners[id(to[0])]}"), down(self, to, of))[1],
        )
        patch.setattr(torch.optim.SGD.step, "__wrapped__", stepped)
        train(model, optimizer, rank, 1)
    first, second, third = dict.fromkeys(
        event.split(" ", 1)[1] for event in events if event.startswith("step")
    )
    assert events == [
        *(f"up {first}", f"up {second}", f"step {first}", f"down {first}"),
        *(f"up {third}", f"step {second}", f"down {second}", f"step {third}", f"down {third}"),
    ]


# -- in and out ------------------------------------------------------------------------------------------------------


@pytest.mark.extensive("each layout")
@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
@pytest.mark.parametrize("way", WRAPS)
def test_checkpoints_and_later_groups(
    rank: int, world_size: int, layout: str, way: str, tmp_path: Path
) -> None:
    """To and from a run without offload, by torch's functions and by ours, in the middle of training."""
    plain = shard(build(), layout=layout)
    ordinary = sw.fully_shard_optimizer(adamw(plain))
    train(plain, ordinary, rank, 2)
    with stand_in_device():
        model = shard(build(seed=3), layout=layout, offload_policy=STATE)
        half = list(model.parameters())
        optimizer = WRAPS[way](torch.optim.AdamW(half[:4], lr=0.01, foreach=True))
        optimizer.add_param_group({"params": half[4:]})
        train(model, optimizer, rank, 1, first=7)
        found = [tmp_path if rank == 0 else None]
        dist.broadcast_object_list(found)
        dcp.save(
            dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
            checkpoint_id=found[0],
        )
        kept = [p.to_local().clone() for p in model.parameters()]
        moments = [local_of(optimizer.state[p]["exp_avg"]).clone() for p in half]
        train(model, optimizer, rank, 1, first=8)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=found[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert all(map(torch.equal, kept, (p.to_local() for p in model.parameters())))
        assert all(map(torch.equal, moments, (local_of(optimizer.state[p]["exp_avg"]) for p in half)))

        merged = WRAPS[way](adamw(model)) if way == "step" else None
        if merged is None:
            optimizer.leave_backward()
            merged = sw.optim.in_backward(adamw(model))
        model.load_state_dict(plain.state_dict())
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full)
            given = copy.deepcopy(get_optimizer_state_dict(plain, ordinary, options=options))
            set_optimizer_state_dict(model, merged, given, options=options)
        train(plain, ordinary, rank, 2, first=5)
        train(model, merged, rank, 2, first=5)
        assert_same(plain, model)
        assert_equal(
            get_optimizer_state_dict(plain, ordinary)["state"],
            get_optimizer_state_dict(model, merged)["state"],
        )


@multirank(1)
def test_loading_does_not_move_state_to_the_device(rank: int, world_size: int) -> None:
    """Torch moves all state but numbers there."""
    name = "_process_value_according_to_param_policy"
    place, moved = getattr(torch.optim.Optimizer, name), []

    def seen(p: torch.Tensor, value: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        moved.append(value.ndim)
        return place(p, value, *given, **options)  # type: ignore[no-any-return]

    with stand_in_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Optimizer, name, staticmethod(seen))
        for policy in (STATE, sw.OffloadPolicy()):
            model = shard(build(), offload_policy=policy)
            optimizer = sw.fully_shard_optimizer(adamw(model))
            train(model, optimizer, rank, 1)
            moved.clear()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert moved and any(moved) is (policy is not STATE)


@multirank(2)
def test_a_failed_backward_leaves_nothing_behind(rank: int, world_size: int) -> None:
    """State that was sent up for it is not what the next one steps with."""
    with stand_in_device():
        plain, model = shard(build()), shard(build(), offload_policy=STATE)
        ordinary = sw.optim.in_backward(adamw(plain))
        optimizer = sw.optim.in_backward(adamw(model))
        for each, its in ((plain, ordinary), (model, optimizer)):
            train(each, its, rank, 1)
            batch = tokens(1, 0, rank)
            loss = loss_of(each(batch), batch)
            handle = each.embed.weight.register_hook(lambda g: (_ for _ in ()).throw(ValueError("fails")))
            with pytest.raises(ValueError, match="fails"):
                loss.backward()
            handle.remove()
            its.step()  # to go on with what backward has stepped
            with torch.no_grad():
                for values in its.state.values():
                    local_of(values["exp_avg"]).mul_(0.5)
            train(each, its, rank, 2, first=2)
        assert_same(plain, model)


class Fails(torch.optim.SGD):
    """Its second call of a step fails."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Fails.calls += 1
        if Fails.calls == 5:
            raise ArithmeticError("this step fails")
        super().step.__wrapped__(self)


@multirank(1)
def test_a_failed_step_keeps_what_was_stepped_until_weights_are_loaded(rank: int, world_size: int) -> None:
    with stand_in_device():
        model = shard(build(), offload_policy=STATE)
        optimizer = sw.fully_shard_optimizer(Fails(model.parameters(), lr=0.1, momentum=0.9), needs=1)
        train(model, optimizer, rank, 1)  # three calls
        before = [local_of(v["momentum_buffer"]).clone() for v in optimizer.state.values()]
        with pytest.raises(ArithmeticError, match="this step fails"):
            train(model, optimizer, rank, 1, first=1)
        after = [local_of(v["momentum_buffer"]) for v in optimizer.state.values()]
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert any(moved) and not all(moved)
        with pytest.raises(RuntimeError, match=r"was interrupted by an exception.*Load a checkpoint"):
            train(model, optimizer, rank, 1, first=2)
        model.load_state_dict(model.state_dict())
        train(model, optimizer, rank, 1, first=2)


class Odd(torch.Tensor):
    pass


class Elsewhere(torch.optim.SGD):
    """Keeps state on a device of its own choice, or as a tensor of its own kind."""

    kind: type = torch.Tensor
    device = "meta"

    def shard_needs(self, p: torch.Tensor) -> int:
        return 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["own"] = torch.empty(3, device=self.device).as_subclass(self.kind)


@multirank(1)
def test_what_would_stay_on_the_device_is_refused(rank: int, world_size: int) -> None:
    with stand_in_device():
        model = shard(build(), offload_policy=STATE)
        batch = tokens(0, 0, 0)
        loss_of(model(batch), batch).backward()
        with pytest.raises(RuntimeError, match=r"this AdamW would keep it on cpu\. Wrap the optimizer"):
            adamw(model).step()
        with pytest.raises(ValueError, match=r"keeps state of shape \(3,\) on meta"):
            sw.fully_shard_optimizer(Elsewhere(model.parameters(), lr=0.1)).step()
        own = sw.fully_shard_optimizer(Elsewhere(model.parameters(), lr=0.1))
        own.device, own.kind = "cpu", Odd
        with pytest.raises(ValueError, match="keeps state as Odd, a tensor subclass"):
            own.step()


# -- streams ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    way: str
    layout: str = "per_parameter"
    reads: bool = False  #: whether the host looks at the state after each step


def simulate(case: Case, streams: Callable[[torch.device], DeviceStreams] = DeviceStreams) -> Simulator:
    with fake_ranks(2), Simulator(streams) as simulator:
        model = shard(build(layers=3), layout=case.layout, offload_policy=STATE)
        # Of AdamW's steps the host would read a number that the simulated device has.
        optimizer = WRAPS[case.way](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True))
        for step in range(4):
            train(model, optimizer, 0, 1, first=step)
            if case.reads:
                for values in optimizer.state.values():
                    local_of(values["momentum_buffer"]).clone()
    return simulator


@pytest.mark.parametrize(
    "case",
    [Case("step"), Case("in backward"), Case("step", "ragged", True), Case("in backward", "ragged", True)],
    ids=str,
)
def test_copies_of_state_are_in_order(case: Case) -> None:
    simulator = simulate(case)
    simulator.check()
    assert simulator.operations["upload"] >= 4 and simulator.operations["download"] >= 4


@pytest.mark.parametrize(
    ("event", "way"),
    [
        ("failures", "in backward"),
        ("two buffers", "in backward"),
        ("frozen", "in backward"),
        ("training on a stream", "optimizer"),
        ("optimizer on a stream", "optimizer"),
    ],
)
def test_copies_of_state_are_in_order_beside(event: str, way: str) -> None:
    """The simulated training of tests/engine/kit/simulated.py runs beside the copies."""
    case = simulated.Case(event=event, offload="state", steps=way, dtypes=(torch.bfloat16, torch.float32))
    with fake_ranks(2), Simulator() as simulator:
        training = simulated.training_of(case, simulator)
        training.run()
        assert training.optimizer.state  # which waits: with it the host's memory goes
    simulator.check()
    assert simulator.operations["upload"] and simulator.operations["download"]


def test_uploads_overlap_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a unit is stepped, the computation has not waited for the upload of the next one's state."""
    found: list[bool] = []
    plain = torch.optim.SGD.step.__wrapped__
    with fake_ranks(2), Simulator() as simulator:
        model = shard(build(layers=3), offload_policy=STATE)
        optimizer = sw.fully_shard_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        )
        train(model, optimizer, 0, 1)
        upload = simulator.side["upload"]

        def stepped(self: Any, *given: Any) -> Any:
            found.append(simulator.computation.clock[upload.number] < upload.clock[upload.number])
            return plain(self, *given)

        monkeypatch.setattr(torch.optim.SGD.step, "__wrapped__", stepped)
        train(model, optimizer, 0, 1, first=1)
    assert found == [True, True, True, False]  # nothing comes after the last unit


class NeverWaits(DeviceStreams):
    def host_wait(self, mark: Any) -> None:
        pass


def test_state_read_too_early_is_found() -> None:
    races = simulate(Case("step", reads=True), NeverWaits).races
    assert any(
        "write by aten::_foreach_copy_ on 'download'" in race and "on 'host'" in race for race in races
    )
