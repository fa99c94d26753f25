"""A proxy in front of real servers: many clients, moving slots, servers that are killed or hang."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
from redis import Redis

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running, free_port, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, replies_in, requests, scanned
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX, eventually, eventually_async
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.cluster.topology import Topology
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from state_backend.model.slots import slot_of
from tests.server.nodes import HALVES, Nodes

MANY = {f"many:{number:03d}".encode(): b"%d" % number for number in range(300)}
MANY_KEY = next(iter(MANY))
SERVER_TIMEOUT_S = 2.0  # longer than a server takes on a machine that runs thirty other things


class ServersAndProxy(Nodes):
    """Two servers of the data set, and a proxy that reads another file of the topology than the servers."""

    def __init__(self, folder: Path, log: Path, stack: ExitStack) -> None:
        self._topology_of_proxy = folder / "proxy.json"
        super().__init__(folder, stack, *HALVES, log=log)
        self.servers = [self.start(0), self.start(1)]
        timeout = ("--server-timeout", str(int(SERVER_TIMEOUT_S * 1000)))
        self.proxy = stack.enter_context(sparkis_proxy(self._topology_of_proxy, *timeout))

    def write_topology(self, *rows: Mapping[str, str], for_proxy: bool = True) -> None:
        super().write_topology(*rows)
        if for_proxy:
            shutil.copy(self.topology, new := self._topology_of_proxy.with_suffix(".new"))
            os.replace(new, self._topology_of_proxy)

    def wait_for_topology(self) -> None:
        """Wait until the proxy and the servers have the topology that was written last."""
        shown = f"topology_version:{self.version}\r\n"
        eventually(lambda: shown in self.info(), awaited="the proxy has the topology")
        eventually(
            lambda: [topology_version(each) for each in self.servers],
            lambda versions: versions == [self.version] * 2,
            "the servers have the topology",
        )

    def wait_for_all_keys(self) -> None:
        eventually(self.values, lambda found: found == list(MANY.values()), "all keys are answered")

    def kill(self, at: int) -> None:
        self.servers[at].process.kill()
        self.servers[at].process.wait()

    def restart(self, at: int) -> None:
        self.servers[at] = self.start(at)

    def restore(self) -> None:
        """Start servers that ended, give each its half, and wait until the proxy answers for all keys."""
        for at, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.restart(at)
        self.write_topology(*HALVES)
        self.wait_for_topology()
        self.wait_for_all_keys()

    def info(self) -> str:
        """Return the proxy's section of INFO."""
        with self.proxy.connect() as connection:
            return str(connection.call("INFO", "proxy").plain.decode())

    def values(self) -> Any:
        """Return the proxy's reply to an MGET of MANY."""
        with self.proxy.connect() as connection:
            return connection.call("MGET", *MANY).plain


def keys_of(half: int) -> list[bytes]:
    """Return the keys of MANY in one half of the slots."""
    return [key for key in MANY if slot_of(key) // 8192 == half]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[ServersAndProxy]:
    """The module's servers and proxy, for tests that only read."""
    with ExitStack() as stack:
        made = ServersAndProxy(tmp_path_factory.mktemp("shared"), dataset_log, stack)
        wait_for_keys(made.proxy, len(dataset.keys))
        yield made


@pytest.fixture
def restored(shared: ServersAndProxy) -> Iterator[ServersAndProxy]:
    """The same for tests that move slots or end servers; both servers have their halves again afterwards."""
    yield shared
    shared.restore()


def topology_version(server: Running) -> int:
    """Return the version of the topology that a server has."""
    with server.connect() as connection:
        return int(json.loads(connection.call("STATE", "TOPOLOGY").plain)["version"])


def mixed_requests(seed: int) -> list[tuple[bytes, ...]]:
    chance = random.Random(seed)
    keys = list(MANY)
    choices: list[Any] = [
        lambda: (b"GET", chance.choice(keys)),
        lambda: (b"MGET", *chance.choices(keys, k=5), b"hash:one", b"missing"),
        lambda: (b"EXISTS", *chance.choices(keys, k=3), b"missing"),
        lambda: (b"HGETALL", b"hash:one"),
        lambda: (b"GET", b"hash:one"),
        lambda: (b"PING",),
        lambda: (b"SINTER", b"many:001", b"many:002"),
        lambda: (b"NOSUCH",),
        lambda: (b"SET", b"a", b"b"),
        lambda: (b"DBSIZE",),
        lambda: (b"LRANGE", b"list:one", b"0", b"-1"),
    ]
    return [chance.choice(choices)() for _ in range(160)]


def test_fifty_clients_with_mixed_pipelines_get_their_answers_in_order(
    shared: ServersAndProxy, sparkis: Running
) -> None:
    def replies_tomixed_requests(server: Running, seed: int) -> list[bytes]:
        greeting = [(b"HELLO", b"3")] if seed % 2 else []
        with server.connect() as connection:
            connection.send(requests([*greeting, *mixed_requests(seed)]))
            connection.end()
            return [reply.raw for reply in replies_in(connection.read_to_end())][len(greeting) :]

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda seed: replies_tomixed_requests(shared.proxy, seed), range(50)))
    for seed, answers in enumerate(found):
        for request, got, expected in zip(
            mixed_requests(seed), answers, replies_tomixed_requests(sparkis, seed), strict=True
        ):
            if request[0] == b"SINTER":
                assert got == b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"
            else:
                assert got == expected, request


