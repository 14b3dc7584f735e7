#!/bin/sh
# Collects the wheels of an extra for a Linux machine without a network, and checks them there as far as it can here:
#
#   sh tools/offline.sh wheels --python 3.12                          what a run needs: train without tensorboard
#   sh tools/offline.sh wheels --python 3.12 --without '' --limit 80  all of the extra train
#   sh tools/offline.sh wheels --python 3.12 --extra hf --limit 200   another extra, in at most 200 MiB
#
# On that machine, whose Python has torch:
#
#   python3 -m pip install --no-index --find-links wheels -r wheels/requirements.txt
#
# torch is not collected. --without leaves out packages of the extra (of train: tensorboard). The wheels
# are installed into a bare environment from the folder alone, if a Python of that version is here. Exit status 1: they do
# not install, or are larger than the limit (50 MiB). The folder must be empty or made by this script.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
    sed -n '4,6s/^# *//p' "$0" >&2
    exit 2
}
fail() {
    printf 'offline: %s\n' "$*" >&2
    exit 1
}

folder='' version='' extra=train without=unset limit=50 machine=$(uname -m)
while [ $# -gt 0 ]; do
    case "$1" in
    --python | --extra | --without | --limit | --machine)
        [ $# -ge 2 ] || usage
        case "$1" in
        --python) version=$2 ;;
        --extra) extra=$2 ;;
        --without) without=$2 ;;
        --limit) limit=$2 ;;
        --machine) machine=$2 ;;
        esac
        shift 2
        ;;
    -*) usage ;;
    *)
        [ -z "$folder" ] || usage
        folder=$1
        shift
        ;;
    esac
done
case "$version" in 3.1[1-3]) ;; *) usage ;; esac
case "$limit" in '' | *[!0-9]*) usage ;; esac
[ -n "$folder" ] || usage
if [ "$without" = unset ]; then
    [ "$extra" = train ] && without=tensorboard || without=
fi

# A Python with pip that reads pyproject.toml: the project's own, or any from 3.11 on.
python=''
for name in "$root/.venv/bin/python" ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$name" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$name
        break
    fi
done
[ -n "$python" ] || fail "found no Python from 3.11 on that has pip; name one: PYTHON=/path/to/python sh tools/offline.sh ..."

mkdir -p "$folder"
if [ -n "$(ls -A "$folder")" ] && [ ! -e "$folder/requirements.txt" ]; then
    fail "$folder has other files; name an empty folder"
fi
rm -f "$folder"/*.whl "$folder/requirements.txt"
"$python" "$root/tools/environment.py" --list "$extra" --without "$without" >"$folder/requirements.txt"
platforms=''
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux_2_5 manylinux1; do
    platforms="$platforms --platform ${tag}_$machine"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "torch==0" >"$work/constraints.txt" # a package that asks for torch is an error before gigabytes are downloaded
# shellcheck disable=SC2086
"$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --implementation cp \
    --python-version "$version" $platforms --constraint "$work/constraints.txt" --dest "$folder" \
    -r "$folder/requirements.txt" ||
    fail "pip cannot collect wheels for Python $version on $machine (its message is above). Packages that need torch" \
        "cannot be carried; leave them out with --without"

bytes=$(cat "$folder"/*.whl | wc -c)
mib=$(((bytes + 1048575) / 1048576))
count=$(ls "$folder"/*.whl | wc -l)

bare=''
for name in "python$version" ${PYTHON:-} "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    if "$name" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1; then
        bare=$name
        break
    fi
done
if [ -n "$bare" ] && [ "$machine" = "$(uname -m)" ]; then
    "$bare" -m venv --without-pip "$work/bare"
    pip="$python -m pip --disable-pip-version-check --python $work/bare/bin/python"
    $pip install --quiet --no-index --find-links "$folder" -r "$folder/requirements.txt" && $pip check >/dev/null ||
        fail "the wheels in $folder do not install into a bare environment (pip's message is above)"
    checked="they install into a bare environment of Python $version"
else
    checked="not tried: there is no Python $version here"
fi
echo "offline: $count wheels, $mib MiB, in $folder; $checked"
if [ "$mib" -gt "$limit" ]; then
    ls -S -l "$folder"/*.whl | head -5 | awk '{ printf "  %6.1f MiB  %s\n", $5 / 1048576, $NF }' >&2
    fail "$mib MiB are more than the limit of $limit MiB; leave packages out with --without, or raise --limit"
fi
