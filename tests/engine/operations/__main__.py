"""``python -m tests.engine.operations``: run the table and print its counts."""

import sys

from tests.engine.operations.report import main

if __name__ == "__main__":
    sys.exit(main())
