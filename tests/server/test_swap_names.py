"""Keys of states that clients know by other names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.wire import Connection
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
