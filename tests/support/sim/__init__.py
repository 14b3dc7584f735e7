"""A simulated accelerator for tests: device "sim", whose streams run later, in an order drawn from a seed.

``load()`` registers it with torch for the rest of the process, as ``torch.sim``. Load it only in processes that serve
no other tests. Operations, memory, streams and collectives are in C++ (device.cpp, queues.h, group.h).
"""

from tests.support.sim.device import Sim, load, reason_to_skip

__all__ = ["Sim", "load", "reason_to_skip"]
