#!/bin/sh
# Build what `make test-kubernetes` starts, from Go modules into build/kubernetes: etcd, and the API server, controller manager and
# kubectl of Kubernetes. A quarter of an hour of processor time and 3 GB, once. Without Go 1.21 or later (which fetches the version
# that is needed) the tests are skipped.
set -eu
version=1.37.2
etcd=3.7.0

command -v go >/dev/null || exit 0
[ -e "build/kubernetes/.ready-$version" ] && exit 0
echo "setup: building the API server of Kubernetes $version (a quarter of an hour)"
mkdir -p build/kubernetes
cd build/kubernetes
rm -f go.mod go.sum
sources=$(GOFLAGS=-mod=mod go mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
{
    sed -n 's/^go /&/p' "$sources/go.mod" | sed '1i module build'
    echo "require k8s.io/kubernetes v$version"
    echo "require go.etcd.io/etcd/server/v3 v$etcd"
    # The modules of Kubernetes' own repository have the version 0.MINOR.PATCH.
    sed -n "s#^[[:space:]]*\(k8s.io/[a-z-]*\) v0.0.0\$#replace \1 => \1 v0.${version#*.}#p" "$sources/go.mod"
} >go.mod
commands=k8s.io/kubernetes/cmd
CGO_ENABLED=0 GOFLAGS=-mod=mod nice go build -buildvcs=false -trimpath -ldflags '-s -w' -o bin/ \
    go.etcd.io/etcd/server/v3 $commands/kube-apiserver $commands/kube-controller-manager $commands/kubectl
mv bin/server bin/etcd
touch ".ready-$version"
