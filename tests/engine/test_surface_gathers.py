"""When units are gathered, compared with torch's ``fully_shard``: resharding and prefetching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.kit.subclasses import LIBRARIES, backward, check, data, full, gradients, loss_of
from tests.engine.kit.surface import Collectives, Net, averaged, both, build, shard
from tests.support import multirank, world_mesh


def unit_sizes(model: Net) -> dict[int, str]:
    """The size of each unit's gather, which tells it from the others."""
    sizes: dict[int, str] = {}
    for name, module in {"root": model, **{f"b{i}": b for i, b in enumerate(model.blocks)}}.items():
        with Collectives() as seen:
            module.unshard()
        module.reshard()
        [(_, size)] = seen.seen
        sizes[size] = name
    assert len(sizes) == 4
    return sizes


def gathers(model: nn.Module, rank: int) -> list[int]:
    """Gathers in forward, in backward and in an evaluation."""
    counts = []
    with Collectives() as seen:
        loss = loss_of(model(data(rank)))
        counts.append(seen.count("gather"))
        loss.backward()
        counts.append(seen.count("gather"))
        with torch.no_grad():
            model(data(rank))
        counts.append(seen.count("gather"))
    return counts


SETTINGS = {
    "default": lambda model: None,
    "root resharded": lambda model: model.set_reshard_after_forward(True, recurse=False),
    "all kept after forward": lambda model: model.set_reshard_after_forward(False),
    "blocks kept after forward": lambda model: [b.set_reshard_after_forward(False) for b in model.blocks],
    "kept after backward": lambda model: model.set_reshard_after_backward(False),
}


@pytest.mark.extensive("each way of keeping", but=("default-*", "root*"))
@multirank(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_units_are_gathered_no_more_often_than_by_fsdp2(rank: int, world_size: int, setting: str) -> None:
    """In two steps without an optimizer between them, each with an evaluation after it."""
    expected = averaged(build(), world_size)
    counts: dict[str, list[list[int]]] = {}
    for library in LIBRARIES:
        model = shard(library, build())
        SETTINGS[setting](model)
        # Taken at rest: FSDP2 leaves full parameters in the modules that are kept, and then zero_grad misses these.
        parameters = dict(model.named_parameters())
        counts[library] = []
        for _ in range(2):
            counts[library].append(gathers(model, rank))
            check({n: full(p.grad) for n, p in parameters.items()}, expected)
            for p in parameters.values():
                p.grad = None
    for step, (mine, theirs) in enumerate(zip(counts["shardwright"], counts["torch"], strict=True)):
        # FSDP2 leaves the root gathered after an evaluation, whatever happens to its weights before the next step.
        assert mine[0] <= theirs[0] + (step > 0), counts
        assert mine[1:] == theirs[1:], counts


@multirank(2)
@both
@pytest.mark.parametrize("value", [None, 2, 1, "yes"])
def test_reshard_after_forward_must_be_a_bool(rank: int, world_size: int, library: str, value: Any) -> None:
    model = shard(library, build())
    with pytest.raises(ValueError, match=r"reshard_after_forward .* bool"):
        model.set_reshard_after_forward(value)


@multirank(2)
@both
def test_weights_that_backward_does_not_need(rank: int, world_size: int, library: str) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(tokens))

    torch.manual_seed(0)
    plain = Embedded()
    batches = [
        torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(r)) for r in range(world_size)
    ]
    expected = averaged(plain, world_size, loss=lambda m, r, _: loss_of(m(batches[r])))
    fully_shard, mesh = LIBRARIES[library].fully_shard, world_mesh(world_size)
    fully_shard(plain.embed, mesh=mesh)
    fully_shard(plain.out, mesh=mesh)
    model: Any = fully_shard(plain, mesh=mesh)
    model.embed.set_unshard_in_backward(False)
    for _ in range(2):
        with Collectives() as seen:
            loss = loss_of(model(batches[rank]))
            assert seen.count("gather") == 2
            loss.backward()
            assert seen.count("gather") == 1
        check(gradients(model), expected)
        model.zero_grad()


@multirank(2)
@both
def test_explicit_forward_prefetch(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    sizes = unit_sizes(model)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    for _ in range(2):
        with Collectives() as seen:
            handle = model.blocks[0].up.register_forward_hook(lambda *_: seen.seen.append(("computed", 0)))
            loss = loss_of(model(data(rank)))
            handle.remove()
        order = [sizes.get(size, kind) for kind, size in seen.take()]
        assert order == ["root", "b0", "b1", "b2", "computed"]
        loss.backward()
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
def test_explicit_backward_prefetch(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    sizes = unit_sizes(model)
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0], model.blocks[1]])
    for _ in range(2):
        loss = loss_of(model(data(rank)))
        with Collectives() as seen:
            loss.backward()
        order = [sizes[size] if kind == "gather" else kind for kind, size in seen.take()]
        assert order[:3] == ["b2", "b0", "b1"]
        assert order.count("reduce") == 4 and len(order) == 7
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()


@multirank(2)
@both
@pytest.mark.parametrize("method", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_only_sharded_modules_can_be_prefetched(
    rank: int, world_size: int, library: str, method: str
) -> None:
    model = shard(library, build())
    with pytest.raises(ValueError, match="Linear"):
        getattr(model, method)([model.blocks[0], model.head])


@multirank(2)
@both
def test_prefetching_again_what_is_there_gathers_nothing(rank: int, world_size: int, library: str) -> None:
    model = shard(library, build())
    model.set_reshard_after_forward(True)
    for i, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[i + 1 :]))
        block.set_modules_to_backward_prefetch(list(model.blocks[:i]))
    for _ in range(2):
        with Collectives() as seen:
            backward(model, rank)
            found = [kind for kind, _ in seen.take()]
        assert (found.count("gather"), found.count("reduce")) == (8, 4)
        check(gradients(model), averaged(build(), world_size))
        model.zero_grad()
