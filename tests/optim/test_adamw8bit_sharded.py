"""AdamW with 8-bit moments cut over ranks, against itself on one device: bits, state dicts, checkpoints, bytes."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard

import shardwright as sw
from shardwright.engine import RaggedTensor
from tests.engine.kit.models import full
from tests.engine.kit.places import On, on, on_meshes
from tests.optim.eight_bits import BLOCK, CODED, check_equal, steps, tiny
from tests.support import WorkerPools, multirank


class Weights(nn.Module):
    """Weights of 0 to 3 dimensions: some have a short last block or are too small for codes; one unused, one frozen."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.inner = nn.Linear(row, 12)
        self.matrix = nn.Parameter(torch.randn(7, row))
        self.stack = nn.Parameter(torch.randn(5, 3, row))
        self.vector = nn.Parameter(torch.randn(288))
        self.small = nn.Parameter(torch.randn(3, 2))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(4, row))
        self.frozen = nn.Parameter(torch.randn(4, row), requires_grad=False)


def build(row: int, seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return Weights(row)


def shard(model: Weights, at: On, layout: Any) -> Any:
    options = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout}
    sw.fully_shard(model.inner, **options)
    return sw.fully_shard(model, **options)


def local_sizes(p: Any) -> list[int]:
    """How many elements each rank has, one after the other."""
    if isinstance(p, RaggedTensor):
        return [stop - start for start, stop in p.spec.ranges]
    sizes = [p.device_mesh.shape[i] for i, each in enumerate(p.placements) if each.is_shard()]
    return [part.numel() for part in torch.empty(p.shape).chunk(math.prod(sizes))] if sizes else [p.numel()]


def cuts_a_block(model: nn.Module) -> bool:
    ends = {p: list(torch.tensor(local_sizes(p)).cumsum(0).tolist()) for p in model.parameters()}
    return any(end % BLOCK for p, e in ends.items() if p.numel() >= 16 for end in e if 0 < end < p.numel())


MESHES = [
    *on("ddp", (2,)),
    *on("zero1", (3,)),
    *on("zero2", (4,)),
    *on("zero3", (1,), (2,), (3,), (4,)),
    *on("hsdp", (2, 2)),
    *on("hfsdp", (2, 2), (1, 2)),
]
#: Whole blocks to a row; two rows to three blocks; and in four.
ROWS = [8, 12, 6]
LAYOUTS = ["per_parameter", sw.Ragged("row"), sw.Ragged("element"), sw.Ragged(1), sw.Ragged(4)]


@pytest.mark.extensive("each number of ranks", but=("zero3@1*", "zero3@3*", "hfsdp@2x2*"))
@on_meshes(MESHES)
def test_ranks_have_the_bits_of_one_device(rank: int, world_size: int, at: On) -> None:
    """On every layout that cuts no block: parameters, codes and scales. One that cuts a block is refused."""
    taken = 0
    for row in ROWS:
        plain = build(row)
        expected = tiny(plain.parameters())
        steps(expected, used(plain), 0, 3)
        for layout in LAYOUTS:
            model = shard(build(row), at, layout)
            if cuts_a_block(model):
                with pytest.raises(ValueError, match=f"blocks of {BLOCK} consecutive elements"):
                    sw.fully_shard_optimizer(tiny(model.parameters()))
                continue
            taken += 1
            optimizer = sw.fully_shard_optimizer(tiny(model.parameters()))
            steps(optimizer, used(model), 0, 3)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                check_equal(p, q)
                assert (p in optimizer.state) == (q in expected.state)
                for key, value in optimizer.state[p].items() if p in optimizer.state else ():
                    check_equal(value, expected.state[q][key])
                    if key in CODED:
                        elements = p.to_local().numel()
                        blocks = -(-elements // BLOCK)
                        assert value.to_local().numel() == (blocks if key.endswith("scales") else elements), (
                            key
                        )
                        assert isinstance(value, RaggedTensor) or key.endswith("codes")
    assert taken >= 6


def used(model: nn.Module) -> list[Any]:
    return [p for name, p in model.named_parameters() if p.requires_grad and name != "unused"]


def trained(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


WHOLE = StateDictOptions(full_state_dict=True)


@pytest.mark.extensive("each place", but=("hsdp@2x2",))
@on_meshes(on("zero3", (3,)) + on("hsdp", (2, 2)) + on("hfsdp", (2, 2)))
def test_state_dicts_by_torch(rank: int, world_size: int, at: On) -> None:
    """Full and sharded, from and to the plain optimizer, loaded before the first step; and steps after that."""
    plain = build(8)
    expected = tiny(plain.parameters())
    steps(expected, trained(plain), 0, 2)
    later = copy.deepcopy((plain, expected))
    steps(later[1], trained(later[0]), 2, 4)
    for number, layout in enumerate(("per_parameter", sw.Ragged(1), sw.Ragged(2))):

        def ours(layout: Any = layout) -> tuple[Any, Any]:
            model = shard(copy.deepcopy(plain), at, layout)
            return model, sw.fully_shard_optimizer(tiny(model.parameters()))

        first, second, third = ours(), ours(), ours()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=number == 0)
        state = copy.deepcopy(get_optimizer_state_dict(plain, expected, options=options))
        set_optimizer_state_dict(*first, state if rank == 0 or number else {}, options=options)
        gathered = copy.deepcopy(get_optimizer_state_dict(*first, options=WHOLE))
        check_equal(gathered["state"], get_optimizer_state_dict(plain, expected)["state"])
        options = StateDictOptions(flatten_optimizer_state_dict=number == 2)
        state = copy.deepcopy(get_optimizer_state_dict(*first, options=options))
        set_optimizer_state_dict(*second, state, options=options)
        third[1].load_state_dict(copy.deepcopy(second[1].state_dict()))
        alone = copy.deepcopy(plain)
        back = alone, tiny(alone.parameters())
        set_optimizer_state_dict(*back, gathered)
        for model, optimizer in (first, second, third, back):
            steps(optimizer, trained(model), 2, 4)
            for p, q in zip(model.parameters(), later[0].parameters(), strict=True):
                check_equal(p, q)


def save(rank: int, world_size: int, path: Path, layout: Any) -> None:
    model, optimizer = sharded_pair(world_size, layout, 0)
    steps(optimizer, trained(model), 0, 2)
    dcp.save(states_of(model, optimizer), checkpoint_id=path)


def load_and_go_on(rank: int, world_size: int, path: Path, layout: Any) -> Any:
    model, optimizer = sharded_pair(world_size, layout, 1)
    load_state(model, optimizer, path)
    steps(optimizer, trained(model), 2, 4)
    return [full(p).detach() for p in model.parameters()]


def load_other_blocks(rank: int, world_size: int, path: Path, layout: Any) -> str:
    model, optimizer = sharded_pair(world_size, layout, 1, block_size=2 * BLOCK)
    with pytest.raises(CheckpointException, match="exp_avg_scales") as failure:
        load_state(model, optimizer, path)
    return str(failure.value)


def sharded_pair(world_size: int, layout: Any, seed: int, **options: Any) -> tuple[Any, Any]:
    model = shard(build(16, seed), *on("zero3", (world_size,)), layout)
    return model, sw.fully_shard_optimizer(tiny(model.parameters(), **options))


def states_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}


