"""Planned memory of one model: the leases of its first step are recorded, then every lease gets a place.

If a plan has no room for a lease, torch's allocator gives the memory (``engine/memory/planned.py``). So a plan changes
addresses and never results.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from shardwright.engine.base.settings import ModelOptions
from shardwright.engine.compat.storages import prepare_to_swap_memory
from shardwright.engine.extend.named_memories import OF_TORCH, NamedMemory, memories
from shardwright.engine.memory import DYNAMIC, Allocator, Item, LeaseRecorder, Plan, Planned, Slab
from shardwright.engine.memory.plan import aligned, fitting, most_at_once
from shardwright.engine.unit.unit import Unit

LONGEST = 200_000  #: largest number of recorded leases and releases, if no optimizer ever steps
REPLANS = 3  #: how often a model is planned again after a step outside its plan


class Pools:
    """The memory of the units of one root.

    Attributes:
        memory: the named kind of memory, or the user's own allocator.
        plan: the places of slabs, after the first step; None before, and without planning.
        trace: the leases of the recorded step; None before the step after it. This is the first step. Without planning
            the second replaces it, since the first gathers nothing ahead.
        allocator: the allocator that the units use now.
    """

    def __init__(self, memory: NamedMemory | Allocator, depth: int, strict: bool) -> None:
        self.memory = memory
        self.strict = strict
        self.plan: Plan | None = None
        self.trace: list[Item] | None = None
        self.leases: Counter[str] = Counter()  #: of dropped plans: "planned" and "dynamic" leases
        self.deviations: Counter[tuple[str, str, str]] = Counter()  #: from dropped plans
        self._base: Allocator = DYNAMIC if isinstance(memory, NamedMemory) else memory
        self._named = memory if isinstance(memory, NamedMemory) else OF_TORCH
        self.allocator: Allocator = self._base
        self._slots = depth + 1
        self._refs: list[weakref.ref[Unit]] = []
        self._outside: set[int] = set()  #: slabs without a slot, since they are leased too long
        self._recorder: LeaseRecorder | None = None
        self.trained = False  #: whether a backward has ended since the recording began
        self._stepped = False
        self._left = REPLANS
        self._again = True  #: whether to record once more, since the first step is not like later ones

    @property
    def planned(self) -> bool:
        return self._named.plan is not None

    @property
    def _units(self) -> list[Unit]:
        return [unit for ref in self._refs if (unit := ref()) is not None]

    def join(self, units: Iterable[Unit]) -> None:
        """Set the units of the model."""
        self._refs = [weakref.ref(unit) for unit in units]
        self._check_pooled()
        if self._named.equal:
            self._check_equal()
        self._record()

    def _use(self, allocator: Allocator) -> None:
        self.allocator = allocator
        for unit in self._units:
            unit.site.owner.allocator = allocator

    def _record(self) -> None:
        self._stepped = self.trained = False
        self._recorder = LeaseRecorder(self._base)
        self._use(self._recorder)

    def step(self) -> None:
        """Note an optimizer's step. If this model had a backward, its step is complete."""
        self._stepped = self.trained

    def begin(self) -> None:
        """A root call begins. Only memory that the user keeps is still leased from the step before."""
        if self._recorder is not None:
            if self._stepped or self._recorder.ticks > LONGEST:
                if self.planned and not self._recorder.continued and self._recorder.leases("gradients"):
                    # The gradients still exist after the optimizer's step. Later steps begin like this one, but the
                    # recorded one did not: reductions add to them, or zero_grad comes after forward.
                    self._stepped = self.trained = False
                    self._recorder.next_step()
                else:
                    self._end_recording(self._recorder)
            elif not self.trained:
                self._recorder.restart()  # a call without backward is no part of a step
        elif isinstance(self.allocator, Planned) and self.allocator.dynamic and self._left:
            self._left -= 1
            self.leases += Counter(planned=self.allocator.planned, dynamic=self.allocator.dynamic)
            self.deviations += self.allocator.deviations
            self._record()

    def _end_recording(self, recorder: LeaseRecorder) -> None:
        self._check_pooled()  # again, as units' settings may have changed since the first call
        self.trace, slabs = recorder.record()
        if self.planned:
            self._recorder = None
            self._make_plan(self.trace, slabs)
        elif self._again:
            self._again = False
            self._record()
        else:
            self._recorder = None
            self._use(self._base)

    def leases_of_step(self) -> list[Item] | None:
        """The leases of the last recorded step that is complete. Before the first is, those up to now: perhaps no
        optimizer of torch ever steps. None before a backward has ended."""
        if self._recorder is not None and (self._stepped or (self.trained and self.trace is None)):
            return self._recorder.record()[0]
        return self.trace

    def _make_plan(self, items: list[Item], slabs: list[Slab]) -> None:
        if self._named.plans == "units":
            pooled = {id(unit.weights.copies.training.slab) for unit in self._pooled()}
            chosen = [i for i, slab in enumerate(slabs) if id(slab) in pooled]
            items, slabs = [items[i] for i in chosen], [slabs[i] for i in chosen]
            fit = fitting(items, min(self._slots, most_at_once(items)))
            self._outside = {id(slab) for i, slab in enumerate(slabs) if i not in fit}
            items, slabs = [items[i] for i in fit], [slabs[i] for i in fit]
        else:
            items = self._from_the_start(items, slabs)
        self.plan = self._named.make_plan(items, min(self._slots, most_at_once(items)))
        device = slabs[0].device if slabs else torch.device("cpu")
        if device.type != "cpu":
            torch.get_device_module(
                device.type
            ).empty_cache()  # free memory of the recorded step, which has other sizes
        self._use(Planned(self.plan, slabs, self._block(self.plan.nbytes, device), self))

    def _from_the_start(self, items: list[Item], slabs: list[Slab]) -> list[Item]:
        """The items, in which units that keep their parameters lease them from the start of the step.

        A forward without a backward, as in a validation, leaves these parameters gathered. The next forward begins with
        them, so nothing that it leases may have their places. The units of a step's end hardly add to the most bytes.
        """
        kept = {
            id(unit.weights.copies.training.slab)
            for unit in self._units
            if unit.parameters and self._keeps(unit)
        }
        return [
            replace(item, spans=((0, item.spans[0][1]), *item.spans[1:])) if id(slab) in kept else item
            for item, slab in zip(items, slabs, strict=True)
        ]

    def _block(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The block of the model. If a unit has a source, the first source allocates it for all units."""
        source = next(
            (unit.site.owner.source for unit in self._units if unit.site.owner.source is not None), None
        )
        if source is None or not nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._left = 0  # all ranks may have to allocate it together, which only the first plan ensures
        return source.take(nbytes, device)

    def restart(self) -> None:
        """Plan again, because the needed memory has changed."""
        if isinstance(self.allocator, Planned):
            self._record()

    def _in_pool(self, slab: Slab) -> bool:
        return slab.kind == "parameters" and any(
            unit.weights.copies.training.slab is slab for unit in self._pooled()
        )

    def _pooled(self) -> Sequence[Unit]:
        """Units that are released after forward and after backward."""
        return [
            u
            for u in self._units
            if u.parameters and u.settings.reshard_after_backward and not self._keeps(u)
        ]

    def _keeps(self, unit: Unit) -> bool:
        """Whether a unit keeps its full parameters from its forward to its backward, as the root does."""
        return not unit.number or unit.settings.reshard_after_forward is False or unit.ranks.keeps_full

    def _check_pooled(self) -> None:
        """Raise if no unit would ever release its slot for another unit."""
        units = [u for u in self._units if u.parameters]
        takes_turns = self._named.plan is not None and self._named.plans == "units"
        if not takes_turns or not units or not all(self._keeps(u) for u in units):
            return
        by_strategy = next((u for u in units if u.ranks.keeps_full), None)
        below = [u for u in units if u.number]
        if by_strategy is not None:
            reason = (
                f"{by_strategy.ranks.strategy} keeps the full parameters of unit {by_strategy.name!r} and of all "
                "other units until the optimizer's step"
            )
            way_out = "Use "
        elif below:
            reason = (
                f"reshard_after_forward=False keeps the full parameters of unit {below[0].name!r} and of all other "
                "units until their backward"
            )
            way_out = "Set reshard_after_forward=True on some units, or use "
        else:
            reason = "the root is the only unit with parameters, and it keeps them until its backward"
            way_out = "Call fully_shard on the model's blocks, too, or use "
        raise ValueError(
            f"memory={self._named.name!r} lets units use a few slots in turn, but {reason}, so no slot ever becomes "
            f'free. {way_out}memory="arena", which plans all memory of a step, or "dynamic".'
        )

    def _check_equal(self) -> None:
        sizes: dict[int, list[str]] = {}
        for unit in self._pooled():
            sizes.setdefault(aligned(unit.weights.copies.training.slab.nbytes), []).append(unit.name)
        if len(sizes) > 1:
            sizes_of_units = "; ".join(
                f"{nbytes:,} bytes: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                for nbytes, names in sorted(sizes.items(), reverse=True)
            )
            raise ValueError(
                f'memory="{self._named.name}" needs units of one size; found {sizes_of_units}. Use '
                'memory="max_pool", which has slots of several sizes, or "arena", which plans all memory.'
            )

    def wants(self, slab: Slab) -> bool:
        """Whether a slab that the plan does not have should be in it."""
        return self._named.plans == "all" or (id(slab) not in self._outside and self._in_pool(slab))

    def tell(self, unit: str, kind: str, reason: str) -> None:
        """Warn of a lease outside the plan, or raise."""
        plan = f"the plan of memory={self._named.name!r}"
        message = f"Unit {unit!r} leases memory for its {kind} outside {plan}: {reason}."
        if self.strict:
            raise RuntimeError(f"{message} With strict=False torch's allocator gives this memory.")
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def model_options(memory: str | NamedMemory | Allocator, prefetch: int | str, strict: bool) -> ModelOptions:
    """Check these arguments of ``fully_shard``.

    Raises:
        ValueError: a value that does not exist.
        MissingCompilerError: planned memory or an allocator on torch 2.11, and no C++ compiler.
    """
    source: NamedMemory | Allocator
    source = memories.get(memory) if isinstance(memory, str) else memory
    if isinstance(source, NamedMemory) and source.allocator is not None:
        source = source.make_allocator()
    missing = [name for name in ("lease", "release") if not callable(getattr(source, name, None))]
    if isinstance(source, type) or (missing and not isinstance(source, NamedMemory)):
        kind = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
        lacks = "" if isinstance(source, type) else f" without {' and '.join(missing)}"
        raise ValueError(
            f"memory: expected an object with the methods of sw.Allocator or {memories.expected()}, found {memory!r}, "
            f"{kind}{lacks}"
        )
    if not isinstance(source, NamedMemory) or source.plan is not None:
        prepare_to_swap_memory()
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    prefetch_budget(prefetch)
    return ModelOptions(source, prefetch, strict)


def bytes_in(text: str) -> int | None:
    """The number of bytes of a text such as "512 MiB"; None for other texts."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    number = text[:-3].strip()
    return int(number) * units[text[-3:]] if text[-3:] in units and number.isdecimal() else None


def prefetch_budget(prefetch: int | str) -> tuple[int, int | None]:
    """The number of units to gather ahead, and the limit of their bytes; None: no limit."""
    if isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0:
        return prefetch, None
    if isinstance(prefetch, str) and (nbytes := bytes_in(prefetch)) is not None:
        return 1 << 30, nbytes
    raise ValueError(
        f'prefetch must be a number of units, 0 or more, or bytes such as "512 MiB", got {prefetch!r}'
    )
