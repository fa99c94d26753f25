"""What writes to a topic while drivers are killed, and the server of what they publish."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as numbers_from
from pathlib import Path
from random import Random
from time import monotonic

from tests.adversity.scene import Process
from tests.kafka.broker import Broker, Message

KEYS = 50
MESSAGES_PER_S, PAUSE_S = 2_000, 0.05
# What the producer holds at once: on a busy machine more may be due.
MESSAGES_MAX = 10_000


class Producing:
    """Writes messages until it is stopped. written: how many so far."""

    def __init__(self, kafka: Broker, topic: str, messages_per_s: int = MESSAGES_PER_S) -> None:
        self.written = 0
        self._kafka, self._topic, self._messages_per_s = kafka, topic, messages_per_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        random, numbers, producer = Random(1), numbers_from(), self._kafka.producer()
        began_s = monotonic()
        while not self._is_over.wait(PAUSE_S):
            due = round((monotonic() - began_s) * self._messages_per_s) - self.written
            keys = random.choices(range(KEYS), k=min(due, MESSAGES_MAX))
            messages = [Message(b"%d" % next(numbers), b"k%d" % key) for key in keys]
            self._kafka.write(self._topic, messages, producer)
            self.written += len(keys)

    def stop(self) -> None:
        """Write no more."""
        self._is_over.set()
        self._thread.join()


@contextmanager
def server(log: Path, store: Path) -> Iterator[int]:
    """Serve a log on a port; no driver's end ends this server."""
    command = [sys.executable, "-m", "resp_server.programs.serve", "--child", "--loglevel", "error", "--port", "0"]
    process = Process([*command, "--log", str(log), "--store", str(store)])
    try:
        yield process.wait_for("port")
    finally:
        process.kill()
