"""Weights gathered in float8 with a scale for each block: every rank has the bits of the whole tensor, encoded once.

Every rank has its own data. ``kit/float8.py`` rounds whole tensors by plain loops over blocks.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwright as sw
from shardwright.comm_hooks import MXFP8, BlockwiseFP8, Int8Blocks
from tests.engine.custom import Gathers
from tests.engine.kit.counting import counted
from tests.engine.kit.float8 import Sent, decoded
from tests.engine.kit.models import build, full, loss_of, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together

FP32, BF16 = torch.float32, torch.bfloat16
HEADER = 16  #: bytes in each gather that detect ranks that diverge

MX, MX5, TILES, SMALL = MXFP8(), MXFP8(torch.float8_e5m2), BlockwiseFP8(), BlockwiseFP8(16)
#: Each codec with layouts that keep its blocks whole.
WAYS: dict[str, tuple[Any, Any]] = {
    "mx, per parameter": (MX, "per_parameter"),
    "mx, rows": (MX, "ragged"),
    "mx, 128 rows": (MX, sw.Ragged(128)),
    "mx e5m2, rows": (MX5, "ragged"),
    "tiles, 128 rows": (TILES, sw.Ragged(128)),
    "tiles, 256 rows": (TILES, sw.Ragged(256)),
    "tiles of 16, 16 rows": (SMALL, sw.Ragged(16)),
}


class Shapes(nn.Module):
    """Parameters whose sizes are no multiples of blocks, and parameters that codecs leave as they are."""

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {
            "wide": (200, 257),
            "tall": (300, 33),
            "short": (2, 40),  # some ranks have no row
            "thin": (40, 1),
            "empty": (0, 40),
            "experts": (3, 128, 40),
            "small_experts": (6, 64, 24),  # two matrices in a granule of 128 rows
            "kernels": (6, 4, 16, 3),
            "vector": (77,),
            "scalar": (),
        }
        for name, shape in shapes.items():
            values = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
            setattr(self, name, nn.Parameter(values))
        self.frozen = nn.Parameter(torch.randn(70, 70), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(160).view(4, 40), requires_grad=False)


def shapes(seed: int = 0) -> Shapes:
    torch.manual_seed(seed)
    return Shapes()


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the full weights of a model of one unit."""
    model.unshard()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.reshard()
    return found


def check(model: Any, whole: dict[str, torch.Tensor], codec: Any, compute: torch.dtype) -> None:
    """The gathered weights have the bits of the whole ones, encoded and decoded."""
    rounded = 0
    for name, found in gathered(model).items():
        dtype = compute if whole[name].is_floating_point() else whole[name].dtype
        expected = decoded(whole[name], codec, dtype) if dtype.is_floating_point else whole[name]
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), name
        rounded += not torch.equal(found, whole[name].to(dtype))
    assert rounded >= 5  # the test would see a codec that does nothing


CASES = select(
    itertools.product(
        [
            *on("zero3", (2,), (3,)),
            *on("zero1", (2,)),
            *on("zero2", (3,)),
            *on("hsdp", (2, 2)),
            *on("hfsdp", (2, 2)),
            *on("1-3", (2, 2)),
        ],
        ("fp32", "bf16 compute", "bf16 storage"),
        ("device", "offload"),
    ),
    lambda row, strength: together(strength, *row),
)


@pytest.mark.extensive("each place")
@on_meshes(CASES)
def test_bits_of_the_whole_tensor(rank: int, world_size: int, at: On, precision: str, place: str) -> None:
    for way in WAYS:
        gather_and_check(at, way, precision, place)


