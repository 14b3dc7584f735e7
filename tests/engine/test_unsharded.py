"""``sw.unsharded``: full parameters for a while, against the plain model, and what happens to them afterwards."""

from __future__ import annotations

import copy
import gc
import itertools
import time
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.engine import UNIT
from shardwright.engine.base import offload
from tests.engine.kit.models import Model, Reference, build, full, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.engine.kit.subclasses import HalfGathered
from tests.engine.kit.training import backward, set_micro, units_of
from tests.support import multirank, world_mesh
from tests.support.matrix import select, together
from tests.support.storages import Storages

FP32, BF16 = torch.float32, torch.bfloat16

#: Changes of a model between its micro-batches, and the options of each.
EDITS = ("read", "values", "gradients", "both", "dropped", "rank0")
LAYOUTS = ("per_parameter", "ragged", sw.Ragged("element"))
#: Before which of two micro-batches, the second of which reduces.
MOMENTS = ("first", "held", "late", "after")


class Row(NamedTuple):
    at: On
    edit: str
    layout: Any
    moment: str
    low: bool
    tied: bool

    def shows(self, strength: int) -> Iterator[Hashable]:
        return iter(together(strength, *self))


WHERE = [*on("zero1", (2,)), *on("zero3", (3,), (1,)), *on("hsdp", (2, 2)), *on("3-1", (2, 2))]
ROWS = select(
    [Row(*r) for r in itertools.product(WHERE, EDITS, LAYOUTS, MOMENTS, (False, True), (False, True))],
    Row.shows,
)


def check_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            scale = tolerance * max(q.grad.abs().max().item(), 1e-3)
            torch.testing.assert_close(
                full(p.grad), q.grad, rtol=0, atol=scale, msg=lambda m, n=name: f"{n}: {m}"
            )


def edit(model: nn.Module, values: bool, gradients: bool) -> None:
    """The same on every rank; some rows only, so that not every rank's part changes."""
    with torch.no_grad():
        if values:
            model.embed.weight[0] += 0.25
            model.head.weight.data[:, -1] = 0.5  # through what moves no version counter
            model.blocks[0].up.bias.copy_(torch.arange(12.0) / 12)
        if gradients:
            for i, p in enumerate(model.parameters()):
                if i % 3 == 0:
                    p.grad = None
                elif p.grad is None:
                    p.grad = torch.full_like(p, 0.125)
                else:
                    p.grad[-1] *= 2.0


@on_meshes(ROWS)
def test_full_parameters_are_shown_and_written_back(
    rank: int, world_size: int, at: On, edit: str, layout: Any, moment: str, low: bool, tied: bool
) -> None:
    policy = (
        sw.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32) if low else sw.MixedPrecisionPolicy()
    )
    plain = build()
    if tied:
        plain.head.weight = plain.embed.weight
    reference = Reference(plain, BF16 if low else FP32, FP32)
    model = shard(plain, True, mesh=at.mesh, strategy=at.strategy, layout=layout, mp_policy=policy)
    options = {
        "with_grads": edit in ("gradients", "both", "rank0"),
        "writeback": edit not in ("dropped", "rank0"),
    }
    expected = reference.model

    def visit() -> None:
        """Compare what is shown with the plain model, and change both."""
        sees = edit != "rank0" or rank == 0
        with sw.unsharded(model, rank0_only=edit == "rank0", **options) as shown:
            assert shown is model and (model.head.weight is model.embed.weight) == tied
            if not sees:
                assert all(hasattr(p, "full_tensor") for p in model.parameters())
                return
            for (name, p), q in zip(model.named_parameters(), expected.named_parameters(), strict=True):
                assert type(p) is nn.Parameter and p.dtype == FP32 and name == q[0]
                torch.testing.assert_close(p, q[1], rtol=1e-5, atol=1e-6)
                if options["with_grads"]:
                    assert (p.grad is None) == (q[1].grad is None), name
                    if p.grad is not None:
                        torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-4, atol=1e-5, msg=name)
            alter(model, edit in ("values", "both", "dropped"), edit in ("gradients", "both", "dropped"))
        alter(expected, edit in ("values", "both"), edit in ("gradients", "both"))

    alter = globals()["edit"]
    for step in range(2):
        for micro in range(2):
            if moment == "first" and micro == 0:
                visit()
            set_micro(model, moment != "held" or micro == 1, moment != "late" or micro == 1)
            reference.backward(world_size, [[tokens(step, micro, r) for r in range(world_size)]])
            backward(model, rank, step, micro)
            if moment in ("held", "late") and micro == 0:
                # Gradients that were held or summed over some ranks only: looking at them completes them.
                visit()
        if moment == "after":
            visit()
        tolerance = 1e-2 if low and edit in ("values", "both") else 1e-5
        check_gradients(model, expected, max(tolerance, 1e-4))
        for unit in units_of(model):
            assert not unit.watch.unsharded and not unit.weights.forms.full_shown
        with torch.no_grad():
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(full(p), q, rtol=1e-5, atol=1e-6)
                if q.grad is not None and step == 0:
                    p.add_(p.grad, alpha=-0.1)
                    q.add_(q.grad, alpha=-0.1)
        model.zero_grad()
        expected.zero_grad()


