"""gloo groups for the tests.

Each has one worker thread: two race in torch and corrupt the heap in rare runs. All groups of a process share one
device. The function for the threads is the package's own. It is loaded from its file without the package, since a
broken engine must not break the pool that reports it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

from torch.distributed import ProcessGroupGloo

_FILE = Path(__file__).parents[2] / "src/shardwright/engine/compat/collectives.py"
_NAME = "tests.support.torch_alone"


def use_one_gloo_thread() -> None:
    """Give each gloo group that this process makes from now on one worker thread."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, _FILE)
        assert spec is not None and spec.loader is not None
        sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.modules[_NAME].use_one_gloo_thread()


def share_one_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on have one device.

    A device has a thread that looks for messages 100 times a second. A rank of the pool has dozens of groups, most of
    which no test uses any more.
    """
    for name in ("create_device", "create_default_device"):
        create = getattr(ProcessGroupGloo, name)
        setattr(ProcessGroupGloo, name, staticmethod(functools.cache(create)))
