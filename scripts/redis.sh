#!/bin/sh
# Install the program redis-server with apt-get, as root or with sudo, if it is missing. Many tests start a redis-server and compare
# sparkis with it. The system's service is neither started nor enabled.
set -eu

if command -v redis-server >/dev/null; then exit 0; fi

give_up() {
    echo "setup: the tests need redis-server; install it (Debian and Ubuntu: apt-get install redis-server, macOS: brew install redis)" >&2
    exit 1
}

if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo -n"; fi
if ! command -v apt-get >/dev/null || ! $as_root true 2>/dev/null; then give_up; fi

echo "setup: installing redis-server with apt-get"
$as_root sh -eu <<'EOF' || give_up
export DEBIAN_FRONTEND=noninteractive
# With this file Debian does not start the services that it installs.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi
install() { apt-get install -y --no-install-recommends redis-server </dev/null >/dev/null; }
install 2>/dev/null || { apt-get update >/dev/null && install; }
if command -v systemctl >/dev/null; then systemctl --quiet disable redis-server 2>/dev/null || true; fi
EOF
