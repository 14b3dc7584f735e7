"""Streams of weights: the values of the saved files, bounded memory, and what happens at their edges."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.checkpoint import Joined, Slice, Stacked, Transposed, open_stored
from tests.checkpoint.kit.models import LAYOUTS, source_model
from tests.engine.kit import tensor_parallel
from tests.engine.kit.models import build, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh
from tests.support.storages import Storages

Weights = dict[str, torch.Tensor]


def collected(stream: Iterator[Weights]) -> tuple[Weights, int]:
    """All tensors, and the number of buckets."""
    weights: Weights = {}
    count = 0
    for bucket in stream:
        assert not weights.keys() & bucket.keys()
        weights.update(bucket)
        count += 1
    return weights, count


def stored(path: Path) -> Weights:
    return {key: each.view().clone() for key, each in open_stored(path).items()}


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
        same = torch.equal(
            found[key].contiguous().view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        )
        assert same, key


def step(model: Any, rank: int) -> None:
    """Values that the constructor does not know, from different data on each rank."""
    optimizer = sw.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    batch = tokens(0, 0, rank)
    loss_of(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()


PLACES = [
    *on("zero1", (2,)),
    *on("zero2", (2,)),
    *on("zero3", (3,), (4,)),
    *on("hsdp", (2, 2)),
    *on("ddp", (2,)),
]
CASES = [
    (at, layout, dtype)
    for number, at in enumerate(PLACES)
    for layout in list(LAYOUTS)[number % 2 :: 2]
    for dtype in [(None, torch.bfloat16)[(number // 2 + len(layout)) % 2]]
]


@pytest.mark.extensive(
    "each layout at each place",
    but=("hsdp@2x2-row-*", "zero3@3-per_parameter-*", "zero1@2-*", "ddp@2-*", "zero2@2-element*"),
)
@on_meshes(CASES, timeout=60)
def test_a_stream_has_the_bits_of_the_saved_files(
    rank: int, world_size: int, at: On, layout: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """After a step, in every layout and strategy, tied weights and buffers among them."""
    options: dict[str, Any] = {"strategy": at.strategy, **LAYOUTS[layout]}
    model = shard(source_model(), mesh=at.mesh, **options)
    step(model, rank)
    sw.save_pretrained(model, tmp_path / "saved", dtype=dtype)
    found, count = collected(sw.stream_weights(model, bucket_bytes=500, dtype=dtype))
    assert_same(found, stored(tmp_path / "saved"))
    assert count > 2 and "head.weight" not in found and "norm.count" in found
    only_first, again = collected(sw.stream_weights(model, bucket_bytes=500, dtype=dtype, to="first"))
    assert again == count and (only_first.keys() == found.keys() if rank == 0 else not only_first)
    step(model, rank)  # and the model is as it was


@multirank(4)
@pytest.mark.parametrize(
    ("shape", "layout"), [((2, 2), "per_parameter"), ((2, 2), "element"), ((1, 4), "row")]
)
def test_tensor_parallel_models(
    rank: int, world_size: int, shape: tuple[int, int], layout: str, tmp_path: Path
) -> None:
    mesh = tensor_parallel.mesh_of(shape)
    model = tensor_parallel.shard(
        tensor_parallel.parallelize(build(5), mesh, "sequence"), mesh, layout=tensor_parallel.LAYOUTS[layout]
    )
    sw.save_pretrained(model, tmp_path / "saved")
    found, _ = collected(sw.stream_weights(model, bucket_bytes=600))
    assert_same(found, stored(tmp_path / "saved"))
    assert_same(found, dict(build(5).state_dict()))


@multirank(2)
@pytest.mark.parametrize(
    "options",
    [{"memory": "arena"}, {"offload_policy": sw.Offload()}, {"strategy": "zero2", "memory": "max_pool"}],
    ids=["arena", "offload", "pool"],
)
def test_planned_memory_and_offload(
    rank: int, world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    if options.get("memory") == "max_pool":
        options = {"memory": "double_buffer"}
    memory = options.pop("memory", "dynamic")
    model = build(0, layers=4)
    for block in model.blocks:
        sw.fully_shard(block, mesh=world_mesh(2), **options)
    sw.fully_shard(model, mesh=world_mesh(2), memory=memory, **options)
    for _ in range(3):
        step(model, rank)
        sw.save_pretrained(model, tmp_path / "saved", overwrite=True)
        found, _ = collected(sw.stream_weights(model, bucket_bytes="1 KiB"))
        assert_same(found, stored(tmp_path / "saved"))


def test_plain_models_and_other_forms(tmp_path: Path) -> None:
    """A key map renames, transposes, cuts and joins; tensors that form one stored tensor are in one bucket."""
    key_map = {
        "embed.weight": Transposed("wte"),
        "blocks.0.up.weight": Joined((Transposed("up.a"), Transposed("up.b"))),
        "blocks.1.up.weight": Stacked(tuple(f"row.{i}" for i in range(12))),
        "blocks.0.norm.weight": Slice("norms", 0, 7),
        "norm.weight": Slice("norms", 14, 7),
        "blocks.1.norm.weight": Slice("norms", 7, 7),
        "head.bias": None,
    }
    model = build()
    sw.save_pretrained(model, tmp_path / "saved", key_map=key_map, dtype=torch.float64)
    options: dict[str, Any] = {"key_map": key_map, "dtype": torch.float64, "bucket_bytes": 700}
    found, _ = collected(sw.stream_weights(model, **options))
    assert_same(found, stored(tmp_path / "saved"))
    for bucket in sw.stream_weights(model, **options):
        rows = [key for key in bucket if key.startswith("row.")]
        assert len(rows) in (0, 12)
    some, _ = collected(sw.stream_weights(model, names=["row.1*", "norms"], **options))
    assert sorted(some) == ["norms", "row.1", "row.10", "row.11"]
    # Copies: changes of them do not reach the model.
    before = model.norm.bias.clone()
    for bucket in sw.stream_weights(model):
        for tensor in bucket.values():
            tensor.fill_(7)
    assert torch.equal(model.norm.bias, before)


def test_a_kept_dict_is_empty_and_a_kept_tensor_is_not() -> None:
    model = build()
    buckets = list(sw.stream_weights(model, bucket_bytes=500))
    assert len(buckets) > 1 and not any(buckets)
    kept: Weights = {}
    for bucket in sw.stream_weights(model, bucket_bytes=500):
        kept |= bucket
    assert_same(kept, dict(model.state_dict()))


def test_wrong_arguments_are_refused_at_the_call() -> None:
    model = build()
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model, {"bucket_bytes": "5 parsec"}, "bucket_bytes must be bytes.*got '5 parsec'"),
        (model, {"bucket_bytes": 0}, "bucket_bytes must be bytes.*got 0"),
        (model, {"dtype": torch.int8}, "dtype must be a floating-point dtype"),
        (model, {"names": ["blocks.*", "head.wait"]}, r"found 'head.wait'; keys are embed.weight"),
        (model, {"names": []}, "found none"),
        (model, {"to": "last"}, '"all" or "first", got \'last\''),
        (model, {"share": "x", "to": "all"}, "the consumers get the tensors"),
        (model, {"share": ""}, "1 to 80 bytes"),
        (model, {"share": "x", "consumers": 0}, "at least 1"),
        (empty, {}, "hold no values yet.*: weight, bias"),
    ]
    for thing, options, message in cases:
        with pytest.raises(ValueError, match=message):
            sw.stream_weights(thing, **options)


# -- memory ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))
        self.other = nn.Parameter(torch.randn(width, rows))


@pytest.mark.extensive("each layout with each dtype", but=("per_parameter-float32-*", "row-bfloat16-*"))
@multirank(4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_rank_has_at_most_one_bucket(
    rank: int, world_size: int, layout: str, dtype: torch.dtype | None
) -> None:
    """All storages of the process, after every operation. Gathers and conversions count; gloo's copies do not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(64, 48 + 8 * (i % 5)) for i in range(8)))
    for layer in model:
        sw.fully_shard(layer, mesh=world_mesh(4), **LAYOUTS[layout])
    itemsize = 2 if dtype is not None else 4
    total = sum(p.numel() for p in model.parameters()) * itemsize
    largest = max(p.numel() for p in model.parameters()) * itemsize
    for limit, to in ((5 * largest, "all"), (5 * largest, "first"), (largest // 2, "all")):
        gc.collect()
        with Storages(lambda frame: "stream: all") as seen:
            for p in model.parameters():
                seen.know(p.to_local().untyped_storage())  # type: ignore[attr-defined]
            seen.settle()
            seen.begin()
            count = 0
            for bucket in sw.stream_weights(model, bucket_bytes=limit, dtype=dtype, to=to):
                count += 1
                del bucket
        # A tensor that needs more than a bucket alone may take three times its size.
        assert seen.peak.nbytes <= (limit if limit > largest else 3 * largest) + 2048, seen.peak
        assert seen.peak.nbytes >= min(limit // 3, largest) and total > limit
        assert count >= total / limit if limit > largest else count == 16


# -- edges -------------------------------------------------------------------------------------------------------------


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "element"])
def test_a_stream_left_by_all_ranks_leaves_the_model_as_it_was(
    rank: int, world_size: int, layout: str, tmp_path: Path
) -> None:
    model = shard(build(), mesh=world_mesh(2), **LAYOUTS[layout])
    expected = dict(build().state_dict())
    for number, _ in enumerate(sw.stream_weights(model, bucket_bytes=500)):
        if number == 1:
            break
    with pytest.raises(KeyError):
        for bucket in sw.stream_weights(model, bucket_bytes=500):
            bucket["nowhere"]
    never_started = sw.stream_weights(model)
    del never_started
    assert_same(collected(sw.stream_weights(model))[0], expected)
    step(model, rank)


@multirank(2)
@pytest.mark.parametrize("change", ["step", "edit", "replaced", "one rank"])
def test_changed_weights_end_the_stream_on_every_rank(rank: int, world_size: int, change: str) -> None:
    model = shard(build(), mesh=world_mesh(2))
    stream = sw.stream_weights(model, bucket_bytes=500)
    next(stream)
    model(tokens(0, 0, rank))  # using the model is fine
    next(stream)
    if change == "step":
        step(model, rank)
    elif change == "edit":
        with torch.no_grad():
            model.norm.bias.add_(1)
    elif change == "replaced":
        model.norm.bias = nn.Parameter(torch.zeros(7))
    elif rank == 1:
        with torch.no_grad():
            model.norm.bias.to_local().add_(1)
    with pytest.raises(
        RuntimeError, match=r"Weights changed after 2 of \d+ buckets.*'(norm.bias|embed.weight)'"
    ):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert len(collected(sw.stream_weights(model))[0]) == len(model.state_dict())


@multirank(2)
def test_a_call_in_a_step_is_refused(rank: int, world_size: int) -> None:
    model = shard(build(), mesh=world_mesh(2))
    errors = []

    def streaming(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="between steps") as error:
            sw.stream_weights(model)
        errors.append(str(error.value))

    handle = model.blocks[1].down.register_forward_hook(streaming)
    batch = tokens(0, 0, rank)
    output = model(batch)
    handle.remove()
    output.register_hook(streaming)
    stream = sw.stream_weights(model, bucket_bytes=500)  # after the forward: between two uses
    next(stream)
    loss_of(output, batch).backward()
    assert len(errors) == 2
    assert len(collected(stream)[0]) + 1 <= len(model.state_dict())  # gradients are no change of weights


@multirank(2)
def test_other_arguments_on_one_rank_are_refused_on_all(rank: int, world_size: int) -> None:
    model = shard(build(), mesh=world_mesh(2))
    with pytest.raises(ValueError, match="different models or arguments"):
        sw.stream_weights(model, bucket_bytes=500 + 2000 * rank)
    with pytest.raises(ValueError if rank else RuntimeError, match="must be a floating-point dtype"):
        sw.stream_weights(model, dtype=torch.int8 if rank else None)
    with pytest.raises(
        ValueError if rank else RuntimeError, match="rank 1 of the training job is in the group"
    ):
        sw.stream_weights(model, group=dist.group.WORLD)
    alone = dist.new_group([0])
    with pytest.raises(RuntimeError if rank else ValueError, match="the group has only the sender"):
        sw.stream_weights(model, group=alone)


@multirank(2)
def test_a_rank_that_leaves_alone_is_reported_to_the_others(rank: int, world_size: int) -> None:
    """It goes on with a step, and the ranks' records differ."""
    model = shard(build(), mesh=world_mesh(2))
    batch = tokens(0, 0, rank)
    model(batch).sum().backward()
    stream = sw.stream_weights(model, bucket_bytes=500)
    next(stream)
    with pytest.raises(RuntimeError, match=r"diverged|full parameters"):
        if rank:
            stream.close()
            model(batch)
        else:
            next(stream)
