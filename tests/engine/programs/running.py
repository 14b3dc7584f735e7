"""Both models of a program side by side: their optimizers, one forward, one micro-batch, and the comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shardwright as sw
from tests.engine.programs.compare import differences, stale_states, too_far
from tests.engine.programs.grammar import CHOSEN, Forward, Instruction, Micro, Program, show
from tests.engine.programs.model import Net, Used, build, shard
from tests.engine.programs.penalties import penalise
from tests.engine.programs.reference import Gradients, Mismatch, Place, Reference


class Running:
    def __init__(self, program: Program, rank: int, world_size: int, sharded: bool = True) -> None:
        self.spec = program.model if sharded else replace(program.model, precision="fp32")
        self.rank, self.world_size, self.sharded = rank, world_size, sharded
        plain = build(self.spec)
        self.reference = Reference(copy.deepcopy(plain), self.spec, world_size)
        self.model = shard(plain, self.spec, world_size) if sharded else plain
        self.step = 0
        self.wrong: list[str] = []
        self.make_optimizers()

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, steps: Sequence[Instruction]) -> None:
        for self.step, instruction in enumerate(steps):
            getattr(self, f"do_{type(instruction).__name__.lower()}")(instruction)
            self.compare(f"step {self.step}, {show(instruction)}")

    def compare(self, where: str) -> None:
        if self.sharded:
            self.wrong += stale_states(self.model, self.step)
        found = differences(
            self.model, self.reference.model, self.tolerance, self.wrong, adopt=True, zeros=self.spec.zeros
        )
        self.wrong = []
        if found:
            raise Mismatch(f"after {where}:\n" + "\n".join(found))

    @property
    def has_bfloat16(self) -> bool:
        """Whether some layer is bfloat16: then a last bit of what comes into it may become its last bit."""
        return any(p.dtype is torch.bfloat16 for p in self.reference.parameters)

    @property
    def tolerance(self) -> float:
        """The tolerance of gradients. In bfloat16 autograd's sums depend on their order, also on the engine's."""
        return 2e-2 if self.spec.precision == "bf16" else 1e-3 if self.has_bfloat16 else 1e-5

    def expect(
        self, mine: list[torch.Tensor], theirs: list[torch.Tensor], what: str, tolerance: float | None = None
    ) -> None:
        if tolerance is None:
            # A kernel may round otherwise where weights lie otherwise in memory, cut along another dimension.
            tolerance = 4e-3 if self.has_bfloat16 or self.spec.precision == "bf16" else 1e-5
        if len(mine) != len(theirs):
            self.wrong.append(f"{what}: {len(mine)} tensors, expected {len(theirs)}")
        for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            self.wrong += too_far(f"{what} {i}", a.detach().double(), b, 1.0, tolerance)

    def make_optimizers(self) -> None:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            if self.spec.optimizer == "sgd":
                return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
            # A large eps: a gradient that is only rounding must not become a step of full size.
            return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2, weight_decay=0.5)

        self.optimizer, self.expected = make(self.model), make(self.reference.model)
        if self.spec.wrapped and self.sharded:
            self.optimizer = sw.fully_shard_optimizer(self.optimizer)

    def both(self, function: Callable[[Net], Any]) -> None:
        function(self.model)
        function(self.reference.model)

    def used(self, forward: Forward, rank: int) -> Used:
        """The layers that run: those that are units on all ranks or on none, others on some.

        Ranks choose differently only where the blocks' inputs need gradients. Otherwise a block of which this rank uses
        nothing has no graph here and has one elsewhere: backward reaches other units on each rank, which is refused.
        """
        first = self.reference.model.first.parameters()
        alike = not forward.input_grad and (forward.direct or not any(p.requires_grad for p in first))
        # A loss that is not made of the output reaches later blocks only through what their layers keep.
        alike |= forward.loss == "hidden" and any(
            p.kind == "auxiliary" for b in self.spec.blocks for p in b.pieces
        )
        rank = 0 if alike else rank
        number = 0
        used = []
        for block in self.spec.blocks:
            bits = [number + i + (0 if piece.unit else 3 * rank) for i, piece in enumerate(block.pieces)]
            used.append(tuple(not forward.unused >> (bit % 12) & 1 for bit in bits))
            number += len(block.pieces)
        return tuple(used)

    # -- forward --------------------------------------------------------------------------------------------------

    def call(
        self, model: Net, forward: Forward, x: torch.Tensor, rank: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of one forward, and what it is made of."""
        for layer in model.every_layer():
            layer.loss = None
        calls, used = forward.calls, self.used(forward, rank)
        if forward.input_grad and torch.is_grad_enabled():
            x = x.requires_grad_()
        if forward.direct:  # only blocks that are units can be called on their own
            calls = tuple(c for c in calls if self.spec.blocks[c.block % len(self.spec.blocks)].unit)
            hidden = model.run_blocks(x, calls, used)
            parts = hidden[-1:]
        else:
            output = model(x, calls, used)
            hidden = output["hidden"]
            parts = {
                "output": [output["y"]],
                "hidden": hidden[:1] or [output["y"]],
                "both": [*hidden[1:2], output["y"]],
            }[forward.loss]
        extra = [layer.loss for layer in model.every_layer() if layer.loss is not None]
        loss = torch.zeros(())
        for part in parts:
            loss = loss + part.float().square().mean() + 0.3 * part.float().mean()
        for part in extra:
            loss = loss + part
        return loss, [*hidden, *parts, *extra]

    def chosen(self, model: Net, pattern: str) -> list[torch.Tensor]:
        """The parameters in ``inputs`` of a backward: all, or every second."""
        trained: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        return trained if pattern == "all inputs" else trained[self.step % 2 :: 2] or trained

    def train_micro(
        self,
        model: Net,
        micro: Micro,
        place: Place,
        cast: Callable[[torch.Tensor], torch.Tensor],
        go: Callable[[int, torch.Tensor], bool],
        after: Callable[[], None],
        between: Callable[[], None],
        returned: Callable[[Gradients], None],
    ) -> list[torch.Tensor]:
        """Forward and backward of one micro-batch; ``go`` says whether a loss has a backward, ``after`` follows it."""
        rank = place.rank
        first, parts = self.call(model, micro.forward, cast(place.x()), rank)
        other = Forward(micro.forward.calls[::-1], micro.forward.unused >> 1, True)
        losses = [first]
        if micro.pattern in ("two forwards", "each", "each reversed", "dropped"):
            second, more = self.call(model, other, cast(place.x(1)), rank)
            parts = parts + more
            if micro.pattern == "two forwards":
                losses = [first + second]
            elif micro.pattern != "dropped":
                losses = [first, second]
        if micro.penalty is not None:
            losses[0] = penalise(losses[0], model, micro.penalty, rank)
        between()
        outputs = [p.detach().clone() for p in [*parts, *losses]]
        order = list(enumerate(losses))
        for number, loss in reversed(order) if micro.pattern == "each reversed" else order:
            if not go(number, loss):
                continue
            if micro.pattern == "two backwards":
                loss.backward(retain_graph=True)
                after()
            if micro.pattern in CHOSEN:
                inputs = self.chosen(model, micro.pattern)
                if micro.pattern == "grad":
                    returned(list(torch.autograd.grad(loss, inputs, allow_unused=True)))
                    continue
                loss.backward(inputs=inputs)
            else:
                loss.backward()
            after()
        return outputs

    def start_again(self) -> None:
        """Parameters may be other objects now, as the plain model's are: gradients and optimizers start again."""
        self.reference.renew()
        for model in (self.model, self.reference.model):
            for p in model.parameters():
                p.grad = None
        self.model.zero_grad()
        self.make_optimizers()

    def clear(self, how: str, set_to_none: bool = True) -> None:
        # Neither torch's own optimizers nor a None by hand can give up what is held, since .grad is None meanwhile.
        if how == "model" or (how == "optimizer" and self.spec.wrapped):
            self.reference.held = []
        pairs = ((self.model, self.optimizer), (self.reference.model, self.expected))
        for model, optimizer in pairs:
            if how == "model":
                model.zero_grad(set_to_none=set_to_none)
            elif how == "optimizer":
                optimizer.zero_grad(set_to_none=set_to_none)
            else:
                for p in model.parameters():
                    p.grad = None
