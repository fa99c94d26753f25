#!/bin/sh
# Fetch what `make test-kafka` needs: a broker with its tools, and Spark's connector, with Maven into build/kafka; a client of Python into
# the virtual environment $1; and an environment with the version of PySpark whose Kafka package docs/kafka.md names.
set -eu
venv=$1
client=2.16.1
spark=4.2.0
pom=tests/kafka/pom.xml

sh scripts/program.sh mvn maven maven
if [ ! -e build/kafka/.ready ] || [ "$pom" -nt build/kafka/.ready ]; then
    echo "setup: fetching Kafka (60 MB) and Spark's connector with Maven"
    rm -rf build/kafka
    copy() { mvn --batch-mode --quiet --file "$pom" --activate-profiles "$1" dependency:copy-dependencies -DoutputDirectory="$PWD/build/kafka/$1" $2; }
    copy broker ""
    copy connector -DincludeArtifactIds=spark-sql-kafka-0-10_2.13,spark-token-provider-kafka-0-10_2.13,kafka-clients,commons-pool2
    touch build/kafka/.ready
fi
if ! "$venv/bin/python" -c 'import confluent_kafka' 2>/dev/null; then
    "$venv/bin/python" scripts/install.py "$venv/bin/python" "confluent-kafka==$client"
fi
sh scripts/spark_venv.sh "$venv" $spark >/dev/null
