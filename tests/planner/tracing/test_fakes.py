"""FakeMemory tensors: which values they have, which reads are refused, and which blocks a program gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardwright.init import truncated
from shardwright.optim import adamw8bit
from shardwright.planner import Alloc, Free, Program
from shardwright.planner.tracing import SMALL, UnknownValueError, trace
from shardwright.planner.tracing.fakes import NUMBERS
from shardwright.planner.tracing.kernels import META

LARGE = 256  #: a square of this side is far larger than ``SMALL``
assert LARGE * LARGE * 4 > SMALL


def program_of(body: Callable[[], Any], kind: Any = "cpu") -> Program:
    with trace(1, kind) as recorder:
        recorder.phase("forward")
        kept = body()
        program = recorder.program()
        del kept
    return program


def live_bytes(body: Callable[[], Any], kind: Any = "cpu") -> int:
    return sum(each.nbytes for each in program_of(body, kind).live())


#: Reads of values that no plan computes.
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.mean()),
    "bool": lambda x: bool((x > 0).any()),
    "comparison": lambda x: 1 if x.max() > 3 else 2,
    "tolist": lambda x: x.sum(0).tolist(),
    "numpy": lambda x: x.sum(0).numpy(),
    "of a row": lambda x: x[0, 0].item(),
    "nonzero": lambda x: x.nonzero(),
    "by a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "what follows": lambda x: (x.sum() * 2 + torch.ones(())).item(),
    "written": lambda x: torch.zeros(LARGE).copy_(x[0]).tolist(),
    "index": lambda x: torch.arange(9)[int(x.argmax())],
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_unknown_values_name_their_line(name: str) -> None:
    first = inspect.getsourcelines(inspect.getmodule(program_of))[0]  # type: ignore[arg-type]
    with pytest.raises(UnknownValueError, match=Path(__file__).name) as raised, trace(1, "cpu"):
        READS[name](torch.empty(LARGE, LARGE))
    number = int(str(raised.value).split(":")[1].split()[0])
    assert first[number - 1].strip().startswith(f'"{name}":')


def test_small_values_are_computed() -> None:
    with trace(1, "cpu"):
        table = torch.arange(10).float().outer(torch.ones(4))
        assert table.sum().item() == 180
        assert table[3].tolist() == [3.0] * 4
        assert torch.full((2,), True).dtype == torch.bool
        assert torch.full((2,), 1).dtype == torch.int64
        assert torch.equal(table, table.clone())
        assert table.nonzero().shape == (36, 2)


POSITIONS = 100_000
assert SMALL < POSITIONS * 8 < NUMBERS


def test_many_integers_are_computed() -> None:
    """A model of transformers asks its positions whether a sample has several documents."""
    with trace(1, "cpu"):
        positions = torch.arange(POSITIONS).unsqueeze(0).expand(2, -1)
        assert (positions.diff(dim=-1) == 1).all()
        assert (positions.contiguous() < POSITIONS).sum().item() == 2 * POSITIONS
        assert positions.float().sum().shape == ()


#: Integers that follow from values that no plan computes, or are too many.
UNKNOWN: dict[str, Callable[[], torch.Tensor]] = {
    "of numbers": lambda: torch.empty(POSITIONS).long(),
    "of choices": lambda: torch.empty(POSITIONS, 2).argmax(-1),
    "written": lambda: torch.arange(POSITIONS).copy_(torch.empty(POSITIONS)),
    "after a sum": lambda: torch.arange(POSITIONS) + torch.empty(POSITIONS).sum().long(),
    "too many": lambda: torch.arange(NUMBERS),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_integers_are_refused(name: str) -> None:
    with pytest.raises(UnknownValueError), trace(1, "cpu"):
        UNKNOWN[name]().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", ["2x3", "3x2", "2x2", "3x3"])
def test_grouped_products_have_the_form_of_the_kernel(dims: str, dtype: torch.dtype) -> None:
    """With rows that are no multiple of 16 bytes, too."""
    groups, rows, inner, columns = 3, 24, 16, 20
    shapes = {
        "2x3": ((rows, inner), (groups, columns, inner)), "3x2": ((groups, columns, inner), (rows, inner)),
        "2x2": ((columns, rows), (columns, rows)), "3x3": ((groups, rows, inner), (groups, columns, inner)),
    }  # fmt: skip
    one, other = (torch.zeros(shape, dtype=dtype) for shape in shapes[dims])
    other = other.mT  # else the kernel refuses these columns in bfloat16
    offs = None if dims == "3x3" else torch.tensor([8, 16, 24], dtype=torch.int32)
    real = torch.ops.aten._grouped_mm(one, other, offs)
    planned = META["aten::_grouped_mm"](
        one.to("meta"), other.to("meta"), None if offs is None else offs.to("meta")
    )
    assert (planned.shape, planned.stride(), planned.dtype) == (real.shape, real.stride(), real.dtype)


BLOCKS: dict[str, tuple[Callable[[], Any], int]] = {
    "view": (lambda: [x := torch.empty(LARGE, LARGE), x.t(), x[1:], x.view(-1)], 1),
    "sum": (lambda: [x := torch.empty(LARGE, LARGE), x + 1], 2),
    "in place": (lambda: torch.empty(LARGE, LARGE).add_(1).mul_(2), 1),
    "gone": (lambda: (torch.empty(LARGE, LARGE) + 1) * 2, 1),
    "turned in place": (lambda: [x := torch.empty(LARGE, 2 * LARGE).t_(), x + 1], 4),
    "grown": (lambda: torch.empty(LARGE).resize_(LARGE, LARGE), 1),
    "freed": (lambda: [x := torch.empty(LARGE, LARGE), x.untyped_storage().resize_(0)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_storages(name: str) -> None:
    body, squares = BLOCKS[name]
    assert live_bytes(body) == squares * LARGE * LARGE * 4


def test_shapes_change_in_place() -> None:
    with trace(1, "cpu"):
        x = torch.empty(LARGE, 2 * LARGE)
        assert (x.t_() + 1).shape == (2 * LARGE, LARGE)
        assert x.unsqueeze_(0).shape == (1, 2 * LARGE, LARGE)


def saved_by(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Size, dtype: torch.dtype, kind: str
) -> int:
    """Bytes that forward keeps for backward, without its input and its result."""

    def body() -> Any:
        given = torch.empty(x, dtype=dtype, requires_grad=True)
        return given, layer(given)

    element = torch.empty(0, dtype=dtype).element_size()
    return live_bytes(body, kind) - 2 * x.numel() * element


def test_a_gpu_norm_keeps_its_input_and_a_number_for_each_row() -> None:
    shape = torch.Size((4, 64, 512))

    def norm(x: torch.Tensor) -> torch.Tensor:
        return nn.RMSNorm(512, dtype=x.dtype)(x)

    rows, weight = 4 * 64 * 4, 512 * 2
    assert saved_by(norm, shape, torch.bfloat16, "cuda") == rows + weight
    assert saved_by(norm, shape, torch.bfloat16, "cpu") > shape.numel() * 4


#: Query heads, key heads, dtype, mask, widths of heads: the kernel on a GPU.
KERNELS = {
    (4, 4, torch.bfloat16, False): "flash", (4, 2, torch.bfloat16, False): "flash",
    (4, 4, torch.float32, False): "efficient", (4, 4, torch.bfloat16, True): "efficient",
    (4, 2, torch.float32, False): "softmax", (4, 2, torch.bfloat16, True): "softmax",
    (4, 4, torch.bfloat16, False, 64, 32): "efficient", (4, 4, torch.bfloat16, True, 60): "softmax",
    (4, 2, torch.bfloat16, False, 64, 32): "softmax",
}  # fmt: skip


def test_small_tensors_take_the_kernels_of_a_gpu_too() -> None:
    """The CPU has no such kernel, which would compute them."""
    with trace(1, "cuda"):
        q, k, v = (torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output.sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_attention_takes_the_kernel_of_a_gpu(case: tuple[Any, ...]) -> None:
    heads, key_heads, dtype, masked, *widths = case
    width = widths[0] if widths else 64

    def body() -> Any:
        q = torch.empty(2, heads, LARGE, width, dtype=dtype, requires_grad=True)
        k = torch.empty(2, key_heads, LARGE, width, dtype=dtype, requires_grad=True)
        v = torch.empty(2, key_heads, LARGE, (widths or [64])[-1], dtype=dtype, requires_grad=True)
        mask = torch.ones(LARGE, LARGE, dtype=torch.bool) if masked else None
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=not masked, enable_gqa=heads != key_heads
        )

    program = program_of(body, "cuda")
    made = " ".join(owner.what for owner in program.owners)
    assert KERNELS[case] in made
    assert all(other not in made for other in {"flash", "efficient", "softmax"} - {KERNELS[case]})
    squares = [
        each.nbytes for each in program.live() if each.nbytes >= 2 * heads * LARGE * LARGE * dtype.itemsize
    ]
    assert bool(squares) == (
        KERNELS[case] == "softmax"
    )  # the formula keeps a weight for each pair of positions


def test_shapes_that_torch_infers_are_no_blocks() -> None:
    def body() -> Any:
        mesh = init_device_mesh("cpu", (1,))
        # A shape that nothing has had before: DTensor keeps what it has inferred.
        tensor = DTensor.from_local(torch.empty(3 * LARGE, LARGE), mesh, [Shard(0)], run_check=False)
        return tensor.detach() + 1

    program = program_of(body)
    large = [each for each in program.events if isinstance(each, Alloc) and each.nbytes > SMALL]
    assert len(large) == 2  # the tensor and the sum


def test_tables_that_stay_for_the_process_have_their_values() -> None:
    cpu = torch.device("cpu")
    for table in (adamw8bit._values, adamw8bit._bounds):
        table.cache_clear()
    with trace(1, "cpu"):
        in_trace = [
            (adamw8bit._values(m, cpu), *adamw8bit._bounds(m, cpu)) for m in ("exp_avg", "exp_avg_sq")
        ]
    for table in (adamw8bit._values, adamw8bit._bounds):
        table.cache_clear()
    for moment, tensors in zip(("exp_avg", "exp_avg_sq"), in_trace, strict=True):
        expected = adamw8bit._values(moment, cpu), *adamw8bit._bounds(moment, cpu)
        assert all(map(torch.equal, tensors, expected))


def test_large_weights_are_drawn_in_the_memory_of_a_piece() -> None:
    truncated._draws_in_pieces.cache_clear()

    def body() -> Any:
        weight = torch.empty(5 * truncated.PIECE)
        plain = torch.nn.init._no_grad_trunc_normal_  # type: ignore[attr-defined]
        return truncated.with_little_memory(plain)(weight, 0.0, 1.0, -3.0, 3.0)

    program = program_of(body)
    room = 4 * truncated.PIECE
    assert program.peak().nbytes == pytest.approx(5 * room + room + room / 2, rel=0.01)  # two masks
    assert len(program.events) < 30
    assert truncated.fill_in_pieces.__module__ == truncated.__name__


def test_blocks_that_are_freed_together_have_one_order() -> None:
    def body() -> None:
        with_values = {torch.empty(LARGE, LARGE) for _ in range(9)}  # a set frees them in any order
        torch.empty(LARGE)
        del with_values

    freed = [each.block for each in program_of(body).events if isinstance(each, Free)]
    assert len(freed) >= 9 and freed[-9:] == sorted(freed[-9:])


def test_a_row_for_many_ranks_has_no_values_of_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty_strided

    def used(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = plain(*arguments, **options)
        return tensor if tensor.is_meta else tensor.fill_(7)

    monkeypatch.setattr(torch, "empty_strided", used)
    with trace(1, "cpu"):
        total = torch.empty(LARGE, 2 * LARGE).sum(dtype=torch.float64)
        row = torch.cat([total[None], torch.zeros(20000, dtype=torch.float64)])
    assert torch.equal(row, torch.zeros(20001, dtype=torch.float64))


@pytest.mark.parametrize("of_keys", [8, 2])
def test_kernels_of_a_gpu_take_workspaces(of_keys: int) -> None:
    """Flash attention's backward has sums for each query, and gradients of each head where keys are shared; cuBLAS
    keeps its own memory from the first product on."""
    query = torch.zeros(2, 8, 200, 48, dtype=torch.bfloat16, requires_grad=True)
    keys = torch.zeros(2, of_keys, 200, 48, dtype=torch.bfloat16, requires_grad=True)
    with trace(2, "cuda") as recorder:
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, enable_gqa=of_keys != 8)
        out.backward(torch.empty_like(out))
        for _ in range(2):
            torch.empty(128, 128) @ torch.empty(128, 128)
        program = recorder.program()
    blocks = [each for each in program.events if isinstance(each, Alloc)]
    taken = {
        program.owners[each.owner].what.partition(" in ")[0]: each.nbytes
        for each in blocks
        if " in _scaled_dot" in program.owners[each.owner].what
    }
    expected = {
        "row sums of the gradient": 2 * 8 * 256 * 4,
        "sums of gradients of queries": 2 * 256 * 8 * 64 * 4,
    }
    if of_keys != 8:
        expected |= dict.fromkeys(("gradients of keys", "gradients of values"), 2 * 200 * 8 * 48 * 2)
    assert taken == expected
    freed = {event.block for event in program.events if isinstance(event, Free)}
    kept = [each.nbytes for each in blocks if program.owners[each.owner].what == "workspace of cuBLAS"]
    assert kept == [32 << 20]
    assert all(each.block in freed for each in blocks if " in _scaled_dot" in program.owners[each.owner].what)


def test_a_tensor_larger_than_the_machine() -> None:
    """Its memory is never touched, so that the system may refuse what is not reserved."""
    with trace(2) as recorder:
        large = torch.empty(1 << 38, dtype=torch.bfloat16)
        recorder.phase("next")
        product = large.view(1 << 19, 1 << 19).t() * 2
        assert product.stride() == (1, 1 << 19) and recorder.now == 2 * 2 * (1 << 38)
        del large, product
        assert recorder.now == 0
