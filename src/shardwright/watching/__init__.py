"""Watches the ranks of a job: where each one is, which one is behind, and why nothing goes on.

``reading`` reads the heartbeats of processes. ``diagnosis`` is pure: from what was read to a verdict. ``evidence``
writes stacks and rings. ``watcher`` is the thread of a rank, ``hosts`` what hosts exchange, ``launched`` what a
launcher sees. ``api`` is ``sw.watch``. The name of this room is not ``watch``: that is the function.
"""

from typing import TYPE_CHECKING

from shardwright.common.doors import door

if TYPE_CHECKING:
    from shardwright.watching.api import Watch, start, watch
    from shardwright.watching.diagnosis import Diagnosis
    from shardwright.watching.launched import Eyes, Hang, Starting
    from shardwright.watching.profiling import Profiler, profiler
    from shardwright.watching.reading import STOPPED, HeartbeatReader
    from shardwright.watching.watcher import Watcher, WatchSettings

if not TYPE_CHECKING:
    __all__, __getattr__, __dir__ = door(__spec__)
