"""Scripts and functions at an upstream: they are the upstream's, over shared connections, within MULTI too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from resp_server.limits import UPSTREAM_CONNECTIONS
from tests.server.overlay import OLD, Overlay

SCRIPT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
LIBRARY = "#!lua name=lib\nredis.register_function('add', function(k, a) return redis.call('INCRBY', k[1], a[1]) end)"
OWNED = b"ERR key 'job:speed:1' is owned by state job:speed"


@pytest.fixture
def client(overlay: Overlay) -> Iterator[Connection]:
    with overlay.proxy.connect() as connection:
        for words in (("FLUSHALL",), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH")):
            connection.call(*words)
        yield connection


def test_script_with_states_key_is_refused_before_it_runs(client: Connection) -> None:
    sha = client.call("SCRIPT", "LOAD", SCRIPT).plain
    assert client.call("EVAL", SCRIPT, 2, "a", "job:speed:1", 1).plain == OWNED
    assert client.call("EVALSHA", sha, 1, "job:speed:1", 1).plain == OWNED
    assert client.call("FCALL", "add", 1, "job:speed:1", 1).plain == OWNED
    assert client.call("EXISTS", "a").plain == 0


def test_undeclared_key_of_script_is_upstreams_copy(client: Connection, overlay: Overlay) -> None:
    with overlay.upstream.connect() as upstream:
        upstream.call("SET", "job:speed:1", OLD)
    assert client.call("EVAL", "return redis.call('GET', 'job:speed:1')", 0).plain == OLD
    assert client.call("GET", "job:speed:1").plain == b"10"


def test_loaded_script_is_run_by_other_clients_and_in_transactions(overlay: Overlay, client: Connection) -> None:
    sha = client.call("SCRIPT", "LOAD", SCRIPT).plain
    with overlay.proxy.connect() as other:
        other.send(request("MULTI") + request("EVALSHA", sha, 1, "n", 4) + request("GET", "job:speed:1"))
        other.send(request("EVALSHA", "0" * 40, 0) + request("EXEC"))
        found = [other.read() for _ in range(5)][-1].plain
    assert found[:2] == [4, b"10"] and found[2].startswith(b"NOSCRIPT")


def begin_endless_script(overlay: Overlay, client: Connection) -> None:
    """Have a client run a script that does not end; wait until the upstream replies BUSY to others."""
    client.send(request("EVAL", "while true do end", 0))
    with overlay.upstream.connect() as direct:
        eventually(lambda: direct.call("GET", "n").raw.startswith(b"-BUSY "))


@pytest.fixture
def impatient(overlay: Overlay) -> Iterator[Connection]:
    """A connection to the upstream, which replies BUSY soon."""
    with overlay.upstream.connect() as direct:
        direct.call("CONFIG", "SET", "busy-reply-threshold", 50)
        yield direct
        direct.call("SCRIPT", "KILL")
        direct.call("CONFIG", "SET", "busy-reply-threshold", 5000)


@pytest.mark.parametrize("protocol", [2, 3])
def test_script_kill_by_any_client_ends_script(overlay: Overlay, impatient: Connection, protocol: int) -> None:
    with overlay.proxy.connect() as client, ExitStack() as stack:
        client.call("HELLO", protocol)
        # As many clients as there are shared connections: one of them shares that of the script.
        for other in [stack.enter_context(overlay.proxy.connect()) for _ in range(UPSTREAM_CONNECTIONS)]:
            other.call("HELLO", protocol)
            begin_endless_script(overlay, client)
            assert other.call_each("PING", "SCRIPT KILL", "PING") == [b"PONG", b"OK", b"PONG"]
            assert b"Script killed by user" in client.read().plain
            assert other.call("FUNCTION", "KILL").plain.startswith(b"NOTBUSY")


def test_script_kill_ends_script_beyond_timeout(overlay: Overlay, impatient: Connection) -> None:
    proxy = overlay.start_overlay("--upstream-timeout", "300")
    with proxy.connect() as client, proxy.connect() as other:
        begin_endless_script(overlay, client)
        with pytest.raises(EOFError):
            client.read()
        eventually(
            lambda: other.call("GET", "n").plain, lambda found: isinstance(found, bytes) and found.startswith(b"BUSY")
        )
        assert other.call("GET", "job:speed:1").plain == b"10"
        eventually(lambda: other.call("SCRIPT", "KILL").plain == b"OK")
        eventually(lambda: not other.call("GET", "n").is_error)


def test_command_table_is_read_after_busy_start(overlay: Overlay, impatient: Connection) -> None:
    with overlay.upstream.connect() as client:
        begin_endless_script(overlay, client)
        with overlay.start_overlay(is_ready=False).connect() as other:
            eventually(lambda: other.call("GET", "n").raw.startswith(b"-BUSY "))
            impatient.call("SCRIPT", "KILL")
            other.call("MULTI")
            # Redis 7.0 does not have this command.
            eventually(lambda: other.call("HEXPIRE", "h", 1, "FIELDS", 1, "f").is_error)


def test_redis_py_reloads_forgotten_script(overlay: Overlay, client: Connection) -> None:
    for protocol in (2, 3):
        with redis.Redis(port=overlay.proxy.port, protocol=protocol) as each:
            add = each.register_script(SCRIPT)
            each.script_flush()
            before = int(each.get("n") or 0)
            assert add(keys=["n"], args=[1]) == before + 1
            with each.pipeline() as pipe:
                add(keys=["n"], args=[1], client=pipe)
                pipe.get("job:speed:1")
                assert pipe.execute() == [before + 2, b"10"]
            with each.lock("lock", timeout=10):
                assert each.get("lock") is not None
            assert each.get("lock") is None
