"""Autograd: the graph, the backward that runs now, what it saves, its hooks on tensors, and version counters.

Hooks, counters and gradients are reached here without the operations that would be recorded. What
``torch.utils.checkpoint`` keeps and computes again is here because autograd saves it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.engine.compat.modes import transformed
from shardwright.engine.compat.probe import probe

_next_number = probe(torch.autograd, "_get_sequence_nr")
_running_node = probe(torch._C, "_current_autograd_node")
_engine = probe(torch.autograd.Variable, "_execution_engine")
_run_backward = probe(torch.autograd, "_engine_run_backward")
probe(torch.autograd.graph, "_engine_run_backward")
_graph_task_id = probe(torch._C, "_current_graph_task_id")
_keeps_graph = probe(torch._C, "_autograd", "_get_current_graph_task_keep_graph")
_peek_sequence_number = probe(torch._C, "_autograd", "_get_sequence_nr")
_graph = probe(torch.autograd, "graph")
probe(_graph, "_allow_mutation_on_saved_tensors_enabled")

#: ``increment_version(tensors)``: moves version counters without an operation.
increment_version = probe(torch.autograd.graph, "increment_version")
#: ``set_versions(tensors, numbers)``: gives each tensor's version counter a value.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = probe(
    torch._C, "_autograd", "_unsafe_set_version_counter"
)


_top_hooks_of_saved_tensors = probe(torch._C, "_autograd", "_top_saved_tensors_default_hooks")


_hooks_of_saved_tensors_enabled = probe(torch._C, "_autograd", "_saved_tensors_hooks_is_enabled")
_forward_ad = probe(torch.autograd, "forward_ad")
probe(_forward_ad, "_current_level")


def takes_hooks_of_saved_tensors() -> bool:
    """Return whether hooks may decide now what autograd saves.

    False inside transforms of ``torch.func``, inside ``disable_saved_tensors_hooks``, and inside a level of
    forward-mode AD: its formulas read saved tensors during forward, and torch crashes if a hook replaced them.
    """
    return not transformed() and _hooks_of_saved_tensors_enabled() and _forward_ad._current_level < 0


def saves_for_checkpoint() -> bool:
    """Return whether ``torch.utils.checkpoint`` (not its reentrant form) decides what autograd saves now."""
    return hook_of_checkpoint() is not None


def hook_of_checkpoint() -> Any:
    """Return the hook by which ``torch.utils.checkpoint`` decides what autograd saves now, or None.

    Each call of ``checkpoint`` has a hook of its own, so the hook tells calls apart.
    """
    hooks = _top_hooks_of_saved_tensors(True)
    from_checkpoint = hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks[0] if from_checkpoint else None


def kept_results(storage: Any) -> list[tuple[Any, Any, Any]]:
    """Return the results that ``create_selective_checkpoint_contexts`` keeps in the ``storage`` of its forward mode.

    Returns:
        For each result a container, a key, and the entry that the container has under the key. The leaves of an entry
        are wrappers that have the tensor as ``val``, and backward calls their ``get_val``.
    """
    found = []
    for entries in storage.values():
        keys = list(entries) if isinstance(entries, dict) else range(len(entries))
        found += [(entries, key, entries[key]) for key in keys]
    return found


#: torch's own mark for results that are computed again, or a new object where torch has no such mark
_LET_GO = getattr(torch.utils.checkpoint, "_RECOMPUTE", object())


def let_go_result(container: Any, key: Any) -> None:
    """Let backward compute one of the `kept_results` again."""
    container[key] = _LET_GO


def was_let_go(storage: Any, operation: Any) -> bool:
    """Return whether the result that a recomputation takes next for this operation was let go, and take it.

    Only for versions of torch that keep lists of results: they ask the policy in the recomputation, and only then.
    """
    entries = storage.get(operation)
    if not entries or entries[0] is not _LET_GO:
        return False
    entries.pop(0)
    return True


def override_stale_capture_streams() -> None:
    """Let a backward inside a graph capture run on the capturing stream what was made on a stream before it.

    Versions of torch before 2.13 cannot do this, and nothing changes there.
    """
    enable = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if enable is not None:
        enable(True)


def mutation_allowed() -> bool:
    """Return whether ``allow_mutation_on_saved_tensors`` copies saved tensors when others write to their memory."""
    return _graph._allow_mutation_on_saved_tensors_enabled  # type: ignore[no-any-return]


#: The number of C++ references to a tensor: one by its Python object, and one by each graph that uses it.
_references_to = probe(torch.Tensor, "_use_count")


def refuse_backward(parameter: torch.Tensor, message: str) -> Any:
    """Let a backward raise RuntimeError if it reaches the leaf ``parameter`` through a graph that exists now.

    Returns a handle whose ``remove`` ends this, or None if no graph can reach the parameter.
    """
    if not (parameter.requires_grad and parameter.is_leaf) or _references_to(parameter) < 2:
        return None

    def refuse(gradients: Any) -> None:
        raise RuntimeError(message)

    return torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


#: Hooks of ``Tensor.register_hook``, which autograd cannot call on a parameter it never sees.
gradient_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")


#: ``requires_grad`` of a tensor. Takes less time than the attribute where many are read.
requires_grad_of: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
#: ``.grad`` of a tensor and its assignment, also where a class has a property of this name.
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]


def waits_for_other_gradients(hook: Any) -> bool:
    """Return whether a gradient hook was made by ``register_multi_grad_hook`` with mode "all".

    It counts the nodes of its tensors that autograd will run, and a sharded parameter has none that autograd runs.
    """
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_name == "inner_hook" and code.co_filename == _graph.__file__


def share_gradient_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the hooks that were registered on ``source``. Their handles still work."""
    target._backward_hooks = source._backward_hooks  # type: ignore[assignment]
    target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks  # type: ignore[attr-defined]


