"""``resize_token_embeddings`` after ``fully_shard``: the model trains on as a plain one that was resized.

The model here resizes as language models of Hugging Face do, in the two ways they have done so: the embedding's data is
set to those of a new one, or the module itself is replaced. New rows are random, and the ranks' generators differ.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwright as sw
from tests.engine.kit.models import full
from tests.engine.kit.torch_versions import subclasses_dispatch
from tests.support import multirank, world_mesh


class Words(nn.Module):
    def __init__(self, tied: bool, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=not tied)
        self.tied, self.way = tied, way
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.block(self.embed(x)))))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def resize_token_embeddings(self, size: int, fails: Any = False) -> nn.Module:
        """As the model of another library has it."""
        rows = min(size, self.embed.num_embeddings)
        new = nn.Embedding(size, 4)
        new.weight.data[:rows] = self.embed.weight.data[:rows]
        if fails:
            raise OSError("no more words")
        if self.way == "data":
            self.embed.weight.data = new.weight.data
            self.embed.num_embeddings = size
        else:
            self.embed = new
        if self.head.weight.shape[0] != size:
            head = nn.Linear(4, size, bias=self.head.bias is not None)
            for key, old in self.head.named_parameters():
                head.get_parameter(key).data[:rows] = old.data[:rows]
            self.head = head
        self.tie()
        return self.embed


#: Where, how and in which units; the sizes are those of one dimension or of two.
SETTINGS: list[tuple[str, tuple[int, ...], Any, str]] = [
    ("zero3", (2,), "per_parameter", ""),
    ("zero3", (2,), "per_parameter", "embed block head"),
    ("zero3", (2,), "ragged", "embed block"),
    ("zero3", (2,), sw.Ragged("element"), "block norm+head"),
    ("zero2", (2,), "per_parameter", "block"),
    ("zero1", (2,), "ragged", "embed block head"),
    ("ddp", (2,), "per_parameter", "embed block"),
    ("hsdp", (2, 1), "ragged", "block"),
    ("hfsdp", (1, 2), "per_parameter", "embed block norm+head"),
]


def shard(model: Any, strategy: str, sizes: tuple[int, ...], layout: Any, units: str) -> Any:
    mesh = (
        world_mesh(*sizes) if len(sizes) == 1 else init_device_mesh("cpu", sizes, mesh_dim_names=("r", "s"))
    )
    options = {"mesh": mesh, "strategy": strategy, "layout": layout}
    for names in units.split():
        modules = [model.get_submodule(name) for name in names.split("+")]
        sw.fully_shard(modules if len(modules) > 1 else modules[0], **options)
    planned = strategy in ("zero3", "hsdp")
    return sw.fully_shard(model, **options, memory="arena" if planned else "dynamic")


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    tokens = data(step, rank)
    return nn.functional.cross_entropy(model(tokens), tokens.flip(0))


def train(model: Any, plain: Any, first: int, steps: int, rank: int, world_size: int) -> None:
    """Both, by the same optimizers, made now; compares parameters and state dicts after each step."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(first, first + steps):
        loss_of(model, step, rank).backward()
        for r in range(world_size):
            (loss_of(plain, step, r) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, plain)


def compare(model: Any, plain: Any) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name in names:
        torch.testing.assert_close(full(model.get_parameter(name)), plain.get_parameter(name))
    for name, value in state.items():
        torch.testing.assert_close(full(value), expected[name])


@pytest.mark.extensive("each setting")
@multirank(2)
def test_training_goes_on_with_another_number_of_rows(rank: int, world_size: int) -> None:
    for number, setting in enumerate(SETTINGS):
        for tied in (False, True):
            way = ("data", "module")[(number + tied) % 2]
            torch.manual_seed(number)
            plain = Words(tied, way)
            model = shard(copy.deepcopy(plain), *setting)
            train(model, plain, 0, 1, rank, world_size)
            for size in (10, 6):
                embed = model.embed.weight
                torch.manual_seed(1)
                plain.resize_token_embeddings(size)
                torch.manual_seed(1 + rank)
                result = model.resize_token_embeddings(size)
                assert result is model.embed
                assert (model.embed.weight is embed) == (way == "data")  # as in plain PyTorch
                assert (model.head.weight is model.embed.weight) == tied
                compare(model, plain)
                train(model, plain, size, 2, rank, world_size)
            train(copy.deepcopy(model), copy.deepcopy(plain), 20, 1, rank, world_size)


