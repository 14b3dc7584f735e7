"""An exception between any two lines of a lease or release, as of a signal's handler: later leases are in order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.engine.memory import Item, Owner, Plan, Planned, Slab


class Interrupt(KeyboardInterrupt):
    """The exception that the handler raises."""


def lines_of(call: Callable[[], None], n: int) -> int:
    """Run ``call``, and raise before its ``n``-th line in the room ``memory``. Returns how many lines there were."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if "/shardwright/engine/memory/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == n:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


class Watcher:
    """Fails if a lease leaves the plan."""

    def wants(self, slab: Slab) -> bool:
        return True

    def tell(self, unit: str, kind: str, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("act", ["lease", "release"])
def test_a_slab_is_in_order_after_an_interrupt_at_any_line(planned: bool, act: str) -> None:
    device, watcher, n = torch.device("cpu"), Watcher(), 0
    while True:
        n += 1
        owner = Owner("unit")
        slab = Slab(64, device, "parameters", owner)
        slab.lease()
        view = slab.view(torch.float32, 0, (16,))
        slab.release()
        item = Item("unit", "parameters", 64, ((0, 1),))
        block = torch.empty(512, dtype=torch.uint8)
        if planned:
            owner.allocator = Planned(Plan((item,), (0,), 512, 512), [slab], block, watcher)
        slab.lease()
        if act == "lease":
            slab.release()
        try:
            lines_of(getattr(slab, act), n)
        except Interrupt:
            pass
        else:
            assert n > 5
            return
        for step in range(3):
            slab.release()
            slab.lease()
            assert slab.leased
            view.fill_(step)
            if planned:
                assert view.data_ptr() == block.data_ptr()
            assert view.eq(step).all()
        slab.release()
        assert not slab.leased
