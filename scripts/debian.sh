#!/bin/sh
# Make a Debian with systemd, Python and a compiler in build/debian, with debootstrap, as root: 600 MB and some minutes, once.
# The systemd of `make test-systemd` runs in it.
set -eu
suite=trixie

[ -e build/debian/.ready ] && exit 0
sh scripts/program.sh debootstrap debootstrap
sh scripts/program.sh systemd-nspawn systemd systemd-container
echo "setup: making a Debian in build/debian (600 MB)"
rm -rf build/debian
mkdir -p build
debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,python3,python3-venv,python3-dev,python3-pip,gcc,libc6-dev,ca-certificates \
    "$suite" build/debian >build/debootstrap.log || { tail -5 build/debootstrap.log >&2; exit 1; }
touch build/debian/.ready
