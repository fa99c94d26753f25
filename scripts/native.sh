#!/bin/sh
# Build the compiled core beside its sources, with the environment $1. It needs a C compiler (from PyPI if the machine has none) and
# Python's headers. If it cannot be built, a message says so, and sparkis runs in Python alone. $1/.native says that it is built.
set -eu
venv=$1
python=$PWD/$venv/bin/python
ziglang=0.17.1

find state_backend resp_server benchmarks -name '*.so' -exec rm -f {} +
if [ -n "${SPARKIS_PURE:-}" ]; then
    echo "setup: SPARKIS_PURE is set: no compiled core"
    exit 0
fi

has_header='import os, sysconfig; raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
if ! "$python" -c "$has_header"; then
    version=$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')
    sh scripts/apt.sh "$version" 2>/dev/null || true
fi
if ! "$python" -c "$has_header"; then
    echo "setup: no Python.h (Debian and Ubuntu: apt-get install python3-dev): sparkis runs without its compiled core" >&2
    exit 0
fi

if [ -z "${CC:-}" ] && ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
    echo "setup: no C compiler found; installing one into $venv (ziglang $ziglang)"
    if ! "$python" -m pip install --quiet --disable-pip-version-check --no-input "ziglang==$ziglang"; then
        echo "setup: no C compiler (Debian and Ubuntu: apt-get install gcc): sparkis runs without its compiled core" >&2
        exit 0
    fi
    export CC="$python -m ziglang cc" LDSHARED="$python -m ziglang cc -shared"
fi

echo "setup: compiling the core"
mkdir -p build
if ! "$python" setup.py -q build_ext --inplace >build/native.log 2>&1 || ! "$python" -c 'import resp_server.native.fast_path' 2>>build/native.log; then
    echo "setup: the core could not be compiled (the reason is in build/native.log): sparkis runs without it" >&2
    exit 0
fi
touch "$venv/.native"
