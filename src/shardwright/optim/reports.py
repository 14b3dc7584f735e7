"""Messages between ranks about a step on whole tensors: before it which gradients exist, after it its result.

The tensors themselves move in ``rounds.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.engine import RankGroup
from shardwright.engine.comm import Communicator, noted
from shardwright.optim import whole_state
from shardwright.optim.moves import MeshRanks
from shardwright.optim.owned import WholeParameter


def agree(
    active: Sequence[WholeParameter], owned: Sequence[WholeParameter], world: MeshRanks, comm: Communicator
) -> None:
    """Raise if ranks have gradients of different parameters. This is checked only on gloo.

    Raises:
        RuntimeError: names a parameter, and the ranks that have its gradient.
    """
    indices = [each.index for each in active]
    if not comm.exchanges or comm.exchange((len(indices), zlib.crc32(repr(indices).encode()))) is None:
        return
    everyone = RankGroup(world.group).all_gather(indices, "optimizer state")
    ranks = dist.get_process_group_ranks(world.group)
    differing = set().union(*everyone).difference(set(everyone[0]).intersection(*everyone))
    first = owned[min(differing)]
    have = [rank for rank, theirs in zip(ranks, everyone, strict=True) if first.index in theirs]
    raise RuntimeError(
        f"A step on whole tensors needs a gradient of parameter {first.name!r} on every rank or on none; ranks "
        f"{have} have one, the other ranks of {ranks} do not. Run the same modules on every rank, or set the "
        "gradients on every rank."
    )


def report(
    owned: Sequence[WholeParameter], failed_at: int, world: MeshRanks, outer: Any, device: torch.device
) -> Exception | None:
    """Show the new state on every rank. Returns the error to raise if another rank has failed.

    Owners send this in one small all-gather: whether they failed, whether keys, shapes or dtypes of their state
    changed, and its numbers. The host waits for it once per step, because state dicts need the numbers.

    Args:
        owned: every parameter that is stepped whole.
        failed_at: where this rank has failed, as in ``Calls``.
        world: the ranks.
        outer: the optimizer's state in the outer form.
        device: the device of the tensors that are sent.
    """
    mine = [each for each in owned if each.owner == world.rank]
    new = {each.index: d for each in mine if (d := whole_state.described(each.state)) != each.description}
    for each in mine:
        each.show_replaced(world, outer)
    if world.size == 1:
        for index, description in new.items():
            owned[index].adopt(description, [], world, outer, device)
        return None
    rows = _gathered_rows(owned, mine, failed_at, bool(new), world, device)
    if any(row[1] for row in rows.values()):
        entries = {
            each.index: (
                whole_state.described(each.state),
                _read(whole_state.numbers(each.state, device)),
            )
            for each in mine
        }
        for part in RankGroup(world.group).all_gather(entries, "optimizer state"):
            for index, (description, numbers) in part.items():
                owned[index].adopt(description, numbers, world, outer, device)
    else:
        values = {rank: iter(row[2:]) for rank, row in rows.items()}
        for each in owned:
            if each.owner != world.rank and each.description:
                each.show(whole_state.set_numbers(dict(outer[each.p]), values[each.owner]), outer)
    failed = {rank: int(row[0]) for rank, row in rows.items() if row[0]}
    return _error_of(*next(iter(failed.items())), owned, world) if failed else None


def _gathered_rows(
    owned: Sequence[WholeParameter],
    mine: Sequence[WholeParameter],
    failed_at: int,
    has_new: bool,
    world: MeshRanks,
    device: torch.device,
) -> dict[int, list[float]]:
    """For each rank: where it failed, whether its descriptions are new, and, if not, its numbers."""
    counts = [0] * world.size
    for each in owned:
        counts[each.owner] += whole_state.count_numbers(each.description)
    numbers = [] if has_new else [n for each in mine for n in whole_state.numbers(each.state, device)]
    # Numbers of the host are filled in: a tensor made of them would be copied to a device, for which the host waits.
    head = [torch.full((1,), value, dtype=torch.float64, device=device) for value in (failed_at, has_new)]
    row = torch.cat([*head, *numbers])
    message = torch.nn.functional.pad(row, (0, 2 + max(counts) - row.numel()))
    everyone = message.new_empty(world.size, message.numel())
    with noted("all-gather of optimizer state", world.group):
        dist.all_gather(list(everyone.unbind()), message, group=world.group)
    return dict(zip(world.order, everyone.tolist(), strict=True))


def _read(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of these tensors of one element, in one read."""
    return torch.cat([*numbers]).tolist() if numbers else []


def _error_of(number: int, at: int, owned: Sequence[WholeParameter], world: MeshRanks) -> Exception:
    rank = dist.get_process_group_ranks(world.group)[world.order.index(number)]
    where = "its local tensors" if at < 0 else f"whole tensors, the first is {owned[at - 1].name!r}"
    return RuntimeError(
        f"The optimizer's step failed on rank {rank}, on {where}; that rank raises the original error. Tensors that "
        "it had not stepped yet were not updated. If the optimizer sends updates only (Muon), they got their weight "
        "decay. All ranks have the same values: load a checkpoint, or continue with these values."
    )
