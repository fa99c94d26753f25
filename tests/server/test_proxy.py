"""A proxy in front of real servers: under many clients, while slots move, and when a server is gone or hangs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from resp_server.commands import command_table
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from state_backend.model.slots import slot_of

MANY = {f"many:{number:03d}".encode(): b"%d" % number for number in range(300)}
MANY_KEY = next(iter(MANY))
HALVES = ("0-8191", "8192-16383")
# How long the proxy waits for a server: longer than one takes on a machine that runs thirty other things.
PATIENCE_S = 2.0


class Behind:
    """Two servers of the data set, a proxy, and the files that tell them a topology: the proxy has one of its own."""

    def __init__(self, folder: Path, log: Path, stack: ExitStack) -> None:
        self._log, self._folder, self._stack = log, folder, stack
        self.ports = [free_port() for _ in HALVES]
        self.files = [folder / "servers.json", folder / "proxy.json"]
        self._version = 0
        self.show(*HALVES)
        self.servers = [self.start(at) for at in range(2)]
        patience = ("--server-timeout", str(int(PATIENCE_S * 1000)))
        self.proxy = stack.enter_context(sparkis_proxy(self.files[1], *patience))

    def start(self, at: int) -> Running:
        options = ("--cluster", str(self.files[0]), "--cluster-node", f"127.0.0.1:{self.ports[at]}")
        folder = self._folder / f"store{at}"
        return self._stack.enter_context(sparkis_server(folder, self._log, *options, port=self.ports[at]))

    def show(self, *slots: str, to_proxy: bool = True) -> None:
        self._version += 1
        nodes = [
            {"host": "127.0.0.1", "port": port, "slots": each} for port, each in zip(self.ports, slots, strict=True)
        ]
        for file in self.files if to_proxy else self.files[:1]:
            new = file.with_suffix(".new")
            new.write_text(json.dumps({"version": self._version, "nodes": nodes}))
            os.replace(new, file)

    def restore(self) -> None:
        """Start servers that ended, give each its half, and wait until the proxy answers for all keys."""
        for at, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.servers[at] = self.start(at)
        self.show(*HALVES)
        eventually(
            lambda: f"topology_version:{self._version}\r\n" in _info(self.proxy), awaited="the proxy learns the slots"
        )
        eventually(lambda: [_version(each) for each in self.servers] == [self._version] * 2)
        eventually(lambda: _answers_of_all(self.proxy) == list(MANY.values()), awaited="all keys are there")

    @property
    def version(self) -> int:
        """The version of the topology that was written last."""
        return self._version

    def of(self, at: int) -> list[bytes]:
        """Return keys of the half that a server has at first."""
        return [key for key in MANY if (slot_of(key) > 8191) == bool(at)]


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Behind]:
    """The module's servers and proxy, for tests that change nothing."""
    with ExitStack() as stack:
        made = Behind(tmp_path_factory.mktemp("still"), dataset_log, stack)
        wait_for_keys(made.proxy, len(dataset.keys))
        yield made


@pytest.fixture
def behind(still: Behind) -> Iterator[Behind]:
    """The same for tests that move slots or end servers: afterwards all is as at first."""
    yield still
    still.restore()


def _info(proxy: Running) -> str:
    with proxy.connect() as connection:
        return str(connection.call("INFO", "proxy").plain.decode())


def _version(server: Running) -> int:
    """Return the version of the topology that a server shows."""
    with server.connect() as connection:
        return int(json.loads(connection.call("STATE", "TOPOLOGY").plain)["version"])


def _answers_of_all(proxy: Running) -> Any:
    with proxy.connect() as connection:
        return connection.call("MGET", *MANY).plain


def _mixed(seed: int) -> list[tuple[bytes, ...]]:
    made = random.Random(seed)
    keys = list(MANY)
    choices: list[Any] = [
        lambda: (b"GET", made.choice(keys)),
        lambda: (b"MGET", *made.choices(keys, k=5), b"hash:one", b"missing"),
        lambda: (b"EXISTS", *made.choices(keys, k=3), b"missing"),
        lambda: (b"HGETALL", b"hash:one"),
        lambda: (b"GET", b"hash:one"),
        lambda: (b"PING",),
        lambda: (b"SINTER", b"many:001", b"many:002"),
        lambda: (b"NOSUCH",),
        lambda: (b"SET", b"a", b"b"),
        lambda: (b"DBSIZE",),
        lambda: (b"LRANGE", b"list:one", b"0", b"-1"),
    ]
    return [made.choice(choices)() for _ in range(160)]


