"""Messages and notifications find their subscribers: between workers, the nodes of a cluster, and proxies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from resp_server.backends.servers.relay_connection import CHECK_S, SILENT_TIMEOUTS_MAX
from resp_server.session.subscriptions import SUBSCRIPTIONS_MAX
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of
from tests.server.nodes import HALVES, Nodes

STATES = [StateDescriptor("v", key="k", value="v")]
KEYS = [b"j:v:%d" % each for each in range(20)]
HALF = 8192


class Job:
    """A job that is published to without Spark."""

    def __init__(self, log: Path) -> None:
        self.writer = LogWriter(log, "j", STATES)
        self.epoch = -1
        self.publish([], b"0")

    def publish(self, servers: list[Running], value: bytes) -> None:
        self.epoch = self.writer.publish([Change("v", Op.PUT, key, value=value) for key in KEYS])
        for server in servers:
            with Connection(server.control_port) as connection:
                connection.call("AUTH", CONTROL_TOKEN)
                connection.call("NOTICE", "j", self.epoch)


def subscriber(port: int, *words: str) -> Connection:
    connection = Connection(port)
    connection.call("HELLO", 3)
    assert connection.call(*words).type == ">"
    return connection


def message(connection: Connection) -> list[Any]:
    reply: Reply = connection.read()
    assert reply.type == ">", reply
    return [each.value for each in reply.value]


# -- workers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Job]]:
    log = tmp_path_factory.mktemp("log")
    job = Job(log)
    options = ("--workers", "2")
    with sparkis_server(tmp_path_factory.mktemp("store"), log, *options) as server:
        wait_for_keys(server, len(KEYS))
        yield server, job


def test_message_reaches_clients_of_all_workers_and_they_are_counted(workers: tuple[Running, Job]) -> None:
    server, _ = workers
    listeners = [subscriber(server.port, "SUBSCRIBE", "x") for _ in range(4)]  # spread evenly over two workers
    with Connection(server.port) as publisher:
        assert publisher.call("PUBLISH", "x", b"\xff\x00binary").value == 4
        assert publisher.call("PUBSUB", "NUMSUB", "x", "y").plain == [b"x", 4, b"y", 0]
        assert publisher.call("PUBSUB", "CHANNELS").plain == [b"x"]
        info = publisher.call("INFO", "clients").value
        assert b"pubsub_clients:4\r\n" in info
    for each in listeners:
        assert message(each) == [b"message", b"x", b"\xff\x00binary"]
        each.__exit__()


def test_client_that_publishes_to_itself_gets_reply_first(workers: tuple[Running, Job]) -> None:
    server, _ = workers
    with subscriber(server.port, "SUBSCRIBE", "self") as connection:
        assert connection.call("PUBLISH", "self", "hello").value == 1
        assert message(connection) == [b"message", b"self", b"hello"]


def test_message_that_is_too_long_for_way_between_workers_is_refused(workers: tuple[Running, Job]) -> None:
    server, _ = workers
    with Connection(server.port) as connection:
        reply = connection.call("PUBLISH", "x", "y" * (1 << 20))
        assert reply.value == b"ERR a message may have 1048576 bytes where several workers serve a port"


def test_notifications_reach_clients_of_all_workers(workers: tuple[Running, Job]) -> None:
    server, job = workers
    listeners = [subscriber(server.port, "PSUBSCRIBE", "__keyspace@0__:*") for _ in range(2)]
    with Connection(server.port) as connection:
        assert connection.call("CONFIG", "SET", "notify-keyspace-events", "K$").value == b"OK"
    with Connection(server.port) as connection:
        assert connection.call("CONFIG", "GET", "notify-keyspace-events").plain[1] == b"$K"
    for each in listeners:
        each._socket.settimeout(0.3)

        def received(each: Connection = each) -> list[Any]:
            job.publish([server], b"%d" % job.epoch)
            with suppress(TimeoutError):
                return message(each)
            return []

        found = eventually(received, awaited="a notification")  # appliers begin to keep events in their own time
        assert found[0] == b"pmessage"
        assert found[2].removeprefix(b"__keyspace@0__:") in KEYS
        assert found[3] == b"set"
        each.__exit__()


# -- a cluster and proxies ------------------------------------------------------------------------------------------


class Cluster(Nodes):
    """Two nodes of a topology file, and two proxies in front of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack, *HALVES)
        self.job = Job(self.log)
        self.nodes = [self.start(at, "--notify-keyspace-events", "KEA") for at in range(2)]
        self.proxies = [self.start_proxy("--notify-keyspace-events", "K$") for _ in range(2)]
        for proxy in self.proxies:
            wait_for_keys(proxy, len(KEYS))

    def owner(self, channel: bytes) -> Running:
        return self.nodes[slot_of(channel) >= HALF]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def test_message_reaches_subscribers_at_all_nodes_and_proxies_once(cluster: Cluster) -> None:
    everywhere = [*cluster.nodes, *cluster.proxies]
    listeners = [subscriber(each.port, "SUBSCRIBE", "news") for each in everywhere]
    patterns = [subscriber(each.port, "PSUBSCRIBE", "n?ws") for each in everywhere]
    for number, each in enumerate(everywhere):
        with Connection(each.port) as publisher:
            assert publisher.call("PUBLISH", "news", number).value >= 2
        for listener in listeners:
            assert message(listener) == [b"message", b"news", b"%d" % number]
        for listener in patterns:
            assert message(listener) == [b"pmessage", b"n?ws", b"news", b"%d" % number]
    for each in (*listeners, *patterns):
        each.__exit__()


