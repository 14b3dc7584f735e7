"""Fabric within ranks of the pool, the model of these tests, and the plain training that they compare with.

Imported by tests at run time only: importing Lightning takes seconds.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from shardwright.integrations.lightning import ShardwrightStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Uneven sizes, buffers of both kinds, a parameter of the root, one made by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 5)
        self.gain = nn.Parameter(torch.rand(12) + 0.5)
        self.register_buffer("shift", torch.randn(12))
        self.register_buffer("table", torch.arange(12.0) / 12, persistent=False)
        self.seen = {"batches": 0, "last": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain + self.shift * self.table)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Reads a parameter of the root itself, besides calling forward."""
        return self(x).sum(dim=-1) * self.gain.sum()


def as_under_torchrun() -> None:
    """Let Fabric find the ranks of the pool, which have met already. The pool restores the environment."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=world)
    os.environ.update(TORCHELASTIC_RUN_ID="pool", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def fabric_of(precision: Any = None, plugins: Any = (), **options: Any) -> Fabric:
    as_under_torchrun()
    options.setdefault("auto_wrap_policy", {Block})
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ShardwrightStrategy(**options),
        precision=precision,
        plugins=list(plugins),
    )
    fabric.launch()
    return fabric


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    inputs, targets = data(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def plain_model(seed: int = 3, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        return Model()
    finally:
        torch.set_default_dtype(torch.float32)


def plain_gradients(model: Model, steps: range, loss: Any = loss_of) -> None:
    """The average over ranks of the sum over these steps' batches, as gradients."""
    world = dist.get_world_size()
    for step in steps:
        for rank in range(world):
            (loss(model, rank, step) / world).backward()


def full(value: Any) -> Any:
    value = value.detach() if isinstance(value, torch.Tensor) else value
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_model(model: Any, plain: nn.Module, close: bool = False) -> None:
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if name == "_extra_state":
            continue
        if close:
            torch.testing.assert_close(full(ours[name]), value, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert torch.equal(full(ours[name]), value), name


def set_up(fabric: Fabric, seed: int = 3, rate: float = 0.01) -> tuple[Any, Any]:
    fabric.seed_everything(seed, verbose=False)
    with fabric.init_module(empty_init=True):
        model = Model()
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=rate))  # type: ignore[no-any-return]


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, fabric.global_rank, step)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
