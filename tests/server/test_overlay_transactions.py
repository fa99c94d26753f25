"""Transactions over the upstream, over states, and over both."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of
from tests.server.overlay import STATES, VALUES, Overlay

OPTIONS = ("--upstream-pinned", "2")


def test_exec_without_watch_needs_no_dedicated_connection(overlay: Overlay, direct: Connection) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(overlay.proxy.connect()) for _ in range(5)]
        for each in clients:
            assert each.call_each("MULTI", "INCR n", "GET job:speed:1")[0] == b"OK"
        assert [each.call("EXEC").plain for each in clients] == [[n, b"10"] for n in range(1, 6)]
        assert overlay.info()["upstream_pinned"] == "0"


def test_refused_watch_watches_nothing(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client:
        assert direct.call("ACL", "SETUSER", "default", "-watch").plain == b"OK"
        try:
            assert client.call("WATCH", "a").raw.startswith(b"-NOPERM")
        finally:
            direct.call("ACL", "SETUSER", "default", "+watch")
        assert client.call("SELECT", "1").plain == b"OK"
        assert client.call_each("WATCH a", "MULTI", "SET a 1", "EXEC")[-1] == [b"OK"]


def test_redis_py_pipelines_cover_both_backends(overlay: Overlay, direct: Connection) -> None:
    for protocol in (2, 3):
        with redis.Redis(port=overlay.proxy.port, protocol=protocol) as client:
            with client.pipeline() as pipe:
                pipe.set("a", 1).get("job:speed:3").hset("h", "f", 1).mget("a", "job:speed:4").hgetall("h")
                assert pipe.execute() == [True, b"30", protocol == 2, [b"1", b"40"], {b"f": b"1"}]

            def add(pipe: redis.client.Pipeline) -> None:
                value = int(pipe.get("a") or 0)
                pipe.multi()
                pipe.set("a", value + 1)
                pipe.get("job:speed:1")

            assert client.transaction(add, "a", "job:speed:1") == [True, b"10"]
            assert client.get("a") == b"2"


def test_refused_command_aborts_transaction(client: Connection, direct: Connection) -> None:
    for line in ("SET job:speed:1 2", "SADD", "DEBUG SLEEP 0", "KEYS", "SINTER a job:speed:1", "OBJECT NOPE a"):
        replies = client.call_each("MULTI", "SET a 1", line, "EXEC")
        assert replies[1] == b"QUEUED" and replies[3] == (
            b"EXECABORT Transaction discarded because of previous errors."
        ), line
    assert direct.call("EXISTS", "a").plain == 0


@pytest.mark.parametrize("of_states", [[], ["GET job:speed:1"]], ids=["upstream", "both backends"])
def test_exec_without_answer_of_upstream_closes_connection(
    overlay: Overlay, client: Connection, direct: Connection, of_states: list[str]
) -> None:
    with overlay.proxy.connect() as other:
        # The first request opens a connection to the upstream.
        assert client.call_each("SET a 0", "MULTI", "SET a 1", *of_states)[-1] == b"QUEUED"
        assert other.call_each("MULTI", "INCR a", *of_states, "DISCARD", "GET a")[-2:] == [b"OK", b"0"]
        overlay.signal_upstream(signal.SIGSTOP)
        client.send(request("EXEC"))
        eventually(lambda: overlay.info()["upstream_waiting"] != "0")
        overlay.signal_upstream(signal.SIGKILL)
        assert client.read_to_end() == b""
        # An EXEC over a connection whose loss the proxy has yet to notice would end its client, too.
        eventually(lambda: overlay.info()["upstream_connections"], "0".__eq__, awaited="all connections are lost")
        found = other.call_each("MULTI", "SET a 1", *of_states, "EXEC")[-1]
        assert found.startswith(b"TRYAGAIN the upstream")
        assert other.call_each("MULTI", "GET job:speed:1", "EXEC")[-1] == [b"10"]
        overlay.start_upstream()
        eventually(lambda: other.call("SET", "a", "5").plain == b"OK")
        assert other.call_each("MULTI", "INCR a", *of_states, "EXEC")[-1] == [6, *(b"10" for _ in of_states)]


def test_executed_transaction_is_not_resent(overlay: Overlay, client: Connection, direct: Connection) -> None:
    long = b"1" * (3 << 20)
    overlay.publish(Change("speed", Op.PUT, b"job:speed:long", value=long))
    eventually(lambda: client.call("GET", "job:speed:long").plain == long)
    for number in range(1, 4):
        for line in ("MULTI", "INCR n"):  # EXEC arrives alone
            client.call(*line.split(" "))
        assert client.call("EXEC").plain == [number]
        assert client.call("MGET", "job:speed:1", "job:speed:long", "job:speed:2").plain == [b"10", long, b"20"]
    assert direct.call("GET", "n").plain == b"3"
    overlay.publish(Change("speed", Op.DELETE, b"job:speed:long"))
    eventually(lambda: client.call("GET", "job:speed:long").plain is None)


def test_watch_lost_at_upstream_disconnects_client(client: Connection, direct: Connection) -> None:
    assert client.call_each("WATCH a", "GET a") == [b"OK", None]
    direct.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert client.read_to_end() == b""


def test_exec_with_watch_lost_while_states_are_read_writes_nothing(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other:
        assert client.call_each("WATCH a", "MULTI", "SET b 1", "GET job:speed:1")[-1] == b"QUEUED"
        for node in overlay.nodes:
            node.process.send_signal(signal.SIGSTOP)
        try:
            client.send(request("EXEC"))
            assert other.call("GET", "a").plain is None  # the proxy has read the EXEC, too
            direct.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert client.read_to_end() == b""
        finally:
            for node in overlay.nodes:
                node.process.send_signal(signal.SIGCONT)
        assert other.call_each("MULTI", "GET job:speed:1", "EXEC")[-1] == [b"10"]  # the states have answered both
        eventually(lambda: other.call("SET", "a", "1").plain == b"OK")
        assert direct.call("EXISTS", "b").plain == 0


def test_keys_within_exec_are_of_epoch_of_its_reads_or_later(overlay: Overlay, direct: Connection) -> None:
    at_first = next(key for key in VALUES if key.startswith(b"job:") and slot_of(key) <= 8191)
    added = next(key for key in (b"job:speed:%d" % number for number in range(100, 200)) if slot_of(key) > 8191)
    with (
        LogWriter(overlay.log, "job", STATES, "first") as writer,
        overlay.proxy.connect() as client,
        overlay.proxy.connect() as other,
    ):
        late = overlay.nodes[1].process
        late.send_signal(signal.SIGSTOP)
        try:
            writer.publish([Change("speed", Op.PUT, key, value=b"new") for key in (at_first, added)])
            eventually(lambda: other.call("GET", at_first).plain == b"new")  # the other server is an epoch behind
            lines = ["MULTI", f"GET {at_first.decode()}", f"KEYS {added.decode()}", "EXEC"]
            client.send(b"".join(request(*line.split(" ")) for line in lines))
            for _ in range(5):  # the proxy has asked for the keys then, unless it waits for the epoch
                assert other.call("GET", at_first).plain == b"new"
        finally:
            late.send_signal(signal.SIGCONT)
        try:
            assert [client.read().plain for _ in lines][-1] == [b"new", [added]]
        finally:
            old = Change("speed", Op.PUT, at_first, value=VALUES[at_first])
            writer.publish([old, Change("speed", Op.DELETE, added)])
            eventually(lambda: other.call("MGET", at_first, added).plain == [VALUES[at_first], None])


def test_watch_keeps_dedicated_connection(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as one, overlay.proxy.connect() as two, overlay.proxy.connect() as three:
        assert one.call_each("WATCH a") == two.call_each("WATCH a") == [b"OK"]
        assert three.call("WATCH", "a").raw.startswith(b"-ERR max number of clients with an upstream connection")
        assert one.call_each("UNWATCH") == [b"OK"]
        assert three.call_each("WATCH a") == [b"OK"]
        direct.call("SET", "a", "1")
        assert two.call_each("MULTI", "SET a 2", "EXEC")[-1] is None
        assert three.call_each("MULTI", "SET a 2", "EXEC")[-1] is None
        assert one.call_each("MULTI", "SET a 2", "EXEC")[-1] == [b"OK"]


def test_requests_before_watch_are_not_overtaken(overlay: Overlay, direct: Connection) -> None:
    for number in range(50):
        with overlay.proxy.connect() as client:
            line = [f"SET k {number}", "WATCH k", "GET k", "MULTI", f"APPEND k x{number}", "EXEC"]
            assert client.call_each(*line)[2] == b"%d" % number


def test_watch_of_released_key_fails_exec(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as admin:
        assert client.call_each("WATCH job:speed:1 a", "MULTI", "GET job:speed:1", "GET a")[-1] == b"QUEUED"
        admin.call("STATE", "RELEASE", "job")
        assert client.call("EXEC").plain is None
        assert client.call_each("WATCH job:speed:1", "MULTI", "SET job:speed:1 mine")[-1] == b"QUEUED"
        admin.call("STATE", "CONFIRM", "job")
        assert client.call("EXEC").plain.startswith(b"EXECABORT Transaction discarded because of: key 'job:speed:1'")
        assert client.call_each("MULTI", "GET job:speed:1", "EXEC")[-1] == [VALUES[b"job:speed:1"]]


def test_long_exec_over_both_backends_is_joined(client: Connection, direct: Connection) -> None:
    lines = [f"RPUSH l {n}" if n % 2 else f"GET job:speed:{n % 6}" for n in range(3000)]
    found = client.call_each("MULTI", *lines, "EXEC")[-1]
    assert found == [(n + 1) // 2 if n % 2 else b"%d" % (n % 6 * 10) for n in range(3000)]


def test_suppressed_exec_sends_nothing(client: Connection, direct: Connection) -> None:
    client.send(b"".join(request(*line.split(" ")) for line in ("CLIENT REPLY OFF", "MULTI", "INCR n", "EXEC")))
    client.send(request("CLIENT", "REPLY", "ON"))
    assert client.read().plain == b"OK"
    assert client.call("GET", "n").plain == b"1"


def test_strict_transactions_refuse_keys_of_both_backends(overlay: Overlay, direct: Connection) -> None:
    proxy = overlay.start_at(f"redis://127.0.0.1:{overlay.upstream.port}", "--transactions", "strict")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        for lines in (["SET a 1", "GET job:speed:1"], ["MGET a job:speed:1"]):
            assert client.call_each("MULTI", *lines, "EXEC")[-1] == (
                b"EXECABORT Transaction discarded because of: --transactions strict refuses keys of states and of the "
                b"upstream together"
            )
        assert client.call_each("WATCH a", "MULTI", "GET job:speed:1", "EXEC")[-1].startswith(b"EXECABORT")
        assert client.call_each("WATCH job:speed:1", "MULTI", "GET a", "EXEC")[-1].startswith(b"EXECABORT")
        assert direct.call("EXISTS", "a").plain == 0
        assert client.call_each("MULTI", "SET a 1", "PING", "EXEC")[-1] == [b"OK", b"PONG"]
        assert client.call_each("MULTI", "GET job:speed:1", "PING", "EXEC")[-1] == [b"10", b"PONG"]


def test_exec_answers_keys_dbsize_and_randomkey(client: Connection, direct: Connection) -> None:
    states = sorted(VALUES)
    lines = ["SET a 1", "DBSIZE", "SET job:x 1", "DBSIZE", "KEYS job:speed:*", "KEYS [ad]*", "RANDOMKEY", "SCAN x"]
    lines += ["GET a"]
    found = client.call_each("MULTI", *lines, "EXEC")[-1]
    assert found[:4] == [b"OK", 1 + len(states), b"OK", 2 + len(states)]
    assert sorted(found[4]) == [key for key in states if key.startswith(b"job:")]
    assert sorted(found[5]) == [b"a", b"dash/7/apdex"] and found[6] in [b"a", b"job:x", *states]
    assert found[7:] == [b"ERR invalid cursor", b"1"]
    assert client.call_each("MULTI", "KEYS", "EXEC")[1].startswith(b"ERR wrong number")


def test_scan_within_exec_covers_both_backends(client: Connection, direct: Connection) -> None:
    direct.call("MSET", "a", 1, "b", 2, *(word for key in VALUES for word in (key, "old")))
    seen: list[bytes] = []
    cursor = b""
    while cursor != b"0":
        found = client.call_each("MULTI", f"SCAN {(cursor or b'0').decode()} COUNT 4", "PING", "EXEC")[-1]
        (cursor, keys), pong = found
        assert pong == b"PONG"
        seen += keys
    assert sorted(seen) == sorted([b"a", b"b", *VALUES])


@pytest.mark.parametrize("protocol", [2, 3])
def test_select_within_exec_has_effect_of_redis(client: Connection, direct: Connection, protocol: int) -> None:
    lines = [
        *("SET n zero", "SELECT 3", "SET n three", "SELECT 99", "SELECT x", "GET n", "GET job:speed:1", "DBSIZE"),
        *("SELECT 0", "GET n", "GET job:speed:1", "SELECT 3"),
    ]
    for each in (direct, client):
        each.call("HELLO", protocol)
    expected = direct.call_each("MULTI", *lines, "EXEC", "GET n", "SELECT 0")
    expected[-3][10] = b"10"
    direct.call("FLUSHALL")
    assert client.call_each("MULTI", *lines, "EXEC", "GET n", "SELECT 0") == expected
    # The connection, which other clients share, is in its database.
    assert client.call_each("GET n", "MULTI", "GET n", "EXEC") == [b"zero", b"OK", b"QUEUED", [b"zero"]]
    # States' keys are in database 0: the SET after SELECT 3 is the upstream's, that after SELECT 0 is refused.
    lines = ["SELECT 3", "SET job:speed:1 mine", "SELECT 0", "SET job:speed:1 mine"]
    assert client.call_each("MULTI", *lines)[2:] == [
        b"QUEUED",
        b"QUEUED",
        b"ERR key 'job:speed:1' is owned by state job:speed",
    ]
    assert client.call_each("EXEC", "SELECT 0", "GET n") == [
        b"EXECABORT Transaction discarded because of previous errors.",
        b"OK",
        b"zero",
    ]


def test_denied_exec_ends_watch(overlay: Overlay, direct: Connection, tmp_path: Path) -> None:
    (users := tmp_path / "users.acl").write_text("user app on nopass ~* +@all -exec\nuser full on nopass ~* +@all\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    for line in users.read_text().splitlines():
        direct.call("ACL", "SETUSER", *line.split()[1:])
    with proxy.connect() as client:
        for connection in (client, direct):
            for multi in ([], ["MULTI"]):
                denied = connection.call_each("AUTH app any", "WATCH n", "SET n 1", *multi, "EXEC")[-1]
                assert b"has no permissions to run the 'exec' command" in denied
                assert connection.call_each("AUTH full any", "MULTI", "PING", "EXEC")[-1] == [b"PONG"]


def test_exec_answers_connection_commands(client: Connection, direct: Connection) -> None:
    lines = ["SET a 1", "MONITOR", "CLIENT REPLY ON", "GET a"]
    assert (
        client.call_each("MULTI", *lines, "EXEC")[-1]
        == direct.call_each("MULTI", *lines, "EXEC")[-1]
        == [b"OK", b"ERR MONITOR isn't allowed for DENY BLOCKING client", b"OK", b"1"]
    )
    found = client.call_each("MULTI", "HELLO", "HELLO 2", "GET a", "EXEC")[-1]
    assert b"proto" in found[0] and found[2] == b"1"
    for line in ("HELLO 3", "CLIENT REPLY OFF", "CLIENT REPLY SKIP"):
        assert b"cannot be in a transaction" in client.call_each("MULTI", line, "DISCARD")[1]
