"""A real Kafka broker, one node that is its own controller, and its tools."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX, eventually

# What `scripts/kafka.sh` fetches.
BUILD = Path(__file__).parents[2] / "build" / "kafka"
BROKER = BUILD / "broker"
CONNECTOR = BUILD / "connector"
CLUSTER_ID = "sparkis-tests-00000000"
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.backoff.ms=100
"""
# The programs of Kafka's own scripts.
TOOLS = {
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-storage.sh": "kafka.tools.StorageTool",
    "kafka-server-start.sh": "kafka.Kafka",
}


def java(tool: str, *arguments: str) -> list[str]:
    """Return the command of one of Kafka's tools."""
    options = ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    return ["java", *options, "-cp", f"{BROKER}/*", TOOLS[tool], *arguments]


@dataclass
class Message:
    """A message to be written. partition: -1: the producer chooses one by the key, as Java's does."""

    value: bytes | None
    key: bytes | None = None
    partition: int = -1
    timestamp_ms: int = 0


@dataclass
class Broker:
    """A running broker."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    admin: AdminClient = field(init=False)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    @property
    def address(self) -> str:
        """What clients connect to."""
        return f"127.0.0.1:{self.port}"

    def create(self, topic: str, partitions: int = 1, **settings: str) -> None:
        """Create a topic; `_` in a setting's name stands for a dot."""
        config = {name.replace("_", "."): value for name, value in settings.items()}
        self._resolve(self.admin.create_topics([NewTopic(topic, partitions, 1, config=config)]))

    def delete(self, topic: str) -> None:
        """Delete a topic, and wait until it is gone."""
        self._resolve(self.admin.delete_topics([topic]))
        eventually(lambda: topic not in self.admin.list_topics(timeout=WAIT_S_MAX).topics, awaited="the topic's end")

    def add_partitions(self, topic: str, count: int) -> None:
        """Have a topic so many partitions from now on."""
        self._resolve(self.admin.create_partitions([NewPartitions(topic, count)]))
        eventually(lambda: len(self.partitions(topic)) == count, awaited="the new partitions")

    def configure(self, topic: str, **settings: str) -> None:
        """Replace a topic's settings."""
        config = {name.replace("_", "."): value for name, value in settings.items()}
        self._resolve(self.admin.alter_configs([ConfigResource(ConfigResource.Type.TOPIC, topic, config)]))

    def partitions(self, topic: str) -> Sequence[int]:
        """Return the numbers of a topic's partitions."""
        return sorted(self.admin.list_topics(topic, WAIT_S_MAX).topics[topic].partitions)

    def producer(self) -> Producer:
        """Return a producer for several writes; it learns late of new partitions."""
        return Producer({"bootstrap.servers": self.address, "partitioner": "murmur2_random", "linger.ms": 0})

    def write(self, topic: str, messages: Sequence[Message], producer: Producer | None = None) -> None:
        """Write messages, and wait until the broker has them."""
        producer = producer or self.producer()
        failed: list[object] = []

        def on_delivery(error: object, _: object) -> None:
            if error is not None:
                failed.append(error)

        for each in messages:
            producer.produce(
                topic,
                each.value,
                each.key,
                each.partition,
                on_delivery=on_delivery,
                timestamp=each.timestamp_ms,
            )
            producer.poll(0)
        assert producer.flush(WAIT_S_MAX) == 0
        assert not failed, failed

    def ends(self, topic: str) -> Mapping[int, int]:
        """Return the end offset of each of a topic's partitions."""
        with self._consumer() as consumer:
            places = [TopicPartition(topic, number) for number in self.partitions(topic)]
            return {each.partition: consumer.get_watermark_offsets(each, WAIT_S_MAX)[1] for each in places}

    def messages(self, topic: str) -> Sequence[Any]:
        """Return all messages of a topic up to its end, in the order of their partitions, then of their offsets."""
        found = []
        with self._consumer() as consumer:
            for partition, end in self.ends(topic).items():
                place = TopicPartition(topic, partition, 0)
                consumer.assign([place])
                while consumer.position([place])[0].offset < end:
                    message = consumer.poll(1)
                    if message is None:
                        continue
                    if message.error() is not None:
                        raise KafkaException(message.error())
                    found.append(message)
        return found

    @contextmanager
    def _consumer(self) -> Iterator[Consumer]:
        settings = {"bootstrap.servers": self.address, "group.id": "the tests", "enable.auto.commit": False}
        consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
        try:
            yield consumer
        finally:
            consumer.close()

    @staticmethod
    def _resolve(futures: Mapping[Any, Any]) -> None:
        for each in futures.values():
            each.result(WAIT_S_MAX)


@contextmanager
def broker(folder: Path) -> Iterator[Broker]:
    """Run a broker, whose files are in this folder; it ends with the block."""
    port, settings, log = free_port(), folder / "server.properties", folder / "broker.log"
    settings.write_text(PROPERTIES.format(port=port, controller_port=free_port(), folder=folder))
    format_ = java("kafka-storage.sh", "format", "--cluster-id", CLUSTER_ID, "--config", str(settings))
    subprocess.run(format_, check=True, capture_output=True, timeout=WAIT_S_MAX)
    with log.open("wb") as output:
        command = java("kafka-server-start.sh", str(settings))
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        running = Broker(port, process, log)
        eventually(lambda: _is_ready(running), awaited=log.read_text, processes=[process])
        yield running
    finally:
        process.terminate()
        process.wait()


def _is_ready(running: Broker) -> bool:
    try:
        return bool(running.admin.list_topics(timeout=1).brokers)
    except KafkaException:
        return False
