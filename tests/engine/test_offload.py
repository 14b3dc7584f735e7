"""Offload to the CPU: the bits of the run that offloads nothing, and nothing left on the device between uses."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardwright as sw
from shardwright.engine.base.offload import HostSlab
from shardwright.engine.compat import dtensor_of
from shardwright.engine.gradients.delivery import OnHost
from shardwright.engine.model.arrivals import Arrivals
from tests.engine.kit.models import Model, build, full, loss_of, shard, tokens
from tests.engine.kit.offload import adamw, assert_same, counted, set_more
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.training import units_of
from tests.support import multirank
from tests.support.fake import fake_ranks
from tests.support.matrix import select, together
from tests.support.stand_in import stand_in_device

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:.*outside the plan:RuntimeWarning")

ACCUMULATION = ["none", "every backward", "not synced", "not last", "not all-reduced"]


class Row(NamedTuple):
    at: On
    layout: str
    memory: str
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    accumulation: str
    in_backward: bool


def rows() -> list[Row]:
    at = [
        *on("ddp", (2,)),
        *on("zero1", (2, 2)),
        *on("zero2", (3,)),
        *on("zero3", (1,), (4,)),
        *on("hsdp", (2, 2)),
        *on("hfsdp", (2, 2)),
    ]
    memory = ["dynamic", "arena"]
    dtypes = [(None, None), (BF16, FP32), (BF16, None)]
    product = itertools.product(at, ["per_parameter", "ragged"], memory, dtypes, ACCUMULATION, [False, True])
    made = [Row(*row) for row in product]
    # In backward every backward is a step, unless it is said that more come.
    legal = [row for row in made if not (row.in_backward and row.accumulation == "every backward")]
    return select(legal, lambda row, strength: together(strength, *row))


def train(model: Model, optimizer: Any, rank: int, steps: int, way: str = "none", clip: bool = True, first: int = 0,
          call_step: bool = True) -> None:  # fmt: skip
    for step in range(first, first + steps):
        micros = 1 if way == "none" else 2
        for micro in range(micros):
            set_more(model, way, micro + 1 < micros)
            batch = tokens(step, micro, rank)
            loss_of(model(batch), batch).backward()
        if clip:
            sw.clip_grad_norm_(model.parameters(), 0.5)
        if call_step:
            optimizer.step()
            optimizer.zero_grad()


@on_meshes(rows())
def test_bits_of_the_run_without_offload(rank: int, world_size: int, at: On, layout: str, memory: str,
                                         dtypes: tuple[torch.dtype | None, torch.dtype | None], accumulation: str,
                                         in_backward: bool) -> None:  # fmt: skip
    models = []
    for offloads in (False, True):
        with stand_in_device() if offloads else contextlib.nullcontext():
            options: dict[str, Any] = {
                "mesh": at.mesh,
                "strategy": at.strategy,
                "layout": layout,
                "mp_policy": sw.MixedPrecisionPolicy(*dtypes),
                "offload_policy": sw.CPUOffloadPolicy() if offloads else sw.OffloadPolicy(),
            }
            model = build()
            for block in model.blocks:
                sw.fully_shard(block, **options)
            sw.fully_shard([model.norm, model.head], **options)
            sw.fully_shard(model, memory=memory, **options)
            wrap = sw.optim.in_backward if in_backward and offloads else sw.fully_shard_optimizer
            train(model, wrap(adamw(model)), rank, 3, accumulation, clip=not in_backward)
            assert all((unit.host is not None) == offloads for unit in units_of(model))
            models.append(model)
    assert_same(*models)


@multirank(2)
def test_a_cpu_mesh_has_one_memory(rank: int, world_size: int) -> None:
    """Every policy is taken, and nothing changes."""
    plain = shard(build())
    train(plain, sw.fully_shard_optimizer(adamw(plain)), rank, 2)
    for policy in (
        sw.CPUOffloadPolicy(pin_memory=False),
        sw.Offload(),
        sw.Offload(parameters=False, gradients=False),
    ):
        model = shard(build(), offload_policy=policy)
        train(model, sw.fully_shard_optimizer(adamw(model)), rank, 2)
        assert_same(plain, model)
        assert all(unit.host is None for unit in units_of(model))


def test_choices_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="offloaded together; got parameters=False, gradients=True"):
        sw.Offload(parameters=False)
    with pytest.raises(ValueError, match="do not set optimizer=False"):
        sw.Offload(optimizer=False)
    with pytest.raises(ValueError, match="pin_memory must be True or False, got 1"):
        sw.Offload(pin_memory=1)


def padded(shapes: list[tuple[int, ...]], ranks: int) -> int:
    """Elements of a shard: rows padded to whole ones per rank, each chunk to 16 bytes of float32."""
    return sum(-(-(-(-s[0] // ranks) * math.prod(s[1:])) // 4) * 4 for s in shapes)


BLOCK = [(7,), (7,), (12, 7), (12,), (7, 12)]
REST = [(11, 7), (7,), (7,), (11, 7), (11,)]


@multirank(2)
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_device_holds_slabs_and_nothing_else(rank: int, world_size: int, in_backward: bool) -> None:
    """Shards, gradients and optimizer state are the host's; of the device's bytes none grows with the layers but one
    unit's: two shards on their way up, one sum and one on its way down."""
    block, rest = 4 * padded(BLOCK, 2), 4 * padded(REST, 2)
    flags = 4 * 8
    for layers in (2, 5):
        with stand_in_device():
            model = shard(Model(layers=layers), offload_policy=sw.CPUOffloadPolicy())
            wrap = sw.optim.in_backward if in_backward else sw.fully_shard_optimizer
            optimizer = wrap(adamw(model))
            with counted() as most:
                train(model, optimizer, rank, 1, clip=False)
            units = units_of(model)
            assert not [s.kind for unit in units for s in unit.site.owner.slabs
                        if s.leased and s.nbytes and not isinstance(s, HostSlab)]  # fmt: skip
            assert most[False, "uploaded shard"] == max(2 * block, block + rest)
            assert most[False, "sum"] <= 2 * max(block, rest) + 2 * flags
            assert (False, "gradients") not in most
            assert most[True, "gradients"] <= layers * (block + flags) + rest + flags
            hosts = {s.untyped_storage().data_ptr() for unit in units for s in unit.weights.shards}
            assert all(p.to_local().untyped_storage().data_ptr() in hosts for p in model.parameters())


