"""`python -m shardwright`: the same as the `shardwright` command."""

from __future__ import annotations

import sys

from shardwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
