"""The hosts of a job: which ranks share one, how they reach each other, and whether they share the run's folder.

gloo looks up the name of its host, and takes the address that it finds. Often that is a loopback address, which leads
nowhere from another host. So the ranks choose the interface by which a host reaches the first rank.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from shardwright.train.errors import UserError
from shardwright.train.run.writing import writing

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
SECONDS_TO_APPEAR = 10.0
"""How long a file of one host may take to appear on another, at most."""


def host_key() -> str:
    """A key that two processes share if they run on one host, in one container.

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
class Place:
    """Where a rank runs: the key of its host, and the address from which it reaches the first rank; "" if unknown."""

    host: str
    address: str

    @property
    def is_reachable(self) -> bool:
        """Whether other hosts may reach it at the address."""
        return bool(self.address) and not ipaddress.ip_address(self.address).is_loopback


def use_one_network(store: dist.Store, rank: int, size: int) -> None:
    """Choose the network interface of gloo, unless the user has chosen one. Called by every rank.

    Each rank writes its place into `store`. The first rank answers with one place of each of two hosts.
    """
    if INTERFACE_VARIABLE in os.environ:
        own = Place(host_key(), "")
    else:
        own = Place(host_key(), _own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    store.set(f"network/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        places = [Place(**json.loads(store.get(f"network/{each}"))) for each in range(size)]
        store.set("network", json.dumps([asdict(place) for place in _two_hosts(places)]))
    everyone = [Place(**each) for each in json.loads(store.get("network"))]
    if INTERFACE_VARIABLE not in os.environ and (interface := _interface(own, everyone)):
        os.environ[INTERFACE_VARIABLE] = interface


def _two_hosts(places: Sequence[Place]) -> list[Place]:
    """A place of the first host and one of another, if there is one; reachable places if there are any."""
    by_host: dict[str, Place] = {}
    for place in sorted(places, key=lambda each: not each.is_reachable):
        by_host.setdefault(place.host, place)
    first = by_host.pop(places[0].host)
    return [first, *list(by_host.values())[:1]]


def _interface(own: Place, known: Sequence[Place]) -> str:
    """The interface for gloo. `known` has one place if all ranks are on one host. Empty: gloo decides."""
    if len(known) == 1:
        return loopback()
    if own.is_reachable:
        return _interface_of(own.address)
    # The first rank's host has its own name in /etc/hosts, with a loopback address.
    others = [place for place in known if place.host != own.host and place.is_reachable]
    return _interface_of(_own_address(others[0].address, 9)) if others else ""


def loopback() -> str:
    """The loopback interface of this host."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _own_address(host: str, port: int) -> str:
    """The address from which this host sends to another one. Sends nothing. Empty if there is no way."""
    try:
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        pass
    return ""


def _interface_of(address: str) -> str:
    """The interface that has an address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def check_shared(folder: Path, is_first: bool) -> None:
    """Raise UserError on every rank if a rank does not see the files of the first rank in the run's folder.

    Called by every rank. Each rank writes a part of each checkpoint there, and a resume needs all parts.
    """
    sign = [f".seen-by-all-hosts-{secrets.token_hex(8)}"]
    problem = [""]
    if is_first:
        try:
            with writing(folder):
                (folder / sign[0]).touch()
        except UserError as error:
            problem = [str(error)]
    dist.broadcast_object_list(message := [*sign, *problem], src=0)
    name, problem[0] = message
    if problem[0]:
        raise UserError(problem[0])
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone: list[tuple[bool, str]] = [(True, "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (seen, socket.gethostname()))
    if is_first:
        (folder / name).unlink(missing_ok=True)
    for rank, (has_seen, host) in enumerate(everyone):
        if not has_seen:
            raise UserError(
                f"run.dir: expected a folder that all hosts share, found {folder.absolute()} of rank 0 (host "
                f"{everyone[0][1]}) not shared with rank {rank} (host {host}); set run.dir to a folder on a file "
                "system that all hosts have under the same path"
            )