def test_fifty_clients_with_mixed_pipelines_get_their_answers_in_order(still: Behind, sparkis: Running) -> None:
    def replies_to_mixed(server: Running, seed: int) -> list[bytes]:
        greeting = [(b"HELLO", b"3")] if seed % 2 else []
        with server.connect() as connection:
            connection.send(requests([*greeting, *_mixed(seed)]))
            connection.end()
            return [reply.raw for reply in replies_in(connection.read_to_end())][len(greeting) :]

    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda seed: replies_to_mixed(still.proxy, seed), range(50)))
    for seed, answers in enumerate(found):
        for request, got, expected in zip(_mixed(seed), answers, replies_to_mixed(sparkis, seed), strict=True):
            if request[0] == b"SINTER":
                assert got == b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"
            else:
                assert got == expected, request


@pytest.mark.parametrize("protocol", ["2", "3"])
def test_request_of_many_arguments_is_asked_for_in_steps(still: Behind, protocol: str) -> None:
    keys = [key for key in [*MANY, b"missing"] for _ in range(20)]
    values = [MANY.get(key) for key in keys]
    with still.proxy.connect() as connection:
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


@pytest.mark.parametrize("is_proxy_told", [True, False], ids=["by its file", "by MOVED"])
def test_slots_move_under_load_without_wrong_reads(behind: Behind, dataset: Dataset, is_proxy_told: bool) -> None:
    stop = Event()

    def read(number: int) -> tuple[int, list[Any]]:
        rounds, wrong = 0, []
        with behind.proxy.connect() as connection:
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
            for slots in (("0-100", "101-16383"), ("8192-16383", "0-8191"), ("0-3,5,7-9000", "4,6,9001-16383"), HALVES):
                behind.show(*slots, to_proxy=is_proxy_told)
                version = behind.version
                eventually(
                    lambda v=version: f"topology_version:{v}\r\n" in _info(behind.proxy), awaited="the proxy learns"
                )
                eventually(lambda v=version: [_version(each) for each in behind.servers] == [v, v])
        finally:
            stop.set()
        for reader in readers:
            rounds, wrong = reader.result()
            assert not wrong, str(wrong[0])[:500]
            assert rounds


def test_killed_server_loses_only_its_keys_until_it_is_back(behind: Behind) -> None:
    assert _answers_of_all(behind.proxy) == list(MANY.values())
    behind.servers[0].process.kill()
    behind.servers[0].process.wait()
    with behind.proxy.connect() as connection:
        for key in behind.of(1)[:50]:
            assert connection.call("GET", key).plain == MANY[key]
        for key in behind.of(0)[:3]:
            reply = connection.call("GET", key)
            assert reply.is_error
            assert f"127.0.0.1:{behind.ports[0]}".encode() in reply.raw
        assert connection.call("DBSIZE").is_error
        eventually(lambda: "status=down" in _info(behind.proxy), awaited="the server is given up")
    behind.servers[0] = behind.start(0)
    eventually(lambda: _answers_of_all(behind.proxy) == list(MANY.values()), awaited="its keys are back")


def test_returned_server_gets_requests_at_once_in_either_protocol(behind: Behind) -> None:
    key = behind.of(0)[0]
    with behind.proxy.connect() as second, behind.proxy.connect() as third:
        third.call("HELLO", "3")
        behind.servers[0].process.kill()
        behind.servers[0].process.wait()
        down_since_s = monotonic()
        # Then both are refused at once: the server was not reached for longer than a request may wait.
        while monotonic() < down_since_s + 2 * PATIENCE_S:
            assert second.call("GET", key).is_error
            assert third.call("GET", key).is_error
        behind.servers[0] = behind.start(0)
        eventually(lambda: second.call("GET", key).plain == MANY[key], awaited="its keys are back")
        assert third.call("GET", key).plain == MANY[key]
        assert "status=down" not in _info(behind.proxy)


def test_hanging_server_delays_only_its_keys_for_bounded_time(behind: Behind) -> None:
    assert _answers_of_all(behind.proxy) == list(MANY.values())
    process = behind.servers[0].process
    process.send_signal(signal.SIGSTOP)
    try:
        with behind.proxy.connect() as waits, behind.proxy.connect() as goes_on:
            waits.send(requests([(b"GET", behind.of(0)[0])]))
            for key in behind.of(1):
                assert goes_on.call("GET", key).plain == MANY[key]
            reply = waits.read()  # it comes although the server never goes on
            assert reply.is_error
            assert str(behind.ports[0]).encode() in reply.raw
    finally:
        process.send_signal(signal.SIGCONT)
    eventually(lambda: _answers_of_all(behind.proxy) == list(MANY.values()), awaited="its keys are back")


