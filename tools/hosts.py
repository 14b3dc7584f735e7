"""Several hosts on one Linux machine, for tests: each has a network, an address, a name, processes and shared memory.

A host is a set of namespaces. Its first process ends when this program ends, and all its other processes end with it.
So nothing stays behind. Making namespaces needs root. Hosts have one another's files, unless `own_folder` is given.

    python tools/hosts.py 3 -- sh -c 'hostname; ping -c 1 $FIRST'

runs a command on three hosts at the same time. Its environment has HOST (from 0), HOSTS, ADDRESS and FIRST, which is
the address of host 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PROGRAMS = ("ip", "unshare", "nsenter", "mount")
REJECT = "add table inet cut; add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}; "
REJECT += "add rule inet cut {hook} {way} eth0 meta l4proto tcp reject with tcp reset"


def reason_against() -> str:
    """Why this process cannot make hosts; empty if it can."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "making namespaces needs root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"these programs are missing: {', '.join(missing)}"
    try:
        with Hosts(1):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"this system refuses namespaces: {error}"


class _Namespaces:
    """A set of namespaces, held by a process that waits for the end of its input."""

    def __init__(self, kinds: Sequence[str], set_up: str) -> None:
        """`set_up` is a shell script that runs inside, before anything else does."""
        script = f"set -e\n{set_up}\necho ready\nexec cat"
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            reason = self._holder.stderr.read().strip()
            self.end()
            raise OSError(reason or "unshare failed")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        #: With a namespace of processes, unshare waits for the first process in it.
        self.pid = int(children[0]) if "--pid" in kinds else self._holder.pid
        self.entry = ["nsenter", "--target", str(self.pid), *(each for each in kinds if each in _ENTERED)]

    def end(self) -> None:
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()
        self._holder.wait(30)


_ENTERED = ("--net", "--uts", "--ipc", "--mount", "--pid")


class Hosts:
    """Hosts on one network. Their addresses are 10.77.0.1, 10.77.0.2, and so on; their names host-0, host-1, ...

    Attributes:
        addresses: of the hosts.
    """

    def __init__(self, count: int, own_folder: Path | None = None, names: str = "all") -> None:
        """Make the hosts.

        Args:
            count: of hosts.
            own_folder: a folder whose files each host has for itself, in memory.
            names: what a host finds by name: "all" hosts, its "own" loopback address, as Debian writes it into
                /etc/hosts, or "none".

        Raises:
            OSError: the system refuses; see `reason_against`.
        """
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._own_folder = own_folder
        self._names = tempfile.TemporaryDirectory(prefix="hosts-")
        everyone = [f"{each} host-{number}" for number, each in enumerate(self.addresses)]
        for number in range(count):
            known = {"all": everyone, "own": [f"127.0.1.1 host-{number}"], "none": []}[names]
            Path(self._names.name, str(number)).write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self._hosts: list[_Namespaces | None] = []
        self._switch = _Namespaces(
            ["--net"], "ip link add bridge0 type bridge\nip link set bridge0 up\nip link set lo up"
        )
        try:
            for number in range(count):
                self._hosts.append(None)
                self.start(number)
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> None:
        """Start a host, or start one that was lost again."""
        assert self._hosts[number] is None, f"host {number} runs"
        lines = [
            "mount --make-rprivate /",
            f"hostname host-{number}",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            f"mount --bind {self._names.name}/{number} /etc/hosts",
            "ip link set lo up",
        ]
        if self._own_folder is not None:
            lines.append(f"mount -t tmpfs tmpfs '{self._own_folder}'")
        kinds = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        host = _Namespaces(kinds, "\n".join(lines))
        self._hosts[number] = host
        cable = f"cable{number}"
        self._in_switch(
            "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)
        )
        self._in_switch("ip", "link", "set", cable, "master", "bridge0")
        self._in_switch("ip", "link", "set", cable, "up")
        for line in (f"address add {self.addresses[number]}/24 dev eth0", "link set eth0 up"):
            self._in_host(number, "ip", *line.split())

    def popen(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, in this process's folder or in `cwd`, with the options of `subprocess.Popen`."""
        folder = os.path.abspath(
            options.pop("cwd", None) or os.getcwd()
        )  # nsenter goes to the root of the files
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', folder]
        return subprocess.Popen([*self.entry(number), *enter, *command], **options)

    def entry(self, number: int) -> list[str]:
        """The words before a command that runs on a host."""
        return self._host(number).entry

    def process(self, number: int) -> int:
        """The number of a host's first process, whose namespaces are the host's."""
        return self._host(number).pid

    def environment(self, number: int) -> dict[str, str]:
        """The variables that describe a host to the commands on it."""
        return {
            "HOST": str(number),
            "HOSTS": str(len(self.addresses)),
            "ADDRESS": self.addresses[number],
            "FIRST": self.addresses[0],
        }

    def cut(self, number: int) -> None:
        """Take the link of a host down. Packets disappear, so the ends of its connections get no reset."""
        self._in_switch("ip", "link", "set", f"cable{number}", "down")

    def refuse(self, number: int) -> None:
        """Answer each TCP packet from and to a host with a reset. Needs nft."""
        for hook, way in (("input", "iifname"), ("output", "oifname")):
            self._in_host(number, "nft", REJECT.format(hook=hook, way=way))

    def mend(self, number: int) -> None:
        """Undo `cut` and `refuse`."""
        self._in_switch("ip", "link", "set", f"cable{number}", "up")
        if shutil.which("nft"):
            self._in_host(number, "sh", "-c", "nft delete table inet cut 2>/dev/null || true")

    def lose(self, number: int) -> None:
        """End all processes of a host at once, with its network. `start` brings it back."""
        host, self._hosts[number] = self._host(number), None
        host.end()
        # The system ends the network later.
        with suppress(OSError):
            self._in_switch("ip", "link", "delete", f"cable{number}")

    def close(self) -> None:
        for host in self._hosts:
            if host is not None:
                host.end()
        self._hosts = []
        self._switch.end()
        self._names.cleanup()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _host(self, number: int) -> _Namespaces:
        host = self._hosts[number]
        assert host is not None, f"host {number} is lost"
        return host

    def _in_switch(self, *command: str) -> None:
        _run([*self._switch.entry, *command])

    def _in_host(self, number: int, *command: str) -> None:
        _run([*self._host(number).entry, *command])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def run_everywhere(hosts: Hosts, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command on all hosts and print their output, with the host before each line. Returns the largest status."""
    processes, threads = [], []
    for number in range(len(hosts.addresses)):
        process = hosts.popen(
            number, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**variables, **hosts.environment(number)},
        )  # fmt: skip
        processes.append(process)
        threads.append(threading.Thread(target=_relay, args=(number, process.stdout)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return max(process.wait() for process in processes)


def _relay(number: int, output: IO[str]) -> None:
    for line in output:
        print(f"host-{number}: {line}", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command on several hosts, made of namespaces.")
    parser.add_argument("count", type=int, help="number of hosts")
    parser.add_argument("--own-folder", type=Path, help="a folder that each host has for itself, in memory")
    parser.add_argument(
        "--names", choices=("all", "own", "none"), default="all", help="what hosts find by name"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or options.count < 1:
        parser.error("expected a number of hosts, then -- and a command")
    if reason := reason_against():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with Hosts(options.count, options.own_folder, options.names) as hosts:
        return run_everywhere(hosts, command, os.environ)


if __name__ == "__main__":
    sys.exit(main())
