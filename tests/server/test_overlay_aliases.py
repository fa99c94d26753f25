"""Keys of states that clients know by other names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection, Reply, request, scanned
from compat.waiting import eventually
from resp_server.backends.servers.field_notifications import FIELDS_MAX
from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from tests.server.aliased import STATES, fact, publish, score
from tests.server.overlay import Overlay

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
# The clients' names of whole keys and of fields.
NAMES = {b"dash/%d/score" % each for each in (1, 2, 3)}
NAMES |= {b"dash/%d/%b" % (each, field) for each in (1, 2) for field in (b"apdex", b"errors")}
# Keys that no test reads, of each server one, and their values.
LAST_ACCOUNTS = (b"last", b"last2")
LAST_CHANGES = count()


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    with ExitStack() as stack:
        made = Overlay(tmp_path_factory.mktemp("overlay"), stack, rules=RULES)
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
        with made.proxy.connect() as client, made.upstream.connect() as upstream:
            for each in (1, 2, 3):
                eventually(lambda each=each: client.call("GET", f"golden:byAccount:{each}").plain == b"%d" % each)  # type: ignore[misc]
            for each in (1, 2):
                eventually(lambda each=each: client.call("HLEN", f"golden:facts:{each}").plain == 2)  # type: ignore[misc]
            upstream.call("MSET", "dash/1/score", "old", "dash/1/apdex", "old", "a", "mine")
        yield made


def test_alias_of_key_has_history(client: Connection) -> None:
    [row] = client.call("STATE", "HISTORY", "dash/2/score").plain
    assert row[4:8] == [b"kind", b"value", b"value", b"2"]
    error = (
        "STATE HISTORY is not available for fields of a state's key: key 'dash/1/apdex' is owned by state golden:facts"
    )
    assert client.call("STATE", "HISTORY", "dash/1/apdex").plain.decode() == f"ERR {error}"


def test_changed_alias_fails_exec_of_watchers(overlay: Overlay, client: Connection) -> None:
    assert client.call("WATCH", "dash/1/score").plain == b"OK"
    try:
        overlay.use_rules(RULES.replace("dash/<account>/score", "dashes/<account>/score"))
        client.send(b"MULTI\r\nGET dashes/1/score\r\nEXEC\r\n")
        assert [client.read().plain for _ in range(3)][-1] is None
        assert client.call("GET", "dashes/1/score").plain == b"1"
    finally:
        overlay.use_rules(RULES)


def test_patterns_find_aliases_as_redis_finds_keys(client: Connection, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, server.connect() as alone:
        alone.call("MSET", *(word for name in NAMES for word in (name, b"x")))

        @given(st.lists(st.sampled_from([*"*?/12ape\\[]^-", "score", "apdex", "dash"]), max_size=6).map("".join))
        @checked(50)
        def find(end: str) -> None:
            pattern = f"dash{end}"
            assert sorted(client.call("KEYS", pattern).plain) == sorted(alone.call("KEYS", pattern).plain)
            assert set(scanned(client, "MATCH", pattern, "TYPE", "string")) == set(scanned(alone, "MATCH", pattern))

        find()


def test_alias_has_ttl_of_field_or_hash(overlay: Overlay, client: Connection) -> None:
    late_ms, later_ms = 4_102_444_800_000, 4_102_448_400_000
    packed = packed_map.pack([(b"f", b"x")])
    publish(
        overlay,
        Change("facts", Op.PUT, b"golden:facts:hash", value=packed, expire_at_ms=late_ms),
        Change("facts", Op.PUT, b"golden:facts:field", b"f", b"x", later_ms),
    )
    eventually(lambda: client.call("EXISTS", "dash/hash/f", "dash/field/f").plain == 2)
    for key, at_ms in ((b"dash/hash/f", late_ms), (b"dash/field/f", later_ms)):
        assert client.call("PEXPIRETIME", key).plain == at_ms and client.call("EXPIRETIME", key).plain == at_ms // 1000
        assert 0 < client.call("PTTL", key).plain < at_ms and 0 < client.call("TTL", key).plain < at_ms // 1000
    assert client.call("PEXPIRETIME", "dash/hash/none").plain == client.call("TTL", "dash/none/f").plain == -2
    client.send(b"MULTI\r\nPEXPIRETIME dash/hash/f\r\nGET a\r\nTTL dash/1/apdex\r\nEXEC\r\n")
    assert [client.read().plain for _ in range(5)][-1] == [late_ms, b"mine", -1]
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON")
    assert client.call("PEXPIRETIME", "dash/hash/f").plain == late_ms
    publish(overlay, *(Change("facts", Op.DELETE, b"golden:facts:" + key) for key in (b"hash", b"field")))
    assert b"dash/hash/f" in (client.read().plain[1] or [b"dash/hash/f"])
    with overlay.proxy.connect() as other:
        eventually(lambda: other.call("EXISTS", "dash/hash/f", "dash/field/f").plain == 0)


def test_randomkey_draws_aliases_of_fields(overlay: Overlay, client: Connection) -> None:
    hashes = [
        b"golden:facts:%d" % (at * 7919) for at in range(10, 60)
    ]  # RANDOMKEY hardly ever draws some of a few keys
    publish(overlay, *(Change("facts", Op.PUT, key, b"drawn", b"x") for key in hashes))
    found: set[bytes] = set()

    def has_drawn_all_kinds() -> bool:
        found.update(client.call("RANDOMKEY").plain for _ in range(10))
        ends = (b"/drawn", b"/score")
        return b"a" in found and found & {*hashes} and all(any(name.endswith(end) for name in found) for end in ends)

    try:
        eventually(has_drawn_all_kinds)
        assert found <= set(client.call("KEYS", "*").plain)
    finally:
        publish(overlay, *(Change("facts", Op.DELETE, key) for key in hashes))
        eventually(lambda: client.call("EXISTS", *hashes).plain == 0)


@pytest.mark.parametrize("fields", [3, 3_000])
def test_aliases_of_many_fields_are_listed(overlay: Overlay, client: Connection, fields: int) -> None:
    names = {b"dash/many/f%d" % at for at in range(fields)}
    publish(overlay, *(Change("facts", Op.PUT, b"golden:facts:many", b"f%d" % at, b"x") for at in range(fields)))
    try:
        eventually(lambda: client.call("HLEN", "golden:facts:many").plain == fields)
        assert set(client.call("KEYS", "dash/many/*").plain) == names
        assert set(scanned(client, "MATCH", "dash/many/*")) == names
        assert client.call("EXISTS", *names).plain == fields
    finally:
        publish(overlay, Change("facts", Op.DELETE, b"golden:facts:many"))
        eventually(lambda: client.call("KEYS", "dash/many/*").plain == [])


@pytest.fixture
def changed(overlay: Overlay) -> Iterator[None]:
    """The test changes values of the state; afterwards they are as before, and their invalidations have arrived.

    Both servers have reached the newest epoch then. An epoch's invalidations come before replies of that epoch.
    """
    yield
    before = [score(each, b"%d" % each) for each in (1, 2, 3)] + [fact(each, b"apdex of %d" % each) for each in (1, 2)]
    last = b"%d" % next(LAST_CHANGES)
    keys = [b"golden:facts:" + account for account in LAST_ACCOUNTS]
    publish(overlay, *before, *(Change("facts", Op.PUT, key, field=b"n", value=last) for key in keys))
    for protocol, key in product((2, 3), keys):
        with overlay.proxy.connect() as client:
            client.call("HELLO", protocol)
            eventually(lambda client=client, key=key: client.call("HGET", key, "n").plain == last)  # type: ignore[misc]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("setting", ["KEA", "EA", "KA"])
@pytest.mark.usefixtures("changed")
def test_notifications_have_aliases(overlay: Overlay, protocol: int, setting: str) -> None:
    with overlay.proxy.connect() as one, overlay.proxy.connect() as pattern, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", setting)
        one.call("HELLO", protocol)
        one.send(request("SUBSCRIBE", "__keyspace@0__:dash/2/score", "__keyevent@0__:set"))
        assert [one.read().plain[2] for _ in range(2)] == [1, 2]
        assert pattern.call("PSUBSCRIBE", "__key*@0__:dash/*").plain[2] == 1
        upstream.call("SET", "dash/2/score", "an old copy")  # no notification
        publish(overlay, score(1, b"x"), score(2, b"y"), fact(1, b"z"))
        expected = [(b"__keyspace@0__:dash/2/score", b"set")] if "K" in setting else []
        for account in (1, 2) if "E" in setting else ():
            names = (b"golden:byAccount:%d" % account, b"dash/%d/score" % account)
            expected += [(b"__keyevent@0__:set", name) for name in names]
        if "E" in setting:
            expected += [(b"__keyevent@0__:set", b"dash/1/%b" % field) for field in (b"apdex", b"errors")]
        read_until(one, expected)
        if "K" in setting:
            names = (b"dash/1/score", b"dash/2/score", b"dash/1/apdex", b"dash/1/errors")
            read_until(pattern, [(b"__keyspace@0__:" + name, b"set") for name in names])


def read_until(client: Connection, expected: list[tuple[bytes, bytes]]) -> None:
    """Read up to the last of these messages; late ones of an earlier test's last change may be among them."""
    missing = set(expected)
    while missing:
        missing.discard(tuple(client.read().plain[-2:]))


