"""A SLURM cluster on one Linux machine, for tests: munged, slurmctld and slurmd of Debian, on hosts of `hosts.py`.

    apt-get install munge slurmctld slurmd slurm-client iproute2
    python tools/slurm.py 2 -- sbatch --wait job.sbatch

starts a cluster of two hosts, runs a command on the first one, and ends the cluster. All files of the cluster are in a
temporary folder; SLURM_CONF says where. Needs root. The cluster asks for nothing that a container lacks: it watches
processes by /proc, without control groups.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
SECONDS_TO_START = 60.0
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=host-0({first})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout={lost}
InactiveLimit=0
KillWait=5
MinJobAge=300
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_against() -> str:
    """Why this process cannot make a cluster; empty if it can."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"SLURM is not installed: {', '.join(missing)}"
    return hosts.reason_against()


class Cluster:
    """A SLURM cluster.

    Attributes:
        hosts: of the cluster. slurmctld runs on the first one.
        folder: with the logs of the daemons.
        variables: for commands that talk to the cluster.
    """

    def __init__(self, count: int, cores: int = 2, seconds_lost: int = 20) -> None:
        """Start it, and wait until all hosts are idle.

        Args:
            count: of hosts.
            cores: of each host, as SLURM counts them.
            seconds_lost: after which a host that does not answer is down.

        Raises:
            OSError: it did not start. The message has the end of the logs.
        """
        self._temporary = tempfile.TemporaryDirectory(prefix="slurm-")
        self.folder = Path(self._temporary.name)
        self.folder.chmod(0o755)
        self.hosts = hosts.Hosts(count)
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[Any]] = []
        try:
            self._configure(cores, seconds_lost)
            self._munge = self._start_munge()
            self._start_daemon(0, "slurmctld", "-D")
            for number in range(count):
                self.start(number)
            self._wait_until_idle(count)
        except BaseException:
            self.close()
            raise

    def _configure(self, cores: int, seconds_lost: int) -> None:
        nodes = [
            f"NodeName=host-{number} NodeAddr={address} CPUs={cores} RealMemory=1000 State=UNKNOWN"
            for number, address in enumerate(self.hosts.addresses)
        ]
        text = CONFIGURATION.format(
            folder=self.folder, first=self.hosts.addresses[0], lost=seconds_lost, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _start_munge(self) -> subprocess.Popen[Any]:
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        # Without --force it refuses folders of a user other than its own.
        command = ["munged", "--foreground", "--force", "--num-threads=2", *options]
        return self._popen(["munge"], command)

    def start(self, number: int) -> None:
        """Start the daemon of a host, also after the host was lost and has started again."""
        self._start_daemon(number, "slurmd", "-D", "-N", f"host-{number}")

    def _start_daemon(self, number: int, *command: str) -> None:
        entry = self.hosts.entry(number)
        self._daemons.append(self._popen([f"{command[0]}-{number}"], [*entry, *command]))

    def _popen(self, name: Sequence[str], command: Sequence[str]) -> subprocess.Popen[Any]:
        with open(self.folder / f"{name[0]}.output", "ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.variables},
            )

    def _wait_until_idle(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while (states := self.states()) != ["idle"] * count:
            if time.monotonic() > deadline:
                raise OSError(f"the hosts are {states}, expected idle\n{self.logs()}")
            time.sleep(0.2)

    def states(self) -> list[str]:
        """The state of each host as SLURM sees it; empty if SLURM does not answer."""
        done = self.run("sinfo", "--noheader", "--Node", "--format=%T", timeout=30)
        return done.stdout.split() if done.returncode == 0 else []

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host and wait for it."""
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=options.get("timeout", 120))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the first host, with the options of `subprocess.Popen`."""
        environment = {**options.pop("env", os.environ), **self.variables}
        return self.hosts.popen(0, command, env=environment, **options)

    def logs(self) -> str:
        """The last lines of all logs."""
        parts = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.output")]):
            lines = path.read_text(errors="replace").splitlines()[-20:]
            parts += [f"== {path.name}", *lines]
        return "\n".join(parts)

    def close(self) -> None:
        self.hosts.close()  # all daemons but munged run on hosts
        for daemon in self._daemons:
            daemon.wait(30)
        munge = getattr(self, "_munge", None)
        if munge is not None:
            munge.send_signal(signal.SIGTERM)
            munge.wait(30)
        self._temporary.cleanup()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run a command on a SLURM cluster of hosts made of namespaces."
    )
    parser.add_argument("count", type=int, help="number of hosts")
    parser.add_argument(
        "--cores", type=int, default=2, help="of each host, as SLURM counts them (default: 2)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or options.count < 1:
        parser.error("expected a number of hosts, then -- and a command")
    if reason := reason_against():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with Cluster(options.count, options.cores) as cluster:
        return cluster.popen(command).wait()


if __name__ == "__main__":
    sys.exit(main())
