"""``python -m tests.engine.hostile``: a long search."""

import sys

from tests.engine.hostile.search import main

if __name__ == "__main__":
    sys.exit(main())
