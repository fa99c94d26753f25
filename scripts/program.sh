#!/bin/sh
# Install a program with apt-get if it is missing: redis-server, which many tests start and compare sparkis with, nutcracker (twemproxy),
# the peer of the benchmarks of the proxy, prometheus, for a slow test (300 MB), or chromedriver with its Chromium, for the tests of the
# page.
set -eu

program=$1
brew=$2
package=${3:-$program}  # of Debian

if command -v "$program" >/dev/null; then exit 0; fi
if ! sh scripts/apt.sh "$package"; then
    echo "setup: $program is missing; install it (Debian and Ubuntu: apt-get install $package, macOS: brew install $brew)" >&2
    exit 1
fi
