"""Client-side caching through a proxy in front of two servers, and where several workers serve a port."""

from __future__ import annotations

import random
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change
from state_backend.model.slots import slot_of
from tests.builders import put_value
from tests.meanwhile import meanwhile, repeated
from tests.server.caching import CachingClient
from tests.server.nodes import PublishedNodes

STATES = [StateDescriptor("n", key="k", value="v")]
KEYS = [b"job:n:%d" % number for number in range(40)]


def changes_to(number: int, keys: list[bytes]) -> list[Change]:
    return [put_value("n", key, b"%d" % number) for key in keys]


class Cluster(PublishedNodes):
    """Two servers, one of them with two workers, and a proxy. Each epoch changes some keys to its number."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.values = dict.fromkeys(KEYS, 0)
        super().__init__(folder, stack, STATES, changes_to(0, KEYS), [(), ("--workers", "2")])
        self.wait()

    def publish(self, keys: list[bytes]) -> None:
        """Publish an epoch that gives these keys its number."""
        number = self.epoch + 1
        self.values |= dict.fromkeys(keys, number)
        self.publish_changes(changes_to(number, keys))

    def wait(self) -> None:
        """Wait until the proxy answers what was published last."""
        with self.proxy.connect() as connection:
            expected = {key: b"%d" % value for key, value in self.values.items()}
            eventually(
                lambda: {key: connection.call("GET", key).value for key in expected}, lambda found: found == expected
            )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("tracking"), stack)


def listen_until_true(client: CachingClient, cluster: Cluster) -> None:
    """Wait until a client that asks nothing holds nothing but what is so."""

    def untrue() -> list[bytes]:
        client.listen(0.05)
        return [key for key, value in client.cache.items() if cluster.values[key] != value]

    eventually(untrue, lambda keys: not keys)


@pytest.mark.parametrize(
    "options",
    [(), (b"BCAST",), (b"BCAST", b"PREFIX", b"job:n:"), (b"OPTIN",), (b"OPTOUT", b"NOLOOP")],
    ids=["default", "all", "some", "optin", "optout"],
)
def test_tracking_clients_of_proxy_keep_no_outdated_value(cluster: Cluster, options: tuple[bytes, ...]) -> None:
    clients = [CachingClient(cluster.proxy.port, *options) for _ in range(4)]
    with meanwhile(repeated(lambda: cluster.publish(random.sample(KEYS, 5)), 0.01)):
        for turn in range(80):
            for client in clients:
                values = client.read(KEYS, is_in_transaction=turn % 10 == 9)
                assert max(values) <= cluster.epoch
    for client in clients:
        listen_until_true(client, cluster)
    assert all(client.pushes for client in clients)
    for client in clients:
        client.close()


def test_broadcasts_begin_once_all_servers_report_changes(cluster: Cluster) -> None:
    cluster.wait()
    stopped, key = cluster.servers[0].process, next(key for key in KEYS if slot_of(key) > 8191)
    with cluster.proxy.connect() as client, cluster.proxy.connect() as other:
        client.call("HELLO", "3")
        stopped.send_signal(signal.SIGSTOP)
        try:
            client.send(request("CLIENT", "TRACKING", "ON", "BCAST"))
            assert not other.call("GET", key).is_error  # the proxy has read the client's request, too
            assert not select.select([client], [], [], 0)[0]
        finally:
            stopped.send_signal(signal.SIGCONT)
        assert client.read().plain == b"OK"
        cluster.publish(KEYS)
        invalidated: set[bytes] = set()
        while invalidated != set(KEYS):
            invalidated |= set(client.read().plain[1])


@pytest.mark.parametrize("options", [["ON"], ["ON", "OPTIN"]], ids=" ".join)
def test_keys_read_by_exec_stay_cached_until_change(cluster: Cluster, options: list[str]) -> None:
    """The keys are of both servers, so that the transaction is not forwarded as it is."""
    cluster.wait()
    with cluster.proxy.connect() as client:
        client.call("HELLO", "3")
        client.call("CLIENT", "TRACKING", *options)
        caching = [["CLIENT", "CACHING", "YES"]] if "OPTIN" in options else []
        transaction = [*caching, ["MULTI"], *(["GET", key] for key in KEYS), ["EXEC"]]

        def invalidated_after_exec() -> list[object]:
            """Return what is invalidated before the next reply; changes before EXEC may be reported late."""
            client.send(b"".join(request(*words) for words in [*transaction, ["PING"]]))
            *_, values = [_next_reply(client) for _ in transaction]
            assert values == [b"%d" % cluster.values[key] for key in KEYS]
            pushes = []
            while (frame := client.read()).plain != b"PONG":
                pushes.append(frame.plain)
            return pushes

        eventually(invalidated_after_exec, lambda pushes: not pushes)
        cluster.publish(KEYS[:1])
        assert client.read().plain == [b"invalidate", KEYS[:1]]


def _next_reply(client: Connection) -> object:
    while (frame := client.read()).type == ">":
        pass
    return frame.plain


def test_cached_value_is_valid_until_it_changes(cluster: Cluster) -> None:
    client = CachingClient(cluster.proxy.port)
    cluster.wait()
    for key in KEYS:
        client.cache[key] = int(client.call(b"GET", key))
    cluster.publish(KEYS[:3])
    listen_until_true(client, cluster)
    assert client.cache.keys() == set(KEYS[3:])
    assert client.nulls == 0
    client.close()


def test_moving_slots_invalidate_all(cluster: Cluster) -> None:
    client = CachingClient(cluster.proxy.port)
    cluster.wait()
    client.read(KEYS)
    cluster.write_topology({"slots": "0-99"}, {"slots": "100-16383"})

    def held() -> int:
        client.listen(0.05)
        return len(client.cache)

    eventually(held, lambda count: count == 0)
    client.read(KEYS)
    listen_until_true(client, cluster)
    client.close()


def test_redirected_invalidation_reaches_client_of_another_worker(cluster: Cluster) -> None:
    server = cluster.servers[1]
    with server.connect() as target, server.connect() as source:
        assert target.call("HELLO", "3").value
        for connection in (target, source):
            cluster.wait_for_slots(connection)  # a topology that arrives later makes everything invalid
        assert target.call("CLIENT", "ID").value != source.call("CLIENT", "ID").value
        target_id = str(target.call("CLIENT", "ID").value)
        assert source.call("CLIENT", "TRACKING", "ON", "REDIRECT", target_id).value == b"OK"
        assert source.call("CLIENT", "GETREDIR").value == int(target_id)
        key = next(key for key in KEYS if source.call("GET", key).type == "$")
        cluster.publish([key])
        assert target.read().raw == b">2\r\n$10\r\ninvalidate\r\n*1\r\n$%d\r\n%b\r\n" % (len(key), key)
        wrong = source.call("CLIENT", "TRACKING", "ON", "REDIRECT", "999999").value
        assert b"The client ID you want redirect to does not exist" in str(wrong).encode()
