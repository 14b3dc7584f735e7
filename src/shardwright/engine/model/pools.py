"""Planned memory of one model: what its first step leases is recorded, then every lease has its place.

Whatever a plan says, a lease that it has no room for is made of torch's allocator (``memory/planned.py``), so a plan
changes addresses and never results.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from shardwright._torch import memory_can_be_swapped
from shardwright.engine.base.settings import ModelOptions
from shardwright.engine.unit.unit import Unit
from shardwright.extend.memories import OF_TORCH, NamedMemory, memories
from shardwright.memory import DYNAMIC, Allocator, Item, Plan, Planned, Recorder, Slab
from shardwright.memory.plan import aligned, fitting, most_at_once

LONGEST = 200_000  #: leases and releases that are recorded at most, where no optimizer ever steps
REPLANS = 3  #: how often a model that runs in another order than was planned for is planned again


class Pools:
    """The memory of the units of one root.

    Attributes:
        memory: where it comes from, or the user's own allocator.
        plan: where slabs lie, once the first step is over; None before, and without planning.
        trace: what was leased in the step that was recorded: the first, without planning the second, since the first
            gathers nothing ahead. None until it is over.
        allocator: what gives the units their memory now.
    """

    def __init__(self, memory: NamedMemory | Allocator, depth: int, strict: bool) -> None:
        self.memory = memory
        self.strict = strict
        self.plan: Plan | None = None
        self.trace: list[Item] | None = None
        self.leases: Counter[str] = Counter()  #: of plans that were given up, "planned" and "dynamic"
        self.deviations: Counter[tuple[str, str, str]] = Counter()  #: from these
        self._base: Allocator = DYNAMIC if isinstance(memory, NamedMemory) else memory
        self._named = memory if isinstance(memory, NamedMemory) else OF_TORCH
        self.allocator: Allocator = self._base
        self._slots = depth + 1
        self._refs: list[weakref.ref[Unit]] = []
        self._outside: set[int] = set()  #: slabs that are leased for so long that they have no slot
        self._recorder: Recorder | None = None
        self.trained = False  #: whether a backward has ended since the recording began
        self._stepped = False
        self._left = REPLANS
        self._again = (
            True  #: whether the first recording is of a step that does not show what the others are like
        )

    @property
    def planned(self) -> bool:
        return self._named.plan is not None

    @property
    def _units(self) -> list[Unit]:
        return [unit for ref in self._refs if (unit := ref()) is not None]

    def join(self, units: Iterable[Unit]) -> None:
        """These units are the model's."""
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
        self._recorder = Recorder(self._base)
        self._use(self._recorder)

    def step(self) -> None:
        """An optimizer steps: if there was a backward of this model, its step is complete."""
        self._stepped = self.trained

    def begin(self) -> None:
        """A root call begins, and of the step before nothing is leased but what the user keeps."""
        if self._recorder is not None:
            if self._stepped or self._recorder.ticks > LONGEST:
                if self.planned and not self._recorder.continued and self._recorder.leases("gradients"):
                    # They were not dropped with the optimizer's step, as later steps will find them and this one
                    # did not: sums are added to them, or they go when this forward is over.
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

    def _end_recording(self, recorder: Recorder) -> None:
        self._check_pooled()  # again, as units' settings may have changed since the first call
        items, slabs = recorder.finish()
        if self.planned:
            self.trace, self._recorder = items, None
            self._make_plan(items, slabs)
        elif self._again:
            self._again = False
            self._record()
        else:
            self.trace, self._recorder = items, None
            self._use(self._base)

    def _make_plan(self, items: list[Item], slabs: list[Slab]) -> None:
        assert self._named.plan is not None
        if self._named.plans == "units":
            chosen = [i for i, slab in enumerate(slabs) if self._in_pool(slab)]
            items, slabs = [items[i] for i in chosen], [slabs[i] for i in chosen]
            fit = fitting(items, min(self._slots, most_at_once(items)))
            self._outside = {id(slab) for i, slab in enumerate(slabs) if i not in fit}
            items, slabs = [items[i] for i in fit], [slabs[i] for i in fit]
        self.plan = self._named.plan(items, min(self._slots, most_at_once(items)))
        device = slabs[0].device if slabs else torch.device("cpu")
        if device.type != "cpu":
            torch.get_device_module(
                device.type
            ).empty_cache()  # what the recorded step left is of other sizes
        self._use(Planned(self.plan, slabs, self._block(self.plan.nbytes, device), self))

    def _block(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Of the kind that the first unit with a wish wants: there is one for all."""
        source = next(
            (unit.site.owner.source for unit in self._units if unit.site.owner.source is not None), None
        )
        if source is None or not nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._left = 0  # it may have to be made on all ranks together, and only the first plan surely is
        return source.take(nbytes, device)

    def restart(self) -> None:
        """What memory there must be has changed: plan anew."""
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
        """Raise if no unit would ever give its place back for another one."""
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
    """What ``fully_shard`` was given for these.

    Raises:
        ValueError: none of the values there are.
        NotImplementedError: planned memory on a torch whose storages cannot be given other memory.
    """
    source: NamedMemory | Allocator
    source = memories.get(memory) if isinstance(memory, str) else memory
    if isinstance(source, NamedMemory) and source.allocator is not None:
        source = source.allocator()
    missing = [name for name in ("lease", "release") if not callable(getattr(source, name, None))]
    if isinstance(source, type) or (missing and not isinstance(source, NamedMemory)):
        kind = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
        lacks = "" if isinstance(source, type) else f" without {' and '.join(missing)}"
        raise ValueError(
            f"memory: expected an object with the methods of sw.Allocator or {memories.expected()}, found {memory!r}, "
            f"{kind}{lacks}"
        )
    if not memory_can_be_swapped and (not isinstance(source, NamedMemory) or source.plan is not None):
        raise NotImplementedError(
            f'memory={memory!r} needs torch 2.12 or later; this is {torch.__version__}. Use memory="dynamic".'
        )
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    prefetch_budget(prefetch)
    return ModelOptions(source, prefetch, strict)


def bytes_in(text: str) -> int | None:
    """How many bytes "512 MiB" or the like says; None if it says none."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    number = text[:-3].strip()
    return int(number) * units[text[-3:]] if text[-3:] in units and number.isdecimal() else None


def prefetch_budget(prefetch: int | str) -> tuple[int, int | None]:
    """Units to gather ahead, and bytes that they may have together, None meaning any number."""
    if isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0:
        return prefetch, None
    if isinstance(prefetch, str) and (nbytes := bytes_in(prefetch)) is not None:
        return 1 << 30, nbytes
    raise ValueError(
        f'prefetch must be a number of units, 0 or more, or bytes such as "512 MiB", got {prefetch!r}'
    )
