"""The network of this host: the address that its name has, and the interface that gloo takes.

Plain gloo takes the interface with the address of the host's name. The trainer chooses one by which the host reaches
the first rank (`train/rank/hosts.py`). Nothing here sends data, and no address of a network is reported.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cli.doctor.children import Unmeasured, within
from shardwright.cli.doctor.finding import Finding

SECONDS = 5.0
"""Limit of a look at the host's name: a name server may not answer."""
VARIABLES = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "NCCL"}


@dataclass(frozen=True)
class Network:
    """The network of a host.

    Attributes:
        interfaces: names of all interfaces.
        address: the one that the host's name has. Empty: none.
        name_error: why there is no address.
        interface: the one with that address. Empty: unknown.
        to_first_rank: the interface by which the host reaches the first rank. Empty: unknown, or no launcher.
        hosts: the number of hosts of the job; 1 without a launcher.
        chosen: the values of variables that choose an interface.
    """

    interfaces: tuple[str, ...]
    address: str = ""
    name_error: str = ""
    interface: str = ""
    to_first_rank: str = ""
    hosts: int = 1
    chosen: Mapping[str, str] | None = None


def find_network() -> Finding:
    """Look at the network, and judge it."""
    address, name_error, interface = "", "", ""
    try:
        address = within(SECONDS, _address_of_host)
        interface = within(SECONDS, lambda: _interface_of(address))
    except Unmeasured as error:
        name_error = f"the name server does not answer: {error}"
    except OSError:
        name_error = "the host's name has no address"
    chosen = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return judge_network(
        Network(_interfaces(), address, name_error, interface, _to_first_rank(), _hosts(), chosen)
    )


def judge_network(network: Network) -> Finding:
    """The verdict on the network of a host."""
    loopback = bool(network.address) and ipaddress.ip_address(network.address).is_loopback
    facts, advice = [], []
    if network.name_error:
        facts.append(network.name_error)
        advice.append(
            "add the host's name and its address to /etc/hosts, or set GLOO_SOCKET_IFNAME: gloo looks the name up"
        )
    elif loopback:
        facts.append(f"the host's name has a loopback address ({network.address})")
        if network.hosts > 1:
            advice.append(
                "other hosts cannot reach this address: the trainer chooses another interface; for programs of your "
                "own set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the cluster's network, or "
                "correct /etc/hosts"
            )
        else:
            facts.append("which is enough for one host")
    else:
        facts.append("the host's name has an address of its network")
    for variable, program in VARIABLES.items():
        value = (network.chosen or {}).get(variable)
        if not value:
            continue
        facts.append(f"{variable}={value}")
        names = [each.partition(":")[0] for each in value.split(",")]
        if variable == "GLOO_SOCKET_IFNAME":
            missing = [each for each in names if each not in network.interfaces]
        else:  # NCCL takes beginnings of names, =NAME for a whole one, and ^NAME for all others
            missing = [
                each
                for each in names
                if not value.startswith("^")
                and not any(there.startswith(each.lstrip("=")) for there in network.interfaces)
            ]
        if missing:
            advice.append(
                f"{program} finds no interface {', '.join(missing)}: unset {variable}, or take one of "
                f"{', '.join(network.interfaces)}"
            )
    if "GLOO_SOCKET_IFNAME" not in (network.chosen or {}):
        if network.interface:
            facts.append(f"plain gloo takes {network.interface}")
        if network.hosts == 1:
            facts.append("the trainer takes the loopback interface")
        elif network.to_first_rank:
            facts.append(
                f"the trainer takes {network.to_first_rank}, by which this host reaches the first rank"
            )
    figures: dict[str, Any] = {
        "interfaces": list(network.interfaces),
        "name_is_loopback": loopback,
        "interface": network.interface or None,
        "to_first_rank": network.to_first_rank or None,
        "hosts": network.hosts,
    }
    return Finding("network", ", ".join(facts), "; ".join(advice), figures)


def _address_of_host() -> str:
    found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return str(found[0][4][0]).partition("%")[0]


def _interface_of(address: str) -> str:
    try:
        from shardwright.train.rank.hosts import interface_of
    except Exception:
        return ""  # without psutil or torch nothing knows the addresses of interfaces
    return interface_of(address)


def _interfaces() -> tuple[str, ...]:
    try:
        return tuple(name for _, name in socket.if_nameindex())
    except (OSError, AttributeError):
        return ()


def _to_first_rank() -> str:
    """The interface by which this host reaches the first rank of a job, if a launcher has started this process."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return ""
    try:
        from shardwright.train.rank.hosts import interface_of, own_address

        address = within(SECONDS, lambda: own_address(host, int(port)))
        return interface_of(address) if address else ""
    except Exception:
        return ""


def _hosts() -> int:
    """The number of hosts of the job of which this process is a rank."""
    try:
        ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return max(1, -(-ranks // here))
    except (KeyError, ValueError, ZeroDivisionError):
        return 1
