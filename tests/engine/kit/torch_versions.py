"""Abilities of this version of torch, for tests of what it cannot do."""

from __future__ import annotations

from shardwright.engine.compat.dtensor import subclasses_dispatch as subclasses_dispatch
