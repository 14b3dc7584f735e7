"""The kernels that torch.compile's backend makes of a graph: which results are stored, and when.

Inductor makes one kernel of several operations, and results inside a kernel take no memory. A result is stored if it
leaves the graph, if an operation with a kernel of its own reads it, if it is a reduction, or if several operations read
it and it is expensive. A result may take the memory of an input that nobody reads later. Nothing here runs.

Sources: ``graph.py``, ``lowering.py``, ``ir.py``, ``scheduler.py`` in ``torch/_inductor`` of PyTorch 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardwright.engine.compat import OpOverload

#: A result with several readers that reads no more tensors, and has no more operations, is computed again in each:
#: ``realize_reads_threshold`` and ``realize_opcount_threshold``.
READS, OPERATIONS = 4, 30
#: Operations that inductor puts into its own kernels, beside those that torch calls pointwise.
_POINTWISE = frozenset(
    {
        "convert_element_type", "_to_copy", "clone", "where", "full", "full_like", "zeros", "zeros_like", "ones",
        "ones_like", "iota", "arange", "scalar_tensor", "cat", "constant_pad_nd", "embedding", "gather", "index",
        "index_select", "slice_scatter", "select_scatter", "rand", "rand_like", "randn", "randn_like",
        "inductor_random", "inductor_seeds", "inductor_lookup_seed", "repeat", "flip", "roll", "tril", "triu",
        "empty", "empty_like", "new_zeros", "new_full", "new_empty", "fma", "masked_fill",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "logsumexp", "xor_sum", "cumsum",
    }
)  # fmt: skip
#: Operations that the CPU's kernels do not compute again for several readers.
_HEAVY = frozenset({"exp", "sigmoid"})
_VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "lift_fresh", "split_with_sizes"}
)


class FusedKernel(NamedTuple):
    """A kernel of a graph.

    Attributes:
        nodes: the operations in it; one if it has a kernel of its own.
        stored: those whose results are stored; none if it has a kernel of its own, which makes its results itself.
        reads: stored results and inputs of the graph that it reads.
        places: by stored result the input whose memory it takes.
    """

    nodes: tuple[Node, ...]
    stored: tuple[Node, ...]
    reads: tuple[Node, ...]
    places: Mapping[Node, Node]


def kernels_of(nodes: Sequence[Node], donated: Set[Node], on_cpu: bool = False) -> list[FusedKernel]:
    """Return the kernels of a graph, in the order in which they run.

    Args:
        nodes: of the graph, with the output as the last one.
        donated: inputs that nobody reads after the graph.
        on_cpu: whether the rules are those for a CPU.
    """
    return _Kernels(nodes, donated, on_cpu).kernels()


class _Kernels:
    def __init__(self, nodes: Sequence[Node], donated: Set[Node], on_cpu: bool) -> None:
        self._donated, self._on_cpu = donated, on_cpu
        self._outputs = {base_of(node) for node in nodes_in(nodes[-1].args)}
        self._nodes = [node for node in nodes if node.op not in ("placeholder", "output")]
        self._number = {node: number for number, node in enumerate(nodes)}
        self._fusable = {node for node in self._nodes if _is_fusable(node)}
        #: Stored results and inputs that a result is computed from, in the order in which they are read. The number of
        #: operations on them is in `_operations`.
        self._reads: dict[Node, dict[Node, None]] = {}
        self._operations: dict[Node, int] = {}
        self._stored: set[Node] = set()
        self._heavy: set[Node] = set()  # computed from a result of `_HEAVY` that is not stored
        for node in self._nodes:
            if node in self._fusable:
                self._look_at(node)
        #: Everything that a result follows from, a bit for each node.
        self._before: dict[Node, int] = {}
        for node in self._nodes:
            bits = 0
            for each in nodes_in((node.args, node.kwargs)):
                bits |= self._bit(each) | self._before.get(each, 0)
            self._before[node] = bits

    def _look_at(self, node: Node) -> None:
        """Note what the node reads, and whether its result is stored."""
        reads = self._reads[node] = {}
        operations = 1
        for each in _inputs(node):
            if each in self._fusable and each not in self._stored:
                reads |= self._reads[each]
                operations += self._operations[each]
            else:
                reads[each] = None
        self._operations[node] = operations
        readers = _readers(node)
        inside = [each for each in _inputs(node) if each in self._fusable and each not in self._stored]
        if name_of(node) in _HEAVY or not self._heavy.isdisjoint(inside):
            self._heavy.add(node)
        heavy = self._on_cpu and node in self._heavy
        expensive = len(reads) > READS or operations > OPERATIONS or heavy
        if (
            node in self._outputs
            or name_of(node) in _REDUCTIONS
            or (len(readers) > 1 and expensive)
            or any(each not in self._fusable for each in readers)
        ):
            self._stored.add(node)

    def kernels(self) -> list[FusedKernel]:
        groups: list[_Group] = []
        for node in self._nodes:
            if node in self._stored:
                home = next((group for group in reversed(groups) if self._joins(node, group, groups)), None)
                if home is not None:
                    home.add(node, self._bit(node), self._before[node])
                    continue
            elif node in self._fusable or _is_view(node):
                continue
            groups.append(_Group([node], self._bit(node), self._before[node]))
        done: set[Node] = set()
        made = []
        for group in _in_order(sorted(groups, key=lambda group: self._number[group.nodes[-1]])):
            made.append(self._kernel(group.nodes, done))
            done.update(group.nodes)
        return made

    def _bit(self, node: Node) -> int:
        return 1 << self._number[node]

    def _joins(self, node: Node, group: _Group, groups: list[_Group]) -> bool:
        """Return whether a kernel can also make the result of `node`: both go over as many elements and read something
        in common, and nothing between them has another kernel."""
        first = group.nodes[0]
        if first not in self._stored or _range(node) != _range(first):
            return False
        before, reads = self._before[node], self._reads[node].keys()
        if not before & group.bits and not any(self._reads[each].keys() & reads for each in group.nodes):
            return False
        after = _following(group, groups)
        return not any(other.bits & before for other in after)

    def _kernel(self, group: list[Node], done: set[Node]) -> FusedKernel:
        if group[0] not in self._stored:
            (node,) = group
            return FusedKernel((node,), (), tuple(_inputs(node)), {})
        members = set(group)
        reads = {each: None for node in group for each in self._reads[node] if each not in members}
        # A result that only this kernel reads is not stored.
        stored = [
            node
            for node in group
            if node in self._outputs or not (found := self._read_by(node)) or not found <= members
        ]
        places: dict[Node, Node] = {}
        for node in stored:
            place = self._place_of(node, members - set(stored), done)
            if place is not None and place not in places.values():
                places[node] = place
        return FusedKernel(tuple(self._inside(group)), tuple(stored), tuple(reads), places)

    def _place_of(self, node: Node, removed: set[Node], done: set[Node]) -> Node | None:
        """Return the input whose memory a result takes: the first one as large that nobody else reads from now on.

        A buffer that is `removed` from the kernel can be such an input. Then the result takes memory of its own.
        """
        for each in self._reads[node]:
            if each in self._outputs or (each.op == "placeholder" and each not in self._donated):
                continue
            later = {
                reader for reader in self._read_by(each) - done if not self._bit(reader) & self._before[node]
            }
            if later <= {node} and _is_like(each, node):
                return None if each in removed else each
        return None

    def _inside(self, group: list[Node]) -> list[Node]:
        """Return the operations of a kernel."""
        inside: set[Node] = set()
        pending = list(group)
        while pending:
            node = pending.pop()
            if node not in inside:
                inside.add(node)
                pending += [
                    e for e in _inputs(node) if e in self._fusable and (e not in self._stored or e in group)
                ]
        return sorted(inside, key=self._number.__getitem__)

    def _read_by(self, node: Node) -> set[Node]:
        """Return the stored results, and operations with kernels of their own, that are computed from a result."""
        found: set[Node] = set()
        pending = [node]
        seen: set[Node] = set()
        while pending:
            more = _readers(pending.pop()) - seen
            seen |= more
            inside = {each for each in more if each in self._fusable and each not in self._stored}
            pending += inside
            found |= more - inside
        return found


@dataclass
class _Group:
    """Operations of one kernel, with a bit for each of them and for everything that they follow from."""

    nodes: list[Node]
    bits: int
    before: int

    def add(self, node: Node, bit: int, before: int) -> None:
        self.nodes.append(node)
        self.bits |= bit
        self.before |= before


def _following(group: _Group, groups: list[_Group]) -> list[_Group]:
    """Return the other groups that follow from a group, also through others."""
    found: list[_Group] = []
    pending, left = [group], [other for other in groups if other is not group]
    while pending:
        bits = pending.pop().bits
        direct = [other for other in left if other.before & bits]
        left = [other for other in left if not other.before & bits]
        pending += direct
        found += direct
    return found


def _in_order(groups: list[_Group]) -> list[_Group]:
    """Return the groups, each after those that it follows from."""
    ordered: list[_Group] = []
    left = 0
    for group in groups:
        left |= group.bits
    while groups:
        ready = next(group for group in groups if not group.before & (left & ~group.bits))
        groups = [group for group in groups if group is not ready]
        ordered.append(ready)
        left &= ~ready.bits
    return ordered


def has_symbols(graph: GraphModule) -> bool:
    """Return whether sizes in a graph are symbols: it was made for several shapes.

    A generator's state, which a recomputation needs, has a symbol in each graph.
    """
    values = [node.meta.get("val") for node in graph.graph.nodes if not _is_state_of_generator(node)]
    sizes = [
        size for value in values if isinstance(value, Tensor) for size in (*value.shape, *value.stride())
    ]
    return any(isinstance(each, torch.SymInt) for each in (*values, *sizes))


def _is_state_of_generator(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and name_of(source) == "run_and_save_rng_state":
        return bool(node.args[1] == 0)
    return any(name_of(each) == "run_with_rng_state" and each.args[0] is node for each in node.users)


def base_of(node: Node) -> Node:
    """Return the node that a view looks into."""
    while node.op == "call_function" and _is_view(node):
        node = next(nodes_in(node.args))
    return node


def nodes_in(tree: Any) -> Iterator[Node]:
    """Yield the nodes in arguments."""
    if isinstance(tree, Node):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from nodes_in(each)
    elif isinstance(tree, dict):
        yield from nodes_in(list(tree.values()))


def name_of(node: Node) -> str:
    """Return the name of an operation, without its namespace."""
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else str(target)


def _is_fusable(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if not isinstance(node.meta.get("val"), Tensor) or node.target._schema.is_mutable or _is_view(node):
        return False
    return torch.Tag.pointwise in node.target.tags or name_of(node) in _POINTWISE | _REDUCTIONS


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    views = [each.alias_info is not None and not each.alias_info.is_write for each in returns]
    return (bool(views) and all(views)) or name_of(node) in _VIEWS


def _inputs(node: Node) -> list[Node]:
    """Return the results that an operation reads, each without the views between."""
    return list(dict.fromkeys(map(base_of, nodes_in((node.args, node.kwargs)))))


def _readers(node: Node) -> set[Node]:
    """Operations that read a result, also through views. A view that leaves the graph counts as none."""
    found: set[Node] = set()
    for each in node.users:
        if each.op == "call_function" and _is_view(each):
            found |= _readers(each)
        elif each.op != "output":
            found.add(each)
    return found


def _range(node: Node) -> int:
    """Return the number of elements that a kernel for the node goes over."""
    if name_of(node) in _REDUCTIONS:
        return max(each.meta["val"].numel() for each in nodes_in(node.args))
    value: Tensor = node.meta["val"]
    return value.numel()


def _is_like(one: Node, other: Node) -> bool:
    """Return whether the results of two operations can have the same memory."""
    a, b = one.meta["val"], other.meta["val"]
    return (
        isinstance(a, Tensor)
        and (a.dtype, a.numel()) == (b.dtype, b.numel())
        and a.is_contiguous()
        and b.is_contiguous()
    )
