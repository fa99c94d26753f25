"""Several databases of the upstream, and states' keys in another one than the first."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection, request, scanned
from compat.waiting import eventually
from state_backend.model.records import Change, Op
from tests.server.overlay import OLD, Overlay

RULES = '[[rule]]\nkeys = "dash/<account>/apdex"\nowner = "state"\ndatabase = 2\n'


@pytest.mark.parametrize(
    ("word", "error"),
    [
        *(("99", b"ERR DB index is out of range"), ("-1", b"ERR DB index is out of range")),
        *(("x", b"ERR value is not an integer or out of range"), ("", b"ERR value is not an integer or out of range")),
    ],
)
def test_select_of_absent_database_is_refused_and_opens_nothing(
    overlay: Overlay, client: Connection, word: str, error: bytes
) -> None:
    client.send(b"SELECT 3\r\n")
    assert client.read().plain == b"OK"
    assert client.call("SELECT", word).plain == error
    assert client.call("SET", "where", "three").plain == b"OK"
    assert client.call("FLUSHDB").plain == b"OK"
    assert overlay.info()["upstream_status"] == "up" and int(overlay.info()["upstream_databases"]) <= 4


def test_transaction_and_watch_follow_database_rule(overlay: Overlay, client: Connection) -> None:
    client.call("SELECT", "2")
    assert client.call("WATCH", "dash/7/apdex").plain == b"OK"
    client.call("MULTI")
    assert client.call("GET", "dash/7/apdex").plain == b"QUEUED"
    assert client.call("EXEC").plain == [b"0.9"]
    assert client.call("WATCH", "dash/7/apdex").plain == b"OK"
    overlay.use_rules(RULES.replace("= 2", "= 5"))
    try:
        client.call("MULTI")
        assert client.call("EXEC").plain is None
    finally:
        overlay.use_rules(RULES)


def test_move_and_copy_onto_states_key_of_other_database_are_refused(overlay: Overlay, client: Connection) -> None:
    in_two, in_zero = (
        b"ERR key '%b' is owned by state %b" % row
        for row in ((b"dash/7/apdex", b"job:apdex"), (b"job:speed:1", b"job:speed"))
    )
    client.call("MSET", "dash/7/apdex", "mine", "other", "mine")
    assert client.call("MOVE", "dash/7/apdex", "2").plain == in_two
    assert client.call("COPY", "other", "dash/7/apdex", "DB", "2").plain == in_two
    assert client.call("COPY", "other", "dash/7/apdex", "REPLACE").plain == 1  # in database 0 it is the upstream's
    assert client.call("COPY", "other", "job:speed:1", "DB", "5", "REPLACE").plain == 1
    assert client.call("COPY", "job:speed:1", "other", "DB", "5").plain == in_zero
    assert client.call("COPY", "other", "x", "DB", "2", "REPLACE").plain == 1
    client.call("SELECT", "5")
    assert client.call("GET", "job:speed:1").plain == b"mine"
    assert client.call("MOVE", "job:speed:1", "0").plain == in_zero
    assert client.call("MOVE", "job:speed:1", "6").plain == 1
    for databases in (("5", "0"), ("2", "5")):
        assert b"has keys of states" in client.call("SWAPDB", *databases).plain
    assert client.call("SWAPDB", "5", "6").plain == b"OK" and client.call("GET", "job:speed:1").plain == b"mine"
    assert client.call("MOVE", "job:speed:1", "x").plain == b"ERR value is not an integer or out of range"


@pytest.mark.parametrize("options", [[], ["BCAST"]])
def test_tracking_covers_selected_database(overlay: Overlay, client: Connection, options: list[str]) -> None:
    client.call("SELECT", "2")
    client.call("HELLO", 3)
    assert client.call("CLIENT", "TRACKING", "ON", *options).plain == b"OK"
    assert client.call("SELECT", "0").plain == (
        b"ERR another database cannot be selected by a subscriber, or a client that tracks keys"
    )
    with overlay.upstream.connect() as upstream:
        upstream.call("SELECT", "2")
        client.send(request("GET", "tracked"))
        while client.read().type == ">":
            pass  # of an epoch just before the client began to track
        upstream.call("SET", "dash/8/apdex", "a copy in database 2")  # no client reads it
        upstream.call("SET", "tracked", "1")
        while (push := client.read().plain) != [b"invalidate", [b"tracked"]]:
            assert push == [b"invalidate", [b"dash/7/apdex"]]  # of an epoch just before the client began to track
        _read_until_reply(client, b"0.9")
        for value in (b"0.7", b"0.9"):
            overlay.publish(Change("apdex", Op.PUT, b"dash/7/apdex", value=value))
            assert [b"invalidate", [b"dash/7/apdex"]] in _read_until_reply(client, value)


def _read_until_reply(client: Connection, value: bytes) -> list[object]:
    """Read the state's key until it has a value; return the pushes before."""
    pushes = []
    while True:
        client.send(request("GET", "dash/7/apdex"))
        while (found := client.read()).type == ">":
            pushes.append(found.plain)
        if found.plain == value:
            return pushes


