"""Steps on whole tensors: each is stepped once in the world by its owner, with the optimizer's own code.

What moves where is planned in ``moves``, what state looks like between steps is in ``held``. Here a step is carried
out: in rounds, so that whole tensors never take more than a few times a bounded number of bytes, and so that the moves
of one round overlap with the arithmetic of another.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright._torch import local_of
from shardwright.comm import Communicator
from shardwright.engine.parameter import unit_of
from shardwright.engine.ragged import RaggedTensor
from shardwright.optim import held
from shardwright.optim.calls import Calls
from shardwright.optim.host_state import HostState, host_of_whole, part_of_state
from shardwright.optim.moves import Item, Mover, Moving, Parts, Round, World, balance, in_rounds


class Owned:
    """A parameter that needs to be whole, and the state that belongs to it.

    Attributes:
        owner: number of the rank in its mesh that steps it.
        host: where its state lies between steps, if that is not the device on which it is stepped.
        on_host: whether the parameter and its gradient do, too.
        state: on the owner what the optimizer's own code sees, elsewhere nothing.
        description: what every rank knows of the state.
        seen: the values that are shown outside, to notice what was loaded or edited.
        known: those of ``state`` that are shown so, to notice what a step has replaced.
    """

    __slots__ = (
        *("cost", "description", "host", "index", "known", "name", "on_host", "owner", "p", "seen", "state"),
    )

    def __init__(self, index: int, name: str, p: DTensor | RaggedTensor, cost: float, owner: int) -> None:
        self.index, self.name, self.p, self.cost, self.owner = index, name, p, cost, owner
        unit = unit_of(p)
        self.host = host_of_whole(p)
        self.on_host = unit is not None and unit.host is not None
        self.state: dict[str, Any] = {}
        self.description: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.known: list[Any] = []


class _Step:
    """One round as this rank carries it out."""

    def __init__(self, one: Round, world: World) -> None:
        self.mine = [item for item in one.items if item.owner == world.rank]
        alone = world.size == 1
        self.there = Mover(one.to_owners(world), world, moves=any(not item.is_whole for item in one.items))
        self.back = Mover(one.back(world), world, moves=not alone)


class Owners:
    """The parameters of one mesh that need to be whole, and who steps them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.world = World(mesh)
        self.owned: list[Owned] = []
        self._loads = [0.0] * self.world.size
        self._plans: dict[Any, tuple[Any, list[_Step]]] = {}
        self._comm: Communicator | None = None

    def check(self, entries: list[tuple[str, DTensor | RaggedTensor, float]]) -> None:
        """Refuse, by ValueError, what is sharded over several mesh axes or is a partial sum."""
        for name, p, _ in entries:
            try:
                Parts(p, self.world)
            except ValueError as error:
                raise ValueError(f"Parameter {name!r} cannot be stepped whole. {error}") from None

    def add(self, entries: list[tuple[str, DTensor | RaggedTensor, float]]) -> None:
        """Choose owners for more parameters, given by name, parameter and cost of a step; earlier ones stay."""
        owners = balance([cost for _, _, cost in entries], self._loads)
        first = len(self.owned)
        self.owned += [
            Owned(first + i, name, p, cost, owner)
            for i, ((name, p, cost), owner) in enumerate(zip(entries, owners, strict=True))
        ]

    # -- state between steps

    def settle(self, outer: Any) -> None:
        """Take over state that was loaded or edited. Communicates, on every rank, where it is sharded otherwise."""
        for owned in self.owned:
            state = outer.get(owned.p) or {}
            if _same(held.leaves(state), owned.seen):
                continue
            state = held.settled(state, self.world, owned.owner)
            owned.state = held.inside(state) if owned.owner == self.world.rank else {}
            owned.known = list(held.leaves(owned.state))
            owned.description = held.described(state)
            self._show(owned, state, outer)

    def _show(self, owned: Owned, state: dict[str, Any], outer: Any) -> None:
        if state or owned.p in outer:
            values = outer[owned.p]
            values.clear()
            values.update(state)
        owned.seen = list(held.leaves(state))

    # -- a step

    @torch.no_grad()
    def step(self, locals_: dict[int, torch.Tensor], calls: Calls, groups: dict[int, int], outer: Any,
             meanwhile: Callable[[], None], host_state: HostState | None = None) -> Exception | None:  # fmt: skip
        """Step every parameter that has a gradient, whole; return what to raise if another rank has failed.

        Args:
            locals_: local tensors with their gradients, by the parameter's index.
            calls: how to call the optimizer's own code.
            groups: the number of each parameter's group, by its index.
            outer: the state as shown outside.
            meanwhile: what can be done while the first moves are under way.
            host_state: brings state that lies on the host to the device and back, if there is any.
        """
        active = [owned for owned in self.owned if locals_[owned.index].grad is not None]
        device = self._device()
        self._agree(active, device)
        steps = self._plan(active, locals_)
        coming = self._send_gradients(steps[0], locals_, device) if steps else None
        try:
            meanwhile()
            if steps and host_state is not None:
                self._send_state(steps[0], host_state)
        except Exception as error:  # others wait for what this rank has to send
            calls.failed(error, -1)
        going: tuple[_Step, Moving | None] | None = None
        for number, step in enumerate(steps):
            whole = self._assemble(step, coming, locals_, device)
            coming = None  # its buffers are free from here
            following = steps[number + 1] if number + 1 < len(steps) else None
            if following is not None:
                coming = self._send_gradients(following, locals_, device)
            self._call(step, whole, calls, groups, host_state, following)
            if going is not None:
                self._receive(*going, locals_)
            going = step, self._send_back(step, whole, locals_, device)
            whole = {}
        if going is not None:
            self._receive(*going, locals_)
        self._land(active, host_state)
        return self._report(calls, outer, device)

    def _device(self) -> torch.device:
        """On which whole tensors are stepped and moved."""
        unit = unit_of(self.owned[0].p)
        return unit.ranks.device if unit is not None else local_of(self.owned[0].p).device

    def _land(self, active: list[Owned], host_state: HostState | None) -> None:
        """The host waits for what was copied there: values of parameters, and state."""
        if host_state is not None:
            host_state.settle()
        host = next((owned.host for owned in active if owned.host is not None), None)
        if host is not None:
            host.wait()

    def _plan(self, active: list[Owned], locals_: dict[int, torch.Tensor]) -> list[_Step]:
        # The objects that say how parameters are cut live as long as the plan, so their ids tell one from another.
        cuts = [o.p.spec if isinstance(o.p, RaggedTensor) else o.p.placements for o in active]
        dtypes = [(locals_[o.index].dtype, locals_[o.index].grad.dtype) for o in active]  # type: ignore[union-attr]
        key = tuple((o.index, id(cut), *both) for o, cut, both in zip(active, cuts, dtypes, strict=True))
        if key not in self._plans:
            items = [
                Item(o.index, o.owner, o.cost, Parts(o.p, self.world), o.p.shape, dtype, gradient_dtype)
                for o, (dtype, gradient_dtype) in zip(active, dtypes, strict=True)
            ]
            if len(self._plans) >= 8:  # parameters that have a gradient now and then
                self._plans.clear()
            self._plans[key] = cuts, [_Step(one, self.world) for one in in_rounds(items)]
        return self._plans[key][1]

    def _send_gradients(
        self, step: _Step, locals_: dict[int, torch.Tensor], device: torch.device
    ) -> Moving | None:
        pieces: list[Any] = []
        for piece, which, *_ in step.there.sends:
            local = locals_[piece.item.key]
            pieces.append(local if which else local.grad)
        return step.there.start(pieces, device)

    def _assemble(
        self,
        step: _Step,
        coming: Moving | None,
        locals_: dict[int, torch.Tensor],
        device: torch.device,
    ) -> dict[int, torch.Tensor]:
        """This rank's whole tensors with their gradients, by index."""
        whole: dict[int, torch.Tensor] = {}
        for item in step.mine:
            local = locals_[item.key]
            gradient: Any = local.grad
            as_it_lies = item.is_whole and not self.owned[item.key].on_host
            if as_it_lies:
                full = local.contiguous().view(item.shape)
            else:
                full = torch.empty(item.shape, dtype=local.dtype, device=device)
            if gradient.dtype != full.dtype:
                full.grad_dtype = gradient.dtype
            if as_it_lies:
                full.grad = gradient.contiguous().view(item.shape)
            else:
                full.grad = torch.empty(item.shape, dtype=gradient.dtype, device=device)
                part = item.parts.of[self.world.rank]
                item.parts.view(full, part).copy_(local, non_blocking=True)
                item.parts.view(full.grad, part).copy_(gradient, non_blocking=True)
            whole[item.key] = full
        targets = []
        for piece, which, *_ in step.there.receives:
            full = whole[piece.item.key]
            target: Any = full if which else full.grad
            targets.append(piece.item.parts.view(target, piece.part))
        step.there.finish(coming, targets)
        return whole

    def _call(
        self,
        step: _Step,
        whole: dict[int, torch.Tensor],
        calls: Calls,
        groups: dict[int, int],
        host_state: HostState | None,
        following: _Step | None,
    ) -> None:
        if not whole:
            return
        params: list[list[torch.Tensor]] = [[] for _ in calls.optimizer.param_groups]
        state: Any = defaultdict(dict)
        for index, full in whole.items():
            params[groups[index]].append(full)
            if self.owned[index].state:
                state[full] = self.owned[index].state
        hosts = {full: host for index, full in whole.items() if (host := self.owned[index].host) is not None}
        at = 1 + step.mine[0].key
        if host_state is None or not hosts:
            calls(params, state, at)
        else:
            before = dict(state)
            try:
                state.update(host_state.take(step, next(iter(hosts.values())), part_of_state(state, hosts)))
                if following is not None:
                    self._send_state(following, host_state)
                calls(params, state, at)
                state.update(host_state.give_back(part_of_state(state, hosts)))
            except Exception as error:  # others wait for what this rank has to send
                calls.failed(error, at)
                state = before  # what was taken is over memory that goes
        for index, full in whole.items():
            if full in state:
                self.owned[index].state = state[full]
            full.grad = None

    def _send_state(self, step: _Step, host_state: HostState) -> None:
        mine = [owned for item in step.mine if (owned := self.owned[item.key]).host is not None]
        if mine:
            assert mine[0].host is not None
            host_state.send(step, mine[0].host, [owned.state for owned in mine])

    def _send_back(
        self,
        step: _Step,
        whole: dict[int, torch.Tensor],
        locals_: dict[int, torch.Tensor],
        device: torch.device,
    ) -> Moving | None:
        for item in step.mine:
            local, full = locals_[item.key], whole[item.key]
            if full.data_ptr() != local.data_ptr():  # else it was stepped where it lies
                local.copy_(item.parts.view(full, item.parts.of[self.world.rank]), non_blocking=True)
        pieces = [piece.item.parts.view(whole[piece.item.key], piece.part) for piece, *_ in step.back.sends]
        return step.back.start(pieces, device)

    def _receive(self, step: _Step, moving: Moving | None, locals_: dict[int, torch.Tensor]) -> None:
        step.back.finish(moving, [locals_[piece.item.key] for piece, *_ in step.back.receives])

    # -- what ranks tell each other

    def _agree(self, active: list[Owned], device: torch.device) -> None:
        """All ranks have gradients of the same parameters. Asked on gloo; elsewhere collectives would wait in vain."""
        if self._comm is None:
            self._comm = Communicator(self.world.group, device)
        comm = self._comm
        indices = [owned.index for owned in active]
        if not comm.exchanges or comm.exchange((len(indices), zlib.crc32(repr(indices).encode()))) is None:
            return
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, indices, group=self.world.group)
        ranks = dist.get_process_group_ranks(self.world.group)
        differing = set().union(*everyone).difference(set(everyone[0]).intersection(*everyone))
        owned = self.owned[min(differing)]
        have = [rank for rank, theirs in zip(ranks, everyone, strict=True) if owned.index in theirs]
        raise RuntimeError(
            f"A step on whole tensors expects every rank to have a gradient of parameter {owned.name!r} or none to; "
            f"ranks {have} have one, the others of {ranks} do not. Run the same modules on every rank, or set the "
            "gradients on every rank."
        )

    def _report(self, calls: Calls, outer: Any, device: torch.device) -> Exception | None:
        """Show the new state on every rank, and tell whether one has failed.

        One small all-gather of what only owners know: whether they failed, whether their state has other keys, shapes
        or dtypes than before, and its numbers. The host waits for it, once per step: state dicts need the numbers.
        """
        world = self.world
        mine = [owned for owned in self.owned if owned.owner == world.rank]
        new = {o.index: d for o in mine if (d := held.described(o.state)) != o.description}
        for owned in mine:
            if not _same(held.leaves(owned.state), owned.known):
                state, owned.state = held.shown(owned.state, world, owned.owner)
                owned.known = list(held.leaves(owned.state))
                self._show(owned, state, outer)
        if world.size == 1:
            self._adopt({index: (description, []) for index, description in new.items()}, outer, device)
            return None
        counts = [0] * world.size
        for owned in self.owned:
            counts[owned.owner] += held.count_numbers(owned.description)
        found = [] if new else [n for owned in mine for n in held.numbers(owned.state, device)]
        head = torch.tensor([calls.failed_at, bool(new)], dtype=torch.float64, device=device)
        message = torch.zeros(2 + max(counts), dtype=torch.float64, device=device)
        said = torch.cat([head, *found])
        message[: said.numel()] = said
        everyone = message.new_empty(world.size, message.numel())
        dist.all_gather(list(everyone.unbind()), message, group=world.group)
        by_rank = dict(zip(world.order, everyone.tolist(), strict=True))
        if any(row[1] for row in by_rank.values()):
            told = {
                o.index: (held.described(o.state), [n.item() for n in held.numbers(o.state, device)])
                for o in mine
            }
            gathered: list[Any] = [None] * world.size
            dist.all_gather_object(gathered, told, group=world.group)
            self._adopt({index: entry for part in gathered for index, entry in part.items()}, outer, device)
        else:
            values = {rank: iter(row[2:]) for rank, row in by_rank.items()}
            for owned in self.owned:
                if owned.owner != world.rank and owned.description:
                    state = held.set_numbers(dict(outer[owned.p]), values[owned.owner])
                    self._show(owned, state, outer)
        failed = {rank: int(row[0]) for rank, row in by_rank.items() if row[0]}
        return self._failure(*next(iter(failed.items()))) if failed else None

    def _adopt(self, told: dict[int, Any], outer: Any, device: torch.device) -> None:
        """Know the owners' state by its descriptions and numbers."""
        for index, (description, values) in told.items():
            owned = self.owned[index]
            known, owned.description = owned.description, description
            if owned.owner == self.world.rank:
                continue
            if known == description:
                state = dict(outer[owned.p])
            else:
                state = held.filled(description, device, self.world, owned.owner)
            self._show(owned, held.set_numbers(state, iter(values)), outer)

    def _failure(self, number: int, at: int) -> Exception:
        rank = dist.get_process_group_ranks(self.world.group)[self.world.order.index(number)]
        where = (
            "its local tensors" if at < 0 else f"whole tensors, {self.owned[at - 1].name!r} the first of them"
        )
        return RuntimeError(
            f"The optimizer's step failed on rank {rank}, on {where}; that rank raises the error itself. What it had "
            "yet to step was not updated. All ranks have the same values: load a checkpoint, or go on with these."
        )


def _same(values: Iterable[Any], others: list[Any]) -> bool:
    """Whether these are the very same objects."""
    values = list(values)
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))
