"""Folders of torch's distributed checkpoint, read as data.

`metadata` reads `.metadata`, after `opcodes` has counted what its pickle would do. `containers` reads
the zip file of each tensor, and `entries` finds tensors and values in them. Rule: no code that a file names runs.
"""
