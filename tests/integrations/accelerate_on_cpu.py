"""Runs a program with an Accelerate that shards on the CPU, as it does on a GPU: ``accelerate_on_cpu.py PROGRAM``.

Accelerate 1.15 takes DDP on the CPU and ignores its plugin. Nothing else of Accelerate is changed here.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

begin = AcceleratorState.__init__


def shard(state: Any, *args: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
    begin(state, *args, fsdp_plugin=fsdp_plugin, **settings)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


if __name__ == "__main__":
    AcceleratorState.__init__ = shard
    program = sys.argv[1]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
