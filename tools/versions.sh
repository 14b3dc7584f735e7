#!/bin/sh
# Runs the tests on another version of torch than the one in .venv:
#
#   sh tools/versions.sh 2.15                    the part of `make test` below
#   sh tools/versions.sh 2.15 all                the whole suite, as `make test-all`
#   sh tools/versions.sh 2.11 tests/engine -x    these arguments of pytest
#   PYTHON=python3.12 sh tools/versions.sh 2.11  with that Python
#
# Each version gets an environment of its own, .venvs/torch-VERSION, on its first run: several minutes and gigabytes
# where only a CUDA wheel exists. The tests need no GPU; on torch 2.11 they need a C++ compiler. Delete the folder when
# you are done.
set -eu
cd "$(dirname "$0")/.."

# What touches torch's private names, its DTensor and its collectives; strategies, memory, checkpoints and the trainer.
PART="tests/engine/comm tests/engine/layout tests/engine/memory tests/checkpoint
    tests/engine/test_arguments.py tests/engine/test_behaviour.py tests/engine/test_edits.py
    tests/engine/test_limits.py tests/engine/test_memory.py tests/engine/test_offload.py
    tests/engine/test_precision.py tests/engine/test_ragged_tensor.py tests/engine/test_schedule.py
    tests/engine/test_sharded_edits.py tests/engine/test_strategies.py tests/engine/test_strategy_costs.py
    tests/engine/test_strategy_reductions.py
    tests/init/test_deferred.py tests/init/test_deferred_generators.py tests/init/test_deferred_tensors.py
    tests/optim/test_optim.py tests/train/step/test_loop.py tests/train/data tests/train/models tests/train/finetune"

version=${1:-}
case "$version" in
2.1[1-5]) shift ;;
*)
    echo "usage: sh tools/versions.sh 2.11|2.12|2.13|2.14|2.15 [all | arguments of pytest]" >&2
    exit 2
    ;;
esac

python=.venvs/torch-$version/bin/python
if ! "$python" -c 'import shardwright, torch, pytest, hypothesis, xdist, transformers, pyarrow, fsspec' >/dev/null 2>&1; then
    echo "versions: making .venvs/torch-$version"
    "${PYTHON:-python3}" -m venv --clear ".venvs/torch-$version"
    # A CPU wheel, if the index has one, saves gigabytes.
    "$python" -m pip install --quiet "torch==$version.0+cpu" 2>/dev/null ||
        "$python" -m pip install --quiet "torch==$version.*"
    # torchao is built for one version of torch; its tests skip without it.
    "$python" -m pip install --quiet --editable '.[data,hf,lightning,train]' "torch==$version.*" \
        'hypothesis>=6.100' 'pytest>=8.2' 'pytest-xdist>=3.6' 'safetensors>=0.4.3'
fi

if [ "${1:-}" = all ]; then
    shift
    set -- --tier all "$@"
elif [ $# -eq 0 ]; then
    # shellcheck disable=SC2086
    set -- --tier change $PART
fi
"$python" -c 'import sys, torch; print("versions: torch", torch.__version__, "on Python", sys.version.split()[0])'
OMP_NUM_THREADS=1 exec "$python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder -q "$@"
