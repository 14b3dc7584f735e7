#!/bin/sh
# Compiles guard.c, an allocator that catches late reads and writes of freed memory, and runs tests under it:
#
#   sh tools/guard.sh                      a part of the suite
#   sh tools/guard.sh tests/engine -x      these arguments of pytest
#
# Every process of the tests writes its findings into build/guard. Status 1 if there are any. Tests take about three
# times as long as without it.
set -eu
cd "$(dirname "$0")/.."
python=${PY:-.venv/bin/python}
logs=$PWD/build/guard
rm -rf "$logs"
mkdir -p "$logs"
"${CC:-cc}" -O2 -g -fPIC -shared -o "$logs/guard.so" tools/guard.c -ldl -lpthread
[ $# -gt 0 ] || set -- tests/engine/comm/test_collectives.py tests/engine/test_behaviour.py tests/engine/memory

status=0
LD_PRELOAD="$logs/guard.so" GUARD_LOG="$logs/log" PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
    "$python" -m pytest -q -p no:cacheprovider "$@" || status=$?
findings=$(cat "$logs"/log.* 2>/dev/null | grep -c '^guard: ' || true)
echo "guard: $findings findings, in $logs"
[ "$findings" = 0 ] || exit 1
exit "$status"
