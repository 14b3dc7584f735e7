"""The hosts of a job: which ranks share one, and how they reach each other.

gloo looks up the name of its host, and takes the address that it finds. Often that is a loopback address, which leads
nowhere from another host. So the ranks choose the interface by which a host reaches the first rank.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def host_key() -> str:
    """Return a key that two processes share if they run on one host, in one container.

    Containers of one machine may have the same host name, and different machines, too.
    """
    parts = [os.environ.get("GROUP_RANK", ""), socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")]
    except OSError:
        pass  # not Linux: no containers
    return "/".join(parts)


@dataclass(frozen=True)
class HostAddress:
    """The host of a rank: its key, and the address from which it reaches the first rank; "" if unknown."""

    host: str
    address: str

    @property
    def is_reachable(self) -> bool:
        """Return whether other hosts may reach it at the address."""
        return bool(self.address) and not ipaddress.ip_address(self.address).is_loopback


def use_one_network(store: dist.Store, rank: int, size: int) -> None:
    """Choose the network interface of gloo, unless the user has chosen one. Called by every rank.

    Each rank writes its address into `store`. The first rank answers with one address of each of two hosts.
    """
    if INTERFACE_VARIABLE in os.environ:
        address = HostAddress(host_key(), "")
    else:
        address = HostAddress(
            host_key(), own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        )
    store.set(f"network/{rank}", json.dumps(asdict(address)))
    if rank == 0:
        addresses = [HostAddress(**json.loads(store.get(f"network/{each}"))) for each in range(size)]
        store.set("network", json.dumps([asdict(each) for each in two_hosts(addresses)]))
    everyone = [HostAddress(**each) for each in json.loads(store.get("network"))]
    if INTERFACE_VARIABLE not in os.environ and (interface := gloo_interface(address, everyone)):
        os.environ[INTERFACE_VARIABLE] = interface


def two_hosts(addresses: Sequence[HostAddress]) -> list[HostAddress]:
    """Return an address of the first host and one of another, if there is one; reachable ones if there are any."""
    by_host: dict[str, HostAddress] = {}
    for address in sorted(addresses, key=lambda each: not each.is_reachable):
        by_host.setdefault(address.host, address)
    first = by_host.pop(addresses[0].host)
    return [first, *list(by_host.values())[:1]]


def gloo_interface(address: HostAddress, known: Sequence[HostAddress]) -> str:
    """Return the interface for gloo. `known` has one address if all ranks are on one host. Empty: gloo decides."""
    if len(known) == 1:
        return loopback()
    if address.is_reachable:
        return interface_of(address.address)
    # The first rank's host has its own name in /etc/hosts, with a loopback address.
    others = [each for each in known if each.host != address.host and each.is_reachable]
    return interface_of(own_address(others[0].address, 9)) if others else ""


def loopback() -> str:
    """Return the loopback interface of this host."""
    return "lo0" if sys.platform == "darwin" else "lo"


def own_address(host: str, port: int) -> str:
    """Return the address from which this host sends to another one. Sends nothing. Empty if there is no way."""
    try:
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        pass
    return ""


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""
