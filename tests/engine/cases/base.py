"""The parts of a case: a micro-batch, a behaviour, the models that it starts from, and the table of cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: its place, and data that no other place has."""

    step: int
    micro: int
    micros: int
    rank: int
    world_size: int
    dtype: torch.dtype

    def randn(self, *shape: int, slot: int = 0) -> torch.Tensor:
        """Values that bfloat16 holds exactly, so that casting inputs early or late makes no difference."""
        return torch.randn(shape, generator=self._generator(slot)).bfloat16().to(self.dtype)

    @property
    def x(self) -> torch.Tensor:
        return self.randn(3, DIM)

    @property
    def ids(self) -> torch.Tensor:
        return torch.randint(0, 11, (2, 4), generator=self._generator(9))

    def _generator(self, slot: int) -> torch.Generator:
        seed = ((self.step * 10 + self.micro) * 10 + self.rank) * 10 + slot
        return torch.Generator().manual_seed(seed)


class Case:
    """A behaviour. Subclasses override what they need; instances carry the variant."""

    steps = 3
    precisions: tuple[str, ...] = ("fp32", "bf16")
    #: Whether the plain model adds up in bfloat16 what is added in float32 (several backwards in a micro-batch), or in
    #: another order (nodes of the engine take part in the order in which autograd runs branches).
    sums_differ_in_bf16 = False
    rebuild_optimizer = False  #: after every edit, since parameters or the model are others

    def build(self) -> nn.Module:
        return Net()

    def units(self, model: Any) -> list[Any]:
        """The modules to which ``fully_shard`` is applied, inner units first; the last is usually the model."""
        return [*model.blocks, model]

    def before_sharding(self, model: Any) -> None:
        """Also done to the plain model."""

    def after_sharding(self, model: Any) -> None:
        """Also done to the plain model."""

    def clone(self, model: nn.Module) -> nn.Module:
        """A plain model to compute one micro-batch on."""
        return copy.deepcopy(model)

    def edit(self, model: Any, step: int) -> nn.Module | None:
        """The user's work before a step, gradients being None; may return another model to go on with."""

    def between(self, model: Any, step: int, micro: int) -> None:
        """The user's work before a micro-batch."""

    def mishap(self, model: Any, batch: Batch) -> None:
        """Something that fails before the step and must leave no trace after ``zero_grad``."""

    def train(self, model: Any, batch: Batch) -> Any:
        """Forward and backward of one micro-batch; returns what is to be equal, too."""
        loss = loss_of(model(batch.x))
        loss.backward()
        return loss

    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> Any:
        """The optimizer's step; returns what is to be equal, too."""
        optimizer.step()


def loss_of(*outputs: torch.Tensor) -> torch.Tensor:
    """A loss of which no gradient is zero by symmetry."""
    return sum(
        (y.float().square().mean() + 0.3 * y.float().sum() / y.numel() for y in outputs), torch.zeros(())
    )


DIM, HIDDEN = 6, 5  # HIDDEN divides evenly over neither 2 nor 3 ranks


class Block(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Input layer, blocks, output layer; ``path`` says which blocks run, in which order."""

    def __init__(self, layers: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor, path: tuple[int, ...] | None = None) -> torch.Tensor:
        x = self.first(x)
        for i in range(len(self.blocks)) if path is None else path:
            x = self.blocks[i](x)
        return self.head(x)


CASES: dict[str, Case] = {}


def case(name: str, *arguments: Any, **options: Any) -> Callable[[type[Case]], type[Case]]:
    """Enter an instance of the class into the matrix; a class may be entered several times."""

    def enter(cls: type[Case]) -> type[Case]:
        assert name not in CASES
        CASES[name] = cls(*arguments, **options)
        return cls

    return enter
