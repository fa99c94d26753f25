"""Messages and notifications as real clients get them, from a server and through a proxy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from compat.conformance.servers import (
    CONTROL_TOKEN,
    Running,
    free_port,
    sparkis_proxy,
    sparkis_server,
    wait_for_keys,
)
from compat.waiting import WAIT_S_MAX
from resp_server.net.client import Client
from state_backend.model.descriptor import StateDescriptor
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op

KEY, CHANNEL = "job:n:a", "__keyspace@0__:job:n:a"
EPOCHS = "__sparkis__:epoch:job"


class Job:
    """A job, a server of all slots, and a proxy in front of it; both notify of everything."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._writer = stack.enter_context(LogWriter(folder / "log", "job", [StateDescriptor("n", key="k", value="v")]))
        self._writer.publish([Change("n", Op.PUT, KEY.encode(), value=b"0")])
        port, topology = free_port(), folder / "cluster.json"
        node = {"host": "127.0.0.1", "port": port, "slots": "0-16383"}
        topology.write_text(json.dumps({"version": 1, "nodes": [node]}))
        all_events = ("--notify-keyspace-events", "KEA")
        options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}", *all_events)
        self.server = stack.enter_context(sparkis_server(folder / "store", folder / "log", *options, port=port))
        self.proxy = stack.enter_context(sparkis_proxy(topology, "--server-timeout", "60000", *all_events))
        wait_for_keys(self.proxy, 1)
        self._control = stack.enter_context(
            Client("127.0.0.1", self.server.control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX)
        )
        self.epoch = 0

    def publish(self) -> None:
        """Publish an epoch that changes the key."""
        self.epoch = self._writer.publish([Change("n", Op.PUT, KEY.encode(), value=b"%d" % (self.epoch + 1))])
        self._control.call("NOTICE", "job", str(self.epoch))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path_factory.mktemp("messages"), stack)


@pytest.fixture(params=["server", "proxy"])
def endpoint(request: pytest.FixtureRequest, job: Job) -> Running:
    running: Running = getattr(job, request.param)
    return running


def next_message(pubsub: Any) -> tuple[Any, Any]:
    found = None
    while found is None:
        found = pubsub.get_message(ignore_subscribe_messages=True, timeout=WAIT_S_MAX)
    return found["channel"], found["data"]


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_gets_messages_notifications_and_epochs(endpoint: Running, job: Job, protocol: int) -> None:
    options: dict[str, Any] = {"port": endpoint.port, "protocol": protocol, "decode_responses": True}
    with redis.Redis(**options) as client, redis.Redis(**options) as reader, client.pubsub() as pubsub:
        pubsub.subscribe("news", EPOCHS)
        pubsub.psubscribe("__keyspace@0__:job:*")
        for _ in range(3):  # the answers, so that all of it holds
            assert pubsub.get_message(timeout=WAIT_S_MAX)["type"] in ("subscribe", "psubscribe")
        assert reader.publish("news", "hello") == 1
        assert next_message(pubsub) == ("news", "hello")
        job.publish()
        received = dict(next_message(pubsub) for _ in range(2))
        assert received[CHANNEL] == "set"
        assert json.loads(received[EPOCHS]) == {"job": "job", "term": 1, "epoch": job.epoch}
        assert reader.get(KEY) == str(job.epoch)
        pubsub.unsubscribe()
        pubsub.punsubscribe()


@pytest.mark.parametrize("script", ["ioredis.mjs", "node_redis.mjs"])
def test_javascript_clients_get_messages_notifications_and_epochs(
    script: str, run_script: Any, endpoint: Running, job: Job
) -> None:
    found = run_script(script, "messages", endpoint, CHANNEL, EPOCHS, meanwhile=job.publish)
    assert found["received"] == 1
    assert found["message"] == ["news", "hello"]
    assert found["notification"] == [CHANNEL, "set"]
    assert json.loads(found["epoch"][1]) == {"job": "job", "term": 1, "epoch": job.epoch}