def gather_and_check(at: On, way: str, precision: str, place: str) -> None:
    codec, layout = WAYS[way]
    storage = BF16 if precision == "bf16 storage" else FP32
    compute = FP32 if precision == "fp32" else BF16
    plain = shapes().to(storage)
    plain.counts = shapes().counts
    whole = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = sw.fully_shard(
        plain,
        mesh=at.mesh,
        strategy=at.strategy,
        layout=layout,
        mp_policy=sw.MixedPrecisionPolicy(param_dtype=None if compute is storage else compute),
        offload_policy=sw.CPUOffloadPolicy() if place == "offload" else sw.OffloadPolicy(),
    )
    model.set_all_gather_codec(codec)
    check(model, whole, codec, compute)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.is_floating_point():
                p.mul_(1.25)
                whole[name].mul_(1.25)
    check(model, whole, codec, compute)
    for name, p in model.named_parameters():
        assert torch.equal(full(p.detach()), whole[name]), name  # the shards have the exact weights
    with sw.unsharded(model, writeback=False):
        assert all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    model.set_all_gather_codec(None)
    for name, found in gathered(model).items():
        exact = whole[name]
        assert torch.equal(found, exact.to(compute) if exact.is_floating_point() else exact)


@multirank(3)
@pytest.mark.parametrize("way", ["mx, per parameter", "mx, rows", "tiles, 128 rows"])
def test_numbers_that_are_not_finite(rank: int, world_size: int, way: str) -> None:
    codec, layout = WAYS[way]
    model = shapes()
    with torch.no_grad():
        model.wide[130, 40], model.experts[1, 5, 39], model.vector[3] = torch.nan, torch.inf, -torch.inf
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = gathered_with(model, codec, layout)
    assert not found["wide"][130, 40].isfinite() and not found["experts"][1, 5, 39].isfinite()
    for name, value in found.items():
        if value.is_floating_point():
            expected = decoded(whole[name], codec, FP32)
            assert torch.equal(value.isfinite(), expected.isfinite()), name
            assert torch.equal(value.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)), name


def gathered_with(model: Any, codec: Any, layout: Any) -> dict[str, torch.Tensor]:
    sharded: Any = sw.fully_shard(model, layout=layout)
    sharded.set_all_gather_codec(codec)
    return gathered(sharded)


