"""Keys whose rule is prefer-state, and which clients know by another name than the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from tests.server.aliased import fact, publish, score
from tests.server.overlay import Overlay
from tests.server.relay import Relay

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
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    with ExitStack() as stack:
        made = Overlay(tmp_path_factory.mktemp("overlay"), stack, rules=RULES)
        publish(made, score(1, b"1"), fact(1, b"0.9"))
        with made.proxy.connect() as client, made.upstream.connect() as upstream:
            eventually(lambda: client.call("GET", "golden:byAccount:1").plain == b"1")
            copies = [(name, "a copy") for name in MIXED if "/1/" in name]
            olds = [("board/old/score", "old score"), ("board/1/old", "old fact"), ("a", "mine")]
            for pair in [*copies, *olds]:
                upstream.call("SET", *pair)
        yield made


def test_preferred_field_alias_of_other_command_is_upstreams(client: Connection) -> None:
    refused = "ERR key 'board/1/apdex' is a state's if it has the key, by the rule 'facts', and the states have it"
    assert client.call("GETRANGE", "board/1/apdex", 0, 0).plain.decode() == refused
    assert client.call("GETRANGE", "board/1/old", 0, 2).plain == b"old"
    assert client.call("GETRANGE", "board/1/score", 0, 0).plain == b"1"


def test_preferred_alias_is_watched_at_both_backends(overlay: Overlay, client: Connection) -> None:
    for name, state_key in (("board/5/score", b"golden:byAccount:5"), ("board/5/apdex", b"golden:facts:5")):
        with overlay.upstream.connect() as upstream, overlay.proxy.connect() as reader:
            assert client.call("WATCH", name).plain == b"OK"
            upstream.call("SET", name, "an old copy")
            client.send(b"MULTI\r\nGET a\r\nEXEC\r\n")
            assert [client.read().plain for _ in range(3)][-1] is None
            assert client.call("WATCH", name, "a").plain == b"OK"
            publish(overlay, score(5, b"5") if b"by" in state_key else fact(5, b"5"))
            eventually(lambda name=name, reader=reader: reader.call("GET", name).plain == b"5")  # type: ignore[misc]
            client.send(b"MULTI\r\nGET a\r\nEXEC\r\n")
            assert [client.read().plain for _ in range(3)][-1] is None


def test_preferred_alias_has_notifications_of_both_backends(overlay: Overlay) -> None:
    expected = {(b"__keyspace@0__:board/6/score", b"set"), (b"__keyspace@0__:board/6/apdex", b"set")}
    with overlay.upstream.connect() as upstream, overlay.proxy.connect() as client:
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        assert client.call("PSUBSCRIBE", "__keyspace@0__:board/6/*").plain[2] == 1
        upstream.call("SET", "board/6/score", "an old copy")
        assert tuple(client.read().plain[-2:]) == (b"__keyspace@0__:board/6/score", b"set")
        publish(overlay, score(6, b"x"), fact(6, b"y"))
        assert {tuple(client.read().plain[-2:]) for _ in expected} == expected


def test_subscription_is_confirmed_after_upstreams_setting_applies_to_states(overlay: Overlay) -> None:
    channel = "__keyspace@0__:board/7/score"
    relay = Relay(overlay.upstream_port)
    proxy = overlay.start_at(f"redis://127.0.0.1:{relay.port}", "--routes", str(overlay.routes))
    overlay.wait_until_ready(proxy)
    with ExitStack() as stack:
        stack.callback(relay.stop)
        upstream, client = (stack.enter_context(each.connect()) for each in (overlay.upstream, proxy))
        upstream.call("CONFIG", "SET", "notify-keyspace-events", "KA")
        assert client.call("SUBSCRIBE", "a").plain[2] == 1  # its connection to the upstream is open
        relay.held = b"notify-keyspace-events"
        client.send(request("SUBSCRIBE", channel))
        eventually(lambda: relay.is_holding)
        with Connection(relay.port) as other:
            other.call("PING")  # later than whatever the proxy has sent
        assert upstream.call("PUBSUB", "NUMSUB", channel).plain[1] == 0
        relay.held = None
        assert client.read().plain[2] == 2
        publish(overlay, score(7, b"7"))
        assert client.read().plain[1:] == [channel.encode(), b"set"]
