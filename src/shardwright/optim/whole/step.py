"""Steps on whole tensors: one rank, the owner, steps each tensor with the optimizer's own code, or computes its update.

Steps go in rounds, which bound the memory of whole tensors. The moves of one round overlap with the arithmetic of
another. Before a step ranks agree on the gradients that exist, and after it on its result.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedTensor, RankGroup, unit_of
from shardwright.engine.comm import Communicator, noted
from shardwright.engine.compat import local_of
from shardwright.optim.calls import PartialSteps
from shardwright.optim.host_state import HostState, part_of_state
from shardwright.optim.whole.plan import Locals, MeshRanks, RankParts, Round, WholePiece, balance, in_rounds
from shardwright.optim.whole.state import WholeParameter, count_numbers, described, numbers
from shardwright.optim.whole.updates import Updates

#: A parameter's name, the parameter, the cost of its step, and how its step is divided, if it is.
OwnedTensor = tuple[str, DTensor | RaggedTensor, float, Updates | None]


class Owners:
    """The parameters of one mesh that need to be whole, and who steps them.

    Attributes:
        owned: the parameters. The index of each is its key in the plan.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.world = MeshRanks(mesh)
        self.owned: list[WholeParameter] = []
        self._loads = [0.0] * self.world.size
        self._plans: dict[Any, tuple[Any, list[Round]]] = {}
        self._comm: Communicator | None = None

    def check(self, entries: list[OwnedTensor]) -> None:
        """Raise ValueError for parameters that are sharded over several mesh axes or are partial sums."""
        for name, p, *_ in entries:
            try:
                RankParts(p, self.world)
            except ValueError as error:
                raise ValueError(f"No rank can step parameter {name!r} whole. {error}") from None

    def add(self, entries: list[OwnedTensor]) -> None:
        """Choose owners for more parameters. Earlier owners stay."""
        owners = balance([cost for _, _, cost, _ in entries], self._loads)
        for entry, owner in zip(entries, owners, strict=True):
            self.owned.append(WholeParameter(len(self.owned), self.world, *entry, owner))

    def settle(self, outer: Any) -> None:
        """Adopt state that was loaded or edited. If it is sharded in another way, all ranks communicate."""
        for owned in self.owned:
            owned.settle(outer)

    @torch.no_grad()
    def step(self, locals_: Locals, calls: PartialSteps, groups: dict[int, int], outer: Any,
             meanwhile: Callable[[], None], host_state: HostState | None = None) -> Exception | None:  # fmt: skip
        """Step every parameter that has a gradient, whole. Returns the error to raise if another rank has failed.

        Args:
            locals_: local tensors with their gradients, by the parameter's index.
            calls: how to call the optimizer's own code.
            groups: the number of each parameter's group, by its index.
            outer: the state in the outer form.
            meanwhile: a function to call while the first moves run.
            host_state: moves state from the host to the device and back, if any is stored there.
        """
        active = [owned for owned in self.owned if locals_[owned.index].grad is not None]
        unit = unit_of(self.owned[0].p)
        device = unit.ranks.device if unit is not None else local_of(self.owned[0].p).device
        if self._comm is None:
            self._comm = Communicator(self.world.group, device)
        self._agree(active, self._comm)
        rounds = self._plan(active, locals_)
        step = _RoundSteps(self.owned, calls, groups, host_state)
        for one in rounds[:1]:
            one.send_gradients(locals_, device)
        with calls.holding():
            meanwhile()
            for one in rounds[:1]:
                step.send_state(one)
        before: Round | None = None
        for number, one in enumerate(rounds):
            whole = one.assemble(locals_, device)
            following = rounds[number + 1] if number + 1 < len(rounds) else None
            if following is not None:
                following.send_gradients(locals_, device)
            step.run(one, whole, following)
            if before is not None:
                before.receive(locals_, step.apply)
            one.send_back(whole, locals_, device, step.apply)
            before, whole = one, {}
        if before is not None:
            before.receive(locals_, step.apply)
        if host_state is not None:
            host_state.settle()
        for host in [owned.host for owned in active if owned.host is not None][:1]:
            host.wait()  # for copies of parameters' values to it
        return self._report(calls.failed_at, outer, device)

    def _plan(self, active: list[WholeParameter], locals_: Locals) -> list[Round]:
        """Return the rounds for the parameters that have a gradient. Plans are kept, because most steps are alike."""
        # The cut objects live as long as the plan, so their ids are unique.
        cuts = [o.p.spec if isinstance(o.p, RaggedTensor) else o.p.placements for o in active]
        dtypes = [(locals_[o.index].dtype, locals_[o.index].grad.dtype) for o in active]  # type: ignore[union-attr]
        key = tuple((o.index, id(cut), *both) for o, cut, both in zip(active, cuts, dtypes, strict=True))
        if key not in self._plans:
            pieces = [
                WholePiece(
                    *(o.index, o.owner, o.cost, RankParts(o.p, self.world), o.p.shape),
                    dtype=dtype if o.updates is None else o.updates.dtype,
                    gradient_dtype=gradient_dtype,
                    sends_update=o.updates is not None,
                    on_host=o.on_host,
                )
                for o, (dtype, gradient_dtype) in zip(active, dtypes, strict=True)
            ]
            if len(self._plans) >= 8:  # parameters that have a gradient only in some steps
                self._plans.clear()
            self._plans[key] = cuts, [Round(one, self.world) for one in in_rounds(pieces)]
        return self._plans[key][1]

    # -- what ranks tell one another -----------------------------------------------------------------------------------

    def _agree(self, active: Sequence[WholeParameter], comm: Communicator) -> None:
        """Raise if ranks have gradients of different parameters. This is checked only on gloo.

        Raises:
            RuntimeError: names a parameter, and the ranks that have its gradient.
        """
        indices = [each.index for each in active]
        if not comm.exchanges or comm.exchange((len(indices), zlib.crc32(repr(indices).encode()))) is None:
            return
        everyone = RankGroup(self.world.group).all_gather(indices, "optimizer state")
        ranks = dist.get_process_group_ranks(self.world.group)
        differing = set().union(*everyone).difference(set(everyone[0]).intersection(*everyone))
        first = self.owned[min(differing)]
        have = [rank for rank, theirs in zip(ranks, everyone, strict=True) if first.index in theirs]
        raise RuntimeError(
            f"A step on whole tensors needs a gradient of parameter {first.name!r} on every rank or on none; ranks "
            f"{have} have one, the other ranks of {ranks} do not. Run the same modules on every rank, or set the "
            "gradients on every rank."
        )

    def _report(self, failed_at: int, outer: Any, device: torch.device) -> Exception | None:
        """Show the new state on every rank. Returns the error to raise if another rank has failed.

        Owners send this in one small all-gather: whether they failed, whether keys, shapes or dtypes of their state
        changed, and its numbers. The host waits for it once per step, because state dicts need the numbers.

        Args:
            failed_at: where this rank has failed, as in :class:`PartialSteps`.
            outer: the optimizer's state in the outer form.
            device: the device of the tensors that are sent.
        """
        mine = [each for each in self.owned if each.is_mine]
        descriptions = [described(each.state) for each in mine]
        has_new = any(d != each.description for d, each in zip(descriptions, mine, strict=True))
        for each in mine:
            each.show_replaced(outer)
        if self.world.size == 1:
            rows = {}
            for each, description in zip(mine, descriptions, strict=True):
                each.description = description
        else:
            rows = self._gathered_rows(failed_at, has_new, mine, device)
        if any(row[1] for row in rows.values()):
            entries = {
                each.index: (description, _read(numbers(each.state, device)))
                for each, description in zip(mine, descriptions, strict=True)
            }
            for part in RankGroup(self.world.group).all_gather(entries, "optimizer state"):
                for index, (description, values) in part.items():
                    self.owned[index].adopt(description, iter(values), outer, device)
        else:
            values_of = {rank: iter(row[2:]) for rank, row in rows.items()}
            for each in self.owned if rows else ():
                each.adopt(each.description, values_of[each.owner], outer, device)
        for number, row in rows.items():
            if row[0]:
                return self._error_of(number, int(row[0]))
        return None

    def _gathered_rows(
        self, failed_at: int, has_new: bool, mine: list[WholeParameter], device: torch.device
    ) -> dict[int, list[float]]:
        """Return for each rank: where it failed, whether its descriptions are new, and, if not, its numbers."""
        counts = [0] * self.world.size
        for each in self.owned:
            counts[each.owner] += count_numbers(each.description)
        values = [] if has_new else [n for each in mine for n in numbers(each.state, device)]
        # Numbers of the host are filled in: a tensor made of them would be copied to a device, for which the host
        # waits.
        head = [torch.full((1,), each, dtype=torch.float64, device=device) for each in (failed_at, has_new)]
        row = torch.cat([*head, *values])
        message = torch.nn.functional.pad(row, (0, 2 + max(counts) - row.numel()))
        everyone = message.new_empty(self.world.size, message.numel())
        with noted("all-gather of optimizer state", self.world.group):
            dist.all_gather(list(everyone.unbind()), message, group=self.world.group)
        return dict(zip(self.world.order, everyone.tolist(), strict=True))

    def _error_of(self, number: int, at: int) -> Exception:
        rank = dist.get_process_group_ranks(self.world.group)[self.world.order.index(number)]
        where = "its local tensors" if at < 0 else f"whole tensors, the first is {self.owned[at - 1].name!r}"
        return RuntimeError(
            f"The optimizer's step failed on rank {rank}, on {where}; that rank raises the original error. Tensors "
            "that it had not stepped yet were not updated. If the optimizer sends updates only (Muon), they got their "
            "weight decay. All ranks have the same values: load a checkpoint, or continue with these values."
        )