def until_end(overlay: Overlay, client: Connection, end: bytes) -> list[tuple[bytes, bytes]]:
    """Return the notifications up to that of a last change, which is published now, without those of its key."""
    publish(overlay, score(9, end), fact(9, end))
    found: list[tuple[bytes, bytes]] = []
    while found[-1:] != [(b"__keyspace@0__:dash/9/apdex", b"set")]:
        found.append(tuple(client.read().plain[-2:]))
    return [row for row in found if b"/9/" not in row[0]]


@pytest.mark.usefixtures("changed")
def test_notifications_of_field_alias_are_those_of_string(overlay: Overlay) -> None:
    gone = Change("facts", Op.DELETE, b"golden:facts:1", field=b"apdex")
    channel = b"__keyspace@0__:dash/1/apdex"
    with overlay.proxy.connect() as client, overlay.proxy.connect() as state, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "K$g")
        client.call("HELLO", 3)
        assert client.call("SUBSCRIBE", channel, "__keyspace@0__:dash/9/apdex").plain[2] == 1
        assert client.read().plain[2] == 2
        assert state.call("PSUBSCRIBE", "__keyspace@0__:golden:*").plain[2] == 1
        found = []
        for number, change in enumerate((fact(1, b"x"), gone, fact(1, b"y"), gone)):
            publish(overlay, change)
            found += [event for name, event in until_end(overlay, client, b"%d" % number) if name == channel]
        assert found == [b"set", b"del", b"set", b"del"]
        publish(overlay, Change("byAccount", Op.PUT, b"golden:byAccount:end", value=b"%d" % next(LAST_CHANGES)))
        names = []
        while names[-1:] != [b"__keyspace@0__:golden:byAccount:end"]:
            names.append(state.read().plain[2])
        assert not any(b"facts" in name for name in names)  # events of hashes are not enabled


