"""One task of ``benchmarks/data.py``: ``python -m benchmarks.data_rows ORDER``."""

import sys

from benchmarks.data_rows.measure import work

if __name__ == "__main__":
    work(sys.argv[1])