def load_state(model: Any, optimizer: Any, path: Path, **options: Any) -> None:
    """As the trainer does it."""
    state = states_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, **options)
    optimizer_state = {**get_optimizer_state_dict(model, optimizer), "state": state["optimizer"]}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)


@pytest.mark.extensive("each pair")
@pytest.mark.multirank
def test_checkpoints_between_world_sizes_layouts_and_one_device(
    worker_pools: WorkerPools, tmp_path: Path
) -> None:
    plain = build(16)
    expected = tiny(plain.parameters())
    steps(expected, trained(plain), 0, 2)
    dcp.save(states_of(plain, expected), checkpoint_id=tmp_path / "one", no_dist=True)
    worker_pools.run(save, 2, path=tmp_path / "two", layout=sw.Ragged(1))
    worker_pools.run(save, 3, path=tmp_path / "three", layout="per_parameter")
    steps(expected, trained(plain), 2, 4)
    for source in ("one", "two", "three"):
        path = tmp_path / source
        for world_size, layout in ((2, "per_parameter"), (3, sw.Ragged(2)), (4, sw.Ragged(1))):
            for found in worker_pools.run(load_and_go_on, world_size, path=path, layout=layout):
                check_equal(found, [p.detach() for p in plain.parameters()])
        alone = build(16, 1)
        optimizer = tiny(alone.parameters())
        load_state(alone, optimizer, path, no_dist=True)
        steps(optimizer, trained(alone), 2, 4)
        check_equal(list(alone.parameters()), [p.detach() for p in plain.parameters()])
    worker_pools.run(load_other_blocks, 2, path=tmp_path / "three", layout=sw.Ragged(1))


@multirank(2)
def test_blocks_that_do_not_follow_each_other_are_refused(rank: int, world_size: int) -> None:
    model = nn.Linear(32, 32, bias=False)
    sw.fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(ValueError, match=r"Parameter 'weight of Linear': .*are not consecutive.*first dim"):
        sw.fully_shard_optimizer(tiny(model.parameters()))


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_sharded_parameters_alone_are_refused(rank: int, world_size: int, layout: str) -> None:
    model = nn.Linear(32, 32)
    sw.fully_shard(model, layout=layout)
    with pytest.raises(TypeError, match=r"steps on plain tensors, found .*sw\.fully_shard_optimizer"):
        steps(tiny(model.parameters()), list(model.parameters()), 0, 1)


@multirank(3)
def test_bytes_of_sharded_state(rank: int, world_size: int) -> None:
    """Two bytes and 8 / 256 per element of this rank's part; AdamW keeps eight."""
    model = nn.Linear(256, 60, bias=False)
    sw.fully_shard(model)
    sizes = []
    for kind in (sw.AdamW8bit, torch.optim.AdamW):
        optimizer = sw.fully_shard_optimizer(kind(model.parameters()))
        steps(optimizer, list(model.parameters()), 0, 1)
        (state,) = optimizer.state.values()
        local = [value.to_local() for value in state.values() if value.ndim]
        sizes.append(sum(t.untyped_storage().nbytes() for t in local))
    assert sizes == [20 * 256 * 2 + 20 * 8, 20 * 256 * 8]
