"""Seconds that a job leaves to a sink, and its processes to one another at its end. Each is shorter than the one that
waits for it."""

from __future__ import annotations

OPENING_SECONDS = 60.0
"""The longest time that a run waits for a sink to open. The other ranks wait for the first step meanwhile: see
`fault.stall_seconds`."""
GRACE_SECONDS = 4.0
"""From the first failure of a rank to the end of the others by the launcher: they can say what they saw of it."""
HURRIED_SECONDS = 3.0
"""The longest time that a run which failed waits for a sink, and for a sink that stops during a run."""
SECONDS_FOR_FIRST = 2.0
"""Seconds that other ranks leave to the first one, which reports: if they end, it loses contact."""
SECONDS_FOR_CAUSE = 1.0
"""Seconds that a rank which lost contact leaves to the rank that caused it, to record its error."""
SECONDS_TO_ASK = 1.0
"""Seconds for which the first rank stays after a mistake that all made: it may host the store, which the others ask
whether the mistake was said."""

assert SECONDS_FOR_CAUSE < SECONDS_FOR_FIRST < HURRIED_SECONDS < GRACE_SECONDS < OPENING_SECONDS
