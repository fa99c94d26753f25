#!/bin/sh
# Make what `make test-systemd` needs: a Debian, and sparkis in it, installed from this checkout as docs/deploy.md says, in
# build/systemd/sparkis, which the machine has as /opt/sparkis. Needs root; without it the tests are skipped.
set -eu
[ "$(id -u)" = 0 ] || exit 0
sh scripts/debian.sh

installed=build/systemd/sparkis
sources="sparkis state_backend resp_server spark_hooks sparkis_ui pyproject.toml setup.py MANIFEST.in README.md LICENSE NOTICE requirements.lock"
# shellcheck disable=SC2086
if [ -e $installed/.ready ] && [ -z "$(find $sources -newer $installed/.ready \( -name '*.py' -o -name '*.p[yx][xd]' -o -name '*.lock' -o -name '*.toml' \) | head -n 1)" ]; then exit 0; fi

echo "setup: installing sparkis in the Debian of build/debian"
mkdir -p $installed build/systemd/source
for each in $sources; do rm -rf "build/systemd/source/$each"; cp -r "$each" build/systemd/source/; done
find build/systemd/source -name '*.so' -delete
# The settings of pip, and the certificates that it trusts, are this machine's.
settings=$(env | sed -n 's/^\(PIP_[A-Z_]*\)=.*/--setenv=\1/p')
# shellcheck disable=SC2086
systemd-nspawn --quiet --register=no --keep-unit --as-pid2 --directory=build/debian --volatile=overlay $settings \
    --bind-ro=/etc/ssl/certs --bind="$PWD/$installed:/opt/sparkis" --bind="$PWD/build/systemd/source:/source" --chdir=/source \
    /bin/sh -eu -c '
        python3 -m venv /opt/sparkis
        /opt/sparkis/bin/pip --quiet wheel --no-deps --constraint requirements.lock --wheel-dir /wheels .
        /opt/sparkis/bin/pip --quiet install --constraint requirements.lock --force-reinstall --no-deps /wheels/sparkis-*.whl
        /opt/sparkis/bin/pip --quiet install --constraint requirements.lock "$(echo /wheels/sparkis-*.whl)[object-store,metrics]"
        /opt/sparkis/bin/python -I -c "import resp_server.native as native; assert native.CORE == \"compiled\""
    ' </dev/null
touch $installed/.ready
