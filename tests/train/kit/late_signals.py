"""Imported by a launcher of `forked`: each of its ranks gets SIGTERM once it has done all, just before it ends.

The ranks of our launcher send it to the launcher, too, which passes it on.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from shardwright.train import rank
from shardwright.train.environment import LAUNCHER_VARIABLE

_run_rank = rank.run_rank


def run_rank(*arguments: Any) -> int:
    status = _run_rank(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    if LAUNCHER_VARIABLE in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.3)  # the launcher looks each 0.05 s
    return status


rank.run_rank = run_rank