@multirank(2)
def test_inside_unsharded(rank: int, world_size: int) -> None:
    """The model is inside a sharded module. Weights that are tied there stay tied."""
    for layout in ("per_parameter", "ragged"):
        torch.manual_seed(0)
        plain = nn.Sequential(Words(True, "data"))
        model: Any = shard(copy.deepcopy(plain), "zero3", (2,), layout, "0.embed")
        train(model, plain, 0, 1, rank, world_size)
        message = "unsharded" if layout == "ragged" or subclasses_dispatch else "mixed torch.Tensor"
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            model[0].resize_token_embeddings(10)
        torch.manual_seed(1)
        plain[0].resize_token_embeddings(10)
        torch.manual_seed(1)
        with sw.unsharded(model):
            model[0].resize_token_embeddings(10)
        train(model, plain, 1, 2, rank, world_size)
        for each in (model, plain):
            with sw.unsharded(each):
                each[0].norm.weight = each[0].norm.bias
        train(model, plain, 3, 1, rank, world_size)
        assert model[0].norm.weight is model[0].norm.bias


@multirank(2)
def test_data_of_another_shape(rank: int, world_size: int) -> None:
    for layout in ("per_parameter", "ragged", sw.Ragged("element")):
        model: Any = sw.fully_shard(nn.Linear(4, 7, bias=False), mesh=world_mesh(2), layout=layout)
        parameter, value = model.weight, torch.arange(20.0).view(5, 4)
        parameter.data = value
        assert model.weight is parameter
        for _ in range(2):
            torch.testing.assert_close(parameter.full_tensor(), value)
            torch.testing.assert_close(full(model.state_dict()["weight"]), value)
            x = torch.full((2, 4), rank + 1.0)
            model(x).sum().backward()
            torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((5, 4), 3.0))
            model.zero_grad()


@multirank(2)
def test_what_cannot_be_resized_is_refused_before_anything_changes(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Words(False, "data")
    model = shard(copy.deepcopy(plain), "zero3", (2,), "ragged", "embed")
    with pytest.raises(ValueError, match=r"'Words' was called with \[9\] on rank 0 and with \[8\] on rank 1"):
        model.resize_token_embeddings(9 - rank)
    compare(model, plain)
    with pytest.raises(OSError, match="no more words"):
        model.resize_token_embeddings(9, fails=True)
    compare(model, plain)
    loss_of(model, 0, rank).backward()
    with pytest.raises(RuntimeError, match=r"'weight' of unit 'embed' has a gradient.*zero_grad"):
        model.resize_token_embeddings(9)
    model.zero_grad()
    train(model, plain, 1, 1, rank, world_size)
    sw.optim.in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"steps .*'weight' of unit 'embed' in backward.*Resize before"):
        model.resize_token_embeddings(9)
    compare(model, plain)

    model = shard(Words(False, "data"), "zero3", (2,), "per_parameter", "embed")
    error, message = (
        (OSError, "no more words") if rank else (RuntimeError, "failed on rank 1 .*no more words")
    )
    with pytest.raises(error, match=message):
        model.resize_token_embeddings(9, fails=[0] * rank)

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallel: Any = parallelize_module(
        Words(False, "data"), mesh["tp"], {"embed": ColwiseParallel(output_layouts=Shard(0))}
    )
    sw.fully_shard(parallel, mesh=mesh["dp"])
    with pytest.raises(NotImplementedError, match=r"'embed.weight' of unit .* is tensor-parallel.*before"):
        parallel.resize_token_embeddings(9)

    with torch.device("meta"):
        deferred: Any = Words(False, "data")
    sw.fully_shard(deferred, mesh=world_mesh(2))
    with pytest.raises(RuntimeError, match=r"'embed.weight' of unit .* holds no values yet"):
        deferred.resize_token_embeddings(9)