@pytest.mark.parametrize("setting", ["KEA", "KA", "EA"])
def test_notifications_have_database_of_key(overlay: Overlay, setting: str) -> None:
    names = {"__keyspace@2__:dash/7/apdex", "__keyspace@0__:dash/7/apdex", "__keyevent@2__:set"}
    with overlay.proxy.connect() as one, overlay.proxy.connect() as pattern, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", setting)
        one.call("HELLO", 3)
        one.send(request("SUBSCRIBE", *names))
        assert sorted(one.read().plain[2] for _ in names) == [1, 2, 3]
        assert pattern.call("PSUBSCRIBE", "__key*@*__:*").plain[2] == 1
        upstream.call("SELECT", "2")
        upstream.call("SET", "dash/7/apdex", "a copy in database 2")  # no notification
        for value in (b"0.8", b"0.9"):
            overlay.publish(Change("apdex", Op.PUT, b"dash/7/apdex", value=value))
        upstream.call("SET", "last", "1")
        of_key = [[b"__keyspace@2__:dash/7/apdex", b"set"]] if "K" in setting else []
        of_event = [[b"__keyevent@2__:set", b"dash/7/apdex"]] if "E" in setting else []
        for client in (one, pattern):
            found = []
            while len([each for each in found if b"last" not in b" ".join(each)]) < 2 * len(of_key + of_event):
                found.append(client.read().plain[-2:])
            assert [each for each in found if b"last" not in b" ".join(each)] == 2 * (of_key + of_event)
        upstream.call("SELECT", "0")
        upstream.call("SET", "dash/7/apdex", OLD)  # in database 0 it is the upstream's
        own = [each for each in _until(pattern, b"@0__:", len(setting) - 1) if b"@0__:" in each[0]]
        assert {each[0] for each in own} <= {b"__keyspace@0__:dash/7/apdex", b"__keyevent@0__:set"}


def _until(client: Connection, text: bytes, count: int) -> list[list[bytes]]:
    """Return messages up to the one with which `count` of their channels contain a text."""
    found: list[list[bytes]] = []
    while sum(text in each[0] for each in found) < count:
        found.append(client.read().plain[-2:])
    return found


def test_select_of_states_database_needs_no_upstream(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client:
        overlay.signal_upstream(signal.SIGSTOP)
        try:
            assert client.call("SELECT", "2").plain == b"OK"
            assert client.call("GET", "dash/7/apdex").plain == b"0.9"
        finally:
            overlay.signal_upstream(signal.SIGCONT)


def test_database_of_url_is_database_0(tmp_path: Path, overlay: Overlay) -> None:
    with redis_server(tmp_path) as upstream:
        proxy = overlay.start_at(f"redis://127.0.0.1:{upstream.port}/3")
        with proxy.connect() as client, upstream.connect() as direct:
            eventually(lambda: client.call("SET", "k", "three").plain == b"OK")
            assert client.call("SELECT", "3").plain == b"OK" and client.call("GET", "k").plain == b"three"
            assert client.call("SELECT", "4").plain == b"OK" and client.call("GET", "k").plain is None
            client.call("SET", "k", "four")
            assert client.call("SELECT", "0").plain == b"OK" and client.call("GET", "k").plain == b"three"
            direct.call("SELECT", "4")
            assert direct.call("GET", "k").plain == b"four"


def test_acl_patterns_apply_in_all_databases(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~mine* +@all\n")
    proxy = overlay.start_overlay("--aclfile", str(users), is_ready=False)
    with proxy.connect() as client:
        client.call("AUTH", "app", "app")
        eventually(lambda: client.call("SELECT", "6").plain == b"OK")
        with overlay.upstream.connect() as upstream:
            upstream.call("SELECT", "6")
            upstream.call("MSET", "mine", "1", "other", "2")
        eventually(lambda: client.call("KEYS", "*").plain == [b"mine"])
        assert scanned(client) == [b"mine"]


def test_watch_in_other_database_follows_earlier_writes(client: Connection) -> None:
    client.call("WATCH", "first")  # from here on the client has a connection of its own in database 0
    client.call("UNWATCH")
    client.call("SELECT", "1")
    for number in range(50):
        client.send(b"SET w %d\r\nWATCH w\r\nMULTI\r\nGET w\r\nEXEC\r\n" % number)
        assert [client.read().plain for _ in range(5)][4] == [b"%d" % number]


def test_shared_connections_of_other_database_are_limited(overlay: Overlay) -> None:
    with ExitStack() as stack, overlay.upstream.connect() as upstream:
        for number in range(8):
            client = stack.enter_context(overlay.proxy.connect())
            assert client.call("SELECT", "7").plain == b"OK" and client.call("SET", "c", str(number)).plain == b"OK"
        shared = [line for line in upstream.call("CLIENT", "LIST").plain.splitlines() if b" db=7 " in line]
        assert len(shared) == 4
