"""Keys of states that clients know by other names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.swap import Swap
from tests.server.test_swap_databases import scanned
from tests.server.test_swap_rules import sparkis

STATES = [
    StateDescriptor("byAccount", key="account", value="score"),
    StateDescriptor("facts", key="account", field="metric", value="n"),
]
RULES = """
[[rule]]
name = "scores"
keys = "dash/<account>/score"
owner = "state"
state_key = "golden:byAccount:<account>"

[[rule]]
name = "facts"
keys = "dash/<account>/<metric>"
owner = "state"
state_key = "golden:facts:<account>"
field = "<metric>"
"""
# The values of a key that no test reads.
LAST_CHANGES = count()


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swap]:
    folder = tmp_path_factory.mktemp("swap")
    routes = folder / "routes.toml"
    routes.write_text("")
    with ExitStack() as stack:
        made = Swap(folder, stack, "--routes", str(routes))
        with LogWriter(made.log, "golden", STATES, "first-of-golden") as writer:
            changes = [
                Change("byAccount", Op.PUT, b"golden:byAccount:%d" % each, value=b"%d" % each) for each in (1, 2, 3)
            ]
            changes += [
                Change("facts", Op.PUT, b"golden:facts:%d" % each, field=field, value=b"%s of %d" % (field, each))
                for each in (1, 2)
                for field in (b"apdex", b"errors")
            ]
            writer.publish(changes)
        routes.write_text(RULES)
        assert sparkis(made.proxy, "reload").returncode == 0
        with made.proxy.connect() as client, made.upstream.connect() as upstream:
            for each in (1, 2, 3):
                eventually(lambda each=each: client.call("GET", f"golden:byAccount:{each}").plain == b"%d" % each)  # type: ignore[misc]
            for each in (1, 2):
                eventually(lambda each=each: client.call("HLEN", f"golden:facts:{each}").plain == 2)  # type: ignore[misc]
            upstream.call("MSET", "dash/1/score", "old", "dash/1/apdex", "old", "a", "mine")
        yield made


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_key_is_read_by_its_other_name(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    assert client.call("GET", "dash/1/score").plain == b"1"
    assert client.call("GET", "dash/9/score").plain is None
    assert client.call("MGET", "dash/1/score", "dash/2/score").plain == [b"1", b"2"]
    assert client.call("MGET", "dash/1/score", "a", "golden:byAccount:3").plain == [b"1", b"mine", b"3"]
    assert client.call("STRLEN", "dash/2/score").plain == 1 and client.call("TTL", "dash/2/score").plain == -1
    assert client.call("OBJECT", "ENCODING", "dash/2/score").plain == b"int"
    assert client.call("SET", "dash/1/score", "x").plain == b"ERR key 'dash/1/score' is owned by state golden:byAccount"


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_key_is_read_from_a_field(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    assert client.call("GET", "dash/1/apdex").plain == b"apdex of 1"
    assert [client.call("GET", key).plain for key in ("dash/1/none", "dash/9/apdex")] == [None, None]
    assert client.call("EXISTS", "dash/1/apdex").plain == 1 and client.call("STRLEN", "dash/1/apdex").plain == 10
    assert [client.call("TYPE", f"dash/{each}/apdex").plain for each in (1, 9)] == [b"string", b"none"]
    assert [client.call("TTL", f"dash/{each}/apdex").plain for each in (1, 9)] == [-1, -2]
    mixed = ["dash/1/apdex", "dash/2/score", "a", "dash/1/none", "dash/2/errors", "golden:byAccount:1"]
    assert client.call("MGET", *mixed).plain == [b"apdex of 1", b"2", b"mine", None, b"errors of 2", b"1"]
    assert client.call("EXISTS", *mixed).plain == client.call("TOUCH", *mixed).plain == 5
    assert client.call("MGET", "dash/1/apdex", "dash/2/errors").plain == [b"apdex of 1", b"errors of 2"]
    assert client.call("GETRANGE", "dash/1/apdex", 0, 1).plain == (
        b"ERR command 'getrange' is not available for fields of a state's key: key 'dash/1/apdex' is owned by state "
        b"golden:facts"
    )


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_long_read_finds_keys_by_their_other_names(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    mixed = ["dash/1/apdex", "dash/2/score", "a", "dash/1/none", "golden:byAccount:1", "none"] * 300
    assert client.call("MGET", *mixed).plain == [b"apdex of 1", b"2", b"mine", None, b"1", None] * 300
    assert client.call("EXISTS", *mixed).plain == 4 * 300
    assert client.call("MGET", *["dash/2/score"] * 1_500).plain == [b"2"] * 1_500
    assert client.call("HMGET", "golden:facts:1", *["apdex", "none"] * 1_000).plain == [b"apdex of 1", None] * 1_000


def test_a_transaction_reads_keys_by_their_other_names(client: Connection) -> None:
    assert client.call("WATCH", "dash/1/score", "dash/1/apdex", "a").plain == b"OK"
    lines = ["MULTI", "GET dash/1/score", "GET a", "TTL dash/1/apdex", "MGET dash/1/apdex a dash/2/score", "EXEC"]
    client.send("".join(f"{line}\r\n" for line in lines).encode())
    replies = [client.read().plain for _ in lines]
    assert replies[-1] == [b"1", b"mine", -1, [b"apdex of 1", b"mine", b"2"]]
    assert client.call("WATCH", "dash/1/score").plain == b"OK"
    client.send(b"MULTI\r\nGET dash/1/score\r\nEXEC\r\n")
    assert [client.read().plain for _ in range(3)][-1] == [b"1"]


def test_a_changed_name_fails_the_exec_of_clients_that_watch_the_key(swap: Swap, client: Connection) -> None:
    assert client.call("WATCH", "dash/1/score").plain == b"OK"
    (swap.folder / "routes.toml").write_text(RULES.replace("dash/<account>/score", "dashes/<account>/score"))
    try:
        assert sparkis(swap.proxy, "reload").returncode == 0
        client.send(b"MULTI\r\nGET dashes/1/score\r\nEXEC\r\n")
        assert [client.read().plain for _ in range(3)][-1] is None
        assert client.call("GET", "dashes/1/score").plain == b"1"
    finally:
        (swap.folder / "routes.toml").write_text(RULES)
        assert sparkis(swap.proxy, "reload").returncode == 0


def test_listed_keys_have_their_other_names(client: Connection) -> None:
    assert sorted(client.call("KEYS", "dash/*").plain) == [b"dash/%d/score" % each for each in (1, 2, 3)]
    assert scanned(client, "MATCH", "dash/*") == {b"dash/%d/score" % each for each in (1, 2, 3)}
    assert b"golden:byAccount:1" in client.call("KEYS", "*").plain
    assert {b"dash/1/score", b"golden:byAccount:1", b"golden:facts:1", b"a"} <= scanned(client)
    assert scanned(client, "MATCH", "golden:b*", "TYPE", "string") == {
        b"golden:byAccount:%d" % each for each in (1, 2, 3)
    }


def publish(swap: Swap, *changes: Change) -> None:
    with LogWriter(swap.log, "golden", STATES, "first-of-golden") as writer:
        writer.publish(list(changes))


def score(account: int, value: bytes) -> Change:
    return Change("byAccount", Op.PUT, b"golden:byAccount:%d" % account, value=value)


def fact(account: int, value: bytes) -> Change:
    return Change("facts", Op.PUT, b"golden:facts:%d" % account, field=b"apdex", value=value)


@pytest.fixture
def changed(swap: Swap) -> Iterator[None]:
    """The test changes values of the state; afterwards they are as before, and their invalidations have arrived.

    A server sends invalidations in the order of changes: after that of a later change, none of them is missing.
    """
    yield
    publish(swap, *(score(each, b"%d" % each) for each in (1, 2, 3)), fact(1, b"apdex of 1"), fact(2, b"apdex of 2"))
    with swap.proxy.connect() as client:
        eventually(lambda: client.call("GET", "dash/1/score").plain == b"1")
        eventually(lambda: client.call("GET", "dash/1/apdex").plain == b"apdex of 1")
        client.call("HELLO", 3)
        client.call("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "golden:facts:last")
        publish(swap, Change("facts", Op.PUT, b"golden:facts:last", field=b"n", value=b"%d" % next(LAST_CHANGES)))
        while client.read().plain[1] != [b"golden:facts:last"]:
            pass


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("setting", ["KEA", "EA", "KA"])
@pytest.mark.usefixtures("changed")
def test_notifications_have_the_names_that_clients_know(swap: Swap, protocol: int, setting: str) -> None:
    with swap.proxy.connect() as one, swap.proxy.connect() as pattern, swap.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", setting)
        one.call("HELLO", protocol)
        one.send(request("SUBSCRIBE", "__keyspace@0__:dash/2/score", "__keyevent@0__:set"))
        assert [one.read().plain[2] for _ in range(2)] == [1, 2]
        assert pattern.call("PSUBSCRIBE", "__key*@0__:dash/*").plain[2] == 1
        upstream.call("SET", "dash/2/score", "an old copy")  # nobody is told
        publish(swap, score(1, b"x"), score(2, b"y"), fact(1, b"z"))
        expected = [(b"__keyspace@0__:dash/2/score", b"set")] if "K" in setting else []
        for account in (1, 2) if "E" in setting else ():
            names = (b"golden:byAccount:%d" % account, b"dash/%d/score" % account)
            expected += [(b"__keyevent@0__:set", name) for name in names]
        read_until(one, expected)
        if "K" in setting:
            read_until(pattern, [(b"__keyspace@0__:dash/%d/score" % each, b"set") for each in (1, 2)])


def read_until(client: Connection, expected: list[tuple[bytes, bytes]]) -> None:
    """Read up to the last of these messages; late ones of an earlier test's last change may be among them."""
    missing = set(expected)
    while missing:
        found = tuple(client.read().plain[-2:])
        assert b"facts" not in found[0] and b"apdex" not in found[0]
        missing.discard(found)


