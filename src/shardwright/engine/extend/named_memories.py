"""Kinds of memory that have a name, for ``fully_shard(memory=...)`` and ``[parallel] memory``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwright.engine.extend.registry import ExtensionError, Registry, call, check_signature

if TYPE_CHECKING:
    from shardwright.engine.memory import Allocator, Item, Plan


@dataclass(frozen=True)
class NamedMemory:
    """A source of a step's memory, with a name.

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
        if self.allocator is not None:
            check_signature(f"NamedMemory {self.name!r}: allocator", self.allocator)
        if self.plan is not None:
            check_signature(f"NamedMemory {self.name!r}: plan", self.plan, "items", "units")

    def make_allocator(self) -> Allocator:
        """The allocator of one model.

        Raises:
            ExtensionError: ``allocator`` raised an error, or returned an object without the methods of ``Allocator``.
        """
        assert self.allocator is not None
        owner = f"The allocator of memory {self.name!r}"
        allocator = call(owner, self.allocator)
        expected = "an object with the methods lease(slab) and release(slab, memory) of sw.Allocator"
        missing = [name for name in ("lease", "release") if not callable(getattr(allocator, name, None))]
        if missing or isinstance(allocator, type):
            description = (
                f"the class {allocator.__name__}"
                if isinstance(allocator, type)
                else f"{allocator!r} ({type(allocator).__name__})"
            )
            without = f", which has no method {' and no method '.join(missing)}" if missing else ""
            raise ExtensionError(f"{owner} returned {description}{without}; expected {expected}")
        try:
            check_signature("lease", allocator.lease, "slab")
            check_signature("release", allocator.release, "slab", "memory")
        except ValueError as error:
            raise ExtensionError(
                f"{owner} returned a {type(allocator).__name__} with another method {error}"
            ) from None
        return allocator  # type: ignore[no-any-return]

    def make_plan(self, items: Sequence[Item], units: int) -> Plan:
        """The plan of a recorded step.

        Raises:
            ExtensionError: ``plan`` raised an error, or returned something other than a plan of these items.
        """
        from shardwright.engine.memory import Plan

        assert self.plan is not None
        owner = f"The plan function of memory {self.name!r}"
        plan = call(owner, self.plan, items, units)
        if not isinstance(plan, Plan):
            raise ExtensionError(
                f"{owner} returned {plan!r} ({type(plan).__name__}); expected a shardwright.engine.memory.Plan of the "
                f"{len(items)} items"
            )
        if tuple(plan.items) != tuple(items) or len(plan.offsets) != len(items):
            raise ExtensionError(
                f"{owner} returned a Plan of {len(plan.items)} items and {len(plan.offsets)} offsets; expected the "
                f"{len(items)} items of its argument in their order, and one offset for each"
            )
        wrong = next((o for o in plan.offsets if not isinstance(o, int) or o < 0 or o % 16), None)
        if wrong is not None:
            raise ExtensionError(
                f"{owner} returned a Plan with the offset {wrong!r}; expected multiples of 16, 0 or more. The sizes "
                "of the items are multiples of 512"
            )
        return plan


def _slots(items: Sequence[Item], units: int) -> Plan:
    from shardwright.engine.memory import slots

    return slots(items, units)


def _packed(items: Sequence[Item], units: int) -> Plan:
    from shardwright.engine.memory import pack

    return pack(items)


OF_TORCH = NamedMemory("dynamic", "torch's allocator gives all memory.")

memories: Registry[NamedMemory] = Registry(
    "memory",
    "memories",
    NamedMemory,
    (
        OF_TORCH,
        NamedMemory(
            "double_buffer", "Units of one size use a few blocks of memory in turn.",
            plan=_slots, plans="units", equal=True,
        ),
        NamedMemory(
            "max_pool", "Units of several sizes use a few blocks of memory in turn.",
            plan=_slots, plans="units",
        ),
        NamedMemory("arena", "One block for all memory of a step, planned from the first step.", plan=_packed),
    ),
)  # fmt: skip
