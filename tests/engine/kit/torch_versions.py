"""What this version of torch can do, for tests of what it cannot."""

from __future__ import annotations

from shardwright.engine.compat.dtensor import subclasses_dispatch as subclasses_dispatch
