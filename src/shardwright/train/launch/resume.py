"""Resuming a run: the command for it, and the settings that differ from the saved run.

The run uses the new configuration: the named file, or without one the configuration of its last start. The command line
overrides both. The model, the data and the order of samples must be the same: `check_same_job` in `run/same_job.py`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tomllib

from shardwright.train.config import Config
from shardwright.train.config.schema import flat, toml_value
from shardwright.train.errors import UserError
from shardwright.train.launch.environment import LAUNCHER_VARIABLE, under_torchrun
from shardwright.train.launch.slurm import started_by_slurm
from shardwright.train.run.folder import RunFolder, checkpoints_of
from shardwright.train.run.position import saved_steps


def resume_command(folder: RunFolder, ranks: int) -> str:
    """Return the complete command that continues a run on `ranks` ranks, for printing."""
    arguments = f"train --resume {shlex.quote(str(folder.path))}"
    if LAUNCHER_VARIABLE not in os.environ and started_by_slurm(os.environ):
        return f"srun {_program('shardwright', 'shardwright')} {arguments}"
    if under_torchrun():
        local = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
        run = _program("torchrun", "torch.distributed.run")
        if int(local) == ranks:
            return f"{run} --standalone --nproc-per-node {ranks} -m shardwright {arguments}"
    several = f" --nproc {ranks}" if ranks > 1 else ""
    return f"{_program('shardwright', 'shardwright')} {arguments}{several}"


def to_continue(folder: RunFolder, ranks: int) -> list[str]:
    """Return lines that say what is saved, and the command that continues from it. Empty if nothing is saved."""
    saved = _saved(folder)
    return [f"{saved}; to continue:", f"  {resume_command(folder, ranks)}"] if saved else []


def _saved(folder: RunFolder) -> str:
    """Return the newest saved step, in words; empty if nothing is saved. No store is asked: it may be what has
    failed."""
    try:
        checkpoints = checkpoints_of(folder, folder.config().checkpoint)
    except UserError:
        return ""
    if isinstance(checkpoints, str):
        return f"the checkpoints are in {checkpoints}"
    steps = saved_steps(checkpoints)
    return f"step {steps[0]} is saved" if steps else ""


def _program(name: str, module: str) -> str:
    """Return the shell command for one of this environment's programs."""
    if shutil.which(name):
        return name
    beside = os.path.join(os.path.dirname(sys.executable), name)
    for path in (os.path.relpath(beside), beside) if os.access(beside, os.X_OK) else ():
        if not path.startswith(os.pardir):
            return shlex.quote(path)
    return f"{shlex.quote(sys.executable)} -m {module}"


def changed_settings(saved: Config, current: Config) -> list[tuple[str, object, object]]:
    """Every key whose value differs, with both values. The folder's name is not compared."""
    before, after = (dict(flat(tomllib.loads(each.resolved().to_toml()))) for each in (saved, current))
    keys = dict.fromkeys([*before, *after])
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if key != "run.dir" and before.get(key) != after.get(key)
    ]


def changes_in_words(saved: Config, current: Config) -> str | None:
    """Return the lines to print, or None if nothing differs."""
    changes = changed_settings(saved, current)
    if not changes:
        return None
    width = max(len(key) for key, _, _ in changes)
    lines = [f"  {key:<{width}}  {_shown(before)} -> {_shown(after)}" for key, before, after in changes]
    changed = {key for key, _, _ in changes}
    if not changed.isdisjoint(("train.steps", "train.epochs")) and current.optimizer.schedule != "constant":
        lines.append(
            f"  the {current.optimizer.schedule} schedule of the learning rate now ends with the new last step, so the "
            "rates of the next steps change"
        )
    return "\n".join(
        ["settings that differ from the saved run (saved -> now); the new ones are used:", *lines]
    )


def _shown(value: object) -> str:
    return "none" if value is None else toml_value(value)
