#!/bin/sh
# Build the image of deploy/container/Containerfile for `make test-image`, as root, and unpack it in build/image/root.
#
# The base is no download: a Debian made by debootstrap, with a Python of the same version, is imported under the base's name. It is
# larger, so what is compared is what the image adds to its base. `chroot` isolation needs no cgroups, and no engine that runs.
set -eu
[ "$(id -u)" = 0 ] || exit 0
sh scripts/debian.sh
sh scripts/program.sh podman podman

folder=$PWD/build/image
base=$(sed -n 's/^FROM \([^ ]*\)$/\1/p' deploy/container/Containerfile)
mkdir -p "$folder"
podman() { command podman --root "$folder/store" --runroot "$folder/run" --storage-driver vfs --cgroup-manager cgroupfs "$@"; }
if ! podman image exists "docker.io/library/$base"; then
    echo "setup: importing build/debian as $base"
    ln -sf /usr/bin/python3 build/debian/usr/local/bin/python
    tar --create --directory build/debian . | podman import --quiet - "docker.io/library/$base"
fi
echo "setup: building the image"
# The settings of pip, and the certificates that it trusts, are this machine's.
settings=$(env | sed -n 's/^\(PIP_[A-Z_]*=.*\)/--env=\1/p')
# shellcheck disable=SC2086
podman build --format docker --isolation=chroot --pull=never --network=host --quiet $settings --volume /etc/ssl/certs:/etc/ssl/certs:ro \
    --file deploy/container/Containerfile --tag sparkis:test . >"$folder/id"
rm -rf "$folder/root"
mounted=$(podman image mount sparkis:test)
cp -a "$mounted" "$folder/root"
podman image unmount sparkis:test >/dev/null
podman image inspect sparkis:test >"$folder/image.json"
