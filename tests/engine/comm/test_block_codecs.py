"""Float8 codecs of weights: each number, byte and scale, against plain loops over blocks, and torchao's MXFP8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shardwright.comm_hooks import MXFP8, BlockwiseFP8, Compressed

CODECS = [MXFP8(), MXFP8(torch.float8_e5m2), BlockwiseFP8(), BlockwiseFP8(16)]
SHAPES = [(1, 1), (3, 31), (5, 32), (4, 33), (7, 100), (128, 128), (129, 130), (200, 257), (300, 5)]


def values_of(dtype: torch.dtype) -> list[float]:
    """All finite magnitudes of a float8 dtype."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    return sorted({abs(v) for v in every.tolist() if math.isfinite(v)})


def nearest(x: float, values: list[float]) -> float:
    """The nearest of ``values``, with the sign of ``x``. Of two equally near, the one with an even mantissa."""
    size = min(abs(x), values[-1])
    best = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return math.copysign(values[best], x)


def rounded(matrix: torch.Tensor, codec: Any) -> torch.Tensor:
    """float32 [rows, columns]: encoded and decoded, as the formats' documents say, one number at a time."""
    result = matrix.float().clone()
    height, width = codec.block_shape
    values = values_of(codec.dtype if isinstance(codec, MXFP8) else torch.float8_e4m3fn)
    for row in range(0, matrix.shape[0], height):
        for column in range(0, matrix.shape[1], width):
            block = result[row : row + height, column : column + width]
            amax = float(block.abs().max())
            if isinstance(codec, MXFP8):
                largest = math.frexp(values[-1])[1] - 1
                scale = 2.0 ** max(math.frexp(amax)[1] - 1 - largest, -127) if amax else 2.0**-127
            else:
                scale = float(torch.tensor(amax) / torch.tensor(448.0))
            for i in range(block.shape[0]):
                for j in range(block.shape[1]):
                    quotient = torch.tensor(float(block[i, j])) / torch.tensor(scale or 1.0)
                    block[i, j] = torch.tensor(nearest(float(quotient), values)) * torch.tensor(scale)
    return result


def through(codec: Any, matrices: torch.Tensor) -> torch.Tensor:
    encoded = codec.encode(matrices)
    assert encoded.dtype == torch.uint8
    assert tuple(encoded.shape) == (len(matrices), codec.nbytes(*matrices.shape[1:]))
    decoded = codec.decode(encoded, *matrices.shape[1:])
    assert decoded.dtype == torch.float32 and decoded.shape == matrices.shape
    return decoded


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_numbers_are_those_of_the_formats(codec: Any, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (5, 33), (19, 40)):
        matrices = normal(2, *shape).clamp(-60000, 60000).to(dtype)
        decoded = through(codec, matrices)
        for one, plain in zip(decoded, matrices, strict=True):
            assert torch.equal(one, rounded(plain, codec)), shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_bytes_and_errors(codec: Any, shape: tuple[int, int]) -> None:
    rows, columns = shape
    height, width = codec.block_shape
    blocks = -(-rows // height) * -(-columns // width)
    assert codec.nbytes(rows, columns) == rows * columns + blocks * (1 if isinstance(codec, MXFP8) else 4)
    matrices = normal(3, rows, columns)
    decoded = through(codec, matrices)
    assert ((decoded - matrices).abs() <= matrices.abs() / 8 + matrices.abs().amax() * 2e-5).all()
    assert torch.equal(codec.decode(codec.encode(matrices[1:2]), rows, columns), decoded[1:2])
    assert not through(codec, torch.zeros(1, rows, columns)).any()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_parts_between_blocks_are_parts_of_the_whole(codec: Any) -> None:
    height, width = codec.block_shape
    matrix = normal(1, 3 * height + 7, 3 * width + 5)
    whole = through(codec, matrix)
    for rows in (slice(0, height), slice(height, 3 * height), slice(2 * height, None)):
        for columns in (slice(0, 2 * width), slice(width, None)):
            assert torch.equal(through(codec, matrix[:, rows, columns]), whole[:, rows, columns])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_is_not_finite_stays_so(codec: Any, bad: float) -> None:
    height, width = codec.block_shape
    matrix = normal(1, 2 * height, 2 * width)
    before = through(codec, matrix)
    matrix[0, height, 0] = bad
    if math.isnan(bad) and math.copysign(1, bad) < 0:  # with its sign bit
        matrix[0, height, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    after = through(codec, matrix)
    assert not after[0, height:, :width].isfinite().any()
    assert torch.equal(after[0, :height], before[0, :height])
    assert torch.equal(after[0, :, width:], before[0, :, width:])


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_ends_of_the_range(codec: Any) -> None:
    """The largest numbers stay finite; the smallest stay small."""
    huge = torch.full((1, 40, 40), torch.finfo(torch.float32).max)
    assert torch.allclose(through(codec, huge), huge, rtol=1 / 8)
    for tiny in (2.0**-126, 2.0**-130, 2.0**-149):
        assert (through(codec, torch.full((1, 40, 40), tiny)) <= 2 * tiny).all()
    if isinstance(codec, MXFP8):  # the smallest scale is 2 ** -127, a subnormal number
        for size in (2.0**-126, 2.0**-120, 2.0**-110):
            matrix = size * normal(1, 8, 40)
            assert torch.equal(through(codec, matrix)[0], rounded(matrix[0], codec))


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_is_that_of_torchao(element: torch.dtype, dtype: torch.dtype) -> None:
    """Elements and scales have torchao's bits."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    matrix = normal(64, 96).to(dtype)
    matrix[3] *= 1e-30
    matrix[5] = 0
    scales, elements = mx.to_mx(matrix, element, 32, ScaleCalculationMode.FLOOR)
    encoded = MXFP8(element).encode(matrix.unsqueeze(0))[0]
    assert torch.equal(encoded[: 64 * 96], elements.contiguous().view(torch.uint8).flatten())
    assert torch.equal(encoded[64 * 96 :], scales.contiguous().view(torch.uint8).flatten())


def test_refusals_of_block_codecs() -> None:
    for bad in (0, -1, True, 2.0, None):
        with pytest.raises(ValueError, match="at least 1"):
            BlockwiseFP8(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"float8_e4m3fn or torch\.float8_e5m2"):
        MXFP8(torch.bfloat16)
    with pytest.raises(TypeError, match="encodes matrices of weights, but gradients travel as flat rows"):
        Compressed(MXFP8())  # type: ignore[arg-type]
    assert [repr(codec) for codec in CODECS] == [
        "MXFP8()",
        "MXFP8(torch.float8_e5m2)",
        "BlockwiseFP8(128)",
        "BlockwiseFP8(16)",
    ]
