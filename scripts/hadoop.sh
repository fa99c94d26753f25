#!/bin/sh
# Fetch what `make test-hadoop` needs with Maven into build/hadoop: Hadoop's daemons, of the version of the client that is among the jars of
# the PySpark in the virtual environment $1.
set -eu
venv=$1
pom=tests/hadoop/pom.xml

jars=$("$venv/bin/python" -c 'import pyspark; print(pyspark.__path__[0])')/jars
hadoop=$(basename "$jars"/hadoop-client-api-*.jar .jar)
hadoop=${hadoop#hadoop-client-api-}
[ -e "build/hadoop/.ready-$hadoop" ] && [ ! "$pom" -nt "build/hadoop/.ready-$hadoop" ] && exit 0
sh scripts/program.sh mvn maven maven
echo "setup: fetching Hadoop $hadoop (65 MB) with Maven"
rm -rf build/hadoop
mvn --batch-mode --quiet --file "$pom" -Dhadoop="$hadoop" dependency:copy-dependencies -DoutputDirectory="$PWD/build/hadoop/jars"
touch "build/hadoop/.ready-$hadoop"
