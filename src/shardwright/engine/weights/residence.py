"""The states of the memory into which a unit gathers its weights, and the events that change them.

Other values say which parameters modules show (``forms.py``) and how old the weights are (an epoch of the ``Ledger``).
"""

from __future__ import annotations

import enum

from shardwright.engine.memory import Owner


class Residence(enum.Enum):
    """The states of the memory of a unit's full weights."""

    following: tuple[Residence, ...]  #: states that ALLOWED has after this one

    SHARDED = "no memory"
    ISSUING = "leased; a collective that writes to it begins, or an exception interrupted its begin"
    GATHERING = "leased; a gather is under way"
    RESIDENT = "leased; the gathered weights are there"
    EMPTY = "leased; the gather failed, so it has no weights"


class Event(enum.Enum):
    """The events that change the state."""

    ISSUE = "a gather begins: a forward, a backward, a prefetch or `unshard()`"
    ISSUED = "the collective is on its way"
    FAIL = "the gather raised an error before its last collective"
    WAIT = "the computation is ordered after the gather"
    RELEASE = "the memory is freed; the memory of an interrupted gather stays for the next gather"


#: The allowed events in each state, and the next state. An interrupted gather may still write, so a release does not
#: change ISSUING. An exception of the interpreter may come before a state is noted: after a lease, or when a gather has
#: begun.
ALLOWED = {
    (Residence.SHARDED, Event.ISSUE): Residence.ISSUING,
    (Residence.RESIDENT, Event.ISSUE): Residence.ISSUING,
    (Residence.ISSUING, Event.ISSUE): Residence.ISSUING,
    (Residence.ISSUING, Event.ISSUED): Residence.GATHERING,
    (Residence.ISSUING, Event.FAIL): Residence.EMPTY,
    (Residence.ISSUING, Event.WAIT): Residence.RESIDENT,
    (Residence.EMPTY, Event.ISSUE): Residence.ISSUING,
    (Residence.EMPTY, Event.RELEASE): Residence.SHARDED,
    (Residence.GATHERING, Event.WAIT): Residence.RESIDENT,
    (Residence.RESIDENT, Event.WAIT): Residence.RESIDENT,
    (Residence.RESIDENT, Event.RELEASE): Residence.SHARDED,
    (Residence.ISSUING, Event.RELEASE): Residence.ISSUING,
    (Residence.SHARDED, Event.RELEASE): Residence.SHARDED,
}

for _state in Residence:
    # On the state itself: to look it up in a dict would call the hash of enum.Enum, which is slow.
    _state.following = tuple({after: None for (before, _), after in ALLOWED.items() if before is _state})


def change(state: Residence, after: Residence, owner: Owner) -> Residence:
    """The state ``after``.

    Raises:
        RuntimeError: the table does not allow it after ``state``.
    """
    if after not in state.following:
        raise RuntimeError(
            f"The memory of the weights of unit {owner.name!r} cannot become {after.name} ({after.value}): it is "
            f"{state.name} ({state.value}). This is an error in shardwright; please report it."
        )
    return after


def table() -> str:
    """The tables of states and events in docs/architecture.md."""
    lines = ["| state | its memory |", "|---|---|"]
    lines += [f"| {state.name} | {state.value} |" for state in Residence]
    lines += ["", "| from | event | to | action |", "|---|---|---|---|"]
    lines += [
        f"| {state.name} | {event.name} | {after.name} | {event.value} |"
        for (state, event), after in ALLOWED.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