@pytest.mark.parametrize("protocol", ["2", "3"])
def test_request_of_many_arguments_is_requested_in_steps(shared: ServersAndProxy, protocol: str) -> None:
    keys = [key for key in [*MANY, b"missing"] for _ in range(20)]
    values = [MANY.get(key) for key in keys]
    with shared.proxy.connect() as connection:
        connection.call("HELLO", protocol)
        pipeline = [(b"GET", keys[0]), (b"MGET", *keys), (b"EXISTS", *keys), (b"PING",), (b"TOUCH", *keys)]
        connection.send(requests(pipeline))
        found = [connection.read().plain for _ in pipeline]
        assert found == [values[0], values, 20 * len(MANY), b"PONG", 20 * len(MANY)]
        assert connection.call("HMGET", "hash:one", *keys).plain == [None] * len(keys)
        assert b"WRONGTYPE" in connection.call("HMGET", MANY_KEY, *keys).plain
        for name in ("SINTER", "WATCH"):
            assert b"arguments of 2 MiB at once; split the request" in connection.call(name, *keys).plain
        connection.call("MULTI")
        assert b"arguments of 2 MiB at once; split the request" in connection.call("MGET", *keys).plain
        assert b"EXECABORT" in connection.call("EXEC").plain
        assert connection.call("MGET", *keys[:2]).plain == values[:2]


@pytest.mark.parametrize("for_proxy", [True, False], ids=["proxy reads it in its file", "proxy learns it by MOVED"])
def test_slots_move_under_load_without_wrong_reads(
    restored: ServersAndProxy, dataset: Dataset, for_proxy: bool
) -> None:
    stop = Event()

    def read(number: int) -> tuple[int, list[Any]]:
        rounds, wrong = 0, []
        with restored.proxy.connect() as connection:
            while not stop.wait(READ_PAUSE_S):
                rounds += 1
                if number == 0:
                    size, keys = connection.call("DBSIZE").plain, connection.call("KEYS", "*").plain
                    if size != len(dataset.keys) or sorted(keys) != sorted(dataset.keys):
                        wrong.append((size, keys))
                elif number == 1:
                    found = scanned(connection, "COUNT", 50)
                    if sorted(found) != sorted(dataset.keys):
                        wrong.append(found)
                else:
                    connection.send(requests([(b"GET", key) for key in MANY] + [(b"MGET", *MANY)]))
                    values = [connection.read().plain for _ in range(len(MANY) + 1)]
                    if values != [*MANY.values(), list(MANY.values())]:
                        wrong.append(values)
        return rounds, wrong

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, number) for number in range(6)]
        try:
            for first, second in (
                ("0-100", "101-16383"),
                ("8192-16383", "0-8191"),
                ("0-3,5,7-9000", "4,6,9001-16383"),
                ("0-8191", "8192-16383"),
            ):
                restored.write_topology({"slots": first}, {"slots": second}, for_proxy=for_proxy)
                restored.wait_for_topology()
        finally:
            stop.set()
        for reader in readers:
            rounds, wrong = reader.result()
            assert not wrong, str(wrong[0])[:500]
            assert rounds


