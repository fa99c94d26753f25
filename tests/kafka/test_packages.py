"""The line of docs/kafka.md that has Spark fetch its Kafka package, run as it is printed: Ivy needs Maven Central."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX
from tests.kafka.broker import BUILD

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
[EXPORT] = re.findall(r"^export PYSPARK_SUBMIT_ARGS=.*$", PAGE, re.MULTILINE)
[VERSION] = re.findall(r"`spark-sql-kafka-0-10_2.13:(\S+)`", PAGE)
PRINTED_VERSION = "$(python -c 'import pyspark; print(pyspark.__version__)')"
PROGRAM = """
from pyspark.sql import SparkSession
read = SparkSession.builder.getOrCreate().readStream.format("kafka")
print(read.option("kafka.bootstrap.servers", "127.0.0.1:1").option("subscribe", "orders").load().columns)
"""


def test_packages_of_the_tested_version_are_found() -> None:
    assert PRINTED_VERSION in EXPORT
    # What was fetched is kept, with what else the tests fetch.
    command = EXPORT.replace(PRINTED_VERSION, VERSION).replace('"--', f'"--conf spark.jars.ivy={BUILD / "ivy"} --', 1)
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", f'{command}\n"$0" -c "$1"', sys.executable, PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * WAIT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("['key', 'value', 'topic', 'partition', 'offset', 'timestamp'")
