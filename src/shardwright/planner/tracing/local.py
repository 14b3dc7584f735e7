"""The GPU of this machine, as a device to plan for."""

from __future__ import annotations

import os

import torch

from shardwright.planner.devices import Device, DeviceError


def local_device() -> Device:
    """Return the first GPU that this process sees.

    Raises:
        DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError("expected a device that is named, found 'local', and this machine has no GPU")
    properties = torch.cuda.get_device_properties(0)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        "local",
        properties.name,
        properties.total_memory,
        "torch.cuda.get_device_properties",
        host_nbytes=host,
        node=torch.cuda.device_count(),
    )
