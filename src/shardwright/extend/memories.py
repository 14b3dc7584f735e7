"""Kinds of memory that have a name, for ``fully_shard(memory=...)`` and ``[parallel] memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwright.extend.registry import Registry

if TYPE_CHECKING:
    from shardwright.memory import Allocator, Item, Plan


@dataclass(frozen=True)
class NamedMemory:
    """Where the memory of a step comes from.

    Attributes:
        name: by which ``fully_shard`` and configurations know it.
        summary: what it does, in a sentence.
        allocator: makes the allocator of one model. None: torch's caching allocator.
        plan: gives each lease of a recorded step its place in one block. Takes the leases and how many units are
            gathered at once at most. None: nothing is planned.
        plans: what is planned: "all" memory of a step, or the "units" that take turns.
        equal: whether units must have one size.
    """

    name: str
    summary: str
    allocator: Callable[[], Allocator] | None = None
    plan: Callable[[Sequence[Item], int], Plan] | None = None
    plans: Literal["all", "units"] = "all"
    equal: bool = False

    def __post_init__(self) -> None:
        if self.allocator is not None and self.plan is not None:
            raise ValueError(f"NamedMemory {self.name!r}: pass allocator or plan, not both")


def _slots(items: Sequence[Item], units: int) -> Plan:
    from shardwright.memory import slots

    return slots(items, units)


def _packed(items: Sequence[Item], units: int) -> Plan:
    from shardwright.memory import pack

    return pack(items)


OF_TORCH = NamedMemory("dynamic", "torch's allocator gives the memory of every lease.")

memories: Registry[NamedMemory] = Registry(
    "memory",
    "memories",
    NamedMemory,
    (
        OF_TORCH,
        NamedMemory(
            "double_buffer", "Units of one size use a few slots in turn.",
            plan=_slots, plans="units", equal=True,
        ),
        NamedMemory("max_pool", "Units of several sizes use a few slots in turn.", plan=_slots, plans="units"),
        NamedMemory("arena", "One block for all memory of a step, planned from the first step.", plan=_packed),
    ),
)  # fmt: skip