def test_killed_server_loses_only_its_keys_until_it_is_back(restored: ServersAndProxy) -> None:
    assert restored.values() == list(MANY.values())
    restored.kill(0)
    with restored.proxy.connect() as connection:
        for key in keys_of(1)[:50]:
            assert connection.call("GET", key).plain == MANY[key]
        for key in keys_of(0)[:3]:
            reply = connection.call("GET", key)
            assert reply.is_error
            assert f"127.0.0.1:{restored.ports[0]}".encode() in reply.raw
        assert connection.call("DBSIZE").is_error
        eventually(lambda: "status=down" in restored.info(), awaited="the proxy counts the server as down")
    restored.restart(0)
    restored.wait_for_all_keys()


def test_returned_server_gets_requests_at_once_in_either_protocol(restored: ServersAndProxy) -> None:
    key = keys_of(0)[0]
    with restored.proxy.connect() as resp2, restored.proxy.connect() as resp3:
        resp3.call("HELLO", "3")
        restored.kill(0)
        down_since_s = monotonic()
        # Longer than a request may wait: the proxy then refuses requests at once.
        while monotonic() < down_since_s + 2 * SERVER_TIMEOUT_S:
            assert resp2.call("GET", key).is_error
            assert resp3.call("GET", key).is_error
        restored.restart(0)
        eventually(lambda: resp2.call("GET", key).plain == MANY[key], awaited="its keys are back")
        assert resp3.call("GET", key).plain == MANY[key]
        assert "status=down" not in restored.info()


def test_hanging_server_delays_only_its_keys_for_bounded_time(restored: ServersAndProxy) -> None:
    assert restored.values() == list(MANY.values())
    process = restored.servers[0].process
    process.send_signal(signal.SIGSTOP)
    try:
        with restored.proxy.connect() as waiting, restored.proxy.connect() as other:
            waiting.send(requests([(b"GET", keys_of(0)[0])]))
            for key in keys_of(1):
                assert other.call("GET", key).plain == MANY[key]
            reply = waiting.read()  # although the server still hangs
            assert reply.is_error
            assert str(restored.ports[0]).encode() in reply.raw
    finally:
        process.send_signal(signal.SIGCONT)
    restored.wait_for_all_keys()


def test_slots_without_owner_are_clusterdown(restored: ServersAndProxy) -> None:
    restored.write_topology({"slots": "0-8191"}, {"slots": ""})
    restored.wait_for_topology()
    with restored.proxy.connect() as connection:
        for request in (("GET", keys_of(1)[0]), ("DBSIZE",), ("SCAN", "0"), ("KEYS", "*")):
            assert connection.call(*request).raw == b"-CLUSTERDOWN Hash slot not served\r\n"
        assert connection.call("GET", keys_of(0)[0]).plain == MANY[keys_of(0)[0]]


def test_clients_that_leave_or_do_not_read_disturb_no_other(shared: ServersAndProxy) -> None:
    for _ in range(20):
        with shared.proxy.connect() as connection:
            connection.send(requests([(b"GET", key) for key in MANY]))
    slow_reader = shared.proxy.connect()
    slow_reader.send(requests([(b"HGETALL", b"hash:large")] * 200))
    with shared.proxy.connect() as connection:
        assert connection.call("MGET", *MANY).plain == list(MANY.values())
    for _ in range(200):
        assert len(slow_reader.read().plain) > 1


def test_single_mget_is_answered_in_either_protocol_for_any_kind_of_key(shared: ServersAndProxy) -> None:
    keys = [b"hash:one", b"missing", keys_of(0)[0], keys_of(1)[0], keys_of(0)[0], b"{same}a", b"{same}b"]
    found = [None, None, MANY[keys[2]], MANY[keys[3]], MANY[keys[4]], None, None]
    with shared.proxy.connect() as connection:
        for greeting, nil in ((b"2", b"$-1\r\n"), (b"3", b"_\r\n")):
            connection.call("HELLO", greeting)
            for name in ("MGET", "mget", "MgEt"):
                items = [nil if each is None else b"$%d\r\n%b\r\n" % (len(each), each) for each in found]
                assert connection.call(name, *keys).raw == b"*7\r\n" + b"".join(items)
            assert connection.call("MGET", "missing").raw == b"*1\r\n" + nil
            assert connection.call("MGET").is_error


