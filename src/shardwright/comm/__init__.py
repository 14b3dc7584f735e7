"""Collectives over bytes, the division of gradients, streams and events. Knows nothing of units."""

from shardwright.comm.collectives import Communicator, Division, Pending, neighbours, plan_division, separate
from shardwright.comm.memory import RegisteredMemory, SymmetricMemory
from shardwright.comm.streams import DeviceStreams, HostStreams, Streams

__all__ = [
    "Communicator",
    "DeviceStreams",
    "Division",
    "HostStreams",
    "Pending",
    "RegisteredMemory",
    "Streams",
    "SymmetricMemory",
    "neighbours",
    "plan_division",
    "separate",
]
