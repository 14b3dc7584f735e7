"""The states of the memory into which a unit gathers its weights, and the events that change them.

Other values say which parameters modules show (``forms.py``) and how old the weights are (an epoch of the ``Ledger``).
"""

from __future__ import annotations

import enum


class Residence(enum.Enum):
    """The states of the memory of a unit's full weights."""

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


#: The allowed events in each state, and the next state. ``Weights`` changes states; only tests compare it with this.
#: An interrupted gather may still write, so a release does not change ISSUING.
ALLOWED = {
    (Residence.SHARDED, Event.ISSUE): Residence.ISSUING,
    (Residence.RESIDENT, Event.ISSUE): Residence.ISSUING,
    (Residence.ISSUING, Event.ISSUE): Residence.ISSUING,
    (Residence.ISSUING, Event.ISSUED): Residence.GATHERING,
    (Residence.ISSUING, Event.FAIL): Residence.EMPTY,
    (Residence.EMPTY, Event.ISSUE): Residence.ISSUING,
    (Residence.EMPTY, Event.RELEASE): Residence.SHARDED,
    (Residence.GATHERING, Event.WAIT): Residence.RESIDENT,
    (Residence.RESIDENT, Event.WAIT): Residence.RESIDENT,
    (Residence.RESIDENT, Event.RELEASE): Residence.SHARDED,
    (Residence.ISSUING, Event.RELEASE): Residence.ISSUING,
}


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