def _read(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of these tensors of one element, in one read."""
    return torch.cat([*tensors]).tolist() if tensors else []


@dataclass
class _RoundSteps:
    """The arithmetic of one step on this rank, round by round.

    Its exceptions go into ``calls`` and end the arithmetic of the step, but not its moves, because other ranks wait for
    what this rank sends.
    """

    owned: list[WholeParameter]
    calls: PartialSteps
    groups: dict[int, int]  #: the number of each parameter's group, by its index
    host_state: HostState | None

    def _group(self, index: int) -> dict[str, Any]:
        return self.calls.optimizer.param_groups[self.groups[index]]

    def run(self, one: Round, whole: Locals, following: Round | None) -> None:
        """Step this rank's whole tensors of a round. Updates replace gradients in ``whole``."""
        if not whole:
            return
        tensors = dict(whole)
        state: Any = defaultdict(dict)
        for index, full in tensors.items():
            if self.owned[index].state:
                state[full] = self.owned[index].state
        hosts = {
            full: host for index, full in tensors.items() if (host := self.owned[index].host) is not None
        }
        at = 1 + one.mine[0].key
        if self.host_state is None or not hosts:
            self._step_or_update(whole, state, at)
        else:
            with self.calls.holding(
                at
            ):  # after a failure state stays on the host, since the device's is released
                host = next(iter(hosts.values()))
                on_device = state | self.host_state.take(one, host, part_of_state(state, hosts))
                if following is not None:
                    self.send_state(following)
                self._step_or_update(whole, on_device, at)
                state = on_device | self.host_state.give_back(part_of_state(on_device, hosts))
        for index, full in tensors.items():
            if full in state:
                self.owned[index].state = state[full]
            full.grad = None
            updates = self.owned[index].updates
            if updates is not None and whole[index] is full:  # a failure; others wait for an update
                whole[index] = torch.zeros_like(full, dtype=updates.dtype)

    def _step_or_update(self, whole: Locals, state: Any, at: int) -> None:
        """Run the optimizer's own code on tensors without updates, and compute the updates of the others."""
        params: list[list[torch.Tensor]] = [[] for _ in self.calls.optimizer.param_groups]
        for index, full in whole.items():
            if self.owned[index].updates is None:
                params[self.groups[index]].append(full)
        if any(params):
            self.calls(params, state, at)
        for index, gradient in whole.items():
            updates = self.owned[index].updates
            if updates is not None and self.calls.failure is None:
                with self.calls.holding(1 + index):
                    update = updates.compute(gradient, state[gradient], self._group(index))
                    whole[index] = _checked(update, gradient.shape, updates.dtype)

    def send_state(self, one: Round) -> None:
        """Begin to copy the state of a round's tensors to the device."""
        mine = [owned for piece in one.mine if (owned := self.owned[piece.key]).host is not None]
        if mine and self.host_state is not None:
            assert mine[0].host is not None
            self.host_state.send(one, mine[0].host, [owned.state for owned in mine])

    def apply(self, index: int, local: torch.Tensor, update: torch.Tensor) -> None:
        """Apply a part of an update to a local tensor."""
        owned = self.owned[index]
        assert owned.updates is not None
        with self.calls.holding():
            owned.updates.apply(local, update, self._group(index), owned.p.shape)


def _checked(update: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the update in contiguous memory."""
    if update.shape != shape or update.dtype != dtype:
        raise ValueError(
            f"An optimizer's update is expected to have the gradient's shape {tuple(shape)} and the dtype {dtype} of "
            f"its Updates, found {tuple(update.shape)} and {update.dtype}."
        )
    return update.contiguous()
