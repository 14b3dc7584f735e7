"""A step captured and replayed, on a graph for the CPU: the bits of the step as it is written, and clear refusals.

What the graph proves here is what a CUDA graph needs: the engine decides nothing on the host from step to step, works
at fixed addresses, and leaves its own state right between replays. What CUDA itself refuses shows on a GPU only.
"""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from tests.engine.custom import Gathers, Scatters
from tests.engine.kit.graphs import graphs
from tests.engine.kit.models import Model, build, loss_of, shard, tokens
from tests.engine.kit.places import On, on, on_meshes
from tests.support import multirank

PLACES = [*on("zero3", (1,), (2,), (3,)), *on("zero2", (2,)), *on("zero1", (2,)), *on("ddp", (2,))]
PLACES += [*on("hsdp", (2, 2)), *on("hfsdp", (2, 2))]
MEMORY = ["dynamic", "max_pool", "arena"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"layout": "ragged", "mp_policy": sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    {"mp_policy": sw.MixedPrecisionPolicy(torch.bfloat16), "hold": True},
    {"layout": sw.Ragged("element"), "prefetch": 2, "hold": True},
]
CASES = [
    (
        at,
        "arena" if max(at.stages) in (1, 2) and (i + j) % 3 == 1 else MEMORY[(i + j) % 3],
        j,
    )  # no pool there
    for (i, at), j in itertools.product(enumerate(PLACES), range(len(SETTINGS)))
    if (i + j) % 2 == 0
]


