"""What docs/kafka.md prints, and its commands with the test's own ports and folders in place of the page's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from compat.waiting import WAIT_S_MAX, eventually
from tests.kafka.broker import Broker, java

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
[JOB] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
[EXPORT] = re.findall(r"^export PYSPARK_SUBMIT_ARGS=.*$", PAGE, re.MULTILINE)
# Of PySpark, and of its Kafka package.
[VERSION] = re.findall(r"`spark-sql-kafka-0-10_2.13:(\S+)`", PAGE)
MESSAGES = re.findall(r"^>(.*)$", PAGE, re.MULTILINE)
[PRODUCER] = re.findall(r"^\$ (kafka-console-producer.sh .*)$", PAGE, re.MULTILINE)
READS = re.findall(r"^\$ (redis-cli .*)\n((?:(?:\d\) )?\".*\n)*)", PAGE, re.MULTILINE)
PAGE_PORT, PAGE_BROKER = "7379", "localhost:9092"


def job_of(kafka: Broker, port: int, folder: Path) -> str:
    """Return the page's job."""
    job = JOB.replace(PAGE_PORT, str(port)).replace(PAGE_BROKER, kafka.address)
    return job.replace("/data/", f"{folder}/")


def produce(kafka: Broker) -> None:
    """Write the page's messages with its producer."""
    program, *arguments = PRODUCER.replace(PAGE_BROKER, kafka.address).split()
    typed = "".join(f"{each}\n" for each in MESSAGES)
    subprocess.run(java(program, *arguments), input=typed, text=True, check=True, timeout=WAIT_S_MAX)
    eventually(lambda: kafka.ends("orders") == {0: len(MESSAGES)}, awaited="the messages")


def wait_for_reads(port: int) -> None:
    """Wait until each redis-cli of the page prints what the page shows."""
    assert len(READS) == 4
    for command, printed in READS:
        _wait_for_output(command.replace(PAGE_PORT, str(port)), printed)


def _wait_for_output(command: str, printed: str) -> None:
    """Wait until redis-cli prints this on a terminal."""
    environment = os.environ | {"FAKETTY": "1"}

    def output() -> str:
        done = subprocess.run(command.split(), env=environment, capture_output=True, timeout=WAIT_S_MAX, check=False)
        return done.stdout.decode()

    eventually(output, lambda found: found == printed, awaited=command)
