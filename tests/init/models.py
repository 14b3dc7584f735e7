"""Models whose construction does what constructors do: ties, reads of values, forks of generators, computed buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.train.config.shapes.presets import HybridConfig, LlamaConfig
from shardwright.train.models.native.hybrid import Hybrid
from shardwright.train.models.native.llama import Llama

LLAMA = LlamaConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=50, max_seq_len=32)
HYBRID = HybridConfig(
    dim=16, pattern="M*ME-", n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=24, vocab_size=50, max_seq_len=64,
    mamba_heads=4, mamba_head_dim=6, mamba_groups=2, mamba_state=5, chunk_size=8, n_experts=5, top_k=2, expert_dim=16,
    shared_dim=12, mtp_pattern="*E", tied_embeddings=True,
)  # fmt: skip


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3, bias=False))
        self.to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=2)
        self.lstm = nn.LSTM(4, 5, 2, bidirectional=True)


class Ties(nn.Module):
    """A shared submodule, tied weights, parameters computed from others, aliases by storage, None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(6, 6)
        self.again = self.block
        self.copied = copy.deepcopy(self.block)
        self.scaled = nn.Parameter(self.block.weight.detach() * 3)
        self.register_parameter("bias", None)
        self.register_buffer("first_row", self.copied.weight.detach()[0].clone(), persistent=False)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.aliases = [self.frozen, {"embed": self.embed.weight}]


class Reads(nn.Module):
    """Values read while it is built: a drop-path schedule, sizes and a branch that depend on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)] + torch.linspace(0, 0.1, 3).tolist()
        sizes = torch.randint(1, 6, (3,)).tolist()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size, 3)) for size in sizes)
        if torch.rand(1) > 0.5:
            self.maybe = nn.Linear(3, 3)
        self.register_buffer("from_numpy", torch.from_numpy(torch.rand(4).numpy() * 2))
        self.register_buffer("chosen", torch.nonzero(torch.rand(20) > 0.5))
        self.register_buffer("order", torch.randperm(10))
        self.last = nn.Linear(3, 5)


class Generators(nn.Module):
    """Seeds, forks, saves and restores generators, and has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.forked = nn.Linear(3, 4)
        state = torch.default_generator.get_state()
        self.two = nn.Linear(3, 4)
        torch.default_generator.set_state(state)
        self.same_as_two = nn.Linear(3, 4)
        own = torch.Generator().manual_seed(3)
        self.own = nn.ParameterList(nn.Parameter(torch.randn(7, generator=own)) for _ in range(2))
        self.register_buffer("drawn", torch.distributions.Normal(0.0, 2.0).sample((3,)))
        self.register_buffer("state", torch.get_rng_state()[:64])
        self.three = nn.Linear(3, 4)


class Computed(nn.Module):
    """Buffers computed from others, a complex one among them, dtype changes, and weights initialised twice."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / 100 ** (torch.arange(0, 8, 2) / 8)
        angles = torch.outer(torch.arange(6), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.linear = nn.Linear(33, 7)
        self.low = nn.Linear(5, 8).to(torch.bfloat16)
        self.frequencies = frequencies  # neither parameter nor buffer
        self.init_weights()
        self.low.double()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.linear.weight, std=0.02, a=-0.03, b=0.05)
        with torch.no_grad():
            self.linear.weight[2].fill_(1)
            self.low.weight.mul_(0.5)
            self.linear.bias.copy_(torch.arange(7))


class Initialisers(nn.Module):
    """Every function of torch.nn.init."""

    def __init__(self) -> None:
        super().__init__()
        init = nn.init
        every: dict[str, Callable[[torch.Tensor], Any]] = {
            "uniform": init.uniform_,
            "normal": init.normal_,
            "trunc_normal": init.trunc_normal_,
            "trunc_normal_tail": lambda w: init.trunc_normal_(w, 0.0, 1.0, 0.9, 1.1),
            "constant": lambda w: init.constant_(w, 0.3),
            "ones": init.ones_,
            "zeros": init.zeros_,
            "eye": init.eye_,
            "xavier_uniform": init.xavier_uniform_,
            "xavier_normal": init.xavier_normal_,
            "kaiming_uniform": init.kaiming_uniform_,
            "kaiming_normal": init.kaiming_normal_,
            "orthogonal": init.orthogonal_,
            "sparse": lambda w: init.sparse_(w, 0.3),
        }
        for name, fill in every.items():
            self.register_parameter(name, nn.Parameter(torch.empty(9, 7)))
            fill(getattr(self, name))
        self.dirac = nn.Parameter(init.dirac_(torch.empty(4, 3, 3)))


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.spectral_norm = nn.utils.spectral_norm(nn.Linear(4, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Llama(LLAMA),
    "hybrid": lambda: Hybrid(HYBRID),
    "convolutions": Convolutions,
    "recurrent": Recurrent,
    "transformer": lambda: nn.Transformer(16, 2, 2, 1, 24, batch_first=True),
    "ties": Ties,
    "reads": Reads,
    "generators": Generators,
    "computed": Computed,
    "initialisers": Initialisers,
    "parametrised": Parametrised,
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Equal bit by bit, whatever is sharded of ``model``, and nothing deferred is left."""
    wanted, found = tensors_of(plain), tensors_of(model)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        whole = full(found[name])
        assert type(whole) in (torch.Tensor, nn.Parameter), name
        assert whole.dtype == value.dtype and whole.shape == value.shape, name
        assert torch.equal(whole, value), name
        if whole is found[name]:
            assert whole.stride() == value.stride(), name
        assert found[name].requires_grad == value.requires_grad, name


def assert_built_alike(
    build: Callable[[], nn.Module], seed: int, shard: Callable[[nn.Module], Any] | None = None
) -> nn.Module:
    """Deferred, sharded and materialised, ``build`` gives what it gives, and leaves the generator as it does."""
    torch.manual_seed(seed)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with sw.deferred_init():
        model = build()
    if shard is not None:
        shard(model)
    assert sw.materialize(model) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model, plain)
    return model
