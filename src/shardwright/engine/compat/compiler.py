"""torch.compile: code that it must leave alone, graphs that it made, and a compiler in the place of its own backend.

Nothing here imports the compiler before a program does, because that takes long.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.engine.compat.probe import probe, when_imported


def call_before_compiling(action: Callable[[], None]) -> None:
    """Call ``action`` whenever torch begins to compile a graph, until the process ends."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: action())


_COMPILER_RULES = "torch._dynamo.trace_rules"


def hide_from_dynamo(files: Callable[[], Iterable[str]]) -> None:
    """Let torch.compile neither trace nor inline code of these files. Its graph ends before and another begins after.

    ``files`` is called when the compiler is imported: now if it was imported before, else at that time. Programs that
    compile nothing do not wait for that import.
    """
    when_imported(_COMPILER_RULES, lambda rules: _hide_files(rules, files))


def _hide_files(rules: Any, files: Callable[[], Iterable[str]]) -> None:
    # rules.add() takes one module and compiles the expression of all that are hidden, in 7 ms each.
    rules.SKIP_DIRS.extend(files())
    rules._recompile_re()


#: Lets torch.compile run a function as it is, with all that it calls.
uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = probe(torch, "_compile", "_disable_dynamo")


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


_InductorWrapper: Any = probe(torch, "_TorchCompileInductorWrapper")
#: Number of graphs that torch.compile may make of one function inside ``compile_by``
_MOST_GRAPHS = 128


@contextmanager
def compile_by(compiler: Callable[[Any, Sequence[Any]], Callable[[list[Any]], Any]]) -> Iterator[None]:
    """Let torch.compile use ``compiler`` inside the context, where it would use its own backend.

    ``compiler`` gets a graph of torch.fx, of a forward or a backward, and examples of its inputs. It returns a function
    that takes the inputs as a list and empties the list.

    torch forgets what was compiled before, and after the context what was compiled inside.
    """
    wrapper = _InductorWrapper
    before = wrapper.__call__
    used: int | None = None  #: the limit of graphs before the first one

    def compile_graph(self: Any, graph: Any, inputs: Any, **_: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        def divide(joint: Any, *arguments: Any, **options: Any) -> Any:
            joint_graph_passes(joint)
            return min_cut_rematerialization_partition(joint, *arguments, **options)

        nonlocal used
        if used is None:
            limits = torch._dynamo.config
            used, limits.recompile_limit = limits.recompile_limit, max(limits.recompile_limit, _MOST_GRAPHS)
        return aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            decompositions=select_decomp_table(),
            partition_fn=divide,
        )(graph, inputs)

    if "torch._dynamo" in sys.modules and compiled_graphs():
        torch._dynamo.reset()
    wrapper.__call__ = compile_graph  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        wrapper.__call__ = before  # type: ignore[method-assign]
        if used is not None:
            torch._dynamo.config.recompile_limit = used
            torch._dynamo.reset()


def donated_inputs(graph: Any) -> set[int]:
    """Return the numbers of the inputs of a graph that nobody reads after it: in a backward saved tensors, else none.

    Only the ``compiler`` of :func:`compile_by` may call this, while it compiles the graph.
    """
    if not any(
        str(node.target).startswith("tangents") for node in graph.graph.nodes if node.op == "placeholder"
    ):
        return set()
    context = torch._guards.TracingContext.try_get()
    facts = None if context is None else context.fw_metadata
    return set(getattr(facts, "bw_donated_idxs", None) or ())


def set_activation_memory_budget(part: float) -> None:
    """Let torch.compile keep this fraction of what it would keep for backward, from now on; with 0 only the inputs."""
    import torch._functorch.config as config

    config.activation_memory_budget = part


def allow_graphs(count: int) -> None:
    """Let torch.compile make at least ``count`` graphs of one function, from now on."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, count)


def log_errors_alone() -> None:
    """Let torch log nothing but errors, unless the user has chosen its logs."""
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.ERROR)
