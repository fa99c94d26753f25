"""Keys whose rule is prefer-state, and which clients know by another name than the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from compat.conformance.wire import Connection
from compat.waiting import eventually
from tests.server.swap import Swap
from tests.server.test_overlay_aliases import fact, publish, score
from tests.server.test_overlay_databases import scanned
from tests.server.test_overlay_rules import sparkis

RULES = """
[[rule]]
name = "scores"
keys = "board/<account>/score"
owner = "prefer-state"
state_key = "golden:byAccount:<account>"

[[rule]]
name = "facts"
keys = "board/<account>/<metric>"
owner = "prefer-state"
state_key = "golden:facts:<account>"
field = "<metric>"
"""
# Names of which the states have 1, `old` is the upstream's only, and nobody has 9.
MIXED = ["board/1/score", "board/old/score", "board/1/apdex", "a", "board/1/old", "board/9/score", "board/9/apdex"]
VALUES = [b"1", b"old score", b"0.9", b"mine", b"old fact", None, None]


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swap]:
    folder = tmp_path_factory.mktemp("swap")
    routes = folder / "routes.toml"
    routes.write_text("")
    with ExitStack() as stack:
        made = Swap(folder, stack, "--routes", str(routes))
        publish(made, score(1, b"1"), fact(1, b"0.9"))
        with made.proxy.connect() as client, made.upstream.connect() as upstream:
            eventually(lambda: client.call("GET", "golden:byAccount:1").plain == b"1")
            copies = [(name, "a copy") for name in MIXED if "/1/" in name]
            olds = [("board/old/score", "old score"), ("board/1/old", "old fact"), ("a", "mine")]
            for pair in [*copies, *olds]:
                upstream.call("SET", *pair)
        routes.write_text(RULES)
        assert sparkis(made.proxy, "reload").returncode == 0
        yield made


@pytest.mark.parametrize("protocol", [2, 3])
def test_preferred_alias_is_answered_by_states_else_by_upstream(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    assert [client.call("GET", name).plain for name in MIXED] == VALUES
    assert [client.call("STRLEN", name).plain for name in MIXED] == [len(each or b"") for each in VALUES]
    assert client.call("MGET", *MIXED).plain == VALUES
    assert client.call("MGET", *MIXED * 200).plain == VALUES * 200
    assert client.call("EXISTS", *MIXED).plain == client.call("TOUCH", *MIXED).plain == 5
    assert [client.call("TYPE", name).plain for name in MIXED] == [b"string"] * 5 + [b"none"] * 2
    assert [client.call("TTL", name).plain for name in MIXED] == [-1] * 5 + [-2] * 2


def test_preferred_field_alias_without_states_command_is_upstreams_unless_states_have_it(client: Connection) -> None:
    refused = "ERR key 'board/1/apdex' is a state's if it has the key, by the rule 'facts', and the states have it"
    assert client.call("GETRANGE", "board/1/apdex", 0, 0).plain.decode() == refused
    assert client.call("GETRANGE", "board/1/old", 0, 2).plain == b"old"
    assert client.call("GETRANGE", "board/1/score", 0, 0).plain == b"1"


@pytest.mark.parametrize("protocol", [2, 3])
def test_preferred_aliases_within_transaction_are_decided_one_by_one(client: Connection, protocol: int) -> None:
    client.call("HELLO", protocol)
    lines: list[list[str | int]] = [["GET", name] for name in MIXED]
    lines += [["TTL", name] for name in MIXED]
    lines += [["MGET", *MIXED], ["EXISTS", *MIXED], ["GETRANGE", "board/1/apdex", 0, 0]]
    client.call("MULTI")
    assert {client.call(*line).plain for line in lines} == {b"QUEUED"}
    found = client.call("EXEC").plain
    assert found[:-1] == [*VALUES, *[-1] * 5, *[-2] * 2, VALUES, 5]
    assert found[-1].endswith(b"and the states have it")


def test_preferred_aliases_are_listed_once(client: Connection) -> None:
    expected = sorted(name.encode() for name, value in zip(MIXED, VALUES, strict=True) if value and name != "a")
    assert sorted(client.call("KEYS", "board/*").plain) == expected
    assert sorted(scanned(client, "MATCH", "board/*")) == expected
    assert sorted(scanned(client, "MATCH", "board/*", "TYPE", "string")) == expected


def test_preferred_alias_is_watched_at_both_backends(swap: Swap, client: Connection) -> None:
    for name, state_key in (("board/5/score", b"golden:byAccount:5"), ("board/5/apdex", b"golden:facts:5")):
        with swap.upstream.connect() as upstream, swap.proxy.connect() as reader:
            assert client.call("WATCH", name).plain == b"OK"
            upstream.call("SET", name, "an old copy")
            client.send(b"MULTI\r\nGET a\r\nEXEC\r\n")
            assert [client.read().plain for _ in range(3)][-1] is None
            assert client.call("WATCH", name, "a").plain == b"OK"
            publish(swap, score(5, b"5") if b"by" in state_key else fact(5, b"5"))
            eventually(lambda name=name, reader=reader: reader.call("GET", name).plain == b"5")  # type: ignore[misc]
            client.send(b"MULTI\r\nGET a\r\nEXEC\r\n")
            assert [client.read().plain for _ in range(3)][-1] is None


def test_preferred_alias_has_notifications_of_both_backends(swap: Swap) -> None:
    expected = {(b"__keyspace@0__:board/6/score", b"set"), (b"__keyspace@0__:board/6/apdex", b"set")}
    with swap.upstream.connect() as upstream, swap.proxy.connect() as client:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        assert client.call("PSUBSCRIBE", "__keyspace@0__:board/6/*").plain[2] == 1
        upstream.call("SET", "board/6/score", "an old copy")
        assert tuple(client.read().plain[-2:]) == (b"__keyspace@0__:board/6/score", b"set")
        publish(swap, score(6, b"x"), fact(6, b"y"))
        assert {tuple(client.read().plain[-2:]) for _ in expected} == expected


@pytest.mark.parametrize("options", [[], ["BCAST", "PREFIX", "board/"]])
def test_preferred_alias_is_invalidated_by_changes_of_either_backend(
    swap: Swap, client: Connection, options: list[str]
) -> None:
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON", *options)
    with swap.upstream.connect() as upstream:
        upstream.call("SET", "board/2/score", "an old copy")
        client.send(b"GET board/2/score\r\n")
        last = read_until_reply(client, {b"board/2/score"})
        publish(swap, score(2, b"%b!" % last))
        if options:
            assert client.read().plain[1] == [b"board/2/score"]
        eventually(lambda: read_reply(client, b"GET board/2/score\r\n") == b"%b!" % last)


def read_until_reply(client: Connection, names: set[bytes]) -> bytes:
    """Return the next reply; all pushes before it are of these names."""
    while (found := client.read()).type == ">":
        assert set(found.plain[1]) <= names
    assert isinstance(found.plain, bytes)
    return found.plain


def read_reply(client: Connection, sent: bytes) -> bytes:
    client.send(sent)
    while (found := client.read()).type == ">":
        pass
    assert isinstance(found.plain, bytes)
    return found.plain
