"""The file of a store is damaged under a running `sparkis serve`: no client reads a wrong value, and it is rebuilt."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from compat.conformance.servers import free_port
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATES = [StateDescriptor("n", key="k", value="v")]
VALUES = {f"job:n:{number}": f"value {number} " * 20 for number in range(300)}
DAMAGED = 77


@contextmanager
def plain_serve(folder: Path, log: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program as a person does."""
    command = [sys.executable, "-m", "resp_server.programs.serve", "--log", str(log), "--store", str(folder)]
    process = subprocess.Popen([*command, "--port", str(port), "--bind", "127.0.0.1", "--loglevel", "error", *options])
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(30) == 0


class Readers:
    """Clients that ask for all keys all the time, each key by itself, and connect again when a connection breaks."""

    def __init__(self, port: int) -> None:
        self.errors: Counter[str] = Counter()
        self.wrong: list[tuple[str, str | None]] = []
        self.rounds = 0  # in a row in which every answer was right
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                # One connection and no pool, which would mend a connection that broke between two requests in silence.
                client = redis.Redis(
                    port=self._port, decode_responses=True, retry=Retry(NoBackoff(), 0), single_connection_client=True
                )
                while not self._is_over.wait(READ_PAUSE_S):
                    self.wrong += [
                        (key, found) for key, value in VALUES.items() if (found := read(client, key)) != value
                    ]
                    self.rounds += 1
            except redis.RedisError as error:
                self.errors[type(error).__name__] += 1
                self.rounds = 0
                sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def read(client: redis.Redis, key: str) -> str:
    """Return a value as the store has it: GET is answered from replies that the server still has, and rightly so."""
    found = client.getrange(key, 0, -1)
    assert isinstance(found, str)
    return found


def spoil(data: Path) -> None:
    """Flip a bit of one key's value, in every copy of it in the file."""
    needle = f"value {DAMAGED} ".encode() * 20
    stored = data.read_bytes()
    with open(data, "r+b") as file:
        at = stored.find(needle)
        assert at >= 0
        while at >= 0:
            file.seek(at + 6)
            file.write(bytes([stored[at + 6] ^ 1]))
            at = stored.find(needle, at + 1)


def cut(data: Path) -> None:
    os.truncate(data, 3 * 4096)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("damage", [spoil, cut])
def test_store_that_is_damaged_under_server_mends_itself(tmp_path: Path, damage: object, workers: int) -> None:
    assert callable(damage)
    log, folder, port = tmp_path / "log", tmp_path / "store", free_port()
    with LogWriter(log, "job", STATES, "q") as writer:
        writer.publish(Change("n", Op.PUT, key.encode(), None, value.encode()) for key, value in VALUES.items())
    with plain_serve(folder, log, port, "--workers", str(workers)) as process:
        readers = Readers(port)
        eventually(lambda: readers.rounds >= 2, awaited="two rounds of reads")
        before = Counter(readers.errors)  # of the start
        (data,) = folder.glob("job/*/data.mdb")
        damage(data)
        eventually(
            lambda: readers.rounds >= 2 and list(folder.glob("job/*/data.mdb")) != [data] and not data.exists(),
            awaited="the store is built anew",
        )
        assert process.poll() is None
        readers.stop()
    assert readers.wrong == []
    assert readers.errors - before
