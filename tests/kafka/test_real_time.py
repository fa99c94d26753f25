"""A query in Real-Time Mode, killed within its batches: readers see whole batches, in order, and each message once."""

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

from compat.waiting import READ_PAUSE_S, eventually
from tests.adversity.scene import Process
from tests.kafka.broker import Broker
from tests.kafka.job import ATTACHED, Orders
from tests.kafka.scene import KEYS, Producing, server

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
PARTITIONS = 4
BATCH_S = 2

# The count, sum and greatest number of each key, in order.
Facts = tuple[tuple[int, int, int], ...]


def shown(client: redis.Redis) -> Facts:
    """Return what one epoch has."""
    with client.pipeline(transaction=True) as pipe:
        for number in range(KEYS):
            pipe.hmget(f"{ATTACHED}:facts:k{number}", ["count", "sum", "max"])
        return tuple(
            (int(count or 0), int(total or 0), int(greatest or 0)) for count, total, greatest in pipe.execute()
        )


class Reading:
    """Reads all keys together, again and again, and keeps each content that it sees, in order."""

    def __init__(self, port: int) -> None:
        self.seen: list[Facts] = []
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with redis.Redis(port=self._port) as client:
            while not self._is_over.wait(READ_PAUSE_S):
                found = shown(client)
                if not self.seen or self.seen[-1] != found:
                    self.seen.append(found)

    def stop(self) -> None:
        """Read no more."""
        self._is_over.set()
        self._thread.join()


class Truth:
    """What each of a query's batches should have, by its offsets in the checkpoint and an independent consumer."""

    def __init__(self, kafka: Broker, topic: str, checkpoint: Path) -> None:
        self._topic, self._checkpoint = topic, checkpoint
        # Of each partition: the key and the number of each message.
        self._messages: list[list[tuple[int, int]]] = [[] for _ in range(PARTITIONS)]
        for message in kafka.messages(topic):
            self._messages[message.partition()].append((int(message.key()[1:]), int(message.value())))

    def of_topic(self) -> Facts:
        """Return the state after all messages."""
        return self._at_each([[len(messages) for messages in self._messages]])[0]

    def of_batches(self) -> list[Facts]:
        """Return the state at the end of each committed batch, in order; the first one is that before all batches."""
        batches = sorted(int(path.name) for path in (self._checkpoint / "commits").iterdir() if path.name.isdigit())
        assert batches[0] == 0, "Spark has removed the first batches"
        return self._at_each([[0] * PARTITIONS, *map(self._ends, batches)])

    def _ends(self, batch: int) -> list[int]:
        (*_, offsets) = (self._checkpoint / "offsets" / str(batch)).read_text().splitlines()
        ends = json.loads(offsets)[self._topic]
        return [ends.get(str(partition), 0) for partition in range(PARTITIONS)]

    def _at_each(self, places: list[list[int]]) -> list[Facts]:
        """Return the state at increasing offsets of all partitions."""
        state, found, before = [(0, 0, 0)] * KEYS, list[Facts](), [0] * PARTITIONS
        for ends in places:
            for messages, begin, end in zip(self._messages, before, ends, strict=True):
                for key, number in messages[begin:end]:
                    count, total, _ = state[key]
                    state[key] = count + 1, total + number, number
            found.append(tuple(state))
            before = ends
        return found


def test_readers_see_whole_batches_however_often_the_query_and_its_attachment_are_killed(
    kafka: Broker, tmp_path: Path
) -> None:
    topic, random = "real-time", Random(3)
    kafka.create(topic, PARTITIONS)
    kafka.create(f"{topic}-results", PARTITIONS)
    log, checkpoints = tmp_path / "log", tmp_path / "checkpoints"
    log.mkdir()
    orders = Orders(kafka.address, topic, str(log), str(checkpoints), "rocksdb", f"{BATCH_S} seconds")
    query = [sys.executable, "-m", "tests.kafka.job", json.dumps(asdict(orders))]
    attach = [sys.executable, "-m", "sparkis", "attach", "--checkpoint", str(checkpoints / ATTACHED)]
    attach += ["--state", "facts", "--log", str(log)]
    committed = checkpoints / ATTACHED / "commits" / "0"
    producing = Producing(kafka, topic)
    with server(log, tmp_path / "store") as port, redis.Redis(port=port) as client:
        reading = Reading(port)
        running = [Process(query)]
        try:
            eventually(lambda: running[0].wait_for("ready") and committed.exists(), bool, processes=[running[0].popen])
            running.append(Process(attach))
            for round_ in range(2 * ROUNDS):
                eventually(lambda: shown(client), shown(client).__ne__, awaited="another batch")
                sleep(random.random() * BATCH_S)
                killed = round_ % 2
                running[killed].kill()
                running[killed] = Process((query, attach)[killed])
            running[0].wait_for("ready")
            producing.stop()
            truth = Truth(kafka, topic, checkpoints / ATTACHED)
            eventually(lambda: shown(client), truth.of_topic().__eq__, awaited="the whole topic")
        finally:
            producing.stop()
            reading.stop()
            for process in running:
                process.kill()
    batches = truth.of_batches()
    places = [batches.index(each) for each in reading.seen]
    assert places == sorted(places) and len(places) > ROUNDS
