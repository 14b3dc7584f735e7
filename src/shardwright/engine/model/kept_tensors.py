"""Tensors that a call of a unit has made and that it does not return, when backward starts from them.

A forward hook on an inner module may keep features for a loss, or a forward may append them to a list. Backward then
enters the unit's part of the graph without passing an output. So before a backward runs, its graph is searched from the
loss to the outputs of units, where the search ends: mostly these are the few nodes of the loss. A node inside a unit
that is found on the way gets a mark, as outputs have, and the unit is gathered when backward reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright.engine.base.visit import Visit
from shardwright.engine.model.root import roots

#: The search ends after this number of nodes, so that a graph with many nodes outside of units costs little time.
_MOST = 5_000


def mark_kept(tensors: Iterable[Any]) -> None:
    """Mark the tensors inside of units that a backward from ``tensors`` reaches without passing an output."""
    visits = [visit for root in list(roots) for visit in root.visits.called()]
    nodes = [t.grad_fn for t in tensors if getattr(t, "grad_fn", None) is not None]
    if not visits or not nodes:
        return
    newest = max(visit.spans[-1][1] for visit in visits)
    marked = set().union(*[visit.marked for visit in visits])
    seen = set(nodes)
    while nodes and len(seen) < _MOST:
        node = nodes.pop()
        number = node._sequence_nr()
        if number < newest:
            if number in marked:
                continue
            visit = _innermost(visits, number)
            if visit is not None:
                node.register_prehook(visit.before_backward)
                visit.marked.add(number)
                visit.returns = True
                continue
        for each, _ in node.next_functions:
            if each is not None and each not in seen:
                seen.add(each)
                nodes.append(each)


def _innermost(visits: Iterable[Visit], number: int) -> Visit | None:
    """Return the visit of the innermost call that has made the node with this number, or None."""
    around = [(begin, visit) for visit in visits for begin, end in visit.spans if begin <= number < end]
    return max(around, key=lambda each: each[0])[1] if around else None
