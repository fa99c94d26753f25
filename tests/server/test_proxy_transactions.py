"""Transactions through a proxy in front of two servers of one log, while epochs come twenty times a second."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from redis import Redis, WatchError

from compat.conformance.wire import Connection, Reply, requests
from compat.waiting import READ_PAUSE_S, eventually
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change
from state_backend.model.slots import slot_of
from tests.builders import put_value
from tests.meanwhile import meanwhile, repeated
from tests.server.nodes import HALVES, PublishedNodes

STATES = [StateDescriptor("n", key="k", value="v"), StateDescriptor("unchanged", key="k", value="v")]
KEYS = [b"job:n:%d" % number for number in range(40)]
UNCHANGED = [b"job:unchanged:%d" % number for number in range(40)]
EPOCH_EVERY_S = 0.05


def changes_to(number: int) -> list[Change]:
    return [put_value("n", key, b"%d" % number) for key in KEYS]


class Cluster(PublishedNodes):
    """Two servers and a proxy. The values are the epochs' numbers."""

    def __init__(self, folder: Path, stack: ExitStack, *options: str) -> None:
        unchanged = [put_value("unchanged", key, b"0") for key in UNCHANGED]
        super().__init__(folder, stack, STATES, [*changes_to(0), *unchanged], [options] * 2)
        self.wait_for(0)

    def publish(self) -> None:
        """Publish an epoch that gives every key its number."""
        self.publish_changes(changes_to(self.epoch + 1))

    def wait_for(self, epoch: int) -> None:
        """Wait until the proxy shows an epoch of both halves."""
        with self.proxy.connect() as connection:
            eventually(
                lambda: [connection.call("GET", key).value for key in KEYS],
                lambda found: all(each is not None and each.isdigit() and int(each) >= epoch for each in found),
            )

    def key_of(self, half: int) -> bytes:
        """Return a key in one half of the slots."""
        return next(key for key in KEYS if slot_of(key) // 8192 == half)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The servers that tests share: each test leaves both halves where they were."""
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def transaction(connection: Connection, *commands: tuple[bytes, ...]) -> Reply:
    """Send a transaction in one write and return EXEC's reply."""
    connection.send(requests([(b"MULTI",), *commands, (b"EXEC",)]))
    replies = [connection.read() for _ in range(len(commands) + 2)]
    assert [each.raw for each in replies[:-1]] == [b"+OK\r\n", *[b"+QUEUED\r\n"] * len(commands)]
    return replies[-1]


@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["one process", "two workers"])
def test_transaction_over_servers_reads_one_epoch(cluster: Cluster, tmp_path: Path, options: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        if options:
            cluster = Cluster(tmp_path, stack, *options)

        def read(seed: int) -> None:
            made = random.Random(seed)
            with cluster.proxy.connect() as connection:
                if seed % 2:
                    connection.call("HELLO", "3")
                last = 0
                while not over.wait(READ_PAUSE_S):
                    keys = made.sample(KEYS, 8)
                    alone = connection.call("GET", keys[0]).value
                    reply = transaction(connection, *[(b"GET", key) for key in keys], (b"MGET", *keys))
                    assert not reply.is_error, reply
                    values = [each.value for each in reply.value[:-1]]
                    assert values == [each.value for each in reply.value[-1].value]
                    assert len(set(values)) == 1, values
                    assert last <= int(alone) <= int(values[0])
                    last = int(values[0])
                    seen[seed].add(last)

        over = Event()
        seen: list[set[int]] = [set() for _ in range(4)]
        with ThreadPoolExecutor(4) as threads, meanwhile(repeated(cluster.publish, EPOCH_EVERY_S)):
            readers = [threads.submit(read, seed) for seed in range(4)]
            try:
                eventually(
                    lambda: [len(each) for each in seen],
                    lambda counts: min(counts) > 10 or any(reader.done() for reader in readers),
                    "each reader sees more than ten epochs",
                )
            finally:
                over.set()
            for reader in readers:
                reader.result()


def test_local_replies_and_servers_replies_come_in_order_within_exec(cluster: Cluster) -> None:
    cluster.wait_for(cluster.epoch)
    value = b"%d" % cluster.epoch
    item = b"$%d\r\n%b\r\n" % (len(value), value)
    with cluster.proxy.connect() as connection:
        here, there, none = cluster.key_of(0), cluster.key_of(1), b"job:n:none"
        reply = transaction(
            connection,
            (b"PING",),
            (b"MGET", there, none, here, there),
            (b"EXISTS", here, there, none),
            (b"ECHO", b"x"),
            (b"LRANGE", here, b"0", b"1"),
            (b"TYPE", there),
            (b"STRLEN", here),
        )
        wrong = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
        assert reply.raw == (
            (b"*7\r\n+PONG\r\n*4\r\n" + item + b"$-1\r\n" + item * 2 + b":2\r\n$1\r\nx\r\n")
            + wrong
            + (b"+string\r\n:%d\r\n" % len(value))
        )
        assert transaction(connection).raw == b"*0\r\n"
        assert transaction(connection, (b"PING",)).raw == b"*1\r\n+PONG\r\n"
        refused = b"-ERR MONITOR isn't allowed for DENY BLOCKING client\r\n"
        assert transaction(connection, (b"MONITOR",), (b"GET", here)).raw == b"*2\r\n" + refused + item
        for command in ("DBSIZE", "SCAN 0", "KEYS *", "SELECT 1", "HELLO 3", "CLIENT REPLY OFF", "INFO", "SET a b"):
            connection.call("MULTI")
            assert connection.call(*command.split()).is_error
            assert connection.call("GET", here).value == b"QUEUED"
            assert connection.call("EXEC").raw == b"-EXECABORT Transaction discarded because of previous errors.\r\n"
        connection.call("MULTI")
        assert connection.call("SINTER", here, there).raw.startswith(b"-CROSSSLOT ")
        assert connection.call("DISCARD").value == b"OK"
        assert connection.call("EXEC").raw == b"-ERR EXEC without MULTI\r\n"
        assert connection.call("GET", here).value == value


def test_planned_exec_waits_for_earlier_replies_of_its_client(cluster: Cluster) -> None:
    slow, fast = cluster.servers
    with cluster.proxy.connect() as client, fast.connect() as direct:

        def execs() -> bytes:
            return direct.call("INFO", "commandstats").plain.partition(b"cmdstat_exec:")[2].partition(b",")[0]

        both = [(b"PING",), *((b"GET", cluster.key_of(at)) for at in range(2))]
        assert transaction(client, *both).value
        before = execs()
        slow.process.send_signal(signal.SIGSTOP)
        try:
            earlier = (b"EXISTS", cluster.key_of(0), cluster.key_of(1))
            client.send(requests([earlier, (b"MULTI",), *both, (b"EXEC",)]))
            eventually(lambda: cluster.requests_waiting_at(0, cluster.proxy), awaited="the EXISTS is sent")
            assert execs() == before
        finally:
            slow.process.send_signal(signal.SIGCONT)
        replies = [client.read() for _ in range(6)]
        assert not any(reply.is_error for reply in replies)
        assert execs() != before


def test_pipeline_with_transactions_is_answered_in_order(cluster: Cluster) -> None:
    with cluster.proxy.connect() as connection, meanwhile(repeated(cluster.publish, EPOCH_EVERY_S)):
        get = [(b"GET", key) for key in KEYS[:4]]
        connection.send(requests([*get, (b"MULTI",), *get, (b"EXEC",), *get, (b"MULTI",), *get, (b"EXEC",)] * 20))
        last = 0
        for _ in range(20):
            for _ in range(2):
                for _ in get:
                    value = int(connection.read().value)
                    assert value >= last
                replies = [connection.read() for _ in range(len(get) + 2)]
                values = {int(each.value) for each in replies[-1].value}
                assert len(values) == 1
                assert min(values) >= last
                last = min(values)


def test_exec_of_restricted_user_is_refused(cluster: Cluster) -> None:
    with cluster.proxy.connect() as client, cluster.proxy.connect() as admin:
        assert not admin.call("ACL", "SETUSER", "ada", "on", ">secret", "~*", "+@all").is_error
        assert not client.call("AUTH", "ada", "secret").is_error
        client.call("MULTI")
        assert client.call("GET", KEYS[0]).value == b"QUEUED"
        admin.call("ACL", "SETUSER", "ada", "-get")
        refused = client.call("EXEC").raw
        assert refused.startswith(b"-EXECABORT Transaction discarded because of: NOPERM ACLs rules changed")
        assert refused.endswith(b" no permission to execute the command or subcommand\r\n")
        admin.call("ACL", "DELUSER", "ada")


@pytest.mark.parametrize("protocol", [2, 3])
def test_watched_keys_of_both_servers_end_transaction_when_they_change(cluster: Cluster, protocol: int) -> None:
    client = Redis(port=cluster.proxy.port, protocol=protocol)
    with client.pipeline() as watching:
        watching.watch(*UNCHANGED[:5])
        cluster.publish()
        cluster.wait_for(cluster.epoch)
        watching.multi()
        watching.get(KEYS[0])
        assert watching.execute() == [b"%d" % cluster.epoch]
        for key in (cluster.key_of(0), cluster.key_of(1)):
            watching.watch(UNCHANGED[0], key)
            assert watching.get(key) == b"%d" % cluster.epoch
            cluster.publish()
            cluster.wait_for(cluster.epoch)
            watching.multi()
            watching.get(UNCHANGED[0])
            with pytest.raises(WatchError):
                watching.execute()
        watching.watch(KEYS[0])
        watching.unwatch()
        cluster.publish()
        cluster.wait_for(cluster.epoch)
        watching.multi()
        watching.get(UNCHANGED[0])
        assert watching.execute() == [b"0"]
    client.close()


@pytest.mark.parametrize("sizes", [(4,), (2, 1, 1)], ids=["one write", "three writes"])
def test_transaction_on_lost_connection_is_resent_to_restarted_server(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        with cluster.proxy.connect() as client:
            gets = [(b"GET", cluster.key_of(0)), (b"GET", cluster.key_of(1))]
            assert transaction(client, *gets).value
            process = cluster.servers[0].process
            process.send_signal(signal.SIGSTOP)
            rest = iter([(b"MULTI",), *gets, (b"EXEC",)])
            *earlier, last = [list(islice(rest, size)) for size in sizes]
            replies: list[Reply] = []
            for write in earlier:
                client.send(requests(write))
                replies += [client.read() for _ in write]
            client.send(requests(last))
            eventually(lambda: cluster.requests_waiting_at(0, cluster.proxy), awaited="the transaction is sent")
            process.kill()
            process.wait()
            cluster.start(0)
            replies += [client.read() for _ in last]
            assert [each.raw for each in replies[:-1]] == [b"+OK\r\n", b"+QUEUED\r\n", b"+QUEUED\r\n"]
            assert [each.value for each in replies[-1].value] == [b"%d" % cluster.epoch] * 2


def test_transactions_are_whole_while_slots_move_and_servers_fail(cluster: Cluster) -> None:
    impatient = cluster.start_proxy("--server-timeout", "1000")
    gets = [(b"GET", key) for key in KEYS]

    def answer(connection: Connection) -> Any:
        reply = transaction(connection, *gets)
        if reply.is_error:
            return reply.raw
        values = {each.value for each in reply.value}
        assert len(values) == 1, values
        return values.pop()

    with impatient.connect() as connection, cluster.proxy.connect() as patient:
        eventually(lambda: not answer(connection).startswith(b"-"))
        with meanwhile(repeated(cluster.publish, EPOCH_EVERY_S)):
            for rows in (HALVES[::-1], ({"slots": "0-16383"}, {"slots": ""}), HALVES):
                cluster.write_topology(*rows)
                for _ in range(20):
                    found = answer(connection)
                    assert found.isdigit() or found.startswith(b"-TRYAGAIN"), found
        address = f":{cluster.ports[1]}".encode()
        eventually(lambda: connection.call("STATE", "LOCATE", cluster.key_of(1)).raw, lambda found: address in found)
        os.kill(cluster.servers[1].process.pid, signal.SIGSTOP)
        assert answer(connection).startswith(b"-")
        assert connection.call("GET", cluster.key_of(0)).value.isdigit()
        os.kill(cluster.servers[1].process.pid, signal.SIGCONT)
        eventually(lambda: answer(connection), lambda found: not found.startswith(b"-"))
        eventually(lambda: patient.call("STATE", "LOCATE", cluster.key_of(1)).raw, lambda found: address in found)
