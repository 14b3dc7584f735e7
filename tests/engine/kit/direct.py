"""Models that use weights without a call of the unit that owns them, in the shapes that users write.

Each entry of ``PROGRAMS`` is a class of models, with the units that it asks for. ``run(model, rank, step)`` returns the
loss of a rank's data. The same code runs on the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

DIM = 6


class Norm(nn.Module):
    """As Gemma's: the weight is added to one, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.v_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn = Norm(), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 14), nn.SiLU(), nn.Linear(14, DIM))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        h, a = self.norm(x), self.self_attn
        return x + a.o_proj(F.scaled_dot_product_attention(a.q_proj(h), a.k_proj(h), a.v_proj(h)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        return x + self.mlp(x)


def joint_block(layers: tuple[Layer, ...], states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The layers of several towers attend to each other: their parts are called, never their forward."""
    hidden = [layer.norm(x) for layer, x in zip(layers, states, strict=True)]
    q, k, v = (
        torch.cat([getattr(layer.self_attn, name)(h) for layer, h in zip(layers, hidden, strict=True)], 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    mixed = F.scaled_dot_product_attention(q, k, v).split([x.shape[1] for x in states], 1)
    new = []
    for layer, x, m in zip(layers, states, mixed, strict=True):
        y = x + layer.self_attn.o_proj(m)
        new.append(y + layer.mlp(y))
    return new


class Towers(nn.Module):
    """pi0.5's shape: a free function uses the layers of two towers. ``checkpoint``: recompute it in backward."""

    checkpoint: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.ModuleList(Layer() for _ in range(3)) for _ in range(2))
        self.embed = nn.Embedding(9, DIM)
        self.norms = nn.ModuleList([Norm(), Norm()])

    def units(self) -> list[nn.Module]:
        return [*self.one, *self.two]

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        states = [self.embed(tokens), x]
        for layers in zip(self.one, self.two, strict=True):
            if self.checkpoint is None:
                states = joint_block(layers, states)
            else:
                states = torch.utils.checkpoint.checkpoint(
                    joint_block, layers, states, use_reentrant=self.checkpoint
                )
        return torch.cat([norm(s) for norm, s in zip(self.norms, states, strict=True)], 1)


class CheckpointedTowers(Towers):
    checkpoint = False


class ReentrantTowers(Towers):
    checkpoint = True


class Parts(nn.Module):
    """A holder of modules whose forward is never called."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        raise AssertionError("only its parts are called")


class RawPositions(nn.Module):
    """GLM-4V's shape: a table of positions is read raw and interpolated, beside a call of its unit's other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Parts(position=nn.Embedding(4, DIM), tokens=nn.Embedding(9, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return [self.embed, *self.layers]

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        table = self.embed.position.weight.t().unsqueeze(0)
        positions = F.interpolate(table, size=tokens.shape[1], mode="linear")[0].t()
        h = self.embed.tokens(tokens) + positions
        for layer in self.layers:
            h = layer(h)
        return h


class OtherWeights(nn.Module):
    """Weights of other units in functions: a tied product, a scaled weight, rows by index, a quantity of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.embed = nn.Embedding(9, DIM)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def units(self) -> list[nn.Module]:
        return [self.embed, *self.layers]

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        first, last = self.layers[0], self.layers[1]
        h = F.linear(h, first.mlp[1].weight[:DIM], last.self_attn.q_proj.bias)
        h = h @ last.self_attn.k_proj.weight.mT + first.norm.weight.exp()[None]
        h = h * last.mlp[0].weight.chunk(2)[0].repeat(2) + self.embed.weight[tokens % 3]
        return (h @ self.embed.weight.t()) * self.scale.exp()


class InnerMethods(nn.Module):
    """Methods of units' modules, and a unit that is called in full between uses of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.attend(x)
        for layer in self.layers:
            x = layer(layer.norm(x))
        return self.layers[0].mlp(x)


class Kinds(nn.Module):
    """Kinds of modules inside a unit that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts(
            attention=nn.MultiheadAttention(DIM, 2, batch_first=True),
            convolution=nn.Conv1d(DIM, DIM, 3, padding=1),
            groups=nn.GroupNorm(2, DIM),
            normed=parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            bilinear=nn.Bilinear(DIM, DIM, DIM),
            rms=nn.RMSNorm(DIM),
            prelu=nn.PReLU(),
            recurrent=nn.GRU(DIM, DIM, batch_first=True),
        )
        self.last = nn.Linear(DIM, DIM)

    def units(self) -> list[nn.Module]:
        return [self.parts, self.last]

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        p: Any = self.parts
        x = x + p.attention(x, x, x)[0]
        x = x + p.groups(p.convolution(x.mT)).mT
        x = x + p.rms(p.normed(x)) + p.bilinear(x, x)
        return self.last(p.recurrent(p.prelu(x))[0])


class FusedLoss(nn.Module):
    """The output layer is a unit; the loss takes its weight after the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, 9, bias=False)

    def units(self) -> list[nn.Module]:
        return [*self.layers, self.lm_head]

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Frozen(Towers):
    """The first tower is frozen, as a pretrained one."""

    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)


class Captured(nn.Module):
    """A function that captured a parameter before the model was sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weights = [layer.self_attn.v_proj.weight for layer in self.layers]
        for layer in self.layers:
            x = layer(x)
        for w in weights:
            x = x @ w.to(x.dtype) + torch.where(x > 0, w[0], w[1])
        return torch.cat([x, weights[0][None].expand(len(x), -1, -1)], 1)


class Double(torch.autograd.Function):
    """A fused product with a backward of its own, as kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * (x @ w.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return 2 * (gradient @ w), 2 * (gradient.flatten(0, 1).t() @ x.flatten(0, 1))


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Double.apply(layer(x), layer.self_attn.q_proj.weight)
        return x


class Queries(nn.Module):
    """BLIP-2's shape: a parameter of the root is an input of a unit, outside of the root's call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.queries = nn.Parameter(torch.randn(3, DIM) / 4)

    def units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Twice(torch.autograd.Function):
    """A function of a weight alone, as a straight-through estimator is."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class InChunks(torch.autograd.Function):
    """A loss that adds up the gradient of a weight in a buffer of its own, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gradients, of_weight, total = [], torch.zeros_like(w), h.new_zeros(())
        for part in h.flatten(0, 1).chunk(3):
            logits = part @ w.t()
            total += logits.pow(2).sum()
            gradients.append(2 * logits @ w)
            of_weight += 2 * logits.t() @ part
        ctx.save_for_backward(torch.cat(gradients).view_as(h), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_h, of_weight = ctx.saved_tensors
        return gradient * of_h, gradient * of_weight


@dataclass(frozen=True)
class Program:
    """A kind of model, and the loss of its output."""

    model: Callable[[], Any]
    loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = lambda model, output, target: (
        output.float().pow(2).mean()
    )


def fused(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weight = model.lm_head.weight
    parts = [
        F.cross_entropy(F.linear(h, weight).float().flatten(0, 1), y.flatten(), reduction="sum")
        for h, y in zip(output.chunk(2), target.chunk(2), strict=True)
    ]
    return sum(parts) / target.numel()  # type: ignore[return-value]


def transposed(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((output @ model.lm_head.weight.t()).float().flatten(0, 1), target.flatten())


def layer_by_itself(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return model.layers[1].attend(output).float().pow(2).mean()


def queried(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    answers = model.layers[1](model.queries.expand(len(output), -1, -1))
    return (output.mean(1) * answers.mean(1)).float().pow(2).mean()


def doubled(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.linear(output, Twice.apply(model.lm_head.weight)).float().pow(2).mean()


def in_chunks(model: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return InChunks.apply(output, model.lm_head.weight) / 90


PROGRAMS: dict[str, Program] = {
    "towers": Program(Towers),
    "checkpointed towers": Program(CheckpointedTowers),
    "reentrant towers": Program(ReentrantTowers),
    "one tower frozen": Program(Frozen),
    "raw positions": Program(RawPositions),
    "other weights": Program(OtherWeights),
    "inner methods": Program(InnerMethods),
    "kinds of modules": Program(Kinds),
    "fused loss": Program(FusedLoss, fused),
    "transposed head": Program(FusedLoss, transposed),
    "captured": Program(Captured),
    "a part after forward": Program(FusedLoss, layer_by_itself),
    "own function": Program(OwnFunction),
    "queries": Program(Queries, queried),
    "function of a weight": Program(FusedLoss, doubled),
    "gradient in a buffer": Program(FusedLoss, in_chunks),
}


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(9, (2, 5), generator=generator)
    return tokens, torch.randn(2, 5, DIM, generator=generator), torch.randint(9, (2, 5), generator=generator)


def loss_of(name: str, model: Any, rank: int, step: int) -> torch.Tensor:
    tokens, x, target = data(rank, step)
    dtype = next(model.parameters()).dtype
    return PROGRAMS[name].loss(model, model(tokens, x.to(dtype)), target)