class Run:
    """A model in training, by its function or by a graph of that."""

    def __init__(self, graphed: bool, rank: int, hold: bool = False, micros: int = 2, **options: Any) -> None:
        root = {key: options.pop(key) for key in ("memory", "prefetch") if key in options}
        self.rank, self.hold, self.micros = rank, hold, micros
        self.model = build(layers=3)
        for block in self.model.blocks:
            sw.fully_shard(block, **options)
        sw.fully_shard(self.model, **options, **root)
        self.optimizer = sw.fully_shard_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-3)
        )
        self.graphed = graphed
        self.done = 0
        self.step: Any = self.function

    def function(self, *batches: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            if self.hold:
                self.model.set_requires_gradient_sync(last)
            loss = loss_of(self.model(batch), batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def train(self, steps: int) -> list[float]:
        seen: list[float] = []
        with graphs(self.model):
            if self.graphed and self.step == self.function:
                self.step = sw.GraphedStep(self.model, self.function)
            for _ in range(steps):
                losses = self.step(*[tokens(self.done, i, self.rank) for i in range(self.micros)])
                seen += [float(loss) for loss in losses]
                seen.append(float(sw.clip_grad_norm_(self.model.parameters(), 0.5)))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.done += 1
        return seen

    @torch.no_grad()
    def validate(self) -> float:
        batch = tokens(77, 0, self.rank)
        with graphs(self.model):
            return float(loss_of(self.model(batch), batch))


def both(rank: int, **options: Any) -> tuple[Run, Run]:
    return Run(False, rank, **options), Run(True, rank, **options)


@pytest.mark.extensive("each place", but=("zero3@1-dynamic-*", "zero3@2-arena-*"))
@on_meshes(CASES)
def test_no_bit_changes(rank: int, world_size: int, at: On, memory: str, setting: int) -> None:
    plain, graphed = both(rank, mesh=at.mesh, strategy=at.strategy, memory=memory, **SETTINGS[setting])
    for steps in (4, 1):  # three warm up
        assert graphed.train(steps) == plain.train(steps)
        assert graphed.validate() == plain.validate()
    assert graphed.step.captured


@pytest.mark.extensive("each way of keeping")
@multirank(4)
@pytest.mark.parametrize("reshard", [2, True, False])
def test_what_is_kept_between_steps_is_gathered_in_the_graph(
    rank: int, world_size: int, reshard: Any
) -> None:
    plain, graphed = both(rank, reshard_after_forward=reshard)
    for run in (plain, graphed):
        run.model.set_reshard_after_backward(False)
    assert graphed.train(4) == plain.train(4)
    assert (
        graphed.validate() == plain.validate()
    )  # keeps weights, which the next replay must not take for its own
    assert graphed.train(1) == plain.train(1)


@on_meshes([*on("zero2", (2,)), *on("hfsdp", (2, 2))])
def test_without_steps_between_nothing_stale_is_captured(rank: int, world_size: int, at: On) -> None:
    """Weights that were kept since an earlier call would be missing in the graph when they have changed."""
    run = Run(True, rank, mesh=at.mesh, strategy=at.strategy)
    batches = [tokens(0, i, rank) for i in range(2)]
    with graphs(run.model):
        step = sw.GraphedStep(run.model, run.function)
        for _ in range(4):
            before = [float(loss) for loss in step(*batches)]
            run.model.zero_grad()
        assert step.captured
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(0.5)
        after = [float(loss) for loss in step(*batches)]
        run.model.zero_grad()
        expected = [float(loss) for loss in run.function(*batches)]
    assert after == expected != before


def freeze(model: Model) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def assign(model: Model) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def load(model: Model) -> None:
    with torch.no_grad():
        for p in model.state_dict().values():
            p.mul_(0.5)


def divide(model: Model) -> None:
    model.blocks[0].set_gradient_divide_factor(3.0)


def compress(model: Model) -> None:
    model.set_gradient_comm_hook(sw.comm_hooks.Compressed(sw.comm_hooks.Cast(torch.bfloat16)))


@pytest.mark.extensive("each change is another graph", but=("compress-True-*",))
@multirank(2)
@pytest.mark.parametrize(
    "change, again",
    [
        (freeze, True),
        (assign, True),
        (load, False),
        (divide, True),
        (compress, True),
    ],
)
def test_a_change_between_steps_counts(rank: int, world_size: int, change: Any, again: bool) -> None:
    plain, graphed = both(rank)
    assert graphed.train(4) == plain.train(4)
    first = graphed.step._captured
    for run in (plain, graphed):
        change(run.model)
    assert graphed.train(3) == plain.train(3)
    assert (graphed.step._captured is not first) == again


@multirank(1)
def test_expandable_segments_need_a_setting_of_nccl(rank: int, world_size: int) -> None:
    model = shard(build())
    for setting, expected in (("", 0), ("max_split_size_mb:128,expandable_segments:True", 1)):
        for registers, warned in (("", expected), ("0", 0)):
            variables = {"PYTORCH_CUDA_ALLOC_CONF": setting, "NCCL_GRAPH_REGISTER": registers}
            with (
                mock.patch.dict(os.environ, variables),
                graphs(model),
                warnings.catch_warnings(record=True) as found,
            ):
                warnings.simplefilter("always")
                sw.GraphedStep(model, lambda batch: loss_of(model(batch), batch))
            assert [str(each.message)[:19] for each in found] == ["expandable_segments"] * warned


@multirank(2)
def test_another_way_of_gathering_is_captured_again(rank: int, world_size: int) -> None:
    """The CPU's stand-in for graphs knows no communicators made later, so the test compares the key of a graph."""
    model = shard(build())
    with graphs(model):
        step = sw.GraphedStep(model, lambda batch: loss_of(model(batch), batch))
    states = [step._state(step._root())]
    for change in (
        lambda: model.set_all_gather_codec(sw.comm_hooks.Int8Blocks()),
        lambda: model.set_custom_all_gather(Gathers()),
        lambda: model.set_custom_reduce_scatter(Scatters()),
        lambda: model.set_separate_reduce_scatter_group(),
    ):
        change()
        states.append(step._state(step._root()))
    assert all(one != other for one, other in itertools.pairwise(states))


@multirank(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(rank: int, world_size: int, reentrant: bool) -> None:
    runs = both(rank, memory="arena")
    for run in runs:
        for block in run.model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(
                inner, x, use_reentrant=reentrant, preserve_rng_state=False
            )
    assert runs[1].train(5) == runs[0].train(5)


@multirank(2)
def test_a_kept_result_of_a_replay_is_the_next_one(rank: int, world_size: int) -> None:
    run = Run(True, rank)
    run.train(3)
    with graphs(run.model):
        one = run.step(*[tokens(0, i, rank) for i in range(2)])
        first = [p.grad for p in run.model.parameters()]
        run.model.zero_grad()
        two = run.step(*[tokens(1, i, rank) for i in range(2)])
    assert all(a is b for a, b in zip(one, two, strict=True))
    assert all(p.grad is g for p, g in zip(run.model.parameters(), first, strict=True))


@multirank(2)
def test_refusals(rank: int, world_size: int) -> None:
    run = Run(True, rank)
    batches = [tokens(0, i, rank) for i in range(2)]
    with pytest.raises(
        NotImplementedError, match="CUDA graphs need a model on a CUDA device; this Model is on cpu"
    ):
        sw.GraphedStep(run.model, run.function)
    with graphs(run.model):
        with pytest.raises(ValueError, match="needs a sharded model, got a plain Linear"):
            sw.GraphedStep(nn.Linear(2, 2), run.function)
        with pytest.raises(ValueError, match="warmup must be an integer of at least 2, got 1"):
            sw.GraphedStep(run.model, run.function, warmup=1)
        step = sw.GraphedStep(run.model, run.function)
        with pytest.raises(ValueError, match="takes tensors, got int as input 0"):
            step(3)
        for _ in range(3):
            run.model.zero_grad()
            step(*batches)
        with pytest.raises(ValueError, match=r"Call zero_grad\(\) before it"):
            step(*batches)
        run.model.zero_grad()
        step(*batches)
        run.model.zero_grad()
        with pytest.raises(ValueError, match="Make one GraphedStep for each"):
            step(*[batch[:1] for batch in batches])
        step(*batches)
        run.model.zero_grad()
        part = sw.GraphedStep(run.model.blocks[0], run.function, warmup=2)
        for _ in range(2):
            part(*batches)
            run.model.zero_grad()
        with pytest.raises(ValueError, match=r"needs the outermost module, got .*Block, a part of unit 0"):
            part(*batches)


@multirank(2)
def test_a_value_read_on_the_host_is_named_and_the_model_goes_on(rank: int, world_size: int) -> None:
    run = Run(True, rank)
    plain = Run(False, rank)
    batches = [tokens(0, i, rank) for i in range(2)]

    def looks(*given: torch.Tensor) -> Any:
        losses = run.function(*given)
        return losses if losses[0].item() > 0 else []

    with graphs(run.model):
        step = sw.GraphedStep(run.model, looks)
        for _ in range(3):
            step(*batches)
            run.model.zero_grad()
        with pytest.raises(
            RuntimeError,
            match=r"Model cannot be captured .*: operation not permitted when .* read values on the host",
        ):
            try:
                raise KeyError("an error that the caller handles")
            except KeyError:
                step(*batches)
        run.model.zero_grad()
    assert run.train(4) == plain.train(4)


@multirank(2)
def test_a_parameter_without_gradient_on_one_rank_is_refused(rank: int, world_size: int) -> None:

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x) if rank else self.one(x)

    model = sw.fully_shard(Skips())

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    with graphs(model):
        step = sw.GraphedStep(model, function, warmup=2)
        for _ in range(2):
            step(torch.ones(2, 4))
            model.zero_grad()
        with pytest.raises(RuntimeError, match="some parameters have no gradient on this rank"):
            step(torch.ones(2, 4))
