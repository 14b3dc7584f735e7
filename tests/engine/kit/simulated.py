"""Training on a simulated accelerator."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.activations import checkpoint_blocks
from shardwright.comm_hooks import Compressed, Int8Blocks, PowerSGD
from shardwright.engine.comm import DeviceStreams
from shardwright.engine.extend.named_strategies import resolve
from tests.engine.custom import Gathers, Scatters
from tests.engine.kit.edits_of_shards import EDITS
from tests.engine.kit.models import Model, loss_of, tokens
from tests.engine.kit.offload_state import STATE
from tests.support.fake import fake_ranks
from tests.support.races import Simulator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class On(NamedTuple):
    """A strategy on a mesh."""

    strategy: str | sw.Strategy
    shape: tuple[int, ...]
    reshard: bool | int | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        return resolve(self.strategy, len(self.shape)).stages

    @property
    def sharded_axes(self) -> int:
        return sum(stage > 0 and size > 1 for stage, size in zip(self.stages, self.shape, strict=True))

    def __str__(self) -> str:
        name = self.strategy if isinstance(self.strategy, str) else "".join(map(str, self.stages))
        return f"{name}@{'x'.join(map(str, self.shape))}-{self.reshard}"


class Case(NamedTuple):
    """One training run."""

    on: On = On("zero3", (2,))
    memory: str = "dynamic"
    prefetch: int | str = 1
    dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)  #: of computation and reduction
    accumulation: str = "none"
    layout: str = "per_parameter"
    event: str = "none"
    offload: str = "none"  #: or "offload", of everything, or "state", of the optimizer's alone
    steps: str = "optimizer"  #: or "in backward"
    recompute: str = "none"  #: "recomputed" or "reentrant"; "parts" and "recomputed parts" call no unit
    graphed: bool = False  #: forward and backward are a graph from the third step on
    #: of the host: "none"; "blocks"; or, of recomputed blocks, what `checkpoint_blocks` keeps with "full" or "ops".
    activations: str = "none"

    @property
    def legal(self) -> bool:
        stay = self.on.reshard is False or (3 not in self.on.stages and any(self.on.stages))
        if self.memory in ("max_pool", "double_buffer") and stay:
            return False  # pools are refused
        return self.layout != "columns" or self.on.sharded_axes < 2

    @property
    def uses_sgd(self) -> bool:
        """SGD steps, because in AdamW's steps on offloaded units the host would read a number of the device."""
        return self.offload != "none" or self.steps == "in backward"

    @property
    def micros(self) -> int:
        return 1 if self.accumulation == "none" else 2

    def __str__(self) -> str:
        dtypes = "/".join("-" if d is None else str(d).removeprefix("torch.") for d in self.dtypes)
        parts = (self.on, self.memory, self.prefetch, dtypes, *self[4:])
        return "-".join(str(t).replace(" ", "_") for t in parts)


class Net(Model):
    """Blocks may be left out, recomputed in backward, or fail."""

    skipped = -1
    recompute = "none"
    keeps_rng_state = True
    fails = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if i == self.fails:
                raise ValueError("this block fails")
            if i != self.skipped:
                run = block.forward if "parts" in self.recompute else block
                if self.recompute in ("none", "parts"):
                    h = run(h)
                else:
                    h = checkpoint(
                        run,
                        h,
                        use_reentrant=self.recompute == "reentrant",
                        preserve_rng_state=self.keeps_rng_state,
                    )
        return self.head(self.norm(h))


