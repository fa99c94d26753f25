"""SUBSCRIBE, keyspace notifications of both backends, and MONITOR through a proxy with an upstream."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from time import sleep

import pytest
import redis

from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from tests.server.overlay import Overlay


def subscribe(client: Connection, *words: str | bytes) -> list[Reply]:
    client.send(request(*words))
    return [client.read() for _ in words[1:]]


def test_subscriber_of_resp2_may_send_few_commands(overlay: Overlay, direct: Connection) -> None:
    lines = ["GET a", "SET a 1", "PING", "PING x", "BLPOP a 0", "MULTI", "EVAL x 0", "WATCH a", "CLIENT ID", "MONITOR"]
    lines += ["WAIT 0 0", "SELECT 0", "SELECT 1", "SELECT x", "SELECT"]
    found = []
    for port in (overlay.upstream.port, overlay.proxy.port):
        with Connection(port) as client:
            subscribe(client, "SUBSCRIBE", "a")
            found.append([client.call(*line.split(" ")).raw for line in lines])
            assert client.call("RESET").plain == b"RESET"
            assert client.call("GET", "a").plain is None
    assert found[1] == found[0]
    with overlay.proxy.connect() as client:
        subscribe(client, "SUBSCRIBE", "a")
        for line in ("GET job:speed:1", "MGET a job:speed:1"):
            assert client.call(*line.split(" ")).plain.startswith(b"ERR Can't execute '")


@pytest.mark.parametrize("protocol", [2, 3])
def test_reset_ends_subscriptions_before_its_reply(client: Connection, direct: Connection, protocol: int) -> None:
    for number in range(50):
        client.call("HELLO", protocol)
        subscribe(client, "SUBSCRIBE", "news")
        subscribe(client, "PSUBSCRIBE", "n*")
        if number % 2 and protocol == 3:
            assert client.call("MULTI").plain == b"OK"
        assert client.call_each("RESET", "PUBLISH news x", "PUBSUB NUMPAT") == [b"RESET", 0, 0]
        assert direct.call("PUBSUB", "NUMSUB", "news").plain[1] == 0


def test_messages_arrive_whole_and_in_order(client: Connection, direct: Connection) -> None:
    subscribe(client, "SUBSCRIBE", "a")
    text = b"x" * (6 << 20)
    direct.call("PUBLISH", "a", text)
    assert client.read().plain == [b"message", b"a", text]
    direct.send(b"".join(request("PUBLISH", "a", number) for number in range(5000)))
    assert [client.read().plain[2] for _ in range(5000)] == [b"%d" % number for number in range(5000)]


def test_subscribe_accepts_many_channels(client: Connection, direct: Connection) -> None:
    names = [f"c{number}" for number in range(3000)]
    assert [each.plain[2] for each in subscribe(client, "SUBSCRIBE", *names)] == list(range(1, 3001))
    assert direct.call("PUBSUB", "NUMSUB", "c2999").plain[1] == 1
    client.send(request("UNSUBSCRIBE"))
    assert sorted(client.read().plain[2] for _ in names) == list(range(3000))
    assert client.call("GET", "k").plain is None


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kind", [b"", b"s", b"p"])
def test_channel_is_confirmed_once_by_upstream(
    client: Connection, direct: Connection, kind: bytes, protocol: int
) -> None:
    def calls() -> int:
        found = direct.call("INFO", "commandstats").plain.partition(b"cmdstat_%bsubscribe:calls=" % kind)[2]
        return int(found.partition(b",")[0] or 0)

    def replies(names: bytes) -> list[list[object]]:
        client.send(b"".join(request(b"%bsubscribe" % kind, name) for name in names.split()))
        return [client.read().plain for _ in names.split()]

    client.call("HELLO", protocol)
    before, word = calls(), b"%bsubscribe" % kind
    assert replies(b"a a b a") == [[word, b"a", 1], [word, b"a", 1], [word, b"b", 2], [word, b"a", 2]]
    assert calls() - before == 2
    client.send(request(b"%bunsubscribe" % kind, "a"))
    assert client.read().plain == [b"%bunsubscribe" % kind, b"a", 1]
    assert replies(b"b a b") == [[word, b"b", 1], [word, b"a", 2], [word, b"b", 2]]
    assert calls() - before == 3
    for name in ("a", "b"):
        assert direct.call("SPUBLISH" if kind == b"s" else "PUBLISH", name, "x").plain == 1
        assert client.read().plain[1:] == ([name.encode()] if kind == b"p" else []) + [name.encode(), b"x"]
    client.send(request(b"%bunsubscribe" % kind) + request(b"%bunsubscribe" % kind))
    assert sorted(client.read().plain[2] for _ in range(2)) == [0, 1]
    assert client.read().plain == [b"%bunsubscribe" % kind, None, 0]
    assert client.call("GET", "k").plain is None


def test_subscribers_are_disconnected_when_upstream_is_lost(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as monitor:
        subscribe(client, "SUBSCRIBE", "a")
        assert monitor.call("MONITOR").plain == b"OK"
        overlay.signal_upstream(signal.SIGKILL)
        assert client.read_to_end() == b""
        monitor.read_to_end()
    with overlay.proxy.connect() as client:
        client.send(request("SUBSCRIBE", "a") + request("GET", "job:speed:1"))
        assert client.read().raw.startswith(b"-TRYAGAIN the upstream")
        assert client.read().plain == b"10"
        overlay.start_upstream()
        eventually(lambda: not client.call("SET", "a", "5").is_error)
        assert subscribe(client, "SUBSCRIBE", "a")[0].plain == [b"subscribe", b"a", 1]


def test_refused_subscription_is_one_error(overlay: Overlay, direct: Connection) -> None:
    direct.call("ACL", "SETUSER", "quiet", "on", ">secret", "~*", "+@all", "resetchannels", "&allowed")
    proxy = overlay.start_at(f"redis://quiet:secret@127.0.0.1:{overlay.upstream.port}")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        client.send(request("SUBSCRIBE", "a") + request("GET", "job:speed:1") + request("SUBSCRIBE", "allowed"))
        assert client.read().raw.startswith(b"-NOPERM")
        assert client.read().plain == b"10"
        assert client.read().plain == [b"subscribe", b"allowed", 1]


def test_subscribe_mistakes_are_not_sent_to_upstream(overlay: Overlay, client: Connection, direct: Connection) -> None:
    assert client.call("SUBSCRIBE").plain == b"ERR wrong number of arguments for 'subscribe' command"
    assert client.call("SUBSCRIBE", "x" * 2000).is_error
    client.call("MULTI")
    assert client.call("SUBSCRIBE", "a").plain.startswith(
        b"ERR command 'subscribe' cannot be in a transaction through --upstream: "
    )
    assert client.call("EXEC").plain.startswith(b"EXECABORT")
    eventually(lambda: direct.call("PUBSUB", "CHANNELS").plain, lambda channels: channels == [])  # of earlier tests
    assert overlay.info()["upstream_pinned"] == "0"


def test_client_reply_off_keeps_messages(client: Connection, direct: Connection) -> None:
    client.send(request("CLIENT", "REPLY", "OFF") + request("SUBSCRIBE", "a"))
    assert client.read().plain == [b"subscribe", b"a", 1]
    direct.call("PUBLISH", "a", "x")
    assert client.read().plain == [b"message", b"a", b"x"]


def test_redis_py_pubsub_works_unchanged(overlay: Overlay, direct: Connection) -> None:
    for protocol in (2, 3):
        with redis.Redis(port=overlay.proxy.port, protocol=protocol) as client, client.pubsub() as pubsub:
            pubsub.subscribe("a")
            pubsub.psubscribe("b*")
            assert [pubsub.get_message(timeout=5)["type"] for _ in range(2)] == ["subscribe", "psubscribe"]
            assert client.publish("a", "1") == 1 and client.publish("bc", "2") == 1
            assert [pubsub.get_message(timeout=5)["data"] for _ in range(2)] == [b"1", b"2"]
            pubsub.unsubscribe("a")
            assert pubsub.get_message(timeout=5)["type"] == "unsubscribe"


@pytest.mark.parametrize("protocol", [2, 3])
def test_monitor_shows_requests_of_both_backends(overlay: Overlay, direct: Connection, protocol: int) -> None:
    with overlay.proxy.connect() as monitor, overlay.proxy.connect() as client:
        monitor.call("HELLO", protocol)
        assert monitor.call("MONITOR").plain == b"OK"
        direct.call("SET", "from", "elsewhere")
        client.call("INCR", "counter")
        client.call("GET", "job:speed:1")
        lines: list[bytes] = []
        for expected in (b'"SET" "from" "elsewhere"', b'"INCR" "counter"', b'"GET" "job:speed:1"'):
            while not any(line.endswith(expected) for line in lines):
                lines.append(monitor.read().plain)
        monitor.send(request("GET", "a"))
        reply = monitor.read()
        while not reply.is_error:
            reply = monitor.read()
        assert reply.plain == b"ERR Replica can't interact with the keyspace"
        monitor.send(request("RESET"))
        while reply.plain != b"RESET":
            reply = monitor.read()
        eventually(lambda: b"cmd=monitor" not in direct.call("CLIENT", "LIST").plain)
        assert monitor.call("GET", "from").plain == b"elsewhere"


def test_refused_monitor_may_monitor_later(client: Connection, direct: Connection) -> None:
    assert direct.call("ACL", "SETUSER", "default", "-monitor").plain == b"OK"
    try:
        assert client.call("MONITOR").raw.startswith(b"-NOPERM")
    finally:
        direct.call("ACL", "SETUSER", "default", "+monitor")
    assert client.call("SELECT", "1").plain == b"OK"
    subscribe(client, "SUBSCRIBE", "a")
    assert client.call("MONITOR").plain.startswith(b"ERR Can't execute 'monitor'")
    assert client.call("UNSUBSCRIBE").plain == [b"unsubscribe", b"a", 0]
    assert client.call("MONITOR").plain == b"OK"
    direct.call("SET", "from", "elsewhere")
    while not client.read().plain.endswith(b'"SET" "from" "elsewhere"'):
        pass


@pytest.mark.parametrize("protocol", [2, 3])
def test_monitor_shows_no_requests_of_proxy(overlay: Overlay, direct: Connection, protocol: int) -> None:
    """Each client gets a connection of its own, over which the proxy greets the upstream first."""
    with overlay.proxy.connect() as monitor, ExitStack() as stack:
        monitor.call("HELLO", protocol)
        assert monitor.call("MONITOR").plain == b"OK"
        for number in range(8):
            client = stack.enter_context(overlay.proxy.connect())
            client.call("HELLO", 2 + number % 2)
            if number % 2:
                client.call("CLIENT", "TRACKING", "ON", "OPTIN")
            else:
                client.call("SELECT", number % 3)
                client.call("BLPOP", "l", "0.001")
            client.call("SET", "k", number)
        client = stack.enter_context(overlay.proxy.connect())
        client.send(request("MULTI") + request("PING") + request("SET", "k", 8) + request("EXEC"))
        assert [client.read().raw for _ in range(4)][3] == b"*2\r\n+PONG\r\n+OK\r\n"
        direct.call("SET", "the", "end")
        lines: list[bytes] = []
        while b'"the" "end"' not in (line := monitor.read().plain):
            lines.append(line.partition(b"] ")[2])
    assert not [line for line in lines if b"sparkis-proxy" in line or line in (b'"ROLE"', b'"CLIENT" "ID"')]
    assert lines.count(b'"PING"') == 1  # the transaction's
    assert [line for line in lines if line.startswith(b'"SET"')] == [b'"SET" "k" "%d"' % number for number in range(9)]


@pytest.mark.parametrize("line", ["SUBSCRIBE a", "PSUBSCRIBE a*", "SSUBSCRIBE a"])
def test_message_follows_confirmation_of_subscription(overlay: Overlay, direct: Connection, line: str) -> None:
    publish = request("SPUBLISH" if line.startswith("SS") else "PUBLISH", "a", "x")
    for _ in range(20):
        with overlay.proxy.connect() as client:
            client.send(request(*line.split(" ")))
            for _ in range(20):
                direct.send(publish * 20)
                replies = [direct.read().plain for _ in range(20)]
                if replies[-1]:
                    break
            assert client.read().plain[0] == line.split(" ")[0].lower().encode()


# For each line what another client sends after it, and what the listening client gets by it.
LATER = [
    ("SUBSCRIBE a", "PUBLISH a x", b"message"),
    ("PSUBSCRIBE a*", "PUBLISH a x", b"pmessage"),
    ("SSUBSCRIBE a", "SPUBLISH a x", b"smessage"),
    ("SUBSCRIBE a", "EVAL return(redis.call('publish','a','x')) 0", b"message"),
    ("SUBSCRIBE __keyevent@0__:set", "SET mine x", b"message"),
    ("PSUBSCRIBE __key*", "SET mine x", b"pmessage"),
    ("PSUBSCRIBE __key*", "GET absent", b"pmessage"),
    ("CLIENT TRACKING ON BCAST", "SET mine x", b"invalidate"),
]


@pytest.mark.parametrize(("line", "later", "expected"), LATER)
def test_subscription_gets_effects_of_later_requests(
    overlay: Overlay, direct: Connection, line: str, later: str, expected: bytes
) -> None:
    direct.call("CONFIG", "SET", "notify-keyspace-events", "KEAm")
    with overlay.proxy.connect() as other, overlay.proxy.connect() as third:
        assert not other.call(*later.split(" ")).is_error
        for number in range(40):
            with overlay.proxy.connect() as client:
                client.call("HELLO", 3)
                client.send(request(*line.split(" ")))
                third.call("ECHO", "the proxy has received the line")
                sleep(number % 4 * 0.0005)
                assert not other.call(*later.split(" ")).is_error
                found = [client.read().plain for _ in range(2)]
                if expected == b"invalidate":  # it may come before the reply
                    assert b"OK" in found and [expected, [b"mine"]] in found
                else:
                    assert found[0] == [*line.lower().encode().split(b" "), 1] and found[1][0] == expected


@pytest.mark.parametrize("before", ["SUBSCRIBE b", "UNSUBSCRIBE c"])
def test_subscription_behind_unconfirmed_one_gets_effects_of_later_requests(
    overlay: Overlay, direct: Connection, before: str
) -> None:
    with overlay.proxy.connect() as other, overlay.proxy.connect() as third, overlay.proxy.connect() as client:
        for _ in range(20):
            subscribe(client, "SUBSCRIBE", "c")  # its connection to the upstream is open
            overlay.signal_upstream(signal.SIGSTOP)
            try:
                for line in (before, "SUBSCRIBE a"):
                    client.send(request(*line.split(" ")))
                    third.call("GET", "job:speed:1")
                other.send(request("PUBLISH", "a", "x"))
                third.call("GET", "job:speed:1")
            finally:
                overlay.signal_upstream(signal.SIGCONT)
            assert other.read().plain == 1
            assert [client.read().plain[:2] for _ in range(3)][1:] == [[b"subscribe", b"a"], [b"message", b"a"]]
            client.call("RESET")


def test_publish_after_unsubscribe_does_not_count_client(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other:
        for _ in range(40):
            subscribe(client, "SUBSCRIBE", "a")
            client.send(request("UNSUBSCRIBE", "a"))
            assert other.call("PUBLISH", "a", "x").plain == 0
            assert client.read().plain == [b"unsubscribe", b"a", 0]


def test_unconfirmed_subscription_delays_only_requests_it_may_get(overlay: Overlay, direct: Connection) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other, overlay.proxy.connect() as gone:
        subscribe(client, "SUBSCRIBE", "none")  # its connection to the upstream is open
        overlay.signal_upstream(signal.SIGSTOP)
        try:
            client.send(request("PSUBSCRIBE", "*"))
            other.send(request("SET", "mine", "x") + request("GET", "mine"))
            gone.send(request("PUBLISH", "a", "the last of a client that does not wait for the reply"))
            gone.__exit__()
            with overlay.proxy.connect() as reader:
                assert reader.call("MGET", "job:speed:1", "job:speed:2").plain == [b"10", b"20"]
        finally:
            overlay.signal_upstream(signal.SIGCONT)
        assert [other.read().plain for _ in range(2)] == [b"OK", b"x"]
        assert client.read().plain == [b"psubscribe", b"*", 2]
        assert client.read().plain[1:3] == [b"*", b"a"]
