"""A driver with a real query is killed and started again: its state is readable all the time, at one URL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from compat.waiting import WAIT_S_MAX, eventually
from resp_server.programs.executor_supervisor import start_of

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from tests.spark.micro_batches import Batches, local_session
import sparkis

place, value = Path(sys.argv[1]), int(sys.argv[2])
spark = local_session("local[1]")
endpoint = sparkis.serve(spark, log=place / "log")
stream = Batches(spark, place / "stream", "k string, v int")
stream.add({"k": "a", "v": value})
writer = sparkis.queryable(stream.df, "last", key="k", value="v", mode="append", wait_for_visibility=True)
query = writer.queryName("job").option("checkpointLocation", str(place / "checkpoint")).start()
query.processAllAvailable()
print(endpoint.url, endpoint.pid, flush=True)
query.awaitTermination()
"""


class Reads(threading.Thread):
    """Reads a key again and again, on new connections."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.ended = threading.Event()
        self.values: list[str] = []
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            try:
                with redis.Redis.from_url(self._url, decode_responses=True) as client:
                    value = str(client.get("job:last:a"))
            except redis.RedisError as error:
                value = repr(error)
            if value not in self.values[-1:]:
                self.values.append(value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path
    stop = [sys.executable, "-m", "sparkis", "stop", "--log", str(tmp_path / "log")]
    subprocess.run(stop, capture_output=True, timeout=WAIT_S_MAX, check=False)


def driver(place: Path, value: int) -> tuple[subprocess.Popen[str], str, int]:
    """Start a driver; return it, its URL, and the server's process id, once its first micro-batch is readable."""
    log = (place / "driver.log").open("a")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(place), str(value)],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, (place / "driver.log").read_text()[-2000:]
    return process, words[0], int(words[1])


def kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the JVM, too
    process.wait()


@pytest.mark.spark
@pytest.mark.slow  # tests/adversity/test_driver_kill.py kills drivers beside readers, too
def test_a_jobs_state_is_readable_while_its_driver_is_killed_and_started_again(place: Path) -> None:
    first, url, pid = driver(place, 1)
    reads = Reads(url)
    try:
        eventually(lambda: reads.values, lambda values: values == ["1"])
        kill(first)
        second, *again = driver(place, 2)
        try:
            assert again == [url, pid]
            eventually(lambda: reads.values, lambda values: values == ["1", "2"])
        finally:
            kill(second)
    finally:
        reads.ended.set()
        reads.join()
    assert reads.values == ["1", "2"]
    assert start_of(pid) is not None
