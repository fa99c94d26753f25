#!/bin/sh
# Build the image of deploy/container/Containerfile for `make test-image`, as root, and unpack it in build/image/root.
#
# The base is no download: debootstrap makes a Debian with the same Python and nothing that the official image lacks, and it is
# imported under the base's name. `chroot` isolation needs no cgroups.
set -eu
[ "$(id -u)" = 0 ] || exit 0
suite=trixie # its Python is that of deploy/container/Containerfile
sh scripts/program.sh debootstrap debootstrap
sh scripts/program.sh podman podman
sh scripts/program.sh iptables iptables # podman publishes ports by it
sh scripts/program.sh ip iproute2 iproute2

folder=$PWD/build/image
base=$(sed -n 's/^FROM \([^ ]*\)$/\1/p' deploy/container/Containerfile)
mkdir -p "$folder"
# A build takes 1.2 GB. With `vfs`, which copies the base for each layer, it took 25.
podman() { command podman --root "$folder/store" --runroot "$folder/run" --storage-driver overlay --cgroup-manager cgroupfs "$@"; }
if ! podman image exists "docker.io/library/$base"; then
    echo "setup: making the base of the image, in the place of $base"
    rm -rf "$folder/base"
    debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata,python3,python3-pip,python3-venv "$suite" "$folder/base" \
        >"$folder/debootstrap.log" || { tail -5 "$folder/debootstrap.log" >&2; exit 1; }
    # The official image has Python's headers, and no bytecode of its modules; the rest is what Debian's slim images leave out.
    chroot "$folder/base" /bin/sh -euc '
        cd /tmp
        version=$(python3 -c "import sys; print(\"python%d.%d\" % sys.version_info[:2])")
        apt-get download "lib$version-dev" >/dev/null
        dpkg-deb --fsys-tarfile lib*-dev_*.deb | tar --extract --directory / ./usr/include
        rm lib*-dev_*.deb
        ln -sf /usr/bin/python3 /usr/local/bin/python
        rm -rf /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /var/cache/apt /var/lib/apt/lists /var/log/*
        find /usr/lib/python3* -name __pycache__ -prune -exec rm -r {} +
        mkdir -p /var/cache/apt/archives/partial /var/lib/apt/lists/partial
    '
    cat >"$folder/base/etc/apt/apt.conf.d/docker-clean" <<'EOF'
// As in the official image: apt keeps no packages and no cache.
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
EOF
    tar --create --directory "$folder/base" . | podman import --quiet - "docker.io/library/$base"
    rm -rf "$folder/base"
fi
echo "setup: building the image"
# The settings of pip, and the certificates that it trusts, are this machine's.
settings=$(env | sed -n 's/^\(PIP_[A-Z_]*=.*\)/--env=\1/p')
# These are fewer open files and processes than podman asks for, which a machine may not allow.
# shellcheck disable=SC2086
podman build --format docker --isolation=chroot --pull=never --network=host --quiet $settings \
    --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 --volume /etc/ssl/certs:/etc/ssl/certs:ro \
    --file deploy/container/Containerfile --tag sparkis:test . >"$folder/id"
rm -rf "$folder/root"
mounted=$(podman image mount sparkis:test)
cp -a "$mounted" "$folder/root"
podman image unmount sparkis:test >/dev/null
podman image inspect sparkis:test >"$folder/image.json"
megabytes() { du --apparent-size --block-size=1000000 --summarize "$folder/root$1" | cut -f 1; }
echo "setup: the image has $(megabytes /) MB; $(megabytes /opt/sparkis) MB are sparkis and its packages"
