"""The line of docs/kafka.md that has Spark fetch its Kafka package, run as it is printed: Ivy needs Maven Central."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX
from tests.kafka.broker import BUILD, Broker
from tests.kafka.page import EXPORT, VERSION, job_of, produce, wait_for_reads

PRINTED_VERSION = "$(python -c 'import pyspark; print(pyspark.__version__)')"
PROGRAM = """
from pyspark.sql import SparkSession
read = SparkSession.builder.getOrCreate().readStream.format("kafka")
print(read.option("kafka.bootstrap.servers", "127.0.0.1:1").option("subscribe", "orders").load().columns)
"""
# The environment that scripts/spark_venv.sh makes of this version.
PYTHON = Path(sys.prefix) / f"spark-{VERSION}" / "bin" / "python"
# What was fetched is kept, with what else the tests fetch.
KEPT = EXPORT.replace('"--', f'"--conf spark.jars.ivy={BUILD / "ivy"} --', 1)


def test_packages_of_tested_version_are_found() -> None:
    assert PRINTED_VERSION in EXPORT
    command = KEPT.replace(PRINTED_VERSION, VERSION)
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
    kafka.create("orders")
    port = free_port()
    (tmp_path / "orders.py").write_text(job_of(kafka, port, tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    environment |= {"PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "PYSPARK_PYTHON": str(PYTHON)}
    with (tmp_path / "output").open("wb") as output:
        commands = ["bash", "-c", f"{KEPT}\nexec python orders.py"]
        driver = subprocess.Popen(
            commands, cwd=tmp_path, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        produce(kafka)
        wait_for_reads(port)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        # The server has a session of its own, and outlives the driver.
        stop = [sys.executable, "-m", "sparkis", "stop", "--log", str(tmp_path / "sparkis-log")]
        subprocess.run(stop, timeout=WAIT_S_MAX, check=True)
        kafka.delete("orders")