@pytest.mark.usefixtures("changed")
def test_notifications_follow_changed_names_and_keep_the_order_of_changes(swap: Swap) -> None:
    with swap.proxy.connect() as client, swap.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        client.call("HELLO", 3)
        (swap.folder / "routes.toml").write_text(RULES.replace("dash/<account>/score", "dashes/<account>/score"))
        try:
            client.call("PSUBSCRIBE", "__keyspace@0__:dash*")
            assert sparkis(swap.proxy, "reload").returncode == 0
            with swap.proxy.connect() as other:
                other.call("PSUBSCRIBE", "__keyspace@0__:other*")
            publish(swap, score(1, b"5"))
            publish(swap, Change("byAccount", Op.DELETE, b"golden:byAccount:1"))
            publish(swap, score(1, b"6"))
            found = [client.read().plain[2:] for _ in range(3)]
            assert found == [[b"__keyspace@0__:dashes/1/score", event] for event in (b"set", b"del", b"set")]
        finally:
            (swap.folder / "routes.toml").write_text(RULES)
            assert sparkis(swap.proxy, "reload").returncode == 0


def read_until_reply(client: Connection) -> tuple[list[Reply], Reply]:
    pushes = []
    while (found := client.read()).type == ">":
        pushes.append(found.plain)
    return pushes, found


