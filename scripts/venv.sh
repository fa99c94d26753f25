#!/bin/sh
# Make a virtual environment at $1 with a Python >= 3.11. PYTHON=/path/to/python chooses another one.
set -eu
venv=$1

is_new_enough='import sys; raise SystemExit(sys.version_info < (3, 11))'
for python in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.14 none; do
    if "$python" -c "$is_new_enough" 2>/dev/null; then break; fi
done
if [ "$python" = none ]; then
    echo "setup: no Python >= 3.11 found; install one (Debian 12 or later: apt-get install python3 python3-venv) or run make with PYTHON=/path/to/python" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip; ensurepip.version()' 2>/dev/null; then
    echo "setup: $python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
fi

echo "setup: $venv with $("$python" --version)"
"$python" -m venv "$venv" || { rm -rf "$venv"; exit 1; }
