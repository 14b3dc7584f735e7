"""A training step in one CUDA graph: the host does the engine's work once, and the device replays it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.engine.assembly.find import UNIT
from shardwright.engine.compat.storages import has_expandable_segments
from shardwright.engine.model.root import Root, attach
from shardwright.engine.unit.owning import settle
from shardwright.engine.unit.unit import Unit
from shardwright.engine.unit.uses import follow_requires_grad


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph, and all memory that it uses, which must not move.

    Attributes:
        replay: runs the graph on the current stream.
        inputs: the tensors from which the graph reads its inputs.
        result: the result of the function, in memory that every replay writes.
        gradients: each parameter's ``.grad``, in memory that every replay writes.
        state: the engine's state for which the graph is valid.
        memory: the allocator whose block the graph uses.
    """

    replay: Callable[[], None]
    inputs: tuple[torch.Tensor, ...]
    result: Any
    gradients: list[tuple[nn.Parameter, torch.Tensor]]
    state: object
    memory: object


class GraphedStep:
    """Forward and backward of a sharded model, captured in a CUDA graph once and replayed afterwards.

    ::

        step = sw.GraphedStep(model, forward_and_backward)
        for batch in batches:
            loss = step(batch)
            optimizer.step()
            optimizer.zero_grad()

    The first calls run ``function`` without a graph. Then it is captured, with its gathers and reductions. Every later
    call copies its inputs to the graph's memory and launches the graph. The results equal those of the function. A
    graph repeats the work of the device and runs no Python. So the function must not depend on values of tensors
    (``item``, shapes that depend on data), and its work on the host happens only in the first calls. Each call
    overwrites every ``.grad``, so accumulate gradients inside the function.

    A graph belongs to the parameters and settings of its capture. If these change (``requires_grad``, ``train()`` and
    ``eval()``, the gradients' divide factor, the memory), the step is captured again.

    Args:
        model: the root module that ``fully_shard`` was applied to, on a CUDA device.
        function: calls the model on its arguments, calls ``backward``, returns tensors or nested containers of them.
        warmup: number of first calls that run without a graph, at least 2. Memory is planned after the first call that
            an optimizer's step completes.

    Raises:
        ValueError: the model is not sharded; ``warmup`` is not an integer of at least 2.
        NotImplementedError: the model is not on a CUDA device.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any], *, warmup: int = 3) -> None:
        unit = getattr(model, UNIT, None)
        if not isinstance(unit, Unit):
            raise ValueError(f"GraphedStep needs a sharded model, got a plain {type(model).__name__}")
        if type(warmup) is not int or warmup < 2:
            raise ValueError(f"warmup must be an integer of at least 2, got {warmup!r}")
        self._streams = unit.comm.streams
        if not self._streams.captures:
            raise NotImplementedError(
                f"CUDA graphs need a model on a CUDA device; this {unit.name} is on {unit.comm.device}. Call the "
                "function without GraphedStep."
            )
        if has_expandable_segments() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
            warnings.warn(
                "expandable_segments: NCCL registers the memory of a graph's collectives, which does not work with "
                "expandable segments. Set NCCL_GRAPH_REGISTER=0 before the process group is made.",
                stacklevel=2,
            )
        self._model = model
        self._function = function
        self._left = warmup
        self._captured: _CapturedGraph | None = None

    @property
    def captured(self) -> bool:
        """Whether the next call replays a graph, if nothing has changed."""
        return self._captured is not None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the step on tensors of the same shapes and dtypes each time.

        Returns:
            The values that the function returned. Once captured, the tensors are the same ones after every call: the
            next call overwrites them.

        Raises:
            ValueError: an input is no tensor, or its shape or dtype differs from the capture; or gradients of an
            earlier
                step still exist.
            RuntimeError: the function cannot be captured.
        """
        for i, tensor in enumerate(inputs):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"GraphedStep takes tensors, got {type(tensor).__name__} as input {i}")
        if self._left:
            self._left -= 1
            return self._streams.warm_up(lambda: self._function(*inputs))
        root = self._root()
        state = self._state(root)
        if self._captured is None or self._captured.state != state:
            self._captured = self._capture(root, state, inputs)
        captured = self._captured
        self._copy_inputs(captured, inputs)
        captured.replay()
        for parameter, gradient in captured.gradients:
            parameter.grad = gradient
        root.agreement.replayed()
        return captured.result

    def _root(self) -> Root:
        """The model's root. First releases all gathered and kept weights, so that the graph does not use them."""
        unit = getattr(self._model, UNIT)
        root: Root = unit.root if unit.root is not None else attach(self._model)
        if root.top is not unit:
            raise ValueError(
                f"GraphedStep needs the outermost module, got {type(self._model).__name__}, a part of "
                f"{root.agreement.model.name_of(0)}"
            )
        for each in root.units():
            if each.host is not None or each.stepping is not None:
                raise NotImplementedError(
                    f"Unit {each.name!r} is offloaded, or its optimizer steps in backward: the host takes part in "
                    "that, and a CUDA graph cannot contain work of the host. Call the function without GraphedStep."
                )
        root.agreement.check()
        root.recover_if_failed()
        for each in root.units():
            if each.parameters:
                settle(each)
                follow_requires_grad(each)
                each.drop_kept()
                each.release()
        if any(unit.gradients.held for unit in root.units()) or any(
            parameter.grad is not None for parameter in self._model.parameters()
        ):
            raise ValueError(
                "There are gradients of an earlier step, and a graphed step overwrites .grad. Call zero_grad() "
                "before it (with set_to_none=True, the default), and accumulate gradients inside the function."
            )
        return root

    def _state(self, root: Root) -> object:
        return (
            [module.training for module in self._model.modules()],
            root.is_last_backward,
            [
                (
                    each.generation,
                    each.settings,
                    tuple(p.sharded.requires_grad for p in each.parameters),
                )
                for each in root.units()
            ],
        )

    def _capture(self, root: Root, state: object, inputs: tuple[torch.Tensor, ...]) -> _CapturedGraph:
        static = tuple(tensor.detach().clone() for tensor in inputs)
        memory = root.pools.allocator
        handled = sys.exception()
        try:
            replay, result = root.agreement.streams.capture(lambda: self._function(*static))
        except RuntimeError as error:
            first = _first_of(error, handled)
            kind = "" if type(first) is RuntimeError else f"{type(first).__name__}: "
            raise RuntimeError(
                f"The step of {type(self._model).__name__} cannot be captured in a CUDA graph: {kind}{first}. "
                "A step in a graph must not read values on the host (item, print, shapes that depend on data). It must "
                "not move tensors from or to the CPU. It must give each parameter a gradient on every rank. Before "
                "torch 2.13 no output or error of an earlier call of the model may be kept. Otherwise run it without "
                "GraphedStep."
            ) from error
        for each in root.units():
            each.drop_kept()
        gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        return _CapturedGraph(replay, static, result, gradients, state, memory)

    @staticmethod
    def _copy_inputs(captured: _CapturedGraph, inputs: tuple[torch.Tensor, ...]) -> None:
        forms = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (inputs, captured.inputs)]
        if forms[0] != forms[1]:
            raise ValueError(
                f"This step was captured for inputs of shapes and dtypes {forms[1]}, got {forms[0]}. Make one "
                "GraphedStep for each set of shapes."
            )
        for target, source in zip(captured.inputs, inputs, strict=True):
            target.copy_(source, non_blocking=True)


def _first_of(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error that began the chain, and not ``handled``, which the caller was handling before.

    After an error inside a capture the end of the capture fails, too, and reports that there was an error.
    """
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or before is handled:
            return error
        error = before
