"""`sw.context_parallel` on modules that know nothing of it, against the module of one process."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.context import inputs, modules, whole_samples
from tests.support import multirank, world_mesh

VOCABULARY, LENGTH, WIDTH = 16, 24, 16


class Block(nn.Module):
    def __init__(self, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.width = heads, shared, 4
        self.qkv = nn.Linear(WIDTH, (heads + 2 * shared) * self.width)
        self.out = nn.Linear(heads * self.width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.shared, self.shared], dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, heads: int, shared: int, checkpoints: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, shared) for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(sw.context.positions(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.output(x)


def samples() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@multirank(2, 4)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["exchanged", "gathered"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
def test_logits_and_gradients_equal_the_plain_module(
    rank: int, world_size: int, heads: tuple[int, int], checkpoints: bool
) -> None:
    mesh = world_mesh(world_size)
    plain = Model(*heads)
    model = copy.deepcopy(plain)
    model.checkpoints = checkpoints
    assert sw.context_parallel(model, mesh) is model
    inputs, targets = samples()
    wanted = plain(inputs)
    loss(wanted, targets).backward()
    found = model(sw.context.shard(inputs, mesh))
    # Products of fewer rows may be summed in another order.
    torch.testing.assert_close(found, sw.context.shard(wanted, mesh), atol=1e-6, rtol=1e-5)
    loss(found, sw.context.shard(targets, mesh)).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(own.grad)
        torch.testing.assert_close(own.grad, other.grad, atol=1e-5, rtol=1e-5)


@multirank(2)
@pytest.mark.parametrize("sharded", ["before", "after"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
def test_parameters_sharded_over_the_same_ranks_step_as_plain_ones(
    rank: int, world_size: int, sharded: str, checkpoints: bool
) -> None:
    """The engine's average over the ranks, times their number, is the sum."""
    mesh = world_mesh(world_size)
    plain = Model(4, 2)
    model = copy.deepcopy(plain)
    model.checkpoints = checkpoints
    if sharded == "after":
        sw.context_parallel(model, mesh)
    for block in model.blocks:
        sw.fully_shard(block, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    if sharded == "before":
        sw.context_parallel(model, mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
    inputs, targets = samples()
    for _ in range(3):
        loss(plain(inputs), targets).backward()
        own = loss(model(sw.context.shard(inputs, mesh)), sw.context.shard(targets, mesh))
        (own * world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            found.full_tensor(), wanted, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@multirank(2)
def test_ranks_may_compute_whole_samples(rank: int, world_size: int) -> None:
    plain = Model(4, 2)
    model = copy.deepcopy(plain)
    split = sw.context.Split(world_mesh(world_size))
    sw.context_parallel(model, split)
    inputs, _ = samples()
    with whole_samples(split):
        assert torch.equal(model(inputs[:, :5]), plain(inputs[:, :5]))


@multirank(2)
def test_gradients_of_gathered_values_are_summed(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    own = torch.full((1, 3), float(rank), requires_grad=True)
    whole = sw.context.gather(own, mesh)
    assert whole.tolist() == [[0.0] * 3 + [1.0] * 3]
    (whole * torch.arange(6.0) * (rank + 1)).sum().backward()
    assert own.grad.tolist() == [[3 * value for value in range(3 * rank, 3 * rank + 3)]]


class Other(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


@multirank(2)
def test_layers_that_mix_tokens_are_refused(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    for layer in (nn.MultiheadAttention(4, 2), nn.LSTM(4, 4), nn.Conv1d(4, 4, 3)):
        with pytest.raises(ValueError, match=f"layer: a {type(layer).__name__} mixes tokens"):
            sw.context_parallel(Other(layer), mesh)
    model = sw.context_parallel(Model(4, 2), mesh)
    with pytest.raises(ValueError, match="was called for it before"):
        sw.context_parallel(model, mesh)


class Places(nn.Module):
    """It takes places of tokens as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(4, 2)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.model(tokens)  # type: ignore[no-any-return]


@multirank(2)
def test_tokens_that_have_not_seen_others_raise_an_error(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    eager = sw.context_parallel(Other(nn.Linear(4, 4)), mesh)
    with pytest.raises(RuntimeError, match="forward of Other has called neither"):
        eager(torch.ones(1, 3, 4))
    model = sw.context_parallel(Places(), mesh)
    own = sw.context.shard(samples()[0], mesh)
    with pytest.raises(RuntimeError, match="forward of Places was called without position_ids, and"):
        model(own)
    model(own, position_ids=sw.context.shard(torch.arange(LENGTH)[None], mesh))


@multirank(2)
def test_equal_inputs_of_all_ranks_are_a_warning_once(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    whole = samples()[0]
    model = sw.context_parallel(Model(4, 2), mesh)
    with pytest.warns(UserWarning, match=r"forward of Model got equal inputs on all 2 ranks .* \[2, 12\]"):
        model(whole[:, :12])
    other = sw.context_parallel(Model(4, 2), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(whole[:, :12])
        other(sw.context.shard(whole, mesh))
        other(whole[:, :12])


class Calling(nn.Module):
    """It calls a function with queries, keys and values."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        result: Tensor = self.function(*tensors, is_causal=True)
        return result


@multirank(2)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.extensive("torch imports its compiler"))]
)
@pytest.mark.parametrize(
    "attend", [F.scaled_dot_product_attention, sw.context.attention], ids=["torch", "ours"]
)
def test_either_attention_is_exchanged_once(rank: int, world_size: int, attend: Any, compiled: bool) -> None:
    mesh = world_mesh(world_size)
    tensors = [torch.randn(1, 4, 8, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    wanted = F.scaled_dot_product_attention(*tensors, is_causal=True)
    if compiled:
        attend = torch.compile(functools.partial(_called, attend), backend="eager")
    model = sw.context_parallel(Calling(attend), mesh)
    found = model(*(sw.context.shard(each, mesh, dim=2) for each in tensors))
    assert torch.equal(found, sw.context.shard(wanted, mesh, dim=2))


def _called(function: Any, *tensors: Tensor, is_causal: bool) -> Any:
    return function(*tensors, is_causal=is_causal)


@pytest.mark.extensive("torch imports its compiler")
@multirank(2)
def test_a_compiled_module_computes_the_same(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    model = sw.context_parallel(Model(4, 2), mesh)
    tokens = sw.context.shard(samples()[0], mesh)
    wanted = model(tokens)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")  # type: ignore[method-assign]
    assert torch.equal(model(tokens), wanted)
    assert torch.equal(torch.compile(model, backend="eager")(tokens), wanted)


class Checkpointing(nn.Module):
    """It checkpoints a method of its own, or a closure around a module."""

    def __init__(self, way: str, reentrant: bool) -> None:
        super().__init__()
        self.block, self.way, self.reentrant = Block(4, 2), way, reentrant

    def attend(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)

    def place(self, x: Tensor) -> Tensor:
        return x * sw.context.positions(x.shape[1]).view(1, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "without gradients":
            with torch.no_grad():
                mixed = self.attend(x)
            return x + mixed
        functions = {"attend": self.attend, "place": self.place, "closure": lambda x: self.block(x)}
        result = checkpoint(functions[self.way], x, use_reentrant=self.reentrant)
        return result + self.attend(x) if self.way == "place" else result


@multirank(2)
def test_a_checkpoint_of_a_function_that_attends_is_refused(rank: int, world_size: int) -> None:
    """Backward would run it again without the split: torch's reentrant checkpoints then have wrong gradients."""
    mesh = world_mesh(world_size)
    whole = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    x = sw.context.shard(whole, mesh).clone().requires_grad_()
    for reentrant in (True, False):
        for way in ("attend", "place"):
            model = sw.context_parallel(Checkpointing(way, reentrant), mesh)
            with pytest.raises(
                RuntimeError, match="expected checkpoints of modules, found one of a function"
            ):
                model(x)
            with torch.no_grad():  # nothing runs again
                model(x)
        for way in ("closure", "without gradients"):
            model = sw.context_parallel(Checkpointing(way, reentrant), mesh)
            (checkpoint(model, x, use_reentrant=reentrant) + model(x)).sum().backward()


@multirank(2)
def test_a_deep_copy_attends_by_itself(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    tokens = sw.context.shard(samples()[0], mesh)
    model: Any = sw.context_parallel(Model(4, 2), mesh)
    copied = copy.deepcopy(model)
    expected = model(tokens)
    assert torch.equal(copied(tokens), expected)
    for p in copied.parameters():
        p.data.zero_()
    assert not copied(tokens).any() and torch.equal(model(tokens), expected)
    assert copied.forward.func.split is not model.forward.func.split


class Packs(nn.Module):
    """A model that takes positions as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.block = Block(4, 2)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        assert position_ids is not None
        return self.output(self.block(self.tokens(input_ids) + self.places(position_ids)))


class Wrapper(nn.Module):
    """It passes everything on, as peft's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.inner(*args, **kwargs)
        return result


_WHOLE = torch.arange(LENGTH)[None]
_MASK = torch.ones(2, LENGTH)
#: Positions and a mask of whole samples, or of each rank if it is a function; and what the error says.
GIVEN: dict[str, tuple[Any, Any, str]] = {
    "whole": (_WHOLE, None, ""),
    "whole, by row": (_WHOLE.expand(2, -1), None, ""),
    "from another start": (_WHOLE + 3, None, ""),
    "each row from its own start": (_WHOLE + torch.tensor([[0], [5]]), None, ""),
    "a mask of ones": (_WHOLE, _MASK, ""),
    "a mask of whole samples": (_WHOLE, lambda rank, part: torch.ones(2, 1, LENGTH, LENGTH), ""),
    "again at the border": (
        torch.cat([torch.arange(LENGTH // 2)] * 2)[None], None, "where rank 1 of the context begins",
    ),
    "again in one row": (
        torch.stack([torch.arange(LENGTH), torch.cat([torch.arange(LENGTH // 2)] * 2)]), None, "where rank 1 .* begins",
    ),
    "rows that go on in one another": (
        lambda rank, part: (_WHOLE + torch.tensor([[5 * rank], [5 - 5 * rank]]))[:, part], None, "where rank 1 .*",
    ),
    "inside one part": (
        torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None], None, "inside the part of rank 0 of the context",
    ),
    "each its own": (
        lambda rank, part: torch.arange(part.stop - part.start)[None], None, r"rank 1 .* begins \(0 there\)",
    ),
    "one alone its own": (
        lambda rank, part: torch.arange(part.stop - part.start)[None] + (7 if rank == 0 else 0), None, "do not go on",
    ),
    "none on one": (lambda rank, part: _WHOLE[:, part] if rank == 0 else None, None, "without position_ids on rank 1"),
    "other sizes": (
        lambda rank, part: _WHOLE[:, part].expand(2 - rank, -1), None, "position_ids of 2 x 12 tokens on rank 0",
    ),
    "padding on one": (
        _WHOLE, torch.cat([torch.ones(2, LENGTH - 3), torch.zeros(2, 3)], 1), "attention_mask .* on rank 1",
    ),
    "padding on all": (_WHOLE, torch.cat([torch.zeros(2, 2), torch.ones(2, LENGTH - 4), torch.zeros(2, 2)], 1), "mask"),
    "a mask of whole rows": (_WHOLE, lambda rank, part: torch.ones(2, LENGTH), "attention_mask .* ranks 0, 1"),
}  # fmt: skip


def _of_rank(value: Any, rank: int, part: slice) -> Any:
    if callable(value):
        return value(rank, part)
    return None if value is None else value[:, part]


@multirank(2)
def test_positions_and_masks_are_those_of_whole_samples_or_all_ranks_raise(
    rank: int, world_size: int
) -> None:
    mesh, tokens = world_mesh(world_size), samples()[0]
    part = slice(rank * LENGTH // world_size, (rank + 1) * LENGTH // world_size)
    torch.manual_seed(0)
    plain = Packs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "is_of_transformers", lambda module: isinstance(module, Packs))
        patch.setattr(inputs, "is_of_transformers", lambda module: isinstance(module, Packs))
        for wrapped in (False, True):
            inner = copy.deepcopy(plain)
            model = sw.context_parallel(Wrapper(inner) if wrapped else inner, mesh)
            for name, (positions, mask, words) in GIVEN.items():
                given = {
                    "position_ids": _of_rank(positions, rank, part),
                    "attention_mask": _of_rank(mask, rank, part),
                }
                if words:
                    with pytest.raises(RuntimeError, match=words):
                        model(tokens[:, part], **given)
                else:
                    found = sw.context.gather(model(tokens[:, part], **given), mesh)
                    wanted = plain(tokens, position_ids=positions)
                    torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")
