"""Watches the ranks of a job: where each one is, which one is behind, and why nothing goes on.

``reading`` reads the boards of processes. ``diagnosis`` is pure: from what was read to a verdict. ``evidence`` writes
stacks and rings. ``watcher`` is the thread of a rank, ``hosts`` what hosts exchange, ``launched`` what a
launcher sees. ``api`` is ``sw.watch``. The name of this room is not ``watch``: that is the function.
"""
