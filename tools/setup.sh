#!/bin/sh
# tools/setup.sh [train | docs | dev]: makes .venv at the root of the repository and installs the project into it with one
# of its extras, on machines with and without GPUs. train: what jobs need. docs: what the site of docs/ needs. dev (default):
# what tests and checks need, too.
# An environment that is there already and satisfies pyproject.toml is left as it is. Nothing is installed outside
# .venv, and no package index is named here: pip's own configuration decides where packages come from.
set -eu
cd "$(dirname "$0")/.."

EXTRA=${1:-dev}

# The tested range of torch, newest first; pyproject.toml states the same bound.
TORCH_VERSIONS="2.15.0 2.14.0 2.13.0 2.12.1 2.12.0 2.11.0"

say() { printf 'set-up: %s\n' "$*"; }
fail() { printf 'set-up: error: %s\n' "$*" >&2; exit 1; }
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

# A Python is probed by running it: a version manager may put a name on the path and refuse to start it, and a
# distribution may leave out ensurepip.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if usable "$name"; then
            echo "$name"
            return
        fi
    done
    fail "expected a Python from 3.11 to 3.13 with venv and ensurepip, found none that runs among:" \
        "${PYTHON:-python3 python3.11 python3.12 python3.13}. Install one, or name it: make PYTHON=/path/to/python"
}

# Prints the version of the torch that a Python brings along, if it is in range and fits the machine.
torch_of() {
    "$1" - 2>/dev/null <<'PY'
import re, shutil, torch
in_range = re.fullmatch(r"2\.1[1-5]\.\d+(\+.*)?", torch.__version__)
fits = torch.version.cuda is not None or shutil.which("nvidia-smi") is None
print(torch.__version__ if in_range and fits else "")
PY
}

make_environment() {
    python=$(find_python)
    if [ -n "$(torch_of "$python")" ]; then
        say "making .venv with $python, which has torch already"
        "$python" -m venv --clear --system-site-packages .venv
    else
        say "making .venv with $python"
        "$python" -m venv --clear .venv
    fi
}

# Installs with pip, and says every few seconds what pip does: a large package takes minutes.
install() {
    log=$(mktemp)
    .venv/bin/python -m pip install --no-input --progress-bar off "$@" >"$log" 2>&1 &
    pip=$! began=$(date +%s) next=3
    trap 'kill $pip 2>/dev/null; exit 130' INT TERM
    while kill -0 $pip 2>/dev/null; do
        sleep 1
        seconds=$(($(date +%s) - began))
        [ $seconds -ge $next ] || continue
        next=$((seconds + 3))
        doing=$(sed -n 's/^ *\(Collecting [^ ]*\|Downloading .*\|Using cached .*\|Building .*\|Installing [a-z ]*\).*/\1/p' "$log" |
            tail -n 1 | sed 's/Installing collected packages/unpacking all packages/' | cut -c 1-90)
        say "${doing:-starting pip} ($seconds s)"
    done
    trap - INT TERM
    wait $pip && status=0 || status=$?
    [ $status -eq 0 ] || tail -n 15 "$log" >&2
    rm -f "$log"
    return $status
}

# Writes what pip may not choose: on a GPU machine a CPU wheel that lies about, anywhere the torch that is there.
write_constraints() {
    present=$(torch_of .venv/bin/python || true)
    if [ -n "$present" ]; then
        echo "torch==$present"
    elif has_gpu; then
        for version in $TORCH_VERSIONS; do echo "torch!=$version+cpu"; done
    fi
}

# Without a GPU a CPU wheel saves gigabytes. A miss costs one look-up; where none is found the index decides.
install_cpu_torch() {
    for version in $TORCH_VERSIONS; do
        if install "torch==$version+cpu" 2>/dev/null; then
            say "installed torch $version+cpu"
            return
        fi
    done
    say "no CPU wheel of torch at hand, leaving the choice to the package index"
}

if .venv/bin/python tools/environment.py "$EXTRA" 2>/dev/null; then
    say ".venv has all of the extra $EXTRA"
    exit 0
fi
usable .venv/bin/python || make_environment
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
if [ -z "$(torch_of .venv/bin/python || true)" ] && ! has_gpu; then
    install_cpu_torch
fi
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
write_constraints >"$constraints"
say "installing shardwright with the extra $EXTRA; packages that are there stay"
install --constraint "$constraints" --editable ".[$EXTRA]" ||
    fail "pip could not install the project (its message is above). Without a network the engine and the benchmarks" \
        "run from the source tree with a Python that has torch: PYTHONPATH=src python ..."
.venv/bin/python tools/environment.py "$EXTRA" || fail "the environment still does not satisfy pyproject.toml"
