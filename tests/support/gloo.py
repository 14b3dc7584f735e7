"""gloo groups with one worker thread for the tests: two of them race in torch and corrupt the heap in rare runs.

The function is the package's own. It is loaded from its file without the package, since a broken engine must not break
the pool that reports it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parents[2] / "src/shardwright/_torch.py"
_NAME = "tests.support.torch_alone"


def use_one_gloo_thread() -> None:
    """Give each gloo group that this process makes from now on one worker thread."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, _FILE)
        assert spec is not None and spec.loader is not None
        sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.modules[_NAME].use_one_gloo_thread()
