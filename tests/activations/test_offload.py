"""Activations in the host's memory in one process: order, bounds, failures, graphs that are kept, and refusals."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.activations import checkpoint_blocks, compile_blocks
from shardwright.engine.comm import HostStreams, use_streams

DIM, LAYERS = 8, 4
X = 2 * 3 * DIM * 4  #: bytes of a block's input


class Block(nn.Module):
    """Saves its input, the result of `up`, and the result of `tanh`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(LAYERS))) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return x


def built(block: Callable[[], nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(block)


def offloaded(
    kind: Any = "blocks", block: Callable[[], nn.Module] = Block, **options: Any
) -> tuple[Stack, Any]:
    model = built(block)
    return model, sw.offload_activations(model.blocks, kind, **({"min_bytes": 0} | options))


def data(number: int) -> Tensor:
    return torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(number), requires_grad=True)


def buffers_in_use(offload: Any) -> int:
    pool = offload._pool
    assert pool is not None
    return pool.nbytes - sum(buffer.nbytes for free in pool._free.values() for buffer in free)


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    return [t.grad.clone() for t in (*model.parameters(), *inputs) if t.grad is not None]


def check(work: Callable[[Stack], list[Tensor]], steps: int = 2, **options: Any) -> None:
    """The work has the same results with offload, and no buffer is lost."""
    plain = built()
    model, offload = offloaded(**options)
    for _ in range(steps):
        for left, right in zip(work(plain), work(model), strict=True):
            assert torch.equal(left, right)
        assert not buffers_in_use(offload)
    assert offload.host_bytes


# -- order


class NotedStreams(HostStreams):
    """Writes down what is queued, as (stream, number of the mark), and which marks the computation waits for."""

    asynchronous = False

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.marks = 0

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        self.events.append(name)
        yield

    def mark(self, name: str) -> Any:
        self.marks += 1
        self.events.append((name, self.marks))
        return self.marks

    def join(self, mark: Any) -> None:
        if mark is not None and ("join", mark) not in self.events:
            self.events.append(("join", mark))

    def host_wait(self, mark: Any) -> None:
        raise AssertionError("the host waits")


class Notes(torch.autograd.Function):
    """The identity, which writes down when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None


def test_storages_leave_beside_the_next_block_and_come_back_a_block_ahead() -> None:
    streams = NotedStreams()
    with use_streams(torch.device("cpu"), streams):
        model, _ = offloaded()
        x = data(0)
        for number, block in enumerate(model.blocks):
            streams.events.append(f"forward {number}")
            x = block(
                Notes.apply(x, functools.partial(streams.events.append, f"backward of {number} is over"))
            )
        x.sum().backward()
    assert streams.events == [
        "forward 0",
        *("forward 1", "store", ("store", 1), ("join", 1)),
        *("forward 2", "store", ("store", 2), ("join", 2)),
        *("forward 3", "store", ("store", 3), ("join", 3)),
        # The last block's storages have stayed. Those of each block come while the block after it runs.
        *("fetch", ("fetch", 4), "backward of 3 is over"),
        *(("join", 4), "fetch", ("fetch", 5), "backward of 2 is over"),
        *(("join", 5), "fetch", ("fetch", 6), "backward of 1 is over"),
        *(("join", 6), "backward of 0 is over"),
    ]


def test_the_device_has_two_blocks_at_a_time() -> None:
    model, _ = offloaded()
    most, x = 0, data(0)
    for block in model.blocks:
        x = block(x)
        alive = {t.data_ptr() for t in gc.get_objects() if type(t) is Tensor and t.shape == (2, 3, DIM)}
        most = max(most, len(alive))
    # Of two blocks the input and the result of tanh; and the result of the last one.
    assert most <= 2 * 2 + 2


# -- what moves


def moved(kind: Any = "blocks", block: Callable[[], nn.Module] = Block, **options: Any) -> int:
    """Bytes of the buffers of one block's activations, of three that move."""
    model, offload = offloaded(kind, block, **options)
    model(data(0)).sum().backward()
    assert offload.host_bytes % (LAYERS - 1) == 0
    return offload.host_bytes // (LAYERS - 1)


class Slices(nn.Module):
    """Saves three slices of one result, the result itself, and transposed and plain forms of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.up(x)
        q, k, v = whole.chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) @ v
        return x + self.down(scores) + (whole * whole).sum() + (x.transpose(0, 1) * x.transpose(0, 1)).sum()


def test_a_storage_moves_once() -> None:
    # Buffers have powers of two as sizes. The scores and the product before them are 256 and 128 bytes.
    assert moved(block=Slices) == 256 + 1024 + 256 + 128


def test_a_slice_of_a_large_storage_moves_alone() -> None:
    large = torch.randn(100, 2, 3, DIM)

    class Sliced(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * large[3]

    model, offload = offloaded(block=Sliced)
    model(data(0)).sum().backward()
    assert offload.host_bytes == 3 * 2 * 256 + 256  # all blocks save the same slice


def test_inputs_alone_move() -> None:
    assert moved("blocks") == 2 * 256 and moved("inputs") == 256


def test_small_tensors_stay() -> None:
    model, offload = offloaded(min_bytes=X + 1)
    model(data(0)).sum().backward()
    assert offload.host_bytes == 0


@pytest.mark.parametrize("kind", ["full", "ops"])
def test_of_recomputed_blocks_move_inputs_and_kept_results(kind: str) -> None:
    model = built()
    checkpoint_blocks(model.blocks, kind)
    offload = sw.offload_activations(model.blocks, min_bytes=0)
    model(data(0)).sum().backward()
    assert offload.host_bytes == (LAYERS - 1) * 256 * (1 if kind == "full" else 3)


def test_what_the_next_block_saves_too_moves_once() -> None:
    class Shares(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)  # saves its result

    model, offload = offloaded(block=lambda: nn.Sequential(Shares(), nn.Linear(DIM, DIM), nn.Tanh()))
    model(data(0)).sum().backward()
    # Each block saves two results of tanh. Its last one is also the input of the next block, which saves none.
    assert offload.host_bytes == 3 * 2 * 256


def test_the_table_of_all_blocks_moves_once() -> None:
    table = torch.randn(2, 3, DIM)

    class Rotated(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * table)

    model, offload = offloaded(block=Rotated)
    model(data(0)).sum().backward()
    assert offload.host_bytes == 3 * 2 * 256 + 256


def test_buffers_serve_every_step() -> None:
    model, offload = offloaded()
    for step in range(3):
        model(data(step)).sum().backward()
        assert offload.host_bytes == 3 * 2 * 256 and not buffers_in_use(offload)


# -- forward and backward in other ways


def twice(model: Stack) -> list[Tensor]:
    model.zero_grad()
    x = data(0)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model, x)


def second_derivatives(model: Stack) -> list[Tensor]:
    model.zero_grad()
    x = data(0)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return gradients(model, x)


def two_forwards(model: Stack, newest_first: bool) -> list[Tensor]:
    model.zero_grad()
    losses = [model(data(number)).square().sum() for number in range(2)]
    for loss in reversed(losses) if newest_first else losses:
        loss.backward()
    return gradients(model)


def other_orders(model: Stack) -> list[Tensor]:
    model.zero_grad()
    for number, order in enumerate([(0, 1, 2, 3), (0, 3), (2, 1, 0), (1, 1, 1), (0, 1, 2, 3)]):
        model(data(number), order).square().sum().backward()
    return gradients(model)


def accumulated(model: Stack) -> list[Tensor]:
    model.zero_grad()
    for number in range(3):
        model(data(number)).square().sum().backward()
    return gradients(model)


def parts_of_a_graph(model: Stack) -> list[Tensor]:
    """The gradients of the last blocks alone, then the rest."""
    x = data(0)
    middle = model(x, (0, 1))
    loss = model(middle, (2, 3)).square().sum()
    (gradient,) = torch.autograd.grad(loss, middle)
    return [gradient, *torch.autograd.grad(middle, [x, *model.blocks[0].parameters()], gradient)]


def a_graph_that_is_dropped(model: Stack) -> list[Tensor]:
    model(data(7))
    return accumulated(model)


def forward_fails(model: Stack) -> list[Tensor]:
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(model(data(0), (0, 1))[..., :5] + data(0), (2, 3))
    return accumulated(model)


def backward_fails(model: Stack) -> list[Tensor]:
    x = model(data(0), (0, 1))
    x.register_hook(fail)
    with pytest.raises(ValueError, match="this backward fails"):
        model(x, (2, 3)).sum().backward()
    return accumulated(model)


def fail(gradient: Tensor) -> Tensor:
    raise ValueError("this backward fails")


def without_gradients(model: Stack) -> list[Tensor]:
    with torch.no_grad():
        one = model(data(1))
    with torch.inference_mode():
        two = model(data(2))
    return [one, two, *accumulated(model)]


def a_frozen_block(model: Stack) -> list[Tensor]:
    model.blocks[1].requires_grad_(False)
    found = accumulated(model)
    model.blocks[1].requires_grad_(True)
    return found


WAYS: dict[str, Callable[[Stack], list[Tensor]]] = {
    "twice": twice,
    "second derivatives": second_derivatives,
    "two forwards": functools.partial(two_forwards, newest_first=False),
    "two forwards, the newest first": functools.partial(two_forwards, newest_first=True),
    "other orders": other_orders,
    "accumulated": accumulated,
    "parts of a graph": parts_of_a_graph,
    "a graph that is dropped": a_graph_that_is_dropped,
    "forward fails": forward_fails,
    "backward fails": backward_fails,
    "without gradients": without_gradients,
    "a frozen block": a_frozen_block,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["blocks", "inputs"])
def test_results_keep_their_bits_and_no_buffer_is_lost(way: str, kind: str) -> None:
    check(WAYS[way], kind=kind)


@pytest.mark.parametrize("way", ["two forwards", "other orders", "backward fails", "a graph that is dropped"])
@pytest.mark.parametrize("kind", ["full", "ops"])
def test_recomputed_blocks_do_so_too(way: str, kind: str) -> None:
    plain, model = built(), built()
    for each in (plain, model):
        checkpoint_blocks(each.blocks, kind)
    offload = sw.offload_activations(model.blocks, min_bytes=0)
    for _ in range(2):
        for left, right in zip(WAYS[way](plain), WAYS[way](model), strict=True):
            assert torch.equal(left, right)
        gc.collect()  # torch's error of backward refers to the graph
        assert not buffers_in_use(offload)


def test_a_retained_graph_leaves_the_device_again() -> None:
    model, offload = offloaded()
    loss = model(data(0)).square().sum()
    loss.backward(retain_graph=True)
    alive = [call for ref in offload._fetched if (call := ref()) is not None and call.present]
    assert len(alive) <= 3
    model(data(1))
    assert not any(call.present for call in alive)
    loss.backward()


def test_compiled_blocks_are_compiled_once() -> None:
    torch._dynamo.reset()
    plain, model = built(), built()
    compile_blocks(plain.blocks, "aot_eager")
    compile_blocks(model.blocks, "aot_eager")
    offload = sw.offload_activations(model.blocks, min_bytes=0)
    for left, right in zip(accumulated(plain), accumulated(model), strict=True):
        assert torch.equal(left, right)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    accumulated(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert offload.host_bytes and not buffers_in_use(offload)


def test_a_copy_of_a_model_has_buffers_of_its_own() -> None:
    model, offload = offloaded()
    other = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(accumulated(model), accumulated(other), strict=True))
    taken = offload.host_bytes
    other_offload = other.blocks[0].forward.func.__self__
    assert other_offload is not offload and other_offload.host_bytes == taken
    assert other.blocks[0].forward.args[1].__self__ is other.blocks[0]


# -- refusals


def test_a_write_to_a_saved_tensor_is_an_error() -> None:
    for last in (True, False):
        model, _ = offloaded()
        x = data(0) * 1
        loss = model.blocks[0](x)
        if not last:
            loss = model.blocks[1](loss)
        with torch.no_grad():
            x.add_(1)
        if last:
            with pytest.raises(RuntimeError, match=r"shape \(6, 8\) .* changed by an operation in place"):
                loss.sum().backward()
        else:  # the host has the values of forward
            loss.sum().backward()


def test_a_write_while_the_copy_runs_is_an_error() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.add_(1)
            return super().forward(x)

    model = built()
    model.blocks[1] = Writes()
    model.blocks[0] = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())  # saves its result
    sw.offload_activations(model.blocks, min_bytes=0)
    with pytest.raises(RuntimeError, match="changed by an operation in place"):
        model(data(0)).sum().backward()


def test_the_first_step_says_that_the_host_has_too_little_memory() -> None:
    model, offload = offloaded(host_bytes=3 * 2 * 256 - 1)
    with pytest.raises(RuntimeError, match=r"of 4 blocks need about 1,536 bytes .* may use 1,535"):
        model(data(0))
    assert offload.host_bytes == 0
    model, offload = offloaded(host_bytes=3 * 2 * 256)
    model(data(0)).sum().backward()


def test_more_than_the_limit_is_refused_and_free_buffers_of_other_sizes_go() -> None:
    model, offload = offloaded(host_bytes=3 * 2 * 256)
    losses = [model(data(0)).sum()]
    with pytest.raises(RuntimeError, match="need more than the 1,536 bytes"):
        model(data(1))
    losses[0].backward()
    model(data(2)[:1].clone()).sum().backward()
    assert offload.host_bytes == 3 * 2 * 128
    plain = built()
    for left, right in zip(accumulated(plain), accumulated(model), strict=False):
        assert torch.equal(left, right)


def test_a_block_inside_a_checkpoint_is_refused() -> None:
    model, _ = offloaded()
    with pytest.raises(RuntimeError, match=r"inside torch.utils.checkpoint.* functools.partial\(checkpoint"):
        checkpoint(model.blocks[0], data(0), use_reentrant=False)
    plain = built()
    assert torch.equal(model(data(0)), plain(data(0)))
    for each in (plain, model):
        checkpoint(each.blocks[0], data(0), use_reentrant=True).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(model), strict=True))


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ([], {}, "at least one block"),
        ([3], {}, "got int as block 0"),
        ("same", {}, r"block 1 \(Block\), or of a module inside it, are already offloaded"),
        ("inside", {}, r"block 1 \(Block\), or of a module"),
        ("inside, later", {}, "already offloaded"),
        ([nn.Linear(2, 2)], {"kind": "all"}, "'blocks' or 'inputs', got 'all'"),
        ([nn.Linear(2, 2)], {"min_bytes": -1}, "min_bytes must be a number of bytes"),
        ([nn.Linear(2, 2)], {"host_bytes": 1.5}, "host_bytes must be a number of bytes"),
    ],
)
def test_wrong_arguments(blocks: Any, options: dict[str, Any], message: str) -> None:
    model = built()
    if blocks == "same":
        blocks = [model.blocks[0], model.blocks[0]]
    elif blocks == "inside":
        blocks = [model, model.blocks[0]]
    elif blocks == "inside, later":
        sw.offload_activations([model.blocks[0]])
        blocks = [model]
    with pytest.raises(ValueError, match=message):
        sw.offload_activations(blocks, **options)


class Inside(nn.Module):
    """A block that does something with its result inside of forward."""

    def __init__(self, work: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.work = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), work

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self.second, torch.tanh(self.first(x)))


@contextmanager
def _hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _halved() -> Any:
    return _hooks(lambda t: t.detach().half(), lambda t: t.float())


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "hooks that keep": lambda: _hooks(lambda t: t, lambda t: t),
    "hooks that round": _halved,
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "a level of forward AD": forward_ad.dual_level,
}


def _with(context: Callable[[], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def work(layer: nn.Module, x: Tensor) -> Tensor:
        with context():
            return torch.tanh(layer(x)) * torch.sigmoid(x)

    return work


def _directional(layer: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        value, tangent = forward_ad.unpack_dual(torch.tanh(layer(dual)) * torch.sigmoid(dual))
        assert tangent is not None
        return value + tangent


INSIDE = {
    **{name: _with(context) for name, context in CONTEXTS.items()},
    "a directional derivative": _directional,
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_blocks_do_with_saved_tensors_themselves(name: str) -> None:
    """Other blocks move theirs; results are those of the plain model."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Inside(INSIDE[name]) for _ in range(3)))
    model = copy.deepcopy(plain)
    sw.offload_activations(model, min_bytes=1)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(data(step)).square().sum().backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("around", ["inputs", "weights", "disabled"])
def test_forward_mode_and_hooks_that_are_disabled_leave_activations_on_the_device(around: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Inside(INSIDE["nothing"]) for _ in range(3)))
    model = copy.deepcopy(plain)
    offload = sw.offload_activations(model, min_bytes=1)
    found = []
    for each in (plain, model):
        x = data(0)
        if around == "disabled":
            with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
                each(x).sum().backward()
            found.append([p.grad for p in each.parameters()])
            continue
        with forward_ad.dual_level():
            weights = dict(each.named_parameters())
            if around == "inputs":
                x = forward_ad.make_dual(x, torch.ones_like(x))
            else:
                weights = {key: forward_ad.make_dual(p, torch.ones_like(p)) for key, p in weights.items()}
            value, tangent = forward_ad.unpack_dual(torch.func.functional_call(each, weights, (x,)))
            value.sum().backward()
            found.append([tangent, *(p.grad for p in each.parameters())])
    assert all(map(torch.equal, *found)) and offload.host_bytes == 0
    model(data(1)).sum().backward()
    assert offload.host_bytes
