"""The training statement of a program: micro-batches, what leaves reductions undone, and when gradients show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import shardwright as sw
from shardwright.engine import UNIT, unit_of
from tests.engine.programs.compare import full, too_far
from tests.engine.programs.grammar import CHOSEN, Forward, Micro, Train
from tests.engine.programs.model import Net
from tests.engine.programs.reference import Gradients, Place
from tests.engine.programs.running import Running


class Training(Running):
    def do_train(self, train: Train) -> None:
        for i, micro in enumerate(train.micros):
            switches = self.switches(train, i)
            if switches and micro.forward.direct:
                continue  # before the root's first call its units have other roots
            self.do_micro(micro, i, switches)

    def switches(self, train: Train, number: int) -> dict[str, set[int]]:
        """The switches that are off in a micro-batch, and for which blocks: -1 means the whole model."""
        ends = number == len(train.micros) - 1
        off: dict[str, set[int]] = {}
        if train.hold == "open" or (train.hold == "yes" and not ends):
            off["sync"] = {-1}
        elif train.hold == "mixed" and not ends:
            off["last" if number else "sync"] = {-1}
        elif train.hold == "late open" or (train.hold == "late" and not ends):
            off["last"] = {-1}
        elif train.hold == "no all-reduce" and not ends:
            off["all-reduce"] = {-1}
        elif train.hold == "one waits":
            off["all-reduce"] = {self.step % len(self.spec.blocks)}
        elif train.hold == "one holds" and not ends:
            off["sync"] = {self.step % len(self.spec.blocks)}
        return off if self.sharded else {}

    def switch(self, off: dict[str, set[int]], on: bool) -> None:
        for what, blocks in off.items():
            for i in blocks:
                module: Any = self.model.blocks[i] if i >= 0 else self.model
                if not isinstance(module, sw.FSDPModule):
                    continue
                if what == "sync":
                    module.set_requires_gradient_sync(on, recurse=i < 0)
                elif what == "all-reduce":
                    module.set_requires_all_reduce(on, recurse=i < 0)
                else:
                    module.set_is_last_backward(on)

    def shown(self, off: dict[str, set[int]]) -> list[bool]:
        """For each parameter whether its gradient is complete after a backward with these switches off."""
        named = {i: block.__dict__.get(UNIT) for i, block in enumerate(self.model.blocks)}
        shape = self.spec.sharding.shape(self.world_size)
        found = []
        for p in self.model.parameters():
            if not off:
                found.append(True)
                continue
            unit = unit_of(p)
            here = {
                what for what, blocks in off.items() if -1 in blocks or any(named[i] is unit for i in blocks)
            }
            stages = unit.ranks.strategy.stages
            waits = any(size > 1 and stage < 2 for size, stage in zip(shape, stages, strict=True))
            found.append("sync" not in here and not (waits and here))
        return found

    def do_micro(self, micro: Micro, number: int, off: dict[str, set[int]]) -> None:
        reference = self.reference
        if micro.pattern in CHOSEN and (
            off or reference.held or micro.between == "freeze" or self.checkpoints(micro.forward)
        ):
            micro = replace(micro, pattern="plain")  # what torch or the engine refuses beside them
        if off or reference.held or micro.between == "freeze" or self.spec.precision == "bf16":
            # Gradients of penalties are complete at once, and penalties are of the stored weights.
            micro = replace(micro, penalty=None)
        frozen = [
            p for i, p in enumerate(self.reference.parameters) if i % 3 == self.step % 3 and p.requires_grad
        ]
        names = [n for n, p in reference.model.named_parameters() if any(p is q for q in frozen)]
        backwards: list[list[Gradients]] = []  # by rank and backward
        goes: list[dict[int, bool]] = []
        expected: list[torch.Tensor] = []
        their_chosen: list[Gradients] = []
        my_chosen: list[Gradients] = []
        for rank in range(self.world_size):
            work = reference.work()
            mine: list[Gradients] = []
            does: dict[int, bool] = {}
            backwards.append(mine)
            goes.append(does)

            def go(number: int, loss: torch.Tensor, does: dict[int, bool] = does) -> bool:
                does[number] = loss.requires_grad
                return loss.requires_grad

            def harvest(work: Net = work, mine: list[Gradients] = mine) -> None:
                mine.append([p.grad for p in work.parameters()])
                for p in work.parameters():
                    p.grad = None

            result = self.train_micro(
                work,
                micro,
                Place(self.step, number, rank),
                reference.x,
                go,
                harvest,
                lambda work=work, rank=rank: self.between(work, micro, names, reference.x, number, rank),
                their_chosen.append,
            )
            if rank == self.rank:
                expected = result
        if len({tuple(sorted(does.items())) for does in goes}) > 1:
            return  # backward on some ranks only: that is for the ranks to refuse
        if micro.pattern in CHOSEN:
            reached = [[*their_chosen[rank : rank + 1], *backwards[rank]] for rank in range(self.world_size)]
            if len({tuple(g is not None for each in rank for g in each) for rank in reached}) > 1:
                return  # so is this: units may be reached on some ranks only
        self.switch(off, False)
        if micro.unshard:
            for call in micro.forward.calls:
                block = self.model.blocks[call.block % len(self.model.blocks)]
                if isinstance(block, sw.FSDPModule):
                    block.unshard(async_op=call.block == 1)
        result = self.train_micro(
            self.model,
            micro,
            Place(self.step, number, self.rank),
            lambda x: x,
            lambda n, loss: goes[0][n],
            lambda: None,
            lambda: self.between(self.model, micro, names, lambda x: x, number, self.rank),
            my_chosen.append,
        )
        self.switch(off, True)
        self.expect(result, expected, f"micro-batch {number}: output")
        if my_chosen:
            self.compare_chosen(my_chosen[0], their_chosen, number)
        for harvests in zip(*backwards, strict=True):
            reference.add(list(harvests), self.shown(off))
        if micro.between == "freeze":
            for name in names:
                self.model.get_parameter(name).requires_grad_(True)

    def compare_chosen(self, mine: Gradients, theirs: list[Gradients], number: int) -> None:
        """Compare the results of torch.autograd.grad: the averages over the ranks, each in its place."""
        for i, parts in enumerate(zip(*theirs, strict=True)):
            there = [part.double() for part in parts if part is not None]
            found, what = mine[i], f"micro-batch {number}: gradient {i} returned"
            if not there:
                if found is not None and full(found).any():
                    self.wrong.append(f"{what} is not None, and no rank used the parameter")
                continue
            if found is None:
                self.wrong.append(f"{what} is None")
                continue
            mean = torch.stack(there).sum(0) / self.world_size
            whole = full(found).double()
            loose = 3e-2 if found.dtype is torch.bfloat16 else 0.0
            self.wrong += too_far(what, whole, mean, 2e-2 if mean.ndim else 1e-1, max(self.tolerance, loose))

    def between(
        self,
        model: Net,
        micro: Micro,
        names: list[str],
        cast: Callable[[torch.Tensor], torch.Tensor],
        number: int,
        rank: int,
    ) -> None:
        place = Place(self.step, number, rank)
        if micro.between == "evaluate":
            with torch.no_grad():
                self.call(model, Forward(micro.forward.calls[::-1]), cast(place.x(2)), rank)
        elif micro.between == "other forward":
            self.call(model, Forward(micro.forward.calls[1:], input_grad=True), cast(place.x(2)), rank)
        elif micro.between == "freeze" and not self.checkpoints(micro.forward):
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        elif micro.between == "state dict":
            model.state_dict()

    def checkpoints(self, forward: Forward) -> bool:
        """Whether anything is recomputed; torch refuses a recomputation that saves other tensors than the forward."""
        return any(c.checkpoint != "none" for c in forward.calls) or any(
            b.inside != "none" for b in self.spec.blocks
        )