@pytest.mark.parametrize(
    "words",
    [
        ("GET", "k"),
        ("MGET", "a", "b"),
        ("HGET", "k", "f"),
        ("KEYS", "*"),
        ("DBSIZE",),
        ("STATE", "JOBS"),
        ("ECHO", "a"),
    ],
)
def test_subscriber_of_resp2_may_send_few_commands_to_proxy(cluster: Cluster, words: tuple[str, ...]) -> None:
    port = cluster.proxies[0].port
    name = "|".join(words).lower() if words[0] == "STATE" else words[0].lower()
    with Connection(port) as listener, Connection(port) as in_resp3:
        listener.call("SUBSCRIBE", "c")
        refused = listener.call(*words)
        assert refused.type == "-"
        assert refused.value.startswith(b"ERR Can't execute '%b': only (P|S)SUBSCRIBE" % name.encode())
        assert listener.call("RESET").value == b"RESET"
        assert listener.call(*words).type != "-"
        in_resp3.call("HELLO", 3)
        assert in_resp3.call("SUBSCRIBE", "c").type == ">"
        assert in_resp3.call(*words).type != "-"


def test_proxy_counts_its_own_clients_and_not_itself(cluster: Cluster) -> None:
    proxy = cluster.proxies[0]
    with Connection(proxy.port) as publisher:
        assert publisher.call("PUBLISH", "alone", "x").value == 0
        listeners = [subscriber(proxy.port, "SUBSCRIBE", "alone") for _ in range(3)]
        assert publisher.call("PUBLISH", "alone", "x").value == 3
        for each in listeners:
            assert message(each) == [b"message", b"alone", b"x"]
            each.__exit__()
        assert publisher.call("PUBLISH", "__sparkis__:epoch:j", "x").is_error


def test_shard_channel_is_at_its_slots_node_and_behind_every_proxy(cluster: Cluster) -> None:
    owner = cluster.owner(b"shard")
    other = next(each for each in cluster.nodes if each is not owner)
    with Connection(other.port) as connection:
        assert connection.call("SSUBSCRIBE", "shard").value.startswith(b"MOVED ")
        assert connection.call("SPUBLISH", "shard", "x").value.startswith(b"MOVED ")
    listeners = [subscriber(each.port, "SSUBSCRIBE", "shard") for each in (owner, *cluster.proxies)]
    for each in (owner, *cluster.proxies):
        with Connection(each.port) as publisher:
            assert publisher.call("SPUBLISH", "shard", each.port).value >= 1
        for listener in listeners:
            assert message(listener) == [b"smessage", b"shard", b"%d" % each.port]
    for listener in listeners:
        listener.__exit__()


