"""Clients whose AUTH is the upstream's own: its users, its passwords, its rights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from compat.conformance.servers import Running, redis_server
from compat.conformance.wire import Connection, replies_to
from compat.waiting import eventually
from tests.server.overlay import Overlay
from tests.server.redis_cluster import RedisCluster

WRONG = b"WRONGPASS invalid username-password pair or user is disabled."


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with redis_server(tmp_path_factory.mktemp("upstream"), password="admin") as server:
        with server.connect() as direct:
            direct.call("ACL", "SETUSER", "ada", "on", ">lovelace", "~*", "+@all", "-@dangerous")
            direct.call("ACL", "SETUSER", "reader", "on", ">r", "~session:*", "+@read", "+@connection")
        yield server


@pytest.fixture(scope="module")
def proxy(overlay: Overlay, upstream: Running) -> Running:
    proxy = overlay.start_at(f"redis://:admin@127.0.0.1:{upstream.port}", "--upstream-auth", "client")
    with proxy.connect() as client:
        eventually(lambda: client.call("AUTH", "ada", "lovelace").plain == b"OK")
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
    return proxy


@pytest.fixture
def client(proxy: Running) -> Iterator[Connection]:
    with proxy.connect() as connection:
        yield connection


def test_client_logs_in_as_user_of_upstream(client: Connection) -> None:
    for words in (("GET", "k"), ("GET", "job:speed:1"), ("SET", "job:speed:1", "x"), ("HELLO", "3")):
        assert client.call(*words).plain.startswith(b"NOAUTH")
    assert client.call("AUTH", "ada", "wrong").plain == WRONG
    assert client.call("AUTH", "nobody", "lovelace").plain == WRONG
    assert client.call("AUTH", "wrong").plain == WRONG
    assert client.call("GET", "k").plain.startswith(b"NOAUTH")
    assert client.call("AUTH", "ada", "lovelace").plain == b"OK"
    assert client.call("SET", "k", "1").plain == b"OK"
    assert client.call("MGET", "k", "job:speed:2").plain == [b"1", b"20"]


def test_client_has_rights_of_its_user(proxy: Running, client: Connection) -> None:
    with proxy.connect() as reader, proxy.connect() as admin:
        assert client.call("AUTH", "ada", "lovelace").plain == b"OK"
        assert reader.call("HELLO", 3, "AUTH", "reader", "r", "SETNAME", "me").raw.startswith(b"%")
        assert admin.call("AUTH", "admin").plain == b"OK"
        assert reader.call("CLIENT", "GETNAME").plain == b"me"
        for _ in range(2):
            assert client.call("SET", "session:1", "x").plain == b"OK"
            assert reader.call("GET", "session:1").plain == b"x"
            assert reader.call("GET", "job:speed:1").plain == b"10"
            assert reader.call("SET", "session:1", "y").plain.startswith(b"NOPERM")
            assert reader.call("GET", "k").plain.startswith(b"NOPERM")
            assert client.call("FLUSHALL").plain.startswith(b"NOPERM")
        assert admin.call("FLUSHALL").plain == b"OK"
        assert reader.call("AUTH", "ada", "lovelace").plain == b"OK"
        assert reader.call("SET", "session:1", "y").plain == b"OK"


def test_auth_in_pipeline_applies_to_later_requests(proxy: Running) -> None:
    pipeline = [
        [b"GET", b"session:2"],
        [b"AUTH", b"reader", b"r"],
        [b"SET", b"session:2", b"x"],
        [b"AUTH", b"ada", b"lovelace"],
        [b"SET", b"session:2", b"x"],
        [b"AUTH", b"ada", b"wrong"],
        [b"GET", b"session:2"],
    ]
    found = [each.plain for each in replies_to(proxy.port, pipeline)]
    assert found[0].startswith(b"NOAUTH") and found[2].startswith(b"NOPERM")
    assert found[1::2] == [b"OK", b"OK", WRONG] and found[4::2] == [b"OK", b"x"]


def test_old_password_is_refused_beside_logins(upstream: Running, proxy: Running, client: Connection) -> None:
    with upstream.connect() as direct:
        direct.call("ACL", "SETUSER", "changing", "on", ">one", "~*", "+@all")
        assert client.call("AUTH", "changing", "one").plain == b"OK"
        direct.call("ACL", "SETUSER", "changing", "resetpass", ">two")
        with proxy.connect() as other:
            assert other.call("AUTH", "changing", "one").plain == WRONG
            assert other.call("AUTH", "changing", "two").plain == b"OK"


def test_reset_logs_out_and_blocking_and_transactions_run_as_user(proxy: Running, client: Connection) -> None:
    with proxy.connect() as reader:
        client.call("AUTH", "ada", "lovelace")
        reader.call("AUTH", "reader", "r")
        assert reader.call("BLPOP", "session:list", "0").plain.startswith(b"NOPERM")
        client.send(b"BLPOP session:list 0\r\n")
        with proxy.connect() as other:
            other.call("AUTH", "ada", "lovelace")
            assert other.call("RPUSH", "session:list", "x").plain == 1
        assert client.read().plain == [b"session:list", b"x"]
        assert [client.call(*line.split()).plain for line in ("MULTI", "INCR n", "AUTH ada lovelace")][:2] == [
            b"OK",
            b"QUEUED",
        ]
        client.call("DISCARD")
        client.call("WATCH", "k")
        assert (
            client.call("AUTH", "ada", "lovelace").plain
            == b"ERR another user cannot log in between WATCH and EXEC, or as a subscriber"
        )
        assert client.call("RESET").plain == b"RESET"
        assert client.call("GET", "k").plain.startswith(b"NOAUTH")


def test_redis_py_logs_in(proxy: Running) -> None:
    for protocol in (2, 3):
        with redis.Redis(port=proxy.port, username="ada", password="lovelace", protocol=protocol) as library:
            assert library.set("k", "1") and library.get("k") == b"1" and library.get("job:speed:1") == b"10"


def test_unused_logins_are_closed(overlay: Overlay, upstream: Running, proxy: Running) -> None:
    with upstream.connect() as direct:
        for number in range(150):
            direct.call("ACL", "SETUSER", f"u{number}", "on", ">p", "~*", "+@all")
        for number in range(150):
            with proxy.connect() as client:
                assert client.call("AUTH", f"u{number}", "p").plain == b"OK"
                assert client.call("GET", "k").plain in (b"1", None)
        eventually(lambda: int(direct.call("INFO", "clients").plain.split(b"connected_clients:")[1].split()[0]) < 400)


def test_user_logs_in_at_all_nodes_of_cluster(overlay: Overlay, tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = RedisCluster(tmp_path, stack)
        for node in cluster.nodes:
            cluster.call(node, "ACL", "SETUSER", "ada", "on", ">lovelace", "~*", "+@all")
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
        proxy = overlay.start_at(f"redis+cluster://{seeds}", "--upstream-auth", "client")
        with proxy.connect() as client:
            eventually(lambda: client.call("AUTH", "ada", "lovelace").plain == b"OK")
            names = [f"name{number}" for number in range(30)]
            eventually(lambda: client.call("MSET", *(word for name in names for word in (name, name))).plain == b"OK")
            assert client.call("MGET", *names).plain == [name.encode() for name in names]


def test_own_password_is_refused_beside_upstream_logins(tmp_path: Path) -> None:
    given = ("--log", str(tmp_path), "--ownership", str(tmp_path / "o.json"), "--upstream", "redis://h")
    command = [sys.executable, "-m", "resp_server.programs.proxy", *given, "--upstream-auth", "client"]
    ended = subprocess.run([*command, "--requirepass", "x"], capture_output=True, text=True, check=False)
    assert ended.returncode and "the upstream has the users" in ended.stderr
