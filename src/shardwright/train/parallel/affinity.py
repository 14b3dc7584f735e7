"""The CPU cores of a rank: those of its GPU's NUMA node, from which copies to the GPU and its kernels start sooner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SYS = Path("/sys")


def bind_to_node_of(device: torch.device, sys: Path = SYS) -> set[int]:
    """Run on the cores of a GPU's NUMA node from now on, this thread and those that it starts.

    Returns these cores, among those that the process may use. Empty: nothing has changed, because the system does not
    tell, or the process may use none of them.
    """
    near = _cores_near(device, sys)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not (near := near & allowed) or near == allowed:
        return set()
    os.sched_setaffinity(0, near)
    torch.set_num_threads(min(torch.get_num_threads(), len(near)))
    return near


def _cores_near(device: torch.device, sys: Path) -> set[int]:
    properties: Any = torch.cuda.get_device_properties(device)
    try:  # torch 2.11 and later know the address; other builds may not
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        return cores_of(
            (sys / f"devices/system/node/node{node}/cpulist").read_text()
        )  # no file for node -1: unknown
    except (AttributeError, OSError, ValueError):
        return set()


def cores_of(text: str) -> set[int]:
    """Return the numbers in a list of the kernel, such as ``0-15,32-47``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