class Fails(torch.autograd.Function):
    """The identity, in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward fails")


class Outcome(NamedTuple):
    """Losses of this rank, and full weights at the end."""

    losses: list[torch.Tensor]
    weights: list[torch.Tensor]


#: By which gradients of the model's own parameters, and of each block's, are multiplied in a hook.
HOOK_FACTORS = (0.5, 0.25, 1.5, 0.125)


def is_edited(step: int) -> bool:
    """Whether an edit comes after this step: before a graph is captured, and between replays."""
    return step in (0, 2)


def names_of(shape: tuple[int, ...]) -> tuple[str, ...]:
    return ("outer", "inner")[-len(shape) :]


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net(layers=3)


def build(case: Case, mesh: DeviceMesh) -> Net:
    options: dict[str, Any] = {
        "mesh": mesh,
        "strategy": case.on.strategy,
        "reshard_after_forward": case.on.reshard,
        "mp_policy": sw.MixedPrecisionPolicy(param_dtype=case.dtypes[0], reduce_dtype=case.dtypes[1]),
        "layout": "ragged" if case.layout == "ragged" else "per_parameter",
    }
    if case.offload != "none":
        options["offload_policy"] = sw.CPUOffloadPolicy() if case.offload == "offload" else STATE
    if case.layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 else None
    model = plain_net()
    for block in model.blocks:
        sw.fully_shard(block, **options)
    if case.event == "list unit":
        sw.fully_shard([model.norm, model.head], **options)
    if case.activations != "none":
        checkpoint_blocks(model.blocks, case.activations)
        sw.offload_activations(
            model.blocks, "inputs" if case.activations == "full" else "blocks", min_bytes=0
        )
    return sw.fully_shard(model, memory=case.memory, prefetch=case.prefetch, **options)


class Training:
    """A case's model and optimizer, and what happens to them in its steps.

    ``api`` makes streams and events, as ``torch.get_device_module`` gives it. Data are of this ``rank``. The losses of
    all backwards are in ``losses``.
    """

    def __init__(
        self, case: Case, api: Any, mesh: DeviceMesh, device: torch.device | None = None, rank: int = 0
    ) -> None:
        self.case, self.api, self.device, self.rank = case, api, device, rank
        self.losses: list[torch.Tensor] = []
        self.model = build(case, mesh)
        parameters = self.model.parameters()
        optimizer: torch.optim.Optimizer
        if case.event == "whole matrices":
            matrices = [p for p in parameters if p.ndim == 2]
            optimizer = torch.optim.Muon(matrices, lr=1e-3)
        else:
            # Sums of many tensors at once, as torch chooses on an accelerator.
            optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        self.optimizer = sw.fully_shard_optimizer(optimizer)
        self.other, self.third = api.Stream(name="user"), api.Stream(name="user's second")
        if case.uses_sgd:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
            wrap = sw.optim.in_backward if case.steps == "in backward" else sw.fully_shard_optimizer
            self.optimizer = wrap(optimizer)
        event, blocks = case.event, self.model.blocks
        if event == "hook on a stream":
            for module, factor in zip((self.model, *blocks), HOOK_FACTORS, strict=True):
                hook = functools.partial(torch.Tensor.mul_, other=factor)
                module.set_all_reduce_hook(hook, stream=self.other)
        elif event == "separate group":
            self.model.set_separate_reduce_scatter_group()
        elif event == "compressed":
            self.model.set_gradient_comm_hook(Compressed(Int8Blocks(8), error_feedback=True))
        elif event == "thin matrices":
            self.model.set_gradient_comm_hook(PowerSGD(1))
        elif event == "weights encoded":
            self.model.set_all_gather_codec(Int8Blocks(8))
        elif event == "own collectives":
            for module in (self.model, *blocks):
                module.set_custom_all_gather(Gathers())
                module.set_custom_reduce_scatter(Scatters())
        elif event == "two buffers":
            self.model.set_reduce_scatter_max_input_buffers(2)
        elif event == "kept after backward":
            self.model.set_reshard_after_backward(False)
        elif event == "own order":
            blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
            blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
        elif event == "frozen":
            blocks[1].requires_grad_(False)
            self.model.embed.requires_grad_(False)
        self.model.recompute = "recomputed" if event == "recomputed" else case.recompute
        self.model.keeps_rng_state = not case.graphed
        self.work: Callable[..., list[torch.Tensor]] = self.forward_and_backward
        if case.graphed:
            self.work = sw.GraphedStep(self.model, self.forward_and_backward, warmup=2)

    def run(self, steps: int = 4) -> None:
        with self._everything():
            for step in range(steps):
                if step == 2 + self.case.graphed:
                    self.validate()
                try:
                    self.step(step)
                except RuntimeError as error:
                    if self.case.event != "a rank steps twice" or "have diverged" not in str(error):
                        raise
                    self.losses.append(torch.tensor(float(step)))
                    break
        self.api.current_stream().wait_stream(self.other)

    @contextmanager
    def _everything(self) -> Iterator[None]:
        """All of the training on a stream of the user's."""
        if self.case.event != "training on a stream":
            yield
            return
        self.other.wait_stream(self.api.current_stream())
        with self.api.stream(self.other):
            yield
        self.api.current_stream().wait_stream(self.other)

    def batch(self, step: int, micro: int = 0) -> torch.Tensor:
        batch = tokens(step, micro, self.rank)
        return batch if self.device is None else batch.to(self.device)

    def validate(self) -> None:
        with torch.no_grad():
            self.model(self.batch(99))

    def step(self, step: int) -> None:
        model, optimizer, case = self.model, self.optimizer, self.case
        if case.event == "another order":
            model.skipped = (-1, 2, -1, 1)[step]
        if case.event == "unshard":
            handle = model.blocks[1].unshard(async_op=True)
            if step % 2:
                handle.wait()
            model.blocks[2].unshard()
            model.blocks[2].reshard()
        if case.event == "failures" and step in (1, 2, 4):
            self.fail(step)
            if case.steps == "in backward":
                optimizer.step()  # to go on with what the failed backward has stepped
        losses = self.work(*[self.batch(step, micro) for micro in range(case.micros)])
        self.losses += [loss.clone() for loss in losses] if case.graphed else losses
        if case.steps == "in backward":
            if case.memory == "dynamic":  # else what is left is stepped where the next forward needs it
                optimizer.step()
            return
        sw.clip_grad_norm_(model.parameters(), 1.0)
        if case.event == "validation on a stream":
            self.api.current_stream().wait_stream(self.other)  # which reads the weights
        if case.event == "optimizer on a stream":
            self.other.wait_stream(self.api.current_stream())
            with self.api.stream(self.other):
                optimizer.step()
            model.set_post_optim_event(self.other.record_event())
            self.validate()  # waits for its gathers, and so for the optimizer
        else:
            optimizer.step()
        if case.event == "a rank steps twice" and (step, self.rank) == (1, 1):
            optimizer.step()
        if case.event == "zeros kept":
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        else:
            optimizer.zero_grad()
            model.zero_grad()
        if case.event in EDITS and is_edited(step):
            with torch.no_grad():
                EDITS[case.event](model)
        if case.event == "validation on a stream":  # beside the next step
            self.other.wait_stream(self.api.current_stream())
            with self.api.stream(self.other), torch.no_grad():
                batch = self.batch(99)
                self.losses.append(loss_of(model(batch), batch))

    def forward_and_backward(self, *batches: torch.Tensor) -> list[torch.Tensor]:
        model, case = self.model, self.case
        losses = []
        if case.event == "streams in the step":
            for stream in (self.other, self.third):
                stream.wait_stream(self.api.current_stream())
        for micro, batch in enumerate(batches):
            last = micro == case.micros - 1
            if case.accumulation == "held":
                model.set_requires_gradient_sync(last)
            elif case.accumulation == "not all-reduced":
                model.set_requires_all_reduce(last)
            elif case.accumulation == "not last":
                model.set_is_last_backward(last)
            with self._forward_stream():
                loss = loss_of(model(batch), batch)
            with self._backward_stream():
                loss.backward()
            losses.append(loss.detach())
        if case.event == "streams in the step":
            for stream in (self.other, self.third):
                self.api.current_stream().wait_stream(stream)
        return losses

    def _forward_stream(self) -> AbstractContextManager[None]:
        """Forward waits for no backward: the engine orders what they do in its memory."""
        if self.case.event != "streams in the step":
            return nullcontext()
        return self.api.stream(self.other)  # type: ignore[no-any-return]

    def _backward_stream(self) -> AbstractContextManager[None]:
        if self.case.event != "streams in the step":
            return nullcontext()
        return self.api.stream(self.third)  # type: ignore[no-any-return]

    def fail(self, step: int) -> None:
        """In the middle of forward, or of backward."""
        model = self.model
        if step == 1:
            model.fails = 1
            with pytest.raises(ValueError, match="this block fails"):
                model(self.batch(step, 9))
            model.fails = -1
            return
        handle = model.blocks[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
        with pytest.raises(ValueError, match="this backward fails"):
            model(self.batch(step, 9)).sum().backward()
        handle.remove()


def training_of(case: Case, simulator: Simulator) -> Training:
    mesh = init_device_mesh("cpu", case.on.shape, mesh_dim_names=names_of(case.on.shape))
    return Training(case, simulator.device, mesh)


def run(case: Case, streams: Callable[[torch.device], DeviceStreams] = DeviceStreams) -> Simulator:
    with fake_ranks(math.prod(case.on.shape)), Simulator(streams) as simulator:
        training_of(case, simulator).run()
    return simulator


EVENTS = [
    "none",
    "compressed",
    "thin matrices",
    "weights encoded",
    "own collectives",
    "another order",
    "failures",
    "frozen",
    "hook on a stream",
    "kept after backward",
    "list unit",
    "optimizer on a stream",
    "own order",
    "recomputed",
    "separate group",
    "training on a stream",
    "two buffers",
    "unshard",
    "validation on a stream",
    "whole matrices",
    "zeros kept",
]
#: And those in which autograd changes the stream, which the simulator of clocks does not know.
EVENTS_OF_DEVICE = [*EVENTS, "streams in the step"]