@pytest.mark.usefixtures("changed")
def test_notifications_of_field_alias_need_string_classes(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "Kh")
        assert client.call("PSUBSCRIBE", "__keyspace@0__:*").plain[2] == 1
        publish(overlay, fact(1, b"x"))
        publish(overlay, fact(2, b"x"))
        found: list[Reply] = []
        while len({name for name, _ in found}) < 2:
            found += [row for row in [client.read().plain[2:]] if row[0][-2:] in (b":1", b":2") or b"dash/1/" in row[0]]
        assert sorted(found) == [[b"__keyspace@0__:golden:facts:%d" % each, b"hset"] for each in (1, 2)]


@pytest.mark.usefixtures("changed")
def test_pattern_gets_aliases_of_all_fields_up_to_limit(overlay: Overlay) -> None:
    few, many = (
        [Change("facts", Op.PUT, b"golden:facts:" + key, b"f%d" % at, b"x") for at in range(count)]
        for key, count in ((b"few", FIELDS_MAX), (b"many", FIELDS_MAX + 1))
    )
    with (
        overlay.proxy.connect() as one,
        overlay.proxy.connect() as few_names,
        overlay.proxy.connect() as many_names,
        overlay.upstream.connect() as upstream,
    ):
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        one.call("SUBSCRIBE", "__keyspace@0__:dash/many/f7")
        few_names.call("PSUBSCRIBE", "__keyspace@0__:dash/few/*")
        many_names.call("PSUBSCRIBE", "__keyspace@0__:dash/many/f*", "__keyspace@0__:dash/9/*")
        many_names.read()
        publish(overlay, *few, *many)
        names = {few_names.read().plain[2] for _ in few}
        assert names == {b"__keyspace@0__:dash/few/f%d" % at for at in range(FIELDS_MAX)}
        assert one.read().plain[1:] == [b"__keyspace@0__:dash/many/f7", b"set"]
        assert {name for name, _ in until_end(overlay, many_names, b"z")} <= {b"__keyspace@0__:dash/many/f7"}
        publish(overlay, *(Change("facts", Op.DELETE, b"golden:facts:" + key) for key in (b"few", b"many")))
        assert one.read().plain[1:] == [b"__keyspace@0__:dash/many/f7", b"del"]


