"""AdamW whose step fails as a file says, once for each line: `--optimizer.name tests.train.kit.faults:ADAMW`.

A line is "RANK STEP KIND". A kind is `error`, `exit`, `sleep`, `pass` (no fault this time), `validation` (sleep in the
next forward in eval mode), or the name of a signal that the rank sends to itself.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from shardwright.train.extend import NamedOptimizer, OptimizerSettings

VARIABLE = "FAULTS"


def environment(folder: Path, *lines: str) -> dict[str, str]:
    """The variables of a job with these faults."""
    folder.mkdir()
    (folder / "faults").write_text("\n".join(lines))
    source = Path(__file__).parents[3]
    return {VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join([str(source / "src"), str(source)])}


class Faulty(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        done = max((int(state["step"]) for state in self.state.values()), default=0)
        _fail(done + 1)
        return super().step(closure)

    def shard_needs(self, parameter: torch.Tensor) -> int:
        return 1


def _fail(step: int) -> None:
    folder = Path(os.environ[VARIABLE])
    for number, line in enumerate((folder / "faults").read_text().splitlines()):
        rank, at, kind = line.split()
        if (rank, at) != (os.environ.get("RANK", "0"), str(step)):
            continue
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue  # it has been
        if kind == "pass":
            return
        if kind == "error":
            raise RuntimeError(f"planned at {id(folder):#x}")
        if kind == "sleep":
            time.sleep(600)
        if kind == "validation":
            torch.nn.modules.module.register_module_forward_pre_hook(_sleep_in_eval)
            continue
        if kind == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[kind])


def _sleep_in_eval(module: torch.nn.Module, args: Any) -> None:
    if not module.training and isinstance(module, torch.nn.Linear):  # inside a unit
        time.sleep(600)


def _make(decayed: Any, others: Any, settings: OptimizerSettings) -> torch.optim.Optimizer:
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return Faulty(groups, settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True)


ADAMW = NamedOptimizer("faulty", "AdamW that fails as planned.", _make, needs=1)