def test_channels_of_many_slots_are_requested_together(cluster: Cluster) -> None:
    channels = [b"shard-%d" % number for number in range(200)]
    with Connection(cluster.proxies[0].port) as client:
        client.call("HELLO", 3)
        for channel in channels:
            client.call("SSUBSCRIBE", channel)
        for channel in channels:
            with Connection(cluster.owner(channel).port) as publisher:
                publisher.call("SPUBLISH", channel, channel)
            assert message(client) == [b"smessage", channel, channel]


def test_proxy_passes_on_more_channels_than_connection_may_have(cluster: Cluster) -> None:
    """A server lets each connection be subscribed to so much, and a proxy is one client to it."""
    names = [[b"many:%d:%d" % (which, at) for at in range(SUBSCRIPTIONS_MAX)] for which in range(3)]
    with ExitStack() as stack:
        clients = [stack.enter_context(Connection(cluster.proxies[0].port)) for _ in names]
        publisher = stack.enter_context(Connection(cluster.nodes[1].port))
        for client, own in zip(clients, names, strict=True):
            client.call("HELLO", 3)
            for at in range(0, len(own), 4_000):
                client.send(request("SUBSCRIBE", *own[at : at + 4_000]))
                for _ in own[at : at + 4_000]:
                    client.read()
        for client, own in zip(clients, names, strict=True):
            for channel in (own[0], own[-1]):
                publisher.call("PUBLISH", channel, b"x")
                assert message(client) == [b"message", channel, b"x"]


def test_node_notifies_of_its_own_slots_and_proxy_of_all(cluster: Cluster) -> None:
    listeners = {each.port: subscriber(each.port, "PSUBSCRIBE", "__keyspace@0__:j:v:*") for each in cluster.nodes}
    behind = subscriber(cluster.proxies[0].port, "PSUBSCRIBE", "__key*")
    cluster.job.publish(cluster.nodes, b"told")
    for node in cluster.nodes:
        own = {key for key in KEYS if cluster.owner(key) is node}
        received = [message(listeners[node.port])[2:] for _ in own]
        assert {channel.removeprefix(b"__keyspace@0__:") for channel, _ in received} == own
        assert {event for _, event in received} == {b"set"}
    received = [message(behind)[2:] for _ in KEYS]
    assert {channel.removeprefix(b"__keyspace@0__:") for channel, _ in received} == set(KEYS)  # and no keyevent: K$
    for each in (*listeners.values(), behind):
        each.__exit__()


def test_proxy_publishes_epoch_when_all_its_servers_show_it(cluster: Cluster) -> None:
    proxy = cluster.proxies[1]
    listener = subscriber(proxy.port, "SUBSCRIBE", "__sparkis__:epoch:j")
    pattern = subscriber(proxy.port, "PSUBSCRIBE", "__sparkis__:*")  # what each node says of itself is not passed on
    with Connection(proxy.port) as reader:
        for number in range(3):
            cluster.job.publish(cluster.nodes, b"epoch %d" % number)
            for each in (listener, pattern):
                received = {"epoch": -1}
                while received["epoch"] < cluster.job.epoch:  # one of before may have come to be shown only just now
                    received = json.loads(message(each)[-1])
                assert received == {"job": "j", "term": 1, "epoch": cluster.job.epoch}
            for key in KEYS:
                assert reader.call("GET", key).value == b"epoch %d" % number
    listener.__exit__()
    pattern.__exit__()


def test_settings_of_proxy_select_notifications_of_its_clients(cluster: Cluster) -> None:
    proxy = cluster.proxies[1]
    with Connection(proxy.port) as connection:
        connection.call("CONFIG", "SET", "notify-keyspace-events", "E$")
    listener = subscriber(proxy.port, "PSUBSCRIBE", "__key*__:*")
    cluster.job.publish(cluster.nodes, b"once more")
    received = [message(listener)[2:] for _ in KEYS]
    assert {channel for channel, _ in received} == {b"__keyevent@0__:set"}
    assert {key for _, key in received} == set(KEYS)
    listener.__exit__()