@multirank(2)
def test_steps_wait_for_the_next_use_of_the_unit(rank: int, world_size: int) -> None:
    """Without a call of step, what is still on its way when backward ends is stepped when it is needed."""
    plain = shard(build())
    ordinary = sw.fully_shard_optimizer(adamw(plain))
    rates = torch.optim.lr_scheduler.ExponentialLR(ordinary, 0.5)
    with stand_in_device() as streams:
        model = shard(build(), offload_policy=sw.CPUOffloadPolicy())
        optimizer = sw.optim.in_backward(adamw(model))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        left = 0
        for step in range(4):
            train(plain, ordinary, rank, 1, clip=False, first=step)
            rates.step()
            train(model, optimizer, rank, 1, clip=False, first=step, call_step=False)
            late = [unit for unit in units_of(model) if unit.gradients.arriving]
            left += len(late)
            scheduler.step()  # not for those: they are stepped with the rate of their backward
            if step == 1:
                assert optimizer.state_dict()["state"] and not any(unit.gradients.arriving for unit in late)
            elif step == 2:
                list(model.parameters())
                assert not any(unit.gradients.arriving for unit in late)
        assert left and streams.waits
        assert_same(plain, model)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_state_goes_in_and_out(rank: int, world_size: int, layout: str, tmp_path: Path) -> None:
    plain = shard(build(), layout=layout)
    ordinary = sw.fully_shard_optimizer(adamw(plain))
    train(plain, ordinary, rank, 2)
    with stand_in_device():
        model = shard(build(seed=3), layout=layout, offload_policy=sw.CPUOffloadPolicy())
        optimizer = sw.optim.in_backward(adamw(model))
        train(model, optimizer, rank, 1, clip=False, first=7, call_step=False)
        model.load_state_dict(plain.state_dict())
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(get_optimizer_state_dict(plain, ordinary)))
        assert_same(plain, model)
        train(plain, ordinary, rank, 1, clip=False, first=5)
        train(model, optimizer, rank, 1, clip=False, first=5)
        assert_same(plain, model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p.mul_(0.5)
                q.mul_(0.5)
        with sw.deferred_init():
            late = Model()
        shard(late, layout=layout, offload_policy=sw.CPUOffloadPolicy())
        torch.manual_seed(0)
        sw.materialize(late)
        late.load_state_dict({name: full(p) for name, p in model.state_dict().items()})
        made = sw.fully_shard_optimizer(adamw(late))
        again = sw.fully_shard_optimizer(adamw(plain))
        train(late, made, rank, 1)
        train(plain, again, rank, 1)
        assert_same(plain, late)
        copied = copy.deepcopy(late)
        train(copied, sw.fully_shard_optimizer(adamw(copied)), rank, 1)
        assert all(unit.host is not None for unit in units_of(copied))


@multirank(2)
def test_failures_leave_nothing_on_its_way(rank: int, world_size: int) -> None:
    with stand_in_device():
        model = shard(build(), offload_policy=sw.CPUOffloadPolicy())
        optimizer = sw.fully_shard_optimizer(adamw(model))
        train(model, optimizer, rank, 1)
        batch = tokens(1, 0, rank)
        loss = loss_of(model(batch), batch)
        handle = model.blocks[0].up.weight.register_hook(
            lambda gradient: (_ for _ in ()).throw(ValueError("fails"))
        )
        with pytest.raises(ValueError, match="fails"):
            loss.backward()
        handle.remove()
        optimizer.zero_grad()
        plain = shard(build())
        plain.load_state_dict(model.state_dict())
        other = sw.fully_shard_optimizer(adamw(plain))
        set_optimizer_state_dict(plain, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
        train(model, optimizer, rank, 1, first=3)
        train(plain, other, rank, 1, first=3)
        assert_same(plain, model)


@multirank(2)
@pytest.mark.parametrize("lands", [True, False])
def test_the_end_of_backward_waits_for_the_last_units_gradients(
    rank: int, world_size: int, lands: bool
) -> None:
    """Those of the units before are handed over, and micro-batches added up, while backward runs."""
    with stand_in_device() as streams, pytest.MonkeyPatch.context() as patch:
        model = shard(Model(layers=5), offload_policy=sw.CPUOffloadPolicy())
        copies = itertools.count(1)
        begun = 0
        waited: list[int] = []

        def mark(name: str) -> Any:
            nonlocal begun
            if name == "download":
                begun = next(copies)
            return begun

        # A copy takes as long as it takes until the next one begins.
        patch.setattr(streams, "mark", mark)
        patch.setattr(streams, "is_over", lambda mark: mark < begun)
        patch.setattr(streams, "host_wait", lambda mark: waited.append(mark) if mark == begun else None)
        landed: list[int] = []
        land, end_backward = OnHost.land, Arrivals.end_backward

        def lands_in_turn(self: OnHost) -> None:
            if self.arriving:
                landed.append(begun)
            land(self)

        patch.setattr(OnHost, "land", lands_in_turn)
        patch.setattr(Arrivals, "end_backward", lambda self: (landed.append(-1), end_backward(self))[1])
        if not lands:
            patch.setattr(Arrivals, "poll", lambda self: None)
        for _ in range(2):
            batch = tokens(0, 0, rank)
            loss_of(model(batch), batch).backward()
            units = begun
            assert waited == [units]  # the last of them
            before = landed.index(-1)
            assert (before == units - 2) is lands, landed  # one that is there, and the one that is not
            waited.clear()
            landed.clear()
            copies, begun = itertools.count(1), 0


def test_a_dtensor_stays_where_its_local_tensor_is() -> None:
    """Over a mesh of another device, where ``DTensor.from_local`` would move it."""
    with fake_ranks(2):
        mesh = init_device_mesh("cuda", (2,))
        made = dtensor_of(torch.ones(3, 4), mesh, (Shard(0),), torch.Size((6, 4)), (4, 1))
        assert made.device.type == made.to_local().device.type == "cpu" and made.shape == (6, 4)
        parameter = nn.Parameter(made)
        parameter.grad = torch.ones_like(made)
        torch.optim.SGD([parameter], lr=0.5).step()
        assert torch.equal(parameter.to_local(), torch.full((3, 4), 0.5))
