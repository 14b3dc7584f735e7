"""A simulated accelerator for tests: device "sim", whose streams run later, in an order drawn from a seed.

``load()`` registers it with torch for the rest of the process, as ``torch.sim``. ``on_sim`` makes tests that run in
processes of their own. Operations, memory, streams and collectives are in C++ (device.cpp, queues.h, group.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pool import CASE_TIMEOUT, multirank
from tests.support.sim.building import reason_to_skip
from tests.support.sim.device import Sim, load

__all__ = ["Sim", "load", "on_sim"]


def on_sim(*world_sizes: int, timeout: float = 4 * CASE_TIMEOUT) -> Callable[[Callable[..., Any]], Any]:
    """As `multirank`, in processes that load the device and run no other tests. Skipped without a compiler."""
    reason = reason_to_skip()

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        case = multirank(*world_sizes, timeout=timeout, pool_name="sim")(body)
        case = pytest.mark.usefixtures("sim_library")(case)
        return pytest.mark.skipif(reason is not None, reason=reason or "")(case)  # type: ignore[no-any-return]

    return decorate
