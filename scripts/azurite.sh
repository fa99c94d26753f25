#!/bin/sh
# Install Azurite, a server of Azure's blobs, with npm into build/azurite (190 MB): 3.35.0 is the last one for Node 20.
set -eu
version=3.35.0

[ -e "build/azurite/.ready-$version" ] && exit 0
echo "setup: installing Azurite $version with npm"
mkdir -p build/azurite
npm install --prefix build/azurite --omit=dev --no-audit --no-fund --ignore-scripts --no-update-notifier --loglevel=error "azurite@$version"
touch "build/azurite/.ready-$version"
