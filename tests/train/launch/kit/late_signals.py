"""Imported by a launcher of `forked`: each of its ranks gets SIGTERM once it has done all, just before it ends.

The ranks of our launcher send it to the launcher, too, which passes it on.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from shardwright.train.launch.environment import LAUNCHER_VARIABLE
from shardwright.train.rank import process

_run_rank = process.run_rank


def run_rank(*arguments: Any) -> int:
    status = _run_rank(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    if LAUNCHER_VARIABLE in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.3)  # the launcher looks each 0.05 s
    return status


process.run_rank = run_rank