@multirank(2)
def test_rows_of_a_matrix_cut_along_other_dimensions(rank: int, world_size: int) -> None:
    """``Shard(1)`` and channels-last weights: blocks along the last dimension, in the parameter's own order."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.columns = nn.Parameter(torch.randn(20, 128))
            self.experts = nn.Parameter(torch.randn(3, 8, 40))
            self.kernels = nn.Parameter(torch.randn(5, 6, 4, 40).to(memory_format=torch.channels_last))

    plain = Some()
    whole = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model: Any = sw.fully_shard(plain, shard_placement_fn=lambda p: Shard(1) if p.ndim < 4 else Shard(0))
    model.set_all_gather_codec(MX)
    for name, found in gathered(model).items():
        assert torch.equal(found, decoded(whole[name], MX, FP32)), name
        assert not torch.equal(found, whole[name]), name


# -- bytes -----------------------------------------------------------------------------------------------------------


def sent_by(model: Any) -> list[int]:
    """Bytes that this rank hands to the all-gathers of one use of the model."""
    model.unshard()
    model.reshard()
    with Sent() as sent, counted() as calls:
        model.unshard()
        model.reshard()
    assert not calls  # no collective beside them
    return sent.nbytes


@multirank(2)
def test_bytes_of_weights(rank: int, world_size: int) -> None:
    """One collective; 1 + 1/32 bytes for each element, or one and four for each block of 128 x 128."""
    numel = 128 * 256
    for codec, expected in (
        (MX, numel + numel // 32),
        (MX5, numel + numel // 32),
        (TILES, numel + 4 * numel // 128**2),
        (SMALL, numel + 4 * numel // 16**2),
    ):
        model: Any = sw.fully_shard(nn.Linear(256, 256, bias=False), layout=sw.Ragged(128))
        model.set_all_gather_codec(codec)
        assert sent_by(model) == [expected + HEADER], codec


@multirank(2)
def test_bytes_of_odd_sizes(rank: int, world_size: int) -> None:
    """The longest rank sets the size: 128 of 200 rows. Rows of 257 elements have 9 blocks of 32, or 3 of 128."""
    for codec, expected in ((MX, 128 * (257 + 9)), (TILES, 128 * 257 + 3 * 4)):
        for bias in (False, True):
            model: Any = sw.fully_shard(nn.Linear(257, 200, bias=bias), layout=sw.Ragged(128))
            model.set_all_gather_codec(codec)
            # All 200 float32 numbers of the bias are one granule: rank 1 has room for them behind its 72 rows.
            assert sent_by(model) == [expected + HEADER], (codec, bias)
    model = sw.fully_shard(nn.Linear(40, 30), mp_policy=sw.MixedPrecisionPolicy(param_dtype=BF16))
    model.set_all_gather_codec(MX)
    assert sent_by(model) == [
        15 * (40 + 2) + 15 * 2 + HEADER
    ]  # rows of two blocks, and half of the bias in bfloat16


@on_meshes([(at,) for at in on("hfsdp", (2, 2))])
def test_bytes_on_two_axes(rank: int, world_size: int, at: On) -> None:
    """Each axis moves the bytes that were encoded once."""
    model: Any = sw.fully_shard(
        nn.Linear(64, 512, bias=False), mesh=at.mesh, strategy=at.strategy, layout=sw.Ragged(128)
    )
    model.set_all_gather_codec(TILES)
    own = 128 * 64 + 4
    found = sent_by(model)
    assert sorted(found) == [2 * own + HEADER] or sorted(found) == [own, 2 * own + HEADER], found


# -- training --------------------------------------------------------------------------------------------------------

TRAINED = select(
    itertools.product(
        [
            *on("zero3", (2,), (3,)),
            *on("zero2", (2,)),
            *on("zero1", (2,)),
            *on("hsdp", (2, 2)),
            *on("hfsdp", (2, 2)),
        ],
        ("mx, per parameter", "mx, rows", "tiles of 16, 16 rows"),
        ("dynamic", "arena"),
        ("single", "communicate", "hold"),
        (None, False, "neighbours"),
    ),
    lambda row, strength: together(strength, *row),
)


def is_possible(at: On, reshard: object) -> bool:
    return reshard is None or (at.stages == (3,) and (reshard is False or at.shape == (2,)))


@on_meshes([row for row in TRAINED if is_possible(row[0], row[4])])
def test_training(
    rank: int, world_size: int, at: On, way: str, memory: str, accumulation: str, reshard: Any
) -> None:
    """Losses and gradients of a plain model with decoded weights; the optimizer changes the exact weights."""
    codec, layout = WAYS[way]
    plain, rounded = build(dim=40, hidden=72), build(dim=40, hidden=72)
    model = build(dim=40, hidden=72)
    options: dict[str, Any] = {"mesh": at.mesh, "strategy": at.strategy, "layout": layout}
    if reshard is not None:
        options["reshard_after_forward"] = False if reshard is False else 2
    for block in model.blocks:
        sw.fully_shard(block, **options)
    sw.fully_shard(model, memory=memory, **options)
    model.set_all_gather_codec(codec)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    micros = 1 if accumulation == "single" else 2
    for step in range(3):
        for p, q in zip(plain.parameters(), rounded.parameters(), strict=True):
            q.data.copy_(decoded(p, codec, FP32))
        for i in range(micros):
            model.set_requires_gradient_sync(accumulation != "hold" or i == micros - 1)
            model.set_is_last_backward(i == micros - 1)
            loss = loss_of(model(tokens(step, i, rank)), tokens(step, i, rank))
            loss.backward()
            losses = [loss_of(rounded(tokens(step, i, r)), tokens(step, i, r)) for r in range(world_size)]
            (sum(losses) / world_size).backward()
            torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=1e-5)
        for (name, p), r, q in zip(
            model.named_parameters(), rounded.parameters(), plain.parameters(), strict=True
        ):
            torch.testing.assert_close(full(p.grad), r.grad, rtol=1e-4, atol=1e-5, msg=name)
            # The same gradients for both, so that no number falls on the other side of a rounding.
            q.grad, r.grad = full(p.grad).clone(), None
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(full(p.detach()), q[1].detach()), name


@pytest.mark.extensive("compiled graphs")
@multirank(2)
def test_compiled_blocks(rank: int, world_size: int) -> None:
    """The bits of the same blocks without a compiler."""

    def results(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model: Any = build(dim=40, hidden=72)
        for block in model.blocks:
            if compiled:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
            sw.fully_shard(block, layout=sw.Ragged(16))
        sw.fully_shard(model, layout=sw.Ragged(16))
        model.set_all_gather_codec(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: list[torch.Tensor] = []
        for step in range(2):
            loss = loss_of(model(tokens(step, 0, rank)), tokens(step, 0, rank))
            loss.backward()
            found += [loss.detach(), *(full(p.grad).clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return found

    assert all(map(torch.equal, results(True), results(False)))


@multirank(2)
def test_evaluation_in_full_precision(rank: int, world_size: int) -> None:
    """The codec gets the weights in the dtype in which they are gathered."""
    torch.manual_seed(0)
    plain, x = nn.Linear(40, 64), torch.randn(3, 40)
    whole = plain.weight.detach().clone()
    policy = sw.PrecisionPolicy(param_dtype=BF16, full_precision_in_eval=True)
    model: Any = sw.fully_shard(plain, mp_policy=policy)
    model.set_all_gather_codec(MX)
    with torch.no_grad():
        bias = full(model.bias.detach())
        for training, dtype in ((True, BF16), (False, FP32), (True, BF16)):
            model.train(training)
            weight = decoded(whole, MX, dtype)
            expected = nn.functional.linear(x.to(dtype), weight, bias.to(dtype))
            assert torch.equal(model(x), expected)


@multirank(2)
def test_state_dicts_are_exact(rank: int, world_size: int) -> None:
    plain = shapes()
    model: Any = sw.fully_shard(shapes(), layout=sw.Ragged(128))
    before = {k: full(v).clone() for k, v in model.state_dict().items()}
    model.set_all_gather_codec(TILES)
    model.unshard()
    for k, v in model.state_dict().items():
        assert torch.equal(full(v), before[k]), k
    assert all(torch.equal(before[k], v) for k, v in plain.state_dict().items())


# -- tensor parallelism ----------------------------------------------------------------------------------------------


class Matrix(nn.Module):
    def __init__(self, rows: int, columns: int, tensor: Any, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = torch.randn(rows, columns)
        self.weight = nn.Parameter(distribute_tensor(self.whole, tensor, [Shard(dim)]))


@multirank(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_weights(rank: int, world_size: int, dim: int) -> None:
    """Blocks are those of the whole parameter; where tensor parallelism cuts one, the codec raises an error."""
    mesh = world_mesh(2, 2, names=("dp", "tp"))
    for codec, layout, shape in ((SMALL, sw.Ragged(16), (96, 64)), (MX, "ragged", (96, 64))):
        made = Matrix(*shape, mesh["tp"], dim)
        whole = decoded(made.whole, codec, FP32)
        model: Any = sw.fully_shard(made, mesh=mesh["dp"], layout=layout)
        model.set_all_gather_codec(codec)
        model.unshard()
        assert isinstance(model.weight, DTensor)
        found = model.weight.detach().redistribute(placements=[Replicate()]).to_local()
        assert torch.equal(found, whole)
        model.reshard()
    shape = (88, 64) if dim == 0 else (96, 80)
    model = sw.fully_shard(Matrix(*shape, mesh["tp"], dim), mesh=mesh["dp"], layout=sw.Ragged(16))
    with pytest.raises(ValueError, match=r"tensor parallelism cuts such a block of parameter 'weight'"):
        model.set_all_gather_codec(SMALL)


# -- refusals --------------------------------------------------------------------------------------------------------


@multirank(3)
def test_a_layout_that_cuts_blocks_is_refused(rank: int, world_size: int) -> None:
    """The error names parameter, place and layout; no unit has changed; the layout that it names works."""

    def model_of(layout: Any, *shape: int) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        inner, outer = nn.Linear(48, 96), nn.Module()
        outer.inner, outer.weight = inner, nn.Parameter(torch.randn(shape))
        whole = {"inner.weight": inner.weight.detach().clone(), "weight": outer.weight.detach().clone()}
        sw.fully_shard(inner, layout="ragged" if layout == "per_parameter" else sw.Ragged(48))
        return sw.fully_shard(outer, layout=layout), whole

    for codec, layout, shape, place in (
        (SMALL, "per_parameter", (60, 40), "before row 20"),
        (SMALL, sw.Ragged("row"), (60, 40), "before row 20"),
        (SMALL, sw.Ragged("element"), (61, 37), "inside row 20"),
        (SMALL, sw.Ragged(16), (3, 40, 24), "before row 8"),
        (MX, sw.Ragged("element"), (61, 37), "inside row 20"),
    ):
        model, whole = model_of(layout, *shape)
        with pytest.raises(ValueError, match=re.escape(repr(codec))) as caught:
            model.set_all_gather_codec(codec)
        message = str(caught.value)
        assert "parameter 'weight'" in message or "parameter 'inner.weight'" in message, message
        assert place in message or "'inner.weight'" in message
        assert torch.equal(gathered(model)["weight"], whole["weight"])
        assert torch.equal(gathered(model.inner)["weight"], whole["inner.weight"])
        suggested = eval(re.search(r"Pass layout=(\S+) to", message)[1], {"shardwright": sw})  # type: ignore[index]
        model, whole = model_of(suggested, *shape)
        model.set_all_gather_codec(codec)
        assert torch.equal(gathered(model)["weight"], decoded(whole["weight"], codec, FP32))


@multirank(3)
def test_columns_that_are_cut_inside_a_block(rank: int, world_size: int) -> None:
    model: Any = sw.fully_shard(nn.Linear(96, 8, bias=False), shard_placement_fn=lambda p: Shard(1))
    model.set_all_gather_codec(MX)  # 32 columns on each rank
    model = sw.fully_shard(nn.Linear(120, 8, bias=False), shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(
        ValueError, match=r"before column 40 of a matrix.* Pass layout=\"ragged\" to fully_shard"
    ):
        model.set_all_gather_codec(MX)
    with pytest.raises(ValueError, match=r"Pass layout=shardwright\.Ragged\(128\) to fully_shard"):
        sw.fully_shard(nn.Linear(8, 200)).set_all_gather_codec(TILES)


@on_meshes([(at,) for at in (*on("zero3", (1,)), *on("ddp", (2,)), *on("hsdp", (2, 1)))])
def test_weights_that_do_not_travel_are_exact(rank: int, world_size: int, at: On) -> None:
    for codec in (MX, TILES, Int8Blocks(32)):
        plain = shapes()
        model: Any = sw.fully_shard(shapes(), mesh=at.mesh, strategy=at.strategy)
        model.set_all_gather_codec(codec)
        for name, found in gathered(model).items():
            assert torch.equal(found, plain.get_parameter(name)), name


@on_meshes([(at,) for at in (*on("zero3", (2,)), *on("hfsdp", (2, 2)))])
def test_custom_gathers_of_encoded_weights(rank: int, world_size: int, at: On) -> None:
    whole = {name: p.detach().clone() for name, p in shapes().named_parameters()}
    model: Any = sw.fully_shard(shapes(), mesh=at.mesh, strategy=at.strategy, layout=sw.Ragged(128))
    gathers = Gathers()
    model.set_custom_all_gather(gathers)
    model.set_all_gather_codec(TILES)
    check(model, whole, TILES, FP32)
    assert gathers.calls == len(at.shape)


class Halves:
    """A codec of a user's: pairs of rows in float16."""

    block_shape: Any = (2, 1)

    def nbytes(self, rows: int, columns: int) -> int:
        return 2 * rows * columns

    def encode(self, matrices: torch.Tensor) -> torch.Tensor:
        return matrices.half().reshape(len(matrices), -1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return encoded.clone().view(torch.float16).float().view(-1, rows, columns)


@multirank(2)
def test_a_codec_of_the_users(rank: int, world_size: int) -> None:
    model: Any = nn.Linear(5, 8)
    whole = model.weight.detach().clone()
    dist.broadcast(whole, 0)
    model.weight.data.copy_(whole)
    model = sw.fully_shard(model)
    model.set_all_gather_codec(Halves())
    assert torch.equal(gathered(model)["weight"], whole.half().float())
    for bad in (2, (2,), (0, 1), (1.0, 2), [1, 2]):
        codec = Halves()
        codec.block_shape = bad
        with pytest.raises(TypeError, match="expected its rows and columns: two positive integers"):
            model.set_all_gather_codec(codec)