def test_suppressed_replies_are_not_sent(shared: ServersAndProxy, dataset: Dataset) -> None:
    with shared.proxy.connect() as connection:
        connection.send(
            requests([(b"CLIENT", b"REPLY", b"SKIP"), (b"GET", b"many:001"), (b"GET", b"many:002"), (b"DBSIZE",)])
        )
        assert [connection.read().plain for _ in range(2)] == [b"2", len(dataset.keys)]
        connection.send(b"*1\r\n$4\r\nPING\r\n*1\r\n!\r\n")
        assert connection.read().plain == b"PONG"
        assert connection.read().raw.startswith(b"-ERR Protocol error")


def test_proxy_with_password_asks_for_it_and_gives_it_to_servers(tmp_path: Path, dataset_log: Path) -> None:
    port = free_port()
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"version": 1, "nodes": [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]}))
    options = ("--cluster", str(file), "--cluster-node", f"127.0.0.1:{port}")
    with (
        sparkis_server(tmp_path / "store", dataset_log, *options, port=port, password="secret"),
        sparkis_proxy(file, password="secret") as proxy,
        sparkis_proxy(file) as stranger,
        Connection(proxy.port) as connection,
    ):
        assert connection.call("GET", "many:001").raw.startswith(b"-NOAUTH")
        assert connection.call("AUTH", "secret").plain == b"OK"
        assert connection.call("GET", "many:001").plain == b"1"
        with stranger.connect() as refused:
            assert b"NOAUTH" in refused.call("GET", "many:001").raw


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_reads_through_proxy(shared: ServersAndProxy, dataset: Dataset, protocol: int) -> None:
    with Redis(port=shared.proxy.port, protocol=protocol) as redis:
        assert redis.mget(list(MANY)) == list(MANY.values())
        assert redis.hgetall("hash:one") == {b"field": b"value"}
        assert set(redis.scan_iter(count=20)) == set(dataset.keys)
        assert redis.info("server")["redis_mode"] == "standalone"
        assert redis.randomkey() in dataset.keys
        with redis.pipeline(transaction=False) as pipeline:
            for key in MANY:
                pipeline.get(key)
            assert pipeline.execute() == list(MANY.values())


def test_redis_cli_reads_through_proxy(shared: ServersAndProxy) -> None:
    command = ["redis-cli", "-p", str(shared.proxy.port)]
    done = subprocess.run([*command, "get", "many:007"], capture_output=True, timeout=WAIT_S_MAX, check=True)
    assert done.stdout == b"7\n"
    done = subprocess.run(
        [*command, "--scan", "--pattern", "many:00*"], capture_output=True, timeout=WAIT_S_MAX, check=True
    )
    assert len(done.stdout.split()) == 10


def test_wrong_topology_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"version": 1}')
    done = subprocess.run(
        [sys.executable, "-m", "resp_server.programs.proxy", "--cluster", str(file)],
        capture_output=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.decode().endswith("the topology has no field 'nodes'\n")


class LastReply(ReplySink):
    """Keeps the last reply."""

    def __init__(self) -> None:
        self.reply: bytes | None = None

    def put(self, index: int, reply: bytes, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self.reply = reply


def test_stopped_proxy_extends_deadlines_of_requests(serve: Any) -> None:
    port, key = free_port(), b"job:temp:1"
    nodes = [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]

    async def reply_after_stop() -> bytes | None:
        cluster, sink = StateCluster(access=ServerAccess(timeout_s=2.0)), LastReply()
        cluster.start()
        cluster.apply_topology(Topology.of_json({"version": 1, "nodes": nodes}), "a test")
        cluster.send(ServerRequest(pack((b"GET", key)), slot_of(key), 2, cluster.deadline_s(), sink, 0))
        await eventually_async(
            lambda: any(connection.reason for connection in cluster.connections.values()), awaited="connecting fails"
        )
        serve(port=port)
        sleep(2 * cluster.access.timeout_s)  # on the thread of the event loop
        await eventually_async(lambda: sink.reply)
        cluster.stop()
        return sink.reply

    assert asyncio.run(reply_after_stop()) == b"$1\r\n1\r\n"
