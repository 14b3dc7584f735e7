"""Graphs of torch.compile in a trace: they take the memory that compiled kernels would take, and compute nothing.

torch itself captures a graph, differentiates it and chooses what forward saves. ``fusion`` says which results of the
graph are stored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardwright.engine.compat import compile_by, donated_inputs, hide_from_dynamo, outside_dispatch_modes
from shardwright.planner.tracing import fakes, recorder
from shardwright.planner.tracing.fusion import (
    FusedKernel,
    base_of,
    has_symbols,
    kernels_of,
    name_of,
    nodes_in,
)
from shardwright.planner.tracing.recorder import BY_LIFE, ProgramRecorder

#: Operations that run another one, which comes first, with the state of the generator that a recomputation needs; and
#: those that check values, which a trace does not have.
_PLAIN: dict[str, Callable[..., Any]] = {
    "_assert_async": lambda *_: None,
    "_assert_scalar": lambda *_: None,
    "_functional_assert_async": lambda *_: None,
    "run_and_save_rng_state": lambda operation, *arguments, **options: (
        torch.get_rng_state(),
        operation(*arguments, **options),
    ),
    "run_with_rng_state": lambda _, operation, *arguments, **options: operation(*arguments, **options),
}


class Graphs:
    """Makes the graphs of torch.compile in traces: they only take memory. Traces one after another may share them.

    Attributes:
        events: of the trace that runs, which get the blocks and kernels.
        on_cpu: whether kernels are made by the rules for a CPU.
        for_several_shapes: whether a graph was made for several shapes, because tensors of another shape came before.
    """

    def __init__(self, on_cpu: bool) -> None:
        self.events = ProgramRecorder()
        self.on_cpu = on_cpu
        self.for_several_shapes = False

    def compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        made: Callable[[list[Any]], Any]
        if has_symbols(graph):  # the sizes of one call are not those of the next
            made = _OneByOne(graph)
            self.for_several_shapes = True
        else:
            made = _HollowGraph(graph, self, donated_inputs(graph))

        def run(arguments: list[Any]) -> Any:
            return made(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextmanager
def graphs_of_fakes(on_cpu: bool) -> Iterator[Graphs]:
    """Let torch.compile's own backend make graphs of fake tensors inside this context.

    What was compiled before is forgotten, and so is afterwards what was compiled inside.
    """
    graphs = Graphs(on_cpu)
    _hide_tracing()
    with compile_by(graphs.compile):
        yield graphs


@functools.cache
def _hide_tracing() -> None:
    """Let torch.compile not compile what runs here at each operation. Functions of ``kernels``, and hooks of modules in
    ``training``, are part of graphs."""
    hide_from_dynamo(lambda: [__file__, *(file for file in (fakes.__file__, recorder.__file__) if file)])


class _OneByOne:
    """A graph whose operations run one after another, called with its inputs as a list, which is emptied."""

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph

    def __call__(self, arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()
        return _Interpreter(self._graph).run(*inputs)


class _Interpreter(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        plain = _PLAIN.get(name_of(n)) if n.op == "call_function" else None
        if plain is None:
            return super().run_node(n)
        arguments, options = self.fetch_args_kwargs_from_env(n)
        return plain(*arguments, **options)


class _HollowGraph:
    """A graph, called with its inputs as a list, which is emptied."""

    def __init__(self, graph: GraphModule, graphs: Graphs, donated: set[int]) -> None:
        self._graph, self._graphs = graph, graphs
        nodes = list(graph.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._output = nodes[-1]
        self._kernels = kernels_of(nodes, {self._inputs[number] for number in donated}, graphs.on_cpu)
        kept = {base_of(node) for node in nodes_in(self._output.args)}
        last = {node: number for number, kernel in enumerate(self._kernels) for node in kernel.reads}
        #: By number of a kernel the values of which it is the last reader. -1: of inputs that none reads.
        self._dying: dict[int, list[Node]] = {
            -1: [node for node in self._inputs if node not in last and node not in kept]
        }
        for node, number in last.items():
            if node not in kept:
                self._dying.setdefault(number, []).append(node)
        # A graph runs many times, so what its nodes say is looked up once.
        self._lines = {node: _line(node) for node in nodes}
        self._targets = {node: _PLAIN.get(name_of(node), node.target) for node in nodes}
        self._words = {node: _in_words(node) for kernel in self._kernels for node in kernel.stored}
        self._names = [
            f"fused_{'_'.join(dict.fromkeys(map(name_of, kernel.nodes)))}" for kernel in self._kernels
        ]

    def __call__(self, arguments: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip(self._inputs, arguments, strict=True))
        arguments.clear()
        for node in self._dying[-1]:
            del values[node]
        for number, kernel in enumerate(self._kernels):
            if kernel.stored:
                self._take(kernel, self._names[number], values)
            else:
                (node,) = kernel.nodes
                events = self._graphs.events
                events.line = self._lines[node]
                try:
                    values[node] = self._run(node, values)
                finally:
                    events.line = None
                if not node.users:
                    del values[node]
            for node in self._dying.get(number, ()):
                values.pop(node, None)
        return _mapped(self._output.args[0], lambda node: self._value(node, values))

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(self._graph, str(node.target))
        target: Any = self._targets[node]
        arguments = _mapped(node.args, lambda each: self._value(each, values))
        options = _mapped(node.kwargs, lambda each: self._value(each, values))
        return target(*arguments, **options)

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        """Return the value of a node: there, or a view of one that is."""
        return values[node] if node in values else self._run(node, values)

    def _take(self, kernel: FusedKernel, name: str, values: dict[Node, Any]) -> None:
        """Take memory for the results of a kernel."""
        events = self._graphs.events
        for node in kernel.stored:
            like: Tensor = node.meta["val"]
            with outside_dispatch_modes():
                if node in kernel.places:
                    made = values[kernel.places[node]].view(like.shape)
                else:
                    made = fakes.untouched(tuple(like.shape), like.stride(), like.dtype)
                if made.untyped_storage().nbytes() <= fakes.SMALL:
                    made.zero_()  # somebody may read it
            events.know(made, self._words[node], self._lines[node], BY_LIFE)
            events.contents.note_unknown(made)
            values[node] = made
        read = [values[node] for node in kernel.reads if isinstance(values.get(node), Tensor)]
        written = [values[node] for node in kernel.stored]
        events.kernel(
            name,
            sum(each.numel() * each.element_size() for each in (*read, *written)),
            tuple(tuple(each.shape) for each in (*read[:4], *written[:1])),
            str(written[0].dtype).removeprefix("torch."),
        )


def _mapped(tree: Any, function: Callable[[Node], Any]) -> Any:
    if isinstance(tree, Node):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(each, function) for each in tree)
    if isinstance(tree, dict):
        return {key: _mapped(each, function) for key, each in tree.items()}
    return tree


def _in_words(node: Node) -> str:
    """Return the operation of a node, with the dtype and the shape of its result."""
    like: Tensor = node.meta["val"]
    return f"{name_of(node)} {str(like.dtype).removeprefix('torch.')} {list(like.shape)}"


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _line(node: Node) -> str:
    """Return the line of the model's code that an operation comes from, as ``layers.py:18``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""