@pytest.mark.usefixtures("changed")
def test_notifications_of_hash_and_aliases_keep_order(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        assert client.call("PSUBSCRIBE", "__keyspace@0__:golden:facts:1", "__keyspace@0__:dash/1/apdex").plain[2] == 1
        assert client.read().plain[2] == 2
        with LogWriter(overlay.log, "golden", STATES, "first-of-golden") as writer:
            for number in range(20):
                writer.publish([fact(1, b"%d" % number)])
        for _ in range(20):  # one event of each name for each change
            found = {tuple(client.read().plain[2:]) for _ in range(2)}
            assert found == {
                (b"__keyspace@0__:golden:facts:1", b"hset"),
                (b"__keyspace@0__:dash/1/apdex", b"set"),
            }


@pytest.mark.usefixtures("changed")
def test_notifications_follow_changed_alias_in_order(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        client.call("HELLO", 3)
        try:
            client.call("PSUBSCRIBE", "__keyspace@0__:dash*")
            overlay.use_rules(RULES.replace("dash/<account>/score", "dashes/<account>/score"))
            with overlay.proxy.connect() as other:
                other.call("PSUBSCRIBE", "__keyspace@0__:other*")
            publish(overlay, score(1, b"5"))
            publish(overlay, Change("byAccount", Op.DELETE, b"golden:byAccount:1"))
            publish(overlay, score(1, b"6"))
            found: list[Reply] = []
            while len(found) < 3:
                found += [row for row in [client.read().plain[2:]] if b"/last" not in row[0]]
            assert found == [[b"__keyspace@0__:dashes/1/score", event] for event in (b"set", b"del", b"set")]
        finally:
            overlay.use_rules(RULES)


@pytest.mark.usefixtures("changed")
def test_notifications_have_aliases_after_reload_of_same_rules(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        client.call("HELLO", 3)
        client.call("PSUBSCRIBE", "__keyspace@0__:dash/1/*")
        overlay.use_rules(RULES)
        with overlay.proxy.connect() as other:
            other.call("PSUBSCRIBE", "__keyspace@0__:other*")
        publish(overlay, score(1, b"7"), fact(1, b"f"))
        read_until(client, [(b"__keyspace@0__:dash/1/" + name, b"set") for name in (b"score", b"apdex", b"errors")])


def read_until_reply(client: Connection) -> tuple[list[Reply], Reply]:
    pushes = []
    while (found := client.read()).type == ">":
        pushes.append(found.plain)
    return pushes, found


@pytest.mark.usefixtures("changed")
def test_tracking_invalidation_of_alias_precedes_newer_reply(overlay: Overlay, client: Connection) -> None:
    client.call("HELLO", 3)
    client.call("CLIENT", "TRACKING", "ON")
    last = {b"dash/1/score": b"1", b"dash/1/apdex": b"apdex of 1"}
    invalid: set[bytes] = set()
    for name in last:
        client.call("GET", name)
    with LogWriter(overlay.log, "golden", STATES, "first-of-golden") as writer:
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


def test_acl_patterns_apply_to_aliases(tmp_path: Path, overlay: Overlay) -> None:
    users = tmp_path / "users"
    users.write_text("user default off\nuser app on >app ~dash/* +@all\n")
    routes = tmp_path / "routes.toml"
    routes.write_text(RULES)
    proxy = overlay.start_overlay("--aclfile", str(users), "--routes", str(routes), is_ready=False)
    with proxy.connect() as client:
        client.call("AUTH", "app", "app")
        eventually(lambda: client.call("GET", "dash/1/score").plain == b"1")
        assert client.call("GET", "golden:byAccount:1").plain.startswith(b"NOPERM")
        found = client.call("KEYS", "*").plain
        assert set(scanned(client)) == set(found) >= NAMES and all(name.startswith(b"dash/") for name in found)
        eventually(lambda: client.call("RANDOMKEY").plain in found)
