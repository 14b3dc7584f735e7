"""Several models: adversarial, distilled, averaged, and called inside each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.engine.cases.base import DIM, Batch, Case, Net, case, loss_of


class Pair(nn.Module):
    """Two models in one module that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Net(2), Net(2)


class PairCase(Case):
    def build(self) -> nn.Module:
        return Pair()

    def units(self, model: Any) -> list[Any]:
        return [*model.one.blocks, model.one, *model.two.blocks, model.two]


@case("GAN")
class Gan(PairCase):
    """Discriminator on real and fake data, then generator through the frozen discriminator."""

    def train(self, model: Any, batch: Batch) -> Any:
        generator, critic = model.one, model.two
        critic.requires_grad_(True)
        fake = generator(batch.x)
        padded = nn.functional.pad(fake, (0, 2))
        real_score = critic(batch.randn(3, DIM, slot=1))
        fake_score = critic(padded.detach())
        (loss_of(real_score) - 0.5 * loss_of(fake_score)).backward()
        critic.requires_grad_(False)
        score = critic(padded)
        loss_of(score).backward()
        critic.requires_grad_(True)
        return fake, real_score, fake_score, score


@case("GAN without freezing")
class GanUnfrozen(PairCase):
    def train(self, model: Any, batch: Batch) -> Any:
        fake = nn.functional.pad(model.one(batch.x), (0, 2))
        loss_of(model.two(fake.detach())).backward()
        score = model.two(fake)
        loss_of(score).backward()
        return fake, score


@case("distillation")
class Distillation(PairCase):
    def edit(self, model: Any, step: int) -> None:
        model.two.requires_grad_(False)
        model.two.eval()

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.one(batch.x)
        with torch.no_grad():
            target = model.two(batch.x)
        loss = (y - target).float().square().mean()
        loss.backward()
        return y, target


@case("moving average of the weights")
class MovingAverage(PairCase):
    def update(self, optimizer: torch.optim.Optimizer, model: Any, step: int) -> None:
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(model.two.parameters(), model.one.parameters(), strict=True):
                slow.lerp_(fast, 0.3)

    def train(self, model: Any, batch: Batch) -> Any:
        with torch.no_grad():
            target = model.two(batch.x)
        loss = (model.one(batch.x) - target).float().square().mean()
        loss.backward()
        return target, loss


@case("reward model inside another model's step", False)
@case("reward model inside another model", True)
class RewardModel(Case):
    class Policy(Net):
        def __init__(self, inside: bool) -> None:
            super().__init__(2)
            self.reward = Net(2).requires_grad_(False)
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x)
            return y + self.reward(nn.functional.pad(y, (0, 2))) if self.inside else y

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def build(self) -> nn.Module:
        return self.Policy(self.inside)

    def units(self, model: Any) -> list[Any]:
        return [*model.reward.blocks, model.reward, *model.blocks, model]

    def train(self, model: Any, batch: Batch) -> Any:
        with torch.no_grad():  # on its own before the model it is a part of
            before = model.reward(batch.x)
        y = model(batch.x)
        reward = model.reward(torch.tanh(nn.functional.pad(y, (0, 2))))
        loss_of(y, reward).backward()
        return before, y, reward


@case("a model called inside another's forward")
class CalledInside(PairCase):
    """The first calls the second, which it does not contain, in its middle."""

    class Calling(Net):
        def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:  # type: ignore[override]
            x = self.blocks[0](self.first(x))
            x = x + nn.functional.pad(other(torch.tanh(x)), (0, 2))
            return self.head(self.blocks[1](x))

    def build(self) -> nn.Module:
        pair = Pair()
        pair.one = self.Calling(2)
        return pair

    def train(self, model: Any, batch: Batch) -> Any:
        y = model.one(batch.x, model.two)
        z = model.two(batch.randn(2, DIM, slot=1))
        loss_of(y, z).backward()
        return y, z
