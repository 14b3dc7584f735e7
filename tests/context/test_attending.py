"""Attention over samples that ranks divide, against attention of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwright as sw
from shardwright.context import copies_of_heads
from shardwright.context.exchange import owners
from tests.support import multirank, world_mesh

LENGTH, WIDTH, BATCH = 24, 8, 2
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 10 + [2] * 7, [0] * 15 + [1] * 9])


def whole(heads: int, shared: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads * 100 + shared)
    return [
        torch.randn(BATCH, count, LENGTH, width, generator=generator).to(dtype).requires_grad_()
        for count, width in ((heads, WIDTH), (shared, WIDTH), (shared, WIDTH + 4))
    ]


def masked(seen: Tensor | None, causal: bool) -> Callable[..., Tensor]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )

    return compute


def lower() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


#: Arguments of `sw.context.attention`, and the mask that says the same.
KINDS: dict[str, tuple[dict[str, Any], Tensor | None, bool]] = {
    "causal": ({"is_causal": True}, None, True),
    "all": ({}, None, False),
    "window": ({"is_causal": True, "window": 5}, lower().triu(-4), False),
    "documents": (
        {"is_causal": True, "documents": DOCUMENTS},
        (lower() & (DOCUMENTS.unsqueeze(2) == DOCUMENTS.unsqueeze(1))).unsqueeze(1),
        False,
    ),
    "mask of heads": (
        {"attn_mask": torch.randn(1, 12, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))},
        torch.randn(1, 12, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)),
        False,
    ),
}
#: Query heads, and heads of keys and values: divided; copied by ranks; copied for each query head; fewer than ranks.
HEADS = [(12, 12), (12, 4), (12, 2), (12, 1), (12, 3), (4, 2), (2, 1), (3, 3), (1, 1)]


@multirank(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_attention_of_one_rank(rank: int, world_size: int, kind: str) -> None:
    mesh = world_mesh(world_size)
    options, seen, causal = KINDS[kind]
    for heads, shared in HEADS:
        if kind == "mask of heads" and heads != 12:
            continue
        mine, reference = whole(heads, shared), whole(heads, shared)
        wanted = masked(seen, causal)(*reference)
        factors = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
        (wanted * factors).sum().backward()

        parts = [sw.context.shard(t, mesh, dim=2) for t in mine]
        found = sw.context.attention(*parts, enable_gqa=True, mesh=mesh, **options)
        (found * sw.context.shard(factors, mesh, dim=2)).sum().backward()

        expected = sw.context.shard(wanted, mesh, dim=2)
        if heads % world_size == 0 and kind in ("causal", "all"):
            assert torch.equal(found, expected)  # the same kernel on the same numbers
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        for own, other in zip(mine, reference, strict=True):
            part, rest = sw.context.shard(own.grad, mesh, dim=2), own.grad.clone()
            # Sums of another order: of the keys of masked kernels, of the query heads that share a head.
            torch.testing.assert_close(part, sw.context.shard(other.grad, mesh, dim=2), atol=3e-6, rtol=1e-5)
            sw.context.shard(rest, mesh, dim=2).zero_()
            assert not rest.any()  # of the tokens of other ranks this rank has no gradient


@multirank(2, 4)
@pytest.mark.parametrize("heads", [4, 3])
def test_another_document_changes_no_bit(rank: int, world_size: int, heads: int) -> None:
    """3 heads are gathered, 4 are exchanged."""
    mesh = world_mesh(world_size)
    q, k, v = (t.detach() for t in whole(heads, 1))

    def attended() -> Tensor:
        parts = [sw.context.shard(t, mesh, dim=2) for t in (q, k, v)]
        return sw.context.gather(
            sw.context.attention(*parts, is_causal=True, enable_gqa=True, documents=DOCUMENTS, mesh=mesh),
            mesh,
            dim=2,
        )

    before, other = attended(), DOCUMENTS != 1
    for t in (q, k, v):
        t.mul_(1 + 7 * other[:, None, :, None])
    after = attended()
    same = ~other[:, None, :, None].expand_as(before)
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before, after)


@multirank(2)
def test_bfloat16_is_as_near_as_one_rank(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    q, k, v = whole(4, 2, torch.bfloat16)
    parts = [sw.context.shard(t, mesh, dim=2) for t in (q, k, v)]
    found = sw.context.attention(*parts, is_causal=True, enable_gqa=True, mesh=mesh)
    assert torch.equal(found, sw.context.shard(masked(None, True)(q, k, v), mesh, dim=2))


def test_copies_of_shared_heads_reach_the_ranks_that_need_them() -> None:
    for ranks in (1, 2, 3, 4, 6, 8, 16, 32):
        for heads in (ranks, 2 * ranks, 3 * ranks, 4 * ranks):
            for shared in (n for n in range(1, heads + 1) if heads % n == 0):
                copies = copies_of_heads(heads, shared, ranks)
                sent = [head for head in range(shared) for _ in range(copies)]
                assert len(sent) % ranks == 0 and len(sent) <= max(heads, shared)
                each, of_rank = len(sent) // ranks, heads // ranks
                assert of_rank % each == 0
                for head in range(heads):
                    used = sent[head // of_rank * each + head % of_rank // (of_rank // each)]
                    assert used == head // (heads // shared)


def test_causal_work_is_balanced() -> None:
    for ranks in range(1, 9):
        pieces: dict[int, list[int]] = {}
        for rank in range(ranks):
            for piece, owner in zip((2 * rank, 2 * rank + 1), owners(rank, ranks), strict=True):
                pieces.setdefault(owner, []).append(piece)
        assert all(sorted(own) == [rank, 2 * ranks - 1 - rank] for rank, own in pieces.items())
        assert len({sum(own) for own in pieces.values()}) == 1


@multirank(2)
def test_what_it_refuses(rank: int, world_size: int) -> None:
    mesh = world_mesh(world_size)
    q = torch.zeros(1, 2, 3, 4)

    def call(message: str, *tensors: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            sw.context.attention(*tensors, mesh=mesh, **options)

    call("found 3, 4 and 4", q[0], q, q)
    call("a divisor of it with enable_gqa", q, q[:, :1], q[:, :1])
    call("cross-attention", q, q[:, :, :2], q[:, :, :2])
    call(r"broadcast to \[1, 2, 6, 6\], found \[1, 1, 3, 3\]", q, q, q, attn_mask=torch.zeros(1, 1, 3, 3))
    call("expected attn_mask alone", q, q, q, attn_mask=torch.zeros(1, 1, 6, 6), is_causal=True)
    call("expected is_causal=True", q, q, q, window=2)
    call("expected a number of keys, 1 or more, found 0", q, q, q, is_causal=True, window=0)
    call(r"of shape \[1, 6\], found \[1, 3\]", q, q, q, is_causal=True, documents=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="that 2 ranks of the context divide, found 3"):
        sw.context.shard(torch.zeros(1, 3), mesh)
