"""No turn of a proxy's event loop is long for any requests of one client: those of a server, and those of a proxy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from compat.conformance.wire import request
from compat.waiting import eventually
from resp_server.command.policy import AnsweredBy
from resp_server.command.table import Command
from resp_server.protocol.replies import encode
from resp_server.session.subscriptions import SUBSCRIPTIONS_MAX
from resp_server.settings.server import ServerConfig
from tests.server.conftest import Peer
from tests.server.measured_proxy import Proxy
from tests.server.turns_measured import (
    ATTACKS,
    END,
    KEYS,
    MEMBERS,
    TURN_MS_MAX,
    WAIT_TURNS_MAX,
    Attacked,
    check_beside_many_subscriptions,
    check_command,
    filled_store,
    served,
)

CONFIG = ServerConfig(port=0, hosts=("127.0.0.1",))
SLOTS = ("0-8191", "8192-16383")
# Of each kind of value, with replies of all sizes.
SINGLE_KEY_COMMANDS = ("get", "getrange", "hget", "hgetall", "hscan", "smembers", "zrange", "zscore", "type")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    store = filled_store(tmp_path_factory.mktemp("turns") / "store")
    proxy = Proxy(store)
    eventually(lambda: Peer(proxy.server.port).ask("GET", "job:temp:1") == b"1")
    gc.collect()
    gc.freeze()
    yield Attacked(proxy, proxy.server.port)
    gc.unfreeze()
    proxy.stop()
    store.close()


def differing() -> Iterator[Command]:
    """Iterate over the commands that a proxy handles differently from each other and from a server.

    What it answers from its own state runs the same code as at a server. It does not look into a command with one key.
    """
    as_at_a_server = ("server", "cluster", "connection", "scripting", "generic")
    for command in served():
        answered_by, is_split = command.answered_without_upstream, command.policy.split is not None
        is_local = answered_by is AnsweredBy.LOCAL and command.facts.group in as_at_a_server
        is_alike = (
            answered_by is AnsweredBy.STATES and command.single_key_at and command.name not in SINGLE_KEY_COMMANDS
        )
        if is_split or not (is_local or is_alike):
            yield command


@pytest.mark.parametrize("command", list(differing()), ids=lambda command: command.name)
def test_every_command_equals_redis_at_its_largest(attacked: Attacked, command: Command) -> None:
    check_command(attacked, command)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_known_attacks_cause_no_long_turn(attacked: Attacked, attack: str) -> None:
    assert attacked.longest_ms(ATTACKS[attack]()) < TURN_MS_MAX
    assert attacked.bystander.longest_wait <= WAIT_TURNS_MAX


@pytest.mark.slow
def test_subscription_beside_those_of_many_clients_causes_no_long_turn(attacked: Attacked) -> None:
    check_beside_many_subscriptions(attacked)


RESP2 = request("HELLO", "2")
# Keys of both servers.
LARGE, PAIR = b"job:temp:large", [b"job:temp:large", b"job:temp:large1"]
PAIRS = [b"job:temp:1", b"job:temp:2"]
MANY_KEYS = [b"job:temp:%d" % (at % KEYS) for at in range(60_000)]
TRACKING = request("CLIENT", "TRACKING", "ON")


@cache
def many_fields() -> list[bytes]:
    return [b"m%d" % at for at in range(250_000)]


OWN_ATTACKS: dict[str, Callable[[], bytes]] = {
    "many fields": lambda: request("HMGET", "job:visits:1", *many_fields()),
    "how long many fields live, RESP2": lambda: (
        RESP2 + request("HTTL", "job:visits:1", "FIELDS", 200_000, *many_fields()[:200_000])
    ),
    "many members, tracked": lambda: TRACKING + request("SMISMEMBER", "job:ids:1", *many_fields()[:200_000]),
    "fields of 60 MB": lambda: request("HMGET", "job:visits:1", *[b"f" * 60_000] * 1_000),
    "tracked MGETs": lambda: TRACKING + request("MGET", *MANY_KEYS[:1000]) * 10,
    "MGETs and EXISTS behind others": lambda: (
        (request("ECHO", "x") + request("MGET", *MANY_KEYS[:1000]) + request("EXISTS", *MANY_KEYS[:1000])) * 10
    ),
    "a transaction of MGETs": lambda: request("MULTI") + request("MGET", *MANY_KEYS[:4000]) * 6 + request("EXEC"),
    "a tracked transaction of MGETs": lambda: (
        TRACKING + request("MULTI") + request("MGET", *MANY_KEYS[:4000]) * 6 + request("EXEC")
    ),
    "long values of one server": lambda: request("MGET", *[LARGE] * 60),
    "long values of both": lambda: request("MGET", *PAIR * 30),
    "long values of both, RESP2": lambda: RESP2 + request("MGET", *PAIR * 30),
    "a pipeline of long values": lambda: request("GET", LARGE) * 60,
    "a pipeline of long values, RESP2": lambda: RESP2 + request("GET", LARGE) * 60,
    "too much": lambda: request("MGET", *[LARGE] * 70),
    "a long dump": lambda: request("DUMP", LARGE) * 2,
    "HGETALL": lambda: request("HGETALL", "job:visits:1") * 10,
    "HGETALL, RESP2": lambda: RESP2 + request("HGETALL", "job:visits:1") * 10,
    "MGET, RESP2": lambda: RESP2 + request("MGET", *MANY_KEYS),
    "many MGETs": lambda: request("MGET", *MANY_KEYS[:1000]) * 60,
    "many MGETs, RESP2": lambda: RESP2 + request("MGET", *MANY_KEYS[:1000]) * 100,
    "EXISTS of few keys": lambda: request("EXISTS", *MANY_KEYS[:100]) * 600,
    "all keys": lambda: request("KEYS", "*") * 10,
    "SCAN of all": lambda: request("SCAN", "0", "COUNT", "10000") * 10,
    "RANDOMKEY and DBSIZE": lambda: (request("RANDOMKEY") + request("DBSIZE")) * 100,
    "STATE JOBS": lambda: (request("STATE", "JOBS") + request("STATE", "LIST", "job") + request("STATE", "LAG")) * 50,
    "WATCH of 1000 keys": lambda: request("WATCH", *MANY_KEYS[:1000]) * 4 + request("UNWATCH"),
    "a transaction of different keys": lambda: (
        request("MULTI") + b"".join(request("GET", key) for key in MANY_KEYS[:20_000]) + request("EXEC")
    ),
    "a transaction of many keys": lambda: request("MULTI") + request("MGET", *MANY_KEYS[:1000]) * 25 + request("EXEC"),
    "a transaction of pairs": lambda: request("MULTI") + request("MGET", *PAIRS) * 7_000 + request("EXEC"),
    "a transaction of long values": lambda: request("MULTI") + request("GET", LARGE) * 60 + request("EXEC"),
    "a transaction of long values of both": lambda: request("MULTI") + request("MGET", *PAIR) * 30 + request("EXEC"),
    "a transaction of PINGs": lambda: request("MULTI") + request("PING") * 30_000 + request("EXEC"),
    "a transaction of COMMANDs": lambda: request("MULTI") + request("COMMAND") * 1_000 + request("EXEC"),
    "a watched transaction": lambda: (
        request("WATCH", *MANY_KEYS[:1000])
        + request("MULTI")
        + request("EXISTS", *MANY_KEYS[:100]) * 2_000
        + request("EXEC")
    ),
    "a silent transaction": lambda: request("MULTI") + request("PUBLISH", "x", "y") * 2_000 + request("EXEC"),
    "shard channels": lambda: request("SSUBSCRIBE", *MANY_KEYS[:5_000]) + request("SUNSUBSCRIBE"),
    "4,096 names": lambda: request("SUBSCRIBE", *MANY_KEYS[:4_090]) + request("UNSUBSCRIBE"),
    "patterns behind others": lambda: (
        request("GET", LARGE)
        + request("PSUBSCRIBE", *many_fields()[:SUBSCRIPTIONS_MAX])
        + request("GET", LARGE)
        + request("PUNSUBSCRIBE")
    ),
    "a transaction that unsubscribes": lambda: (
        request("SUBSCRIBE", *many_fields()[:SUBSCRIPTIONS_MAX])
        + request("MULTI")
        + request("UNSUBSCRIBE")
        + request("EXEC")
    ),
    "COMMANDs behind others": lambda: (request("GET", "job:temp:1") + request("COMMAND")) * 100,
    "own messages": lambda: request("SUBSCRIBE", "to me") + request("PUBLISH", "to me", b"x" * 1000) * 5_000,
    "long messages": lambda: request("SUBSCRIBE", "to me") + request("PUBLISH", "to me", b"x" * 1_000_000) * 20,
}


@pytest.mark.slow  # 30 s of processor time; each command at its largest is measured above
@pytest.mark.parametrize("attack", OWN_ATTACKS)
def test_attacks_on_proxy_cause_no_long_turn(attacked: Attacked, attack: str) -> None:
    assert attacked.longest_ms(OWN_ATTACKS[attack]()) < TURN_MS_MAX
    assert attacked.bystander.longest_wait <= WAIT_TURNS_MAX


@pytest.mark.parametrize("protocol", [2, 3])
def test_long_replies_are_whole(attacked: Attacked, protocol: int) -> None:
    """What is joined and sent in steps is what a server would send."""
    value = b"ab" * (2 << 20)
    peer = Peer(attacked.port)
    peer.send(request("HELLO", protocol))
    peer.send(request("ECHO", END))
    peer.read_until(END + b"\r\n")
    peer.send(
        request("MGET", *PAIR, "job:temp:1", "job:temp:none", LARGE)
        + b"".join(request("GET", key) for key in ("job:temp:2", LARGE, "job:temp:none", PAIR[1]))
        + request("MULTI")
        + request("GET", LARGE)
        + request("MGET", *PAIR, "job:temp:3")
        + request("PING")
        + request("EXEC")
        + request("MGET", *[b"job:temp:%d" % at for at in range(2000)], *PAIR)
    )
    expected = [
        encode([value, value, b"1", None, value], protocol),
        *(encode(each, protocol) for each in (b"2", value, None, value)),
        b"+OK\r\n" + b"+QUEUED\r\n" * 3,
        encode([value, [value, value, b"3"], "PONG"], protocol),
        encode([*(b"%d" % at for at in range(2000)), value, value], protocol),
    ]
    for each in expected:
        is_same = peer.read(len(each)) == each  # no text of megabytes is to be compared line by line
        assert is_same, each[:50]
    peer.socket.close()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("before", [b"", TRACKING, request("GET", "job:temp:1"), request("CLIENT", "REPLY", "SKIP")])
def test_long_requests_about_one_key_equal_servers(attacked: Attacked, before: bytes, protocol: int) -> None:
    assert isinstance(attacked.thread, Proxy)
    fields = [b"m%d" % at for at in range(MEMBERS - 2_000, MEMBERS + 2_500)]
    asked = (
        request("HMGET", "job:visits:1", *fields)
        + request("GET", "job:temp:1")
        + request("SMISMEMBER", "job:ids:1", *fields) * 2
        + request("HTTL", "job:visits:1", "FIELDS", len(fields), *fields)
        + request("ZMSCORE", "job:temp:1", *fields)
        + request("ECHO", END)
    )
    replies = []
    for port in (attacked.port, attacked.thread.nodes[0].server.port):
        peer = Peer(port)
        peer.send(request("HELLO", protocol) + request("ECHO", END))
        peer.read_until(END + b"\r\n")
        peer.send(before + asked)
        replies.append(peer.read_until(END + b"\r\n"))
        peer.socket.close()
    is_same = replies[0] == replies[1]  # no text of megabytes is to be compared line by line
    assert is_same, [each[:80] for each in replies]


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("before", [b"", request("GET", "job:temp:1"), request("CLIENT", "REPLY", "SKIP")])
@pytest.mark.parametrize("verb", ["SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"])
def test_long_subscriptions_equal_servers(attacked: Attacked, verb: str, before: bytes, protocol: int) -> None:
    assert isinstance(attacked.thread, Proxy)
    # In a slot of the first server, so that it accepts shard channels.
    names = [b"%d{job:temp:1}" % at for at in range(5_000)]
    undone = verb.replace("SUB", "UNSUB")
    asked = (
        before
        + request(verb, *names)
        + (request("GET", "job:temp:1") + request("MGET", "job:temp:1", "job:temp:1") if protocol == 3 else b"")
        + request(undone, *names[:1_500])
        + request(verb, *names[:3_000])
        + request(undone)
        + request("GET", "job:temp:1")
        + request("ECHO", END)
    )
    replies = []
    for port in (attacked.port, attacked.thread.nodes[0].server.port):
        peer = Peer(port)
        peer.send(request("HELLO", protocol) + request("ECHO", END))
        peer.read_until(END + b"\r\n")
        peer.send(asked)
        # the order of names without an order, in the reply to an UNSUBSCRIBE of all
        replies.append(sorted(peer.read_until(END + b"\r\n").split(b"\r\n")))
        peer.socket.close()
    is_same = replies[0] == replies[1]
    assert is_same, [len(each) for each in replies]


def test_long_subscription_in_transaction_is_refused(attacked: Attacked) -> None:
    peer = Peer(attacked.port)
    peer.send(request("MULTI") + request("SUBSCRIBE", *many_fields()[:2_000]) + request("EXEC"))
    received = peer.read_until(b"EXECABORT Transaction discarded because of previous errors.\r\n")
    assert b"-ERR 'subscribe' takes 1024 arguments of 2 MiB at once; split the request\r\n" in received
    peer.socket.close()


def test_clients_may_leave_while_their_last_reply_is_unsent(attacked: Attacked) -> None:
    """A reply in steps behind missing replies is released when the client is gone."""
    for _ in range(8):
        peer = Peer(attacked.port)
        peer.send(request("GET", LARGE) * 12 + request("PSUBSCRIBE", *many_fields()[:3_000]))
        peer.socket.close()
    peer = Peer(attacked.port)
    eventually(lambda: b"connected_clients:2\r\n" in peer.ask("INFO", "clients"))
    assert peer.ask("PUBSUB", "NUMPAT") == 0
    peer.socket.close()


def test_long_request_of_too_many_bytes_is_refused(attacked: Attacked) -> None:
    peer = Peer(attacked.port)
    peer.send(request("HMGET", "job:visits:1", *[b"f" * 60_000] * 1_000) + request("GET", "job:temp:1"))
    assert peer.read_until(b"$1\r\n1\r\n").startswith(b"-ERR a request may have 32 MiB through a proxy; split it\r\n")
    peer.socket.close()


def test_too_large_transaction_is_refused(attacked: Attacked) -> None:
    peer = Peer(attacked.port)
    peer.send(request("MULTI") + request("EXISTS", *MANY_KEYS[:100]) * 2_000 + request("EXEC"))
    received = peer.read_until(b"split it\r\n")
    assert received.endswith(b"-ERR a transaction may have 90000 commands for one server; split it\r\n")
    peer.socket.close()
