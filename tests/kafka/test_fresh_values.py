"""Values before their commit are right, whatever is killed: the driver, the server, the network between both."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import sleep

import redis

from compat.conformance.servers import free_port
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog
from tests.adversity.scene import Process
from tests.kafka.broker import Broker
from tests.kafka.job import ATTACHED, Orders
from tests.kafka.scene import KEYS, Producing
from tests.kafka.truth import NO_FACTS, Facts, Truth
from tests.server.relay import Relay

# Each has three kills.
ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
PARTITIONS = 4
BATCH_S = 2
FIELDS = ("count", "sum", "last")


def key_of(number: int) -> str:
    return f"{ATTACHED}:facts:k{number}"


def read(client: redis.Redis, *, is_committed: bool) -> Facts:
    """Return the facts of each key: those of one epoch, or the newest ones, committed or not."""
    with client.pipeline(transaction=is_committed) as pipe:
        for number in range(KEYS):
            pipe.hmget(key_of(number), FIELDS)
        return tuple((int(count or 0), int(total or 0), int(last or 0)) for count, total, last in pipe.execute())


def of_epoch(log: Path, epoch: int) -> Facts:
    """Return the facts of each key in an epoch of the log."""
    found = []
    with read_snapshot(str(log), ATTACHED, epoch) as snapshot:
        for number in range(KEYS):
            pairs = dict(snapshot.map_pairs(key_of(number).encode()))
            found.append(tuple(int(pairs.get(field.encode(), 0)) for field in FIELDS))
    return tuple(found)  # type: ignore[arg-type]  # three numbers each


class Reading:
    """Reads all keys again and again, while servers come and go.

    Attributes:
        seen: Each value of each key, committed or not.
        taken_back: The number of values that one of fewer rows followed.
        epochs: The committed facts, whenever they changed.
    """

    def __init__(self, port: int) -> None:
        self.seen: list[set[tuple[int, int, int]]] = [set() for _ in range(KEYS)]
        self.taken_back = 0
        self.epochs: list[Facts] = [NO_FACTS]
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = NO_FACTS
        while not self._is_over.wait(READ_PAUSE_S):
            try:
                with redis.Redis(port=self._port) as client:
                    while not self._is_over.wait(READ_PAUSE_S):
                        before = self._look(client, before)
            except redis.RedisError:
                pass  # the server is away, or loading

    def _look(self, client: redis.Redis, before: Facts) -> Facts:
        found = read(client, is_committed=False)
        for seen, value in zip(self.seen, found, strict=True):
            seen.add(value)
        self.taken_back += sum(now[0] < then[0] for now, then in zip(found, before, strict=True))
        committed = read(client, is_committed=True)
        if committed != self.epochs[-1]:
            self.epochs.append(committed)
        return found

    def stop(self) -> None:
        """Read no more."""
        self._is_over.set()
        self._thread.join()


class Parts:
    """A driver, a server that no driver's end ends, and the network between both, on which rows come."""

    def __init__(self, kafka: Broker, topic: str, folder: Path) -> None:
        self.log, self.checkpoint, self.port = folder / "log", folder / "checkpoints" / ATTACHED, free_port()
        self.log.mkdir()
        self._random = Random(5)
        self._network = Relay(self.port)
        orders = Orders(
            kafka.address,
            topic,
            str(self.log),
            str(folder / "checkpoints"),
            "rocksdb",
            f"{BATCH_S} seconds",
            servers=f"redis://127.0.0.1:{self._network.port}",
        )
        self._job = [sys.executable, "-m", "tests.kafka.job", json.dumps(asdict(orders))]
        self._serve = [sys.executable, "-m", "resp_server.programs.serve", "--child", "--loglevel", "error"]
        self._serve += ["--port", str(self.port), "--log", str(self.log), "--store", str(folder / "store")]
        self._server = Process(self._serve)
        self._server.wait_for("port")
        self.driver = Process(self._job)
        self.driver.wait_for("ready")

    def wait_for_fresh_values(self, reading: Reading) -> None:
        """Wait until a new value of a key is shown that no epoch has."""

        def count() -> int:
            return sum(len(values) for values in reading.seen)

        before = count()
        eventually(count, lambda found: found > before + len(reading.epochs), processes=[self.driver.popen])

    def kill_driver(self) -> None:
        self.driver.kill()
        self.driver = Process(self._job)
        self.driver.wait_for("ready")

    def kill_server(self) -> None:
        self._server.kill()
        self._server = Process(self._serve)
        self._server.wait_for("port")

    def cut_network(self) -> None:
        """Let no packet pass for a part of a batch. Connections from before stay silent."""
        self._network.drop()
        sleep(self._random.random() * BATCH_S)
        self._network.restore()

    def kill_each(self, reading: Reading) -> None:
        """Kill all parts once, in any order, at any moment of a batch that shows values before their commit."""
        kills = [self.kill_driver, self.kill_server, self.cut_network]
        self._random.shuffle(kills)
        for kill in kills:
            self.wait_for_fresh_values(reading)
            sleep(self._random.random() * BATCH_S)
            kill()

    def end(self) -> None:
        self.driver.kill()
        self._server.kill()
        self._network.stop()


def test_uncommitted_values_are_those_that_query_emitted_despite_kills(kafka: Broker, tmp_path: Path) -> None:
    topic = "fresh-values"
    kafka.create(topic, PARTITIONS)
    producing, parts = Producing(kafka, topic), Parts(kafka, topic, tmp_path)
    reading, client = Reading(parts.port), redis.Redis(port=parts.port)
    try:
        for _ in range(ROUNDS):
            parts.kill_each(reading)
        parts.wait_for_fresh_values(reading)
        producing.stop()
        truth = Truth(kafka, topic, parts.checkpoint)
        for is_committed in (False, True):
            eventually(lambda: read(client, is_committed=is_committed), truth.of_topic().__eq__)  # noqa: B023
    finally:
        producing.stop()
        reading.stop()
        client.close()
        parts.end()
    batches, emitted = truth.of_batches(), truth.of_keys()
    log = ChangeLog(str(parts.log)).job(ATTACHED)
    current = log.current()
    assert current is not None
    epochs = log.numbers(current.generation)
    assert [of_epoch(parts.log, epoch) for epoch in epochs] == [batches[epoch + 1] for epoch in epochs]
    places = [batches.index(each) for each in reading.epochs]
    assert places == sorted(places)
    for seen, values in zip(reading.seen, emitted, strict=True):
        assert seen <= values
    fresh = sum(len(seen - {facts[number] for facts in batches}) for number, seen in enumerate(reading.seen))
    assert fresh
    print(
        f"{3 * ROUNDS} kills, {len(epochs)} epochs, {fresh} values before their commit, {reading.taken_back} taken back"
    )