def test_slots_without_owner_are_clusterdown(behind: Behind) -> None:
    behind.show("0-8191", "")
    eventually(lambda: f"topology_version:{behind.version}\r\n" in _info(behind.proxy), awaited="the proxy learns")
    with behind.proxy.connect() as connection:
        for request in (("GET", behind.of(1)[0]), ("DBSIZE",), ("SCAN", "0"), ("KEYS", "*")):
            assert connection.call(*request).raw == b"-CLUSTERDOWN Hash slot not served\r\n"
        assert connection.call("GET", behind.of(0)[0]).plain == MANY[behind.of(0)[0]]


def test_clients_that_leave_or_do_not_read_disturb_no_other(still: Behind) -> None:
    for _ in range(20):
        with still.proxy.connect() as connection:
            connection.send(requests([(b"GET", key) for key in MANY]))
    deaf = still.proxy.connect()
    deaf.send(requests([(b"HGETALL", b"hash:large")] * 200))
    with still.proxy.connect() as connection:
        assert connection.call("MGET", *MANY).plain == list(MANY.values())
    assert len(replies_in_number(deaf, 200)) == 200


def test_single_mget_is_answered_in_either_protocol_for_any_kind_of_key(still: Behind) -> None:
    keys = [b"hash:one", b"missing", still.of(0)[0], still.of(1)[0], still.of(0)[0], b"{same}a", b"{same}b"]
    found = [None, None, MANY[keys[2]], MANY[keys[3]], MANY[keys[4]], None, None]
    with still.proxy.connect() as connection:
        for greeting, nil in ((b"2", b"$-1\r\n"), (b"3", b"_\r\n")):
            connection.call("HELLO", greeting)
            for name in ("MGET", "mget", "MgEt"):
                items = [nil if each is None else b"$%d\r\n%b\r\n" % (len(each), each) for each in found]
                assert connection.call(name, *keys).raw == b"*7\r\n" + b"".join(items)
            assert connection.call("MGET", "missing").raw == b"*1\r\n" + nil
            assert connection.call("MGET").is_error


def replies_in_number(connection: Connection, count: int) -> list[bytes]:
    return [connection.read().raw for _ in range(count)]


def test_suppressed_replies_are_not_sent(still: Behind, dataset: Dataset) -> None:
    with still.proxy.connect() as connection:
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
def test_redis_py_reads_through_proxy(still: Behind, dataset: Dataset, protocol: int) -> None:
    with Redis(port=still.proxy.port, protocol=protocol) as redis:
        assert redis.mget(list(MANY)) == list(MANY.values())
        assert redis.hgetall("hash:one") == {b"field": b"value"}
        assert set(redis.scan_iter(count=20)) == set(dataset.keys)
        assert redis.info("server")["redis_mode"] == "standalone"
        assert redis.randomkey() in dataset.keys
        with redis.pipeline(transaction=False) as pipeline:
            for key in MANY:
                pipeline.get(key)
            assert pipeline.execute() == list(MANY.values())


def test_redis_cli_reads_through_proxy(still: Behind) -> None:
    command = ["redis-cli", "-p", str(still.proxy.port)]
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


class Waiting(ReplySink):
    """Waits for one answer."""

    def __init__(self) -> None:
        self.reply: bytes | None = None

    def put(self, index: int, reply: bytes, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self.reply = reply


def test_stopped_proxy_extends_deadlines_of_requests(serve: Any) -> None:
    port, key = free_port(), b"job:temp:1"
    nodes = [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]

    async def play() -> bytes | None:
        cluster, waiting = StateCluster(access=ServerAccess(timeout_s=2.0)), Waiting()
        cluster.start()
        cluster.apply_topology(Topology.of_json({"version": 1, "nodes": nodes}), "a test")
        cluster.send(ServerRequest(pack((b"GET", key)), slot_of(key), 2, cluster.deadline_s(), waiting, 0))
        await eventually_async(
            lambda: any(connection.reason for connection in cluster.connections.values()), awaited="a try fails"
        )
        serve(port=port)
        sleep(2 * cluster.access.timeout_s)  # on the thread of the event loop
        await eventually_async(lambda: waiting.reply)
        cluster.stop()
        return waiting.reply

    assert asyncio.run(play()) == b"$1\r\n1\r\n"


def test_commands_sent_to_all_servers_are_those_of_redis_tips() -> None:
    table = command_table()
    for name in (b"dbsize", b"keys", b"randomkey"):
        found = table.get(name)
        assert found is not None
        assert "request_policy:all_shards" in found.facts.tips
