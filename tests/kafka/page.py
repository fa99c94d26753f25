"""A page of docs/ with a job that reads Kafka, with the test's own ports and folders in place of the page's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compat.waiting import WAIT_S_MAX, eventually
from tests.kafka.broker import BUILD, Broker, java

DOCS = Path(__file__).parents[2] / "docs"
PAGE_PORT, PAGE_BROKER = "7379", "localhost:9092"
PROMPT = f"127.0.0.1:{PAGE_PORT}> "


class Page:
    """What a page prints.

    Attributes:
        export: The line that has Spark fetch its Kafka package.
        name: The name of the job's file.
    """

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text()
        [(self.name, self._job)] = re.findall(r"^<!-- (\S+\.py) -->\n```python\n(.*?)^```", self.text, re.M | re.S)
        [self._log] = re.findall(r'sparkis\.serve\(spark, log="/data/([^"]+)"', self._job)
        [self.export] = re.findall(r"^export PYSPARK_SUBMIT_ARGS=.*$", self.text, re.M)
        self._messages = re.findall(r"^>(.*)$", self.text, re.M)
        [self._producer] = re.findall(r"^\$ (kafka-console-producer.sh .*)$", self.text, re.M)
        self._reads = re.findall(r"^\$ (redis-cli .*)\n((?:(?:\d\) )?\".*\n)+)", self.text, re.M)
        self._typed = re.findall(rf"^{PROMPT}(.*)\n(.*\n)", self.text, re.M)

    def job(self, kafka: Broker, port: int, folder: Path) -> str:
        """Return the job."""
        job = self._job.replace(PAGE_PORT, str(port)).replace(PAGE_BROKER, kafka.address)
        return job.replace("/data/", f"{folder}/")

    @contextmanager
    def running(self, kafka: Broker, port: int, folder: Path, python: Path, export: str) -> Iterator[None]:
        """Run the job in a Python, after an export, with a topic of its own; its processes are killed at the end."""
        kafka.create("orders")
        (folder / self.name).write_text(self.job(kafka, port, folder))
        environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
        environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYSPARK_PYTHON": str(python)}
        with (folder / "output").open("wb") as output:
            commands = ["bash", "-c", f"{export}\nexec python {self.name}"]
            driver = subprocess.Popen(
                commands, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
            # The server has a session of its own, and outlives the driver.
            stop = [sys.executable, "-m", "sparkis", "stop", "--log", str(folder / self._log)]
            subprocess.run(stop, timeout=WAIT_S_MAX, check=True)
            kafka.delete("orders")

    def produce(self, kafka: Broker) -> None:
        """Write the messages with the page's producer."""
        program, *arguments = self._producer.replace(PAGE_BROKER, kafka.address).split()
        typed = "".join(f"{each}\n" for each in self._messages)
        subprocess.run(java(program, *arguments), input=typed, text=True, check=True, timeout=WAIT_S_MAX)
        eventually(lambda: kafka.ends("orders") == {0: len(self._messages)}, awaited="the messages")

    def wait_for_reads(self, port: int, count: int) -> None:
        """Wait until each redis-cli of the page prints what the page shows."""
        assert len(self._reads) == count
        for command, printed in self._reads:
            eventually(lambda: output_of(command, port), lambda found: found == printed, awaited=command)  # noqa: B023

    def check_typed_commands(self, port: int) -> None:
        """Compare what redis-cli prints for the commands at its prompt."""
        assert self._typed
        typed = "".join(f"{command}\n" for command, _ in self._typed)
        assert output_of(f"redis-cli -p {PAGE_PORT}", port, typed) == "".join(printed for _, printed in self._typed)


def kept(export: str) -> str:
    """Return an export whose packages are kept for other runs."""
    return export.replace('"--', f'"--conf spark.jars.ivy={BUILD / "ivy"} --', 1)


def output_of(command: str, port: int, typed: str = "") -> str:
    """Return what redis-cli prints on a terminal."""
    words = command.replace(PAGE_PORT, str(port)).split()
    environment = os.environ | {"FAKETTY": "1"}
    return subprocess.run(
        words, env=environment, input=typed, stdout=subprocess.PIPE, text=True, timeout=WAIT_S_MAX, check=False
    ).stdout
