"""A driver that reads a topic is killed again and again: each message counts once, and no reader goes back."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import sleep

import pytest
import redis

from compat.waiting import READ_PAUSE_S, eventually
from tests.adversity.scene import Process
from tests.kafka.broker import Broker
from tests.kafka.job import ATTACHED, PROVIDERS, SINK, Orders
from tests.kafka.scene import KEYS, Producing, server

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
PARTITIONS = 4


class Reading:
    """Reads the counts of both jobs; no count may be less than before."""

    def __init__(self, port: int) -> None:
        self.reads, self.wrongs = 0, list[str]()
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = [0] * KEYS * 2
        with redis.Redis(port=self._port) as client:
            while not self._is_over.wait(READ_PAUSE_S):
                found = counts(client)
                self.wrongs += [f"{old}, then {new}" for old, new in zip(before, found, strict=True) if new < old]
                before, self.reads = found, self.reads + 1

    def stop(self) -> None:
        """Read no more; fail if a count was less than before."""
        self._is_over.set()
        self._thread.join()
        assert not self.wrongs, self.wrongs[:3]
        assert self.reads > ROUNDS


def counts(client: redis.Redis) -> list[int]:
    """Return the count of each key, of the sink and then of the attachment."""
    pipe = client.pipeline(transaction=False)
    pipe.mget([f"{SINK}:count:k{number}" for number in range(KEYS)])
    for number in range(KEYS):
        pipe.hget(f"{ATTACHED}:facts:k{number}", "count")
    of_sink, *attached = pipe.execute()
    return [int(each or 0) for each in (*of_sink, *attached)]


def wait_for_more(client: redis.Redis) -> None:
    """Wait until both jobs have counted more messages of each key."""
    before = counts(client)
    eventually(lambda: counts(client), lambda found: all(map(int.__lt__, before, found)), awaited="more messages")


Facts = dict[str, tuple[int, int, int]]


def facts(client: redis.Redis) -> tuple[Facts, Facts]:
    """Return the count, the sum and the last number of each key: those of the sink, and those of the attachment."""
    names, keys = ("count", "sum", "last"), [f"k{number}" for number in range(KEYS)]
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.mget([f"{SINK}:{name}:{key}" for name in names])
        pipe.hmget(f"{ATTACHED}:facts:{key}", names)
    found = [(int(count or 0), int(total or 0), int(last or 0)) for count, total, last in pipe.execute()]
    return dict(zip(keys, found[::2], strict=True)), dict(zip(keys, found[1::2], strict=True))


def truth(kafka: Broker, topic: str) -> Facts:
    """Return the same of all messages of a topic, as an independent consumer finds it."""
    found: Facts = {f"k{number}": (0, 0, 0) for number in range(KEYS)}
    for message in kafka.messages(topic):
        key, number = message.key().decode(), int(message.value())
        count, total, _ = found[key]
        found[key] = count + 1, total + number, number
    return found


@pytest.mark.parametrize("provider", PROVIDERS)
def test_driver_kills_count_each_message_once(provider: str, kafka: Broker, tmp_path: Path) -> None:
    topic, random = f"killed-{provider}", Random(2)
    kafka.create(topic, PARTITIONS)
    orders = Orders(kafka.address, topic, str(tmp_path / "log"), str(tmp_path / "checkpoints"), provider)
    (tmp_path / "log").mkdir()
    command = [sys.executable, "-m", "tests.kafka.job", json.dumps(asdict(orders))]
    producing = Producing(kafka, topic)
    with server(tmp_path / "log", tmp_path / "store") as port, redis.Redis(port=port) as client:
        reading = Reading(port)
        driver = Process(command)
        try:
            for _ in range(ROUNDS):
                driver.wait_for("ready")
                wait_for_more(client)
                sleep(random.random() * 2)
                driver.kill()
                driver = Process(command)
            driver.wait_for("ready")
            producing.stop()
            expected = truth(kafka, topic)
            messages = sum(count for count, _, _ in expected.values())
            assert messages > 1000
            eventually(lambda: facts(client), lambda found: found == (expected, expected))
            print(f"{provider}: {ROUNDS} kills, {messages:,} messages, {KEYS * 2 * reading.reads:,} counts read")
        finally:
            producing.stop()
            reading.stop()
            driver.kill()
