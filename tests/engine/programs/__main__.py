"""``python -m tests.engine.programs``: a long search."""

import sys

from tests.engine.programs.search import main

sys.exit(main())