@multirank(2)
def test_offloaded_as_they_are_gathered(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, and only where they are kept."""
    model = sharded()
    backward(model, rank, 0, 0)
    names = [name for name, _ in model.named_parameters()]
    events: list[str] = []

    def noted(kind: Any, method: str) -> None:
        original = getattr(kind, method)

        def call(tensor: Any) -> Any:
            events.append(method)
            return original(tensor)

        monkeypatch.setattr(kind, method, call)

    noted(offload, "full_of")
    noted(torch.Tensor, "cpu")
    with sw.unsharded(model, offload_to_cpu=True, with_grads=True), torch.no_grad():
        assert events == ["full_of", "cpu"] * 2 * len(names)
        model.head.weight.fill_(2.0)
        model.head.weight.grad = None
        model.norm.weight.grad.fill_(3.0)
    events.clear()
    with sw.unsharded(model, offload_to_cpu=True, rank0_only=True, writeback=False):
        assert events == ["full_of", *(["cpu"] if rank == 0 else [])] * len(names)
        with (
            pytest.raises(ValueError, match="offload_to_cpu=True"),
            sw.unsharded(model, rank0_only=True, writeback=False),
        ):
            pass
    assert (full(model.head.weight) == 2).all() and model.head.weight.grad is None
    assert (full(model.norm.weight.grad) == 3).all()


# -- nesting, exceptions, what is refused ----------------------------------------------------------------------------


def sharded(**options: Any) -> Model:
    return shard(build(), True, mesh=world_mesh(2), **options)


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged"])
def test_contexts_nest_and_survive_exceptions(rank: int, world_size: int, layout: str) -> None:
    model, plain = sharded(layout=layout), build()
    with sw.unsharded(model.blocks[1], recurse=False), torch.no_grad():
        inner = model.blocks[1].up.weight
        assert type(inner) is nn.Parameter and type(model.head.weight) is not nn.Parameter
        with sw.unsharded(model):
            assert model.blocks[1].up.weight is inner and type(model.head.weight) is nn.Parameter
            inner.add_(1.0)
        assert type(inner) is nn.Parameter and model.blocks[1].up.weight is inner
        assert type(model.head.weight) is not nn.Parameter
    assert type(model.blocks[1].up.weight) is not nn.Parameter
    torch.testing.assert_close(full(model.blocks[1].up.weight), plain.blocks[1].up.weight + 1)
    with sw.unsharded(model, recurse=False):  # the list unit inside is another's, as the blocks are
        assert type(model.embed.weight) is nn.Parameter
        assert (
            type(model.head.weight) is not nn.Parameter
            and type(model.blocks[0].up.weight) is not nn.Parameter
        )
    with sw.unsharded(model.head):  # no unit of its own
        assert type(model.head.weight) is nn.Parameter and type(model.norm.weight) is not nn.Parameter
    # Edits before an exception stay, or go, as without one.
    for writeback in (True, False):
        with pytest.raises(ZeroDivisionError), torch.no_grad(), sw.unsharded(model, writeback=writeback):
            model.embed.weight.fill_(3.0 if writeback else 4.0)
            raise ZeroDivisionError
        assert full(model.embed.weight).unique().tolist() == [3.0]
    # A whole state dict comes out and goes in; a replaced parameter is taken over, or put back.
    with sw.unsharded(model):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        assert {type(v) for v in state.values()} == {torch.Tensor}
        model.load_state_dict(plain.state_dict())
    for writeback in (False, True):
        with sw.unsharded(model, writeback=writeback):
            model.head.bias = nn.Parameter(torch.full((11,), 7.0))
        model.named_parameters()
        assert (full(model.head.bias) == 7).all() == writeback and type(model.head.bias) is not nn.Parameter
    with torch.no_grad():
        plain.head.bias.fill_(7.0)
    for r in range(2):
        (loss_of(plain(tokens(0, 0, r)), tokens(0, 0, r)) / 2).backward()
    backward(model, rank)
    check_gradients(model, plain)


@multirank(2)
def test_use_inside_and_in_the_wrong_place_is_refused(rank: int, world_size: int) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tokens(0, 0, rank)
    loss = loss_of(model(batch), batch)

    def refused(doing: Any, told: str, error: type[Exception] = RuntimeError) -> None:
        with pytest.raises(error, match=told):
            doing()

    with sw.unsharded(model):
        refused(lambda: model(batch), r"Forward of unit .* inside shardwright.unsharded.*Leave the context")
        refused(loss.backward, "Backward through unit .* inside shardwright.unsharded")
        refused(lambda: model.half(), "Conversion of unit")
        refused(lambda: copy.deepcopy(model), "deepcopy of unit")
        refused(lambda: model.unshard(), r"unshard\(\) of unit")
        refused(
            lambda: sw.unsharded(model, writeback=False).__enter__(),
            r"unsharded\(writeback=False, .*\) was entered inside unsharded\(writeback=True, .*same options",
            ValueError,
        )
        refused(lambda: sw.unsharded(model.norm, with_grads=True).__enter__(), "same options", ValueError)
        assert type(model.head.weight) is nn.Parameter
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with sw.unsharded(model):
        refused(optimizer.step, "An optimizer's step of unit")
    refused(lambda: sw.unsharded(model, rank0_only=True).__enter__(), "Pass writeback=False", ValueError)

    def recast() -> None:
        with sw.unsharded(model):
            model.head.bias.data = torch.zeros(11, dtype=torch.float64)

    refused(recast, r"'1.bias' of \(11,\) and torch.float32 is \(11,\) and torch.float64", ValueError)
    model.zero_grad()

    class Peeks(nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.where = where

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def peek(gradient: Any) -> None:
                sw.unsharded(self.inner).__enter__()

            y = self.inner(x)
            if self.where == "backward":
                y.register_hook(peek)
            elif self.where == "forward":
                peek(None)
            return y

    for where in ("forward", "backward"):
        one = sw.fully_shard(Peeks(where), mesh=world_mesh(2))
        refused(
            lambda one=one: one(torch.ones(2, 4)).sum().backward(), "while unit .* is in forward or backward"
        )
        one.where = "nowhere"
        one(torch.ones(2, 4)).sum().backward()
    backward(model, rank)  # nothing was left behind
    plain = build()
    for r in range(2):
        (loss_of(plain(tokens(0, 0, r)), tokens(0, 0, r)) / 2).backward()
    check_gradients(model, plain)


class Odd(nn.Module):
    """0-d, channels-last, half, complex, integer, frozen and empty parameters, an LSTM, which keeps its own list, and
    weights that attention reads without calling their module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.image = nn.Parameter(torch.rand(3, 4, 2, 2).to(memory_format=torch.channels_last))
        self.small = nn.Parameter(torch.rand(5, 3).half())
        self.wave = nn.Parameter(torch.rand(3, 2, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.rand(3, 5).t())
        self.lstm = nn.LSTM(3, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lstm(x)[0]
        h = self.attention(h, h, h)[0] * self.scale + self.image.sum() + self.small.float().sum()
        return h.sum() + self.wave.abs().sum() + self.frozen.sum() + self.empty.sum() + self.transposed.sum()


@multirank(2)
@pytest.mark.parametrize("layout", ["per_parameter", "ragged", sw.Ragged("element")])
def test_odd_parameters(rank: int, world_size: int, layout: Any) -> None:
    torch.manual_seed(0)
    plain = Odd()
    model: Any = copy.deepcopy(plain)
    model.frozen.note = "kept"
    sw.fully_shard(model.attention.out_proj, mesh=world_mesh(2), layout=layout)
    sw.fully_shard(model, mesh=world_mesh(2), layout=layout)

    def alike() -> None:
        with sw.unsharded(model, writeback=False):
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (
                    type(p) is nn.Parameter and p.dtype == q.dtype and p.requires_grad == q.requires_grad
                ), name
                assert p.shape == q.shape and torch.equal(p, q), name
            assert model.frozen.note == "kept"
            assert all(w is p for w, p in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))

    alike()
    for each in (model, plain):
        with sw.unsharded(each), torch.no_grad():
            for p in each.parameters():
                p.copy_(p.flip(0) if p.ndim else p + 1)
    alike()
    x = torch.rand(2, 2, 3)
    torch.testing.assert_close(model(x), plain(x))
    model(x).backward()
    with sw.unsharded(model, with_grads=True):
        for p in model.parameters():
            assert p.grad is None or (type(p.grad) is torch.Tensor and p.grad.shape == p.shape)
    # An exception on one rank alone leaves the others as they are.
    try:
        with sw.unsharded(model), torch.no_grad():
            model.scale.fill_(5.0)
            if rank:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert full(model.scale).item() == 5.0
    # On the first rank only, twice.
    with (
        sw.unsharded(model, writeback=False, rank0_only=True),
        sw.unsharded(model, writeback=False, rank0_only=True),
    ):
        assert (type(model.scale) is nn.Parameter) == (rank == 0)
    model(x).backward()


@multirank(2)
def test_ranks_that_diverge_are_named(rank: int, world_size: int) -> None:
    model = sharded()
    backward(model, rank)
    with pytest.raises(
        RuntimeError, match=r"rank 0 shows the full parameters of unit 0 .*; rank 1 gathers unit"
    ):
        if rank:
            model(tokens(0, 0, rank))
        else:
            sw.unsharded(model).__enter__()
    with sw.unsharded(model):
        assert type(model.head.weight) is nn.Parameter


@multirank(2)
def test_what_has_no_values_or_decides_itself_is_refused(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = build()
    shard(model, mesh=world_mesh(2))
    with pytest.raises(RuntimeError, match=r"Parameter 'embed.weight' .*holds no values yet.*materialize"):
        sw.unsharded(model).__enter__()
    one = nn.Linear(4, 4, bias=False)
    one.weight = nn.Parameter(HalfGathered(one.weight.detach()))
    sw.fully_shard(one, mesh=world_mesh(2))
    with pytest.raises(NotImplementedError, match=r"'weight' .* is a HalfGathered, which defines its own"):
        sw.unsharded(one).__enter__()


@multirank(2)
def test_reading_leaves_a_pending_backward_right_and_an_edit_refuses_it(rank: int, world_size: int) -> None:
    """An edit of one row is an edit on every rank: they go on agreeing on what is gathered anew."""
    for keep, change in itertools.product((None, False), (False, True)):
        model = sharded(reshard_after_forward=keep)
        batch = tokens(0, 0, rank)
        loss = loss_of(model(batch), batch)
        with sw.unsharded(model), torch.no_grad():
            if change:
                model.embed.weight[0] += 1.0  # in rank 0's part alone
                model.head.weight[0] += 1.0
        if change:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        model.zero_grad()
        with torch.no_grad():
            model(batch)


@multirank(2)
def test_full_parameters_take_memory_where_they_are_shown(rank: int, world_size: int) -> None:
    """Ranks without them hold none, and afterwards nobody does.

    In a ragged layout, since DTensor's own collectives make wrappers that cannot be counted.
    """
    plain = build(dim=32, hidden=128, vocab=64)
    sizes = [p.nbytes for p in plain.parameters()]
    model = shard(plain, mesh=world_mesh(2), layout="ragged")
    meeting = getattr(model, UNIT).ranks.every[0].meeting
    locals_ = [p.to_local() for p in model.parameters()]
    locals_ += [meeting._way._mine.tensor, meeting._way._theirs.tensor]  # in which the ranks agree

    def settles(seen: Storages, nbytes: int) -> bool:
        """gloo's threads may hold the last ones for a moment."""
        for _ in range(200):
            seen.begin()
            if seen.peak.nbytes == nbytes:
                return True
            time.sleep(0.05)
        return False

    gc.collect()
    gc.disable()
    try:
        with Storages(lambda frame: "full") as seen:
            for local in locals_:
                seen.know(local.untyped_storage())
            seen.settle()
            for only in (False, True):
                context = sw.unsharded(model, writeback=False, rank0_only=only)
                context.__enter__()
                assert settles(seen, sum(sizes) if not only or rank == 0 else 0)
                context.__exit__(None, None, None)
                assert settles(seen, 0)
    finally:
        gc.enable()
