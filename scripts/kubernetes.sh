#!/bin/sh
# Build what `make test-kubernetes` starts, from Go modules into build/kubernetes: etcd, and the API server, controller manager and
# kubectl of Kubernetes. A quarter of an hour of processor time and 3 GB, once. Go 1.21 or later fetches the version that is needed; without
# it the tests are skipped.
set -eu
version=1.37.2
etcd=3.7.0

[ -e "build/kubernetes/.ready-$version" ] && exit 0
sh scripts/program.sh go go golang-go || exit 0
minor=$(go env GOVERSION | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
if [ "${minor:-0}" -lt 21 ]; then
    echo "setup: $(go version) is too old to build Kubernetes; install Go 1.21 or later" >&2
    exit 0
fi
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
