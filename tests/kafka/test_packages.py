"""The line of docs/kafka.md that has Spark fetch its Kafka package, run as it is printed: Ivy needs Maven Central."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX
from tests.kafka.broker import Broker
from tests.kafka.page import Page, kept

PAGE = Page("kafka.md")
# Of PySpark, and of its Kafka package.
[VERSION] = re.findall(r"`spark-sql-kafka-0-10_2.13:(\S+)`", PAGE.text)
PRINTED_VERSION = "$(python -c 'import pyspark; print(pyspark.__version__)')"
PROGRAM = """
from pyspark.sql import SparkSession
read = SparkSession.builder.getOrCreate().readStream.format("kafka")
print(read.option("kafka.bootstrap.servers", "127.0.0.1:1").option("subscribe", "orders").load().columns)
"""
# The environment that scripts/spark_venv.sh makes of this version.
PYTHON = Path(sys.prefix) / f"spark-{VERSION}" / "bin" / "python"


def test_packages_of_tested_version_are_found() -> None:
    assert PRINTED_VERSION in PAGE.export
    command = kept(PAGE.export).replace(PRINTED_VERSION, VERSION)
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


def test_page_runs_as_printed_where_pyspark_has_version_of_package(kafka: Broker, tmp_path: Path) -> None:
    assert PYTHON.exists(), "make test-kafka makes it"
    port = free_port()
    with PAGE.running(kafka, port, tmp_path, PYTHON, kept(PAGE.export)):
        PAGE.produce(kafka)
        PAGE.wait_for_reads(port, 4)
