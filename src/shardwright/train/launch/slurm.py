"""SLURM's variables as those of torchrun: `srun shardwright train` needs no other launcher.

A batch script has some of SLURM's variables, too, and is no rank. Only a task of a step with several tasks is one.
Nothing here asks SLURM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwright.train.errors import UserError

FIRST_PORT, PORTS = 12000, 20000
"""Ports of the first rank. Those from 32768 on are given to programs by Linux."""


def variables_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for this task; empty if this process is no task of several, or has RANK and WORLD_SIZE.

    MASTER_ADDR and MASTER_PORT stay as they are. Raises UserError for variables that do not fit together.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    if not environment.get("SLURM_STEP_ID", "").isdecimal() or "SLURM_PROCID" not in environment:
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if tasks < 2:
        return {}
    rank, local, node = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "NODEID"))
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(per_node) != tasks or node >= len(per_node):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE: expected {tasks} tasks and a host {node}, found "
            f"{environment.get('SLURM_STEP_TASKS_PER_NODE', 'nothing')}; start with srun, or with torchrun"
        )
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    variables = {
        "RANK": rank, "WORLD_SIZE": tasks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node[node],
        "GROUP_RANK": node,
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": FIRST_PORT + (7 * job + step) % PORTS,  # jobs that share a host get different ones
    }  # fmt: skip
    own = {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name)}
    return {name: str(value) for name, value in variables.items()} | own


def started_by_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether this process is a rank because of `variables_of_task`."""
    return "TORCHELASTIC_RUN_ID" not in environment and (
        environment.get("SLURM_PROCID", "no rank") == environment.get("RANK")
        and environment.get("SLURM_STEP_NUM_TASKS") == environment.get("WORLD_SIZE")
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list such as `gpu[07-09,12],cpu1`: gpu07. Raises UserError if there is none."""
    text = re.split(r",(?![^\[]*\])", nodes.strip())[0]
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", text)
    if not re.fullmatch(r"[\w.-]+", host):
        raise UserError(
            f"SLURM_STEP_NODELIST: expected a list of hosts, found {nodes!r}; set MASTER_ADDR to the host of the first "
            "task, and MASTER_PORT"
        )
    return host


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each host, from SLURM's form: `2(x3),1` is 2, 2, 2, 1. Empty for a text of another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{name}: expected the number that srun sets, found {text!r}; start with srun, or with torchrun"
        )
    return int(text)
