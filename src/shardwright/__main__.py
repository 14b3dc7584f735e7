"""`python -m shardwright`: the same as the `shardwright` command."""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0] or ".") == os.path.realpath("."):
    # `python -m` looks for modules in the working folder first, where a random.py of the user's would take the place
    # of Python's own.
    del sys.path[0]

from shardwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
