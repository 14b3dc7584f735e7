"""The command line: it parses arguments, calls a command and prints. Each command has a file here; the work is in
`train/` and `doctor`.

Only commands that need torch import it, so help and errors in arguments appear at once.
"""

from shardwright.cli.program import main

__all__ = ["main"]
