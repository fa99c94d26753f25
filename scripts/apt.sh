#!/bin/sh
# Install the Debian package $1 with apt-get, as root or with sudo; fail if that is not possible here. The system's service is neither
# started nor enabled.
set -eu
package=$1

if [ "$(id -u)" = 0 ]; then as_root=""; else as_root="sudo -n"; fi
if ! command -v apt-get >/dev/null || ! $as_root true 2>/dev/null; then exit 1; fi

echo "setup: installing $package with apt-get"
# One at a time: others may be at work beside this one, and apt-get does not wait for them.
$as_root mkdir -p /run/lock # a container may lack it
$as_root flock /run/lock/sparkis-program sh -eu -s "$package" <<'END'
package=$1
export DEBIAN_FRONTEND=noninteractive
# With this file Debian does not start the services that it installs.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi
install() { apt-get install -y --no-install-recommends "$package" </dev/null >/dev/null; }
install 2>/dev/null || { apt-get update >/dev/null && install; }
if command -v systemctl >/dev/null; then systemctl --quiet disable "$package" 2>/dev/null || true; fi
END
