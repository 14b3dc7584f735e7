"""Steps on whole tensors: one rank, the owner, steps each tensor with the optimizer's own code, or computes its update.

``moves`` plans the moves of tensors, ``rounds`` runs them. ``updates`` has the optimizers that compute updates,
``reports`` the messages between ranks, ``owned`` a parameter's state. This file makes a step of them, in rounds. Rounds
bound the memory of whole tensors. The moves of one round overlap with the arithmetic of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.engine import RaggedTensor, unit_of
from shardwright.engine.comm import Communicator
from shardwright.engine.compat import local_of
from shardwright.optim.calls import PartialSteps
from shardwright.optim.host_state import HostState, part_of_state
from shardwright.optim.moves import MeshRanks, Moving, RankParts, StepItem, balance, in_rounds
from shardwright.optim.owned import WholeParameter
from shardwright.optim.reports import agree, report
from shardwright.optim.rounds import Locals, RankRound
from shardwright.optim.updates import Updates

#: A parameter's name, the parameter, the cost of its step, and how its step is divided, if it is.
OwnedTensor = tuple[str, DTensor | RaggedTensor, float, Updates | None]


class Owners:
    """The parameters of one mesh that need to be whole, and who steps them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.world = MeshRanks(mesh)
        self.owned: list[WholeParameter] = []
        self._loads = [0.0] * self.world.size
        self._plans: dict[Any, tuple[Any, list[RankRound]]] = {}
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
        first = len(self.owned)
        self.owned += [
            WholeParameter(first + i, *entry, owner)
            for i, (entry, owner) in enumerate(zip(entries, owners, strict=True))
        ]

    def settle(self, outer: Any) -> None:
        """Adopt state that was loaded or edited. If it is sharded in another way, all ranks communicate."""
        for owned in self.owned:
            owned.settle(self.world, outer)

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
        device = self._device()
        if self._comm is None:
            self._comm = Communicator(self.world.group, device)
        agree(active, self.owned, self.world, self._comm)
        rounds = self._plan(active, locals_)
        coming = rounds[0].send_gradients(locals_, device) if rounds else None
        try:
            meanwhile()
            if rounds and host_state is not None:
                self._send_state(rounds[0], host_state)
        except Exception as error:  # others wait for what this rank has to send
            calls.failed(error, -1)

        def apply(index: int, local: torch.Tensor, update: torch.Tensor) -> None:
            owned = self.owned[index]
            assert owned.updates is not None
            try:
                owned.updates.apply(local, update, calls.optimizer.param_groups[groups[index]], owned.p.shape)
            except Exception as error:  # others wait for what this rank has to send
                calls.failed(error, -1)

        going: tuple[RankRound, Moving | None] | None = None
        for number, one in enumerate(rounds):
            whole = one.assemble(coming, locals_, device)
            coming = None  # frees its buffers
            following = rounds[number + 1] if number + 1 < len(rounds) else None
            if following is not None:
                coming = following.send_gradients(locals_, device)
            self._call(one, whole, calls, groups, host_state, following)
            if going is not None:
                going[0].receive(going[1], locals_, apply)
            going = one, one.send_back(whole, locals_, device, apply)
            whole = {}
        if going is not None:
            going[0].receive(going[1], locals_, apply)
        self._land(active, host_state)
        return report(self.owned, calls.failed_at, self.world, outer, device)

    def _device(self) -> torch.device:
        """The device on which whole tensors are stepped and moved."""
        unit = unit_of(self.owned[0].p)
        return unit.ranks.device if unit is not None else local_of(self.owned[0].p).device

    def _land(self, active: list[WholeParameter], host_state: HostState | None) -> None:
        """Let the host wait for copies to it: values of parameters, and state."""
        if host_state is not None:
            host_state.settle()
        host = next((owned.host for owned in active if owned.host is not None), None)
        if host is not None:
            host.wait()

    def _plan(self, active: list[WholeParameter], locals_: Locals) -> list[RankRound]:
        # The cut objects live as long as the plan, so their ids are unique.
        cuts = [o.p.spec if isinstance(o.p, RaggedTensor) else o.p.placements for o in active]
        dtypes = [(locals_[o.index].dtype, locals_[o.index].grad.dtype) for o in active]  # type: ignore[union-attr]
        key = tuple((o.index, id(cut), *both) for o, cut, both in zip(active, cuts, dtypes, strict=True))
        if key not in self._plans:
            items = [
                StepItem(
                    *(o.index, o.owner, o.cost, RankParts(o.p, self.world), o.p.shape),
                    dtype=dtype if o.updates is None else o.updates.dtype,
                    gradient_dtype=gradient_dtype,
                    sends_update=o.updates is not None,
                )
                for o, (dtype, gradient_dtype) in zip(active, dtypes, strict=True)
            ]
            if len(self._plans) >= 8:  # parameters that have a gradient only in some steps
                self._plans.clear()
            self._plans[key] = cuts, [RankRound(one, self.world, self.owned) for one in in_rounds(items)]
        return self._plans[key][1]

    def _call(
        self,
        one: RankRound,
        whole: Locals,
        calls: PartialSteps,
        groups: dict[int, int],
        host_state: HostState | None,
        following: RankRound | None,
    ) -> None:
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
        if host_state is None or not hosts:
            self._step_or_update(whole, state, calls, groups, at)
        else:
            before = dict(state)
            try:
                state.update(host_state.take(one, next(iter(hosts.values())), part_of_state(state, hosts)))
                if following is not None:
                    self._send_state(following, host_state)
                self._step_or_update(whole, state, calls, groups, at)
                state.update(host_state.give_back(part_of_state(state, hosts)))
            except Exception as error:  # others wait for what this rank has to send
                calls.failed(error, at)
                state = before  # the taken state is in memory that is released
        for index, full in tensors.items():
            if full in state:
                self.owned[index].state = state[full]
            full.grad = None
            updates = self.owned[index].updates
            if updates is not None and whole[index] is full:  # a failure; others wait for an update
                whole[index] = torch.zeros_like(full, dtype=updates.dtype)

    def _step_or_update(
        self, whole: Locals, state: Any, calls: PartialSteps, groups: dict[int, int], at: int
    ) -> None:
        """Run the optimizer's own code on tensors without updates, and compute the updates of the others."""
        params: list[list[torch.Tensor]] = [[] for _ in calls.optimizer.param_groups]
        for index, full in whole.items():
            if self.owned[index].updates is None:
                params[groups[index]].append(full)
        if any(params):
            calls(params, state, at)
        for index, gradient in whole.items():
            updates = self.owned[index].updates
            if updates is None or calls.failure is not None:
                continue
            try:
                update = updates.compute(
                    gradient, state[gradient], calls.optimizer.param_groups[groups[index]]
                )
                whole[index] = _checked(update, gradient.shape, updates.dtype)
            except Exception as error:  # others wait for what this rank has to send
                calls.failed(error, 1 + index)

    def _send_state(self, one: RankRound, host_state: HostState) -> None:
        """Begin to copy the state of a round's tensors to the device."""
        mine = [owned for item in one.mine if (owned := self.owned[item.key]).host is not None]
        if mine:
            assert mine[0].host is not None
            host_state.send(one, mine[0].host, [owned.state for owned in mine])


def _checked(update: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The update in contiguous memory."""
    if update.shape != shape or update.dtype != dtype:
        raise ValueError(
            f"An optimizer's update is expected to have the gradient's shape {tuple(shape)} and the dtype {dtype} of "
            f"its Updates, found {tuple(update.shape)} and {update.dtype}."
        )
    return update.contiguous()
