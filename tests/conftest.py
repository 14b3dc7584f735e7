"""Fixtures of the whole suite. The worker pools live as long as the session.

None is started before a test needs it, and nothing here imports the package under test.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

# Before torch is imported, and inherited by every worker: ranks that share the cores must not each claim all.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tokens of texts are kept there; what tests make goes with them.
_caches = tempfile.TemporaryDirectory(prefix="shardwright-caches-")
os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = _caches.name
os.environ["MPLCONFIGDIR"] = f"{_caches.name}/matplotlib"  # else matplotlib makes a folder in the user's home
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")

# A shell lets what it starts in the background ignore Ctrl-C. Children inherit that, and tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.support.pool import WorkerPools
from tests.support.sim.building import library

pytest_plugins = ("tests.support.tiers",)


@pytest.fixture(scope="session")
def worker_pools() -> Iterator[WorkerPools]:
    """The pools of this session; use `multirank` rather than this, unless a failure itself is under test."""
    pools = WorkerPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def sim_library() -> None:
    """The simulated device is compiled before a case begins that needs it: a case has not the time."""
    library()


@pytest.fixture(scope="module", autouse=True)
def no_second_modules() -> Iterator[None]:
    """A file leaves no second copy of one of our modules, which would fail another file of the same worker."""
    yield
    for name, module in list(sys.modules.items()):
        parent, _, own = name.rpartition(".")
        if name.startswith("shardwright.") and module is not None:
            known = getattr(sys.modules[parent], own, module)
            assert known is module or not isinstance(known, ModuleType), f"{name} was imported twice"


@pytest.fixture(scope="session", autouse=True)
def what_is_frozen_stays_frozen() -> Iterator[None]:
    """Nobody counts or unfreezes the objects of all tests, which take longer than most plans of a search.

    A search freezes what lives after its first plan and unfreezes it at the end. Here it freezes after each plan.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 0)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


#: Files that start programs or compile. A worker takes a file at a time, and such a one must not be the last.
LONG = re.compile(
    r"/train/|/integrations/|/tests/test_(repository|start|typing|package)|/engine/test_(compiled|programs|features|cases|graphed|dropin)|test_notices"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, then those with many tests."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (LONG.search(str(item.path)) is None, -tests[item.path]))


def pytest_collection_finish() -> None:
    """Objects of imported tests stay for good: no later collection of garbage looks through them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Each failure is named when it happens, too: the summary is lost if the run is ended."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


class FailuresAtOnce:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = f": {crash.message.splitlines()[0]}" if crash is not None and crash.message else ""
            self.terminal.ensure_newline()
            self.terminal.line(f"failed in {report.when}: {report.nodeid}{reason}")