#: Hooks of ``register_post_accumulate_grad_hook``, which autograd cannot call on a parameter it never sees.
post_accumulate_grad_hooks: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)


def set_post_accumulate_grad_hooks(parameter: torch.Tensor, hooks: dict[int, Any] | None) -> None:
    parameter._post_accumulate_grad_hooks = hooks  # type: ignore[assignment]


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward now running has finished; valid only inside a backward."""
    _engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether this thread is now inside a backward pass."""
    return _graph_task_id() != -1


def keeps_graph() -> bool:
    """Return whether the backward that runs now keeps its graph for another one."""
    return _keeps_graph()  # type: ignore[no-any-return]


def number_of_next_node() -> int:
    """Return the number that the next node of autograd's graph gets in this thread."""
    return _next_number()  # type: ignore[no-any-return]


def number_of_running_node() -> int:
    """Return the number of the node that backward runs now in this thread, or -1 outside of a backward."""
    node = _running_node()
    return -1 if node is None else node._sequence_nr()  # type: ignore[no-any-return]


def watch_backward(run: Callable[..., Any]) -> None:
    """Let ``run`` carry out each ``backward`` and ``torch.autograd.grad`` of this process from now on.

    It is called as ``run(original, outputs, gradients, retain_graph, create_graph, inputs, *rest, **options)``; all but
    the first are arguments of ``original``. torch itself asks nothing of tensors that backward does not reach.
    """

    @functools.wraps(_run_backward)
    def watched(*args: Any, **options: Any) -> Any:
        return run(_run_backward, *args, **options)

    # torch.compile puts a function of its own here for a while, and afterwards what the second name has.
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = watched  # type: ignore[attr-defined]


def preserve_version_counters(tensors: Sequence[torch.Tensor]) -> Any:
    """Return a context that leaves the tensors' version counters as they were."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


def leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradients this node of a graph adds up, or None if the node is of another kind."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None


def sequence_number(tensor: torch.Tensor) -> int:
    """Return the number of the autograd node that made the tensor. Later nodes of a thread have larger numbers."""
    return tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]


def next_sequence_number() -> int:
    """Return the number of the autograd node that this thread makes next."""
    return _peek_sequence_number()
