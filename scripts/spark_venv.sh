#!/bin/sh
# Make the virtual environment $1/spark-$2 if it is missing: PySpark $2, this checkout, and what the tests of `make test-versions`
# and `scripts/golden_checkpoints.py` need. It prints the environment's Python; the exit code is 3 if the machine has none for
# this Spark. $2 may name the Python, too: 4.3.0-python3.13
#
# Packages beside Spark are the locked ones. Spark 3.5 gets those of its clusters: Databricks Runtime 15.4 has Python 3.11,
# pandas 1.5, pyarrow 14 and numpy 1.23. PySpark 3.5 does not run on Python 3.12 (it imports distutils).
set -eu
venv=$1 version=${2%-python*}
target=$venv/spark-$2
python=$target/bin/python

if [ ! -e "$target/.ready" ]; then
    case $version in
    3.5.*) newest=11 locked='^(pyspark|pandas|pyarrow|numpy|protobuf|googleapis-common-protos|grpcio.*)=' of_spark="pandas==1.5.3 pyarrow==14.0.2 numpy==1.23.5" ;;
    *) newest=13 locked='^pyspark=' of_spark="pandas pyarrow numpy protobuf" ;;
    esac
    case $2 in
    *-python*) bases=python${2##*-python} ;;
    *) bases="$venv/bin/python python3.11 python3.12 python3.13 python3" ;;
    esac
    for base in $bases none; do
        if "$base" -c "import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, $newest + 1))" 2>/dev/null; then break; fi
    done
    if [ "$base" = none ]; then
        echo "spark $version: no Python found of: $bases (3.11 to 3.$newest); install one, such as python3.11 and python3.11-venv" >&2
        exit 3
    fi
    echo "spark $version: making $target with $("$base" --version) (some minutes; Spark alone is 450 MB)" >&2
    [ -x "$python" ] || "$base" -m venv --without-pip "$target"
    grep -vE "^#|$locked" requirements.lock >"$target/constraints.txt"
    # shellcheck disable=SC2086
    "$venv/bin/python" scripts/install.py "$python" -c "$target/constraints.txt" "pyspark==$version" $of_spark \
        lmdb hiredis uvloop rocksdict redis pytest hypothesis trustme setuptools cython
    SPARKIS_PURE=1 "$venv/bin/python" scripts/install.py "$python" --no-deps --no-build-isolation -e .
    touch "$target/.ready"
fi
echo "$python"
