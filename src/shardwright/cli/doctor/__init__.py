"""``shardwright doctor``: a description of the machine for a bug report, and measurements with what to do about them.

``description`` looks at versions and settings and is quick. ``measurements`` measures, with a file for each subject:
``devices``, ``links``, ``memory`` and ``folders``. Each of these has facts, taken from the machine, and verdicts, which
are pure functions of the facts. ``children`` runs a measurement in a process with a time limit. Nothing here trains,
and nothing raises for what cannot be measured. What tools of the system measure is left to them.
"""