@contextmanager
def stopped(server: Running) -> Iterator[None]:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def channel_of(server: Running, cluster: Cluster) -> bytes:
    return next(name for number in range(100) if cluster.owner(name := b"shard:%d" % number) is server)


def test_server_without_subscribers_is_not_waited_for(cluster: Cluster) -> None:
    other = cluster.nodes[1]
    with sparkis_proxy(cluster.topology, "--server-timeout", "60000") as proxy:
        wait_for_keys(proxy, len(KEYS))
        with stopped(other), Connection(proxy.port) as leaving, Connection(proxy.port) as waiting:
            number = leaving.call("CLIENT", "ID").value
            leaving.send(b"SSUBSCRIBE %b\r\n" % channel_of(other, cluster))
            wait_for_client(proxy, "ssubscribe")
            waiting.send(b"SUBSCRIBE news\r\n")
            wait_for_client(proxy, "subscribe")
            with Connection(proxy.port) as connection:
                assert connection.call("CLIENT", "KILL", "ID", number).value == 1
            assert [each.value for each in waiting.read().value] == [b"subscribe", b"news", 1]


def test_clients_are_cut_when_their_message_server_is_mute(cluster: Cluster) -> None:
    home, other = cluster.nodes
    with sparkis_proxy(cluster.topology, "--server-timeout", "300") as proxy:
        wait_for_keys(proxy, len(KEYS))
        of_other = subscriber(proxy.port, "SSUBSCRIBE", channel_of(other, cluster).decode())
        of_home = subscriber(proxy.port, "SUBSCRIBE", "news")
        with stopped(other):
            assert of_other.read_to_end() == b""
            with Connection(home.port) as publisher:
                publisher.call("PUBLISH", "news", "x")
            assert message(of_home) == [b"message", b"news", b"x"]


def test_pause_of_proxy_cuts_no_clients(cluster: Cluster) -> None:
    with sparkis_proxy(cluster.topology, "--server-timeout", "600") as proxy:
        wait_for_keys(proxy, len(KEYS))
        of_home = subscriber(proxy.port, "SUBSCRIBE", "news")
        with stopped(proxy):
            sleep((SILENT_TIMEOUTS_MAX + 1) * 0.6)
        sleep(4 * CHECK_S)  # it has looked whom it hears
        with Connection(cluster.nodes[0].port) as publisher:
            publisher.call("PUBLISH", "news", "x")
        assert message(of_home) == [b"message", b"news", b"x"]
        of_home.__exit__()


def wait_for_client(server: Running, command: str) -> None:
    """Wait until the last thing that some client sent is this command."""
    with Connection(server.port) as connection:
        eventually(
            lambda: connection.call("CLIENT", "LIST").value,
            lambda clients: b" cmd=%b " % command.encode() in clients,
            f"a client has sent {command}",
        )


def test_server_that_starts_later_delivers_messages(tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes = Nodes(tmp_path, stack, {"slots": "0-16383"})
        proxy = nodes.start_proxy("--server-timeout", "300")
        listener = subscriber(proxy.port, "SSUBSCRIBE", "early")
        server = nodes.start(0)
        with Connection(server.port) as publisher:
            eventually(lambda: publisher.call("SPUBLISH", "early", "x").value, lambda received: received == 1)
        assert message(listener) == [b"smessage", b"early", b"x"]


def test_clients_are_cut_when_their_message_server_is_gone(cluster: Cluster) -> None:
    behind = subscriber(cluster.proxies[0].port, "PSUBSCRIBE", "__keyspace@0__:*")
    cluster.nodes[1].process.kill()  # the last that is asked of this cluster
    assert behind.read_to_end() == b""
    with Connection(cluster.proxies[0].port) as connection:
        assert connection.call("PING").value == b"PONG"
