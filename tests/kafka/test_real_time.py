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
from tests.kafka.row_receiver import RowReceiver, row_sender_jar
from tests.kafka.scene import KEYS, Producing, server
from tests.kafka.truth import NO_FACTS, Facts, Truth

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
PARTITIONS = 4
# Of the tests' Spark.
SHUFFLE_PARTITIONS = 2
BATCH_S = 2


def read_facts(client: redis.Redis) -> Facts:
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
                found = read_facts(client)
                if not self.seen or self.seen[-1] != found:
                    self.seen.append(found)

    def stop(self) -> None:
        """Read no more."""
        self._is_over.set()
        self._thread.join()


def test_readers_see_whole_batches_despite_kills_of_query_and_attachment(kafka: Broker, tmp_path: Path) -> None:
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
                eventually(lambda: read_facts(client), read_facts(client).__ne__, awaited="another batch")
                sleep(random.random() * BATCH_S)
                killed = round_ % 2
                running[killed].kill()
                running[killed] = Process((query, attach)[killed])
            running[0].wait_for("ready")
            producing.stop()
            truth = Truth(kafka, topic, checkpoints / ATTACHED)
            eventually(lambda: read_facts(client), truth.of_topic().__eq__, awaited="the whole topic")
        finally:
            producing.stop()
            reading.stop()
            for process in running:
                process.kill()
    batches = truth.of_batches()
    places = [batches.index(each) for each in reading.seen]
    assert places == sorted(places) and len(places) > ROUNDS


def test_rows_that_jvm_writer_got_up_to_commit_are_state_at_commit(kafka: Broker, tmp_path: Path) -> None:
    topic, receiver = "real-time-rows", RowReceiver()
    kafka.create(topic, PARTITIONS)
    checkpoint = tmp_path / "checkpoints" / ATTACHED
    orders = Orders(
        kafka.address, topic, "", str(tmp_path / "checkpoints"), "rocksdb", f"{BATCH_S} seconds", receiver.port
    )
    command = [sys.executable, "-m", "tests.kafka.job", json.dumps(asdict(orders))]

    def wait_for_committed_rows() -> None:
        """Wait for rows, and then for a commit: the first batches of a slow machine read nothing."""
        for read in (lambda: receiver.received, lambda: len(list(checkpoint.glob("commits/[0-9]*")))):
            eventually(read, read().__lt__, awaited="rows, or a commit", processes=[driver.popen])

    row_sender_jar()
    producing = Producing(kafka, topic)
    driver = Process(command)
    try:
        for _ in range(ROUNDS):
            driver.wait_for("ready")
            wait_for_committed_rows()
            before = receiver.received
            eventually(lambda: receiver.received > before, bool, awaited="rows of the next batch")  # noqa: B023
            driver.kill()
            driver = Process(command)
        driver.wait_for("ready")
        wait_for_committed_rows()
    finally:
        producing.stop()
        driver.kill()
        receiver.close()
    truth = Truth(kafka, topic, checkpoint).of_batches()
    assert receiver.states(len(truth) - 1, SHUFFLE_PARTITIONS) == truth[1:] and truth[-1] != NO_FACTS
    assert receiver.voided, "no run had opened a batch that a later one committed"
    hops = sorted(receiver.hops_ms)
    print(
        f"{ROUNDS} kills, {len(truth) - 1} batches, {receiver.received:,} rows, of which {receiver.voided:,} last "
        f"values of keys were voided; from process() to the receiver: p50 {hops[len(hops) // 2]:.1f} ms, "
        f"p99 {hops[len(hops) * 99 // 100]:.1f} ms"
    )