@pytest.mark.usefixtures("changed")
def test_changed_keys_are_invalidated_by_the_names_that_were_read(swap: Swap, client: Connection) -> None:
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call("MGET", "dash/1/score", "dash/2/score").plain == [b"1", b"2"]
    assert client.call("GET", "golden:byAccount:3").plain == b"3"
    assert client.call("GET", "dash/1/apdex").plain == b"apdex of 1"
    assert client.call("TTL", "dash/2/apdex").plain == -1
    assert client.call("PING").plain == b"PONG"  # nothing was invalidated yet
    with swap.upstream.connect() as upstream:
        upstream.call("SET", "dash/1/score", "an old copy")
    publish(swap, score(1, b"x"), score(3, b"y"), fact(1, b"z"), fact(2, b"z"))
    expected = {b"dash/1/score", b"golden:byAccount:3", b"dash/1/apdex", b"dash/2/apdex"}
    found: set[bytes] = set()
    while len(found) < len(expected):
        found |= set(client.read().plain[1])
    assert found == expected
    publish(swap, score(1, b"1"))  # it was not read again
    assert client.call("PING").plain == b"PONG"


@pytest.mark.usefixtures("changed")
def test_an_invalidation_of_another_name_comes_before_any_newer_reply(swap: Swap, client: Connection) -> None:
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON")
    last = {b"dash/1/score": b"1", b"dash/1/apdex": b"apdex of 1"}
    invalid: set[bytes] = set()
    for name in last:
        client.call("GET", name)
    with LogWriter(swap.log, "golden", STATES, "first-of-golden") as writer:
        for number in range(40):
            writer.publish([score(1, b"%d" % number), fact(1, b"f%d" % number)])
            for name in last:
                client.send(request("GET", name))
                pushes, reply = read_until_reply(client)
                invalid |= {key for _, keys in pushes for key in keys or last}
                assert reply.plain == last[name] or name in invalid
                if reply.plain != last[name]:
                    last[name] = reply.plain
                    invalid.discard(name)


@pytest.mark.usefixtures("changed")
def test_broadcasts_have_the_names_that_clients_know(swap: Swap, client: Connection) -> None:
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "dash/")
    assert client.call("GET", "dash/2/apdex").plain == b"apdex of 2"
    publish(swap, score(3, b"x"), fact(2, b"z"))
    found: set[bytes] = set()
    while not {b"dash/3/score", b"dash/2/apdex"} <= found:
        found |= set(client.read().plain[1])


def test_users_rights_are_about_the_names_that_they_use(tmp_path: Path, swap: Swap) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~dash/* +@all\n")
    routes = tmp_path / "routes.toml"
    routes.write_text(RULES)
    proxy = swap.start_swap("--aclfile", str(users), "--routes", str(routes), is_ready=False)
    with proxy.connect() as client:
        client.call("AUTH", "app", "app")
        eventually(lambda: client.call("GET", "dash/1/score").plain == b"1")
        assert client.call("GET", "golden:byAccount:1").plain.startswith(b"NOPERM")
        assert sorted(client.call("KEYS", "*").plain) == [b"dash/%d/score" % each for each in (1, 2, 3)]
        assert scanned(client) == {b"dash/%d/score" % each for each in (1, 2, 3)}
