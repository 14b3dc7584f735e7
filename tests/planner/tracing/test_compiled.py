"""Graphs of torch.compile in a trace: the results that are stored, their lines, and that nothing is left behind.

Peaks of compiled blocks beside real steps are in ``tests/train/planning/test_peaks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardwright as sw
from shardwright.planner import Alloc, Kernel, Program
from shardwright.planner.tracing import trace, watch_training

N = 256  #: rows and columns; a matrix has 256 KiB, more than a trace computes


def matrix(trained: bool = False) -> Tensor:
    return torch.empty(N, N, requires_grad=trained)


def norm(x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


def blocks_of(function: Callable[..., Tensor], trained: bool, compiled: bool = True) -> list[int]:
    """Whole matrices that a call takes, and with `trained` those that its backward takes."""
    compiled_function = torch.compile(function) if compiled else function
    with trace(2, "cuda") as recorder, torch.set_grad_enabled(trained):
        arguments = [matrix(trained) for _ in range(function.__code__.co_argcount)]
        recorder.phase("call")
        out = compiled_function(*arguments)
        recorder.phase("done")
        counts = [matrices(recorder.program(), "call")]
        if trained:
            gradient = torch.empty_like(out)
            recorder.phase("its backward")
            out.backward(gradient)
            counts.append(matrices(recorder.program(), "its backward") - len(arguments))
    return counts


def matrices(program: Program, first: str) -> int:
    """Blocks as large as a matrix from a phase on."""
    start = next(i for i, name in program.phase_starts() if name == first)
    later = program.events[start:]
    return sum(isinstance(event, Alloc) and event.nbytes == 4 * N * N for event in later)


#: By function: blocks that a call takes without gradients; with them, and those of its backward beside the gradients.
CASES: dict[str, tuple[Callable[..., Tensor], list[int], list[int]]] = {
    "one kernel": (lambda x: ((x * 2).relu() + 1).exp(), [1], [1, 0]),
    "a result that two kernels read is made twice": (lambda x, y: (x + y) @ x + (x + y), [2], [2, 1]),
    "the place of a product": (lambda x, y: (x @ y).relu(), [1], [1, 1]),
    "a norm is one kernel": (norm, [1], [1, 0]),
    "a product reads a stored norm": (lambda x, y: norm(x) @ y, [2], [2, 0]),
    "views take nothing": (lambda x, y: (x.T @ y).view(N // 2, 2 * N), [1], [1, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_inside_a_kernel_take_no_memory(name: str) -> None:
    function, evaluated, trained = CASES[name]
    assert blocks_of(function, trained=False) == evaluated
    assert blocks_of(function, trained=True) == trained


def test_functions_have_their_numbers_before_and_after_a_trace() -> None:
    @torch.compile(backend="aot_eager")
    def elsewhere(x: Tensor) -> Tensor:
        return x * 3

    function = torch.compile(norm)
    small = torch.randn(8, 8)
    assert torch.equal(elsewhere(small), small * 3)
    with trace(2):
        function(matrix())
        elsewhere(matrix())
    assert torch.equal(elsewhere(small), small * 3)
    assert torch.compile(norm, backend="aot_eager")(small).allclose(norm(small))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.extensive("compiles for each", but=("blocks-*",))
@pytest.mark.parametrize("engine", ["shardwright", "torch"])
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_a_loop_of_ones_own_may_compile(engine: str, what: str) -> None:
    """It saves for backward what torch's partitioner chooses, which is not more than without."""
    shard = sw.fully_shard if engine == "shardwright" else fully_shard

    def loop(compiles: bool) -> None:
        model = Model()
        for layer in model.layers:
            if compiles and what == "blocks":
                layer.compile()
            shard(layer)  # type: ignore[operator]
        shard(model)  # type: ignore[operator]
        called = torch.compile(model) if compiles and what == "model" else model
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            called(torch.zeros(64, 64, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, compiled = (sw.plan(partial(loop, compiles), on="2xh100") for compiles in (False, True))
    assert compiled.exact == plain.exact
    assert 0 < compiled.traced["activations"] <= plain.traced["activations"]
    assert compiled.peak.owner.line.startswith("test_compiled.py:")


def test_blocks_name_their_lines() -> None:
    with trace(2) as recorder, watch_training(recorder):
        layer = Block(128)
        layer.compile()
        out = layer(torch.zeros(64, 64, 128))
        program = recorder.program()
    whats = {each.what: each.line for each in program.owners if "float32 [64, 64, 512]" in each.what}
    assert whats and all(line.startswith("test_compiled.py:") for line in whats.values()), whats
    del out


def test_a_graph_for_several_shapes_has_the_sizes_of_each_call() -> None:
    """torch makes such a graph when it sees a second length. A third length has another size again."""
    function = torch.compile(lambda x: (x * 2).relu() + 1)
    lengths = (300, 400, 500)
    with trace(2) as recorder, torch.no_grad():
        inputs = [torch.empty(length, 64) for length in lengths]
        recorder.phase("calls")
        kept = [function(each) for each in inputs]
        program = recorder.program()
    start = next(i for i, name in program.phase_starts() if name == "calls")
    sizes = {event.nbytes for event in program.events[start:] if isinstance(event, Alloc)}
    assert {length * 64 * 4 for length in lengths} <= sizes
    assert [each.shape[0] for each in kept] == list(lengths)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 2, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.extensive("compiles for each", but=("one",))
@pytest.mark.parametrize("lengths", [(64,), (64, 96, 128)], ids=["one", "several"])
def test_a_recomputed_block_with_a_generators_state(lengths: tuple[int, ...]) -> None:
    """The state has a symbol for its size, and the graph is made for one shape for all that."""
    layer = Attention().bfloat16()
    function = torch.compile(partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False))
    with trace(2) as recorder:
        for length in lengths:
            function(torch.empty(16, length, 128, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        names = [event.name for event in recorder.program().events if isinstance(event, Kernel)]
    assert any(name.startswith("fused_") for name in names)
    assert names.count("_scaled_dot_product_flash_attention") == 2 * len(lengths)
    if len(lengths) == 1:
        assert not {"add", "mul", "convert_element_type"} & set(names)
