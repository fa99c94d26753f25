"""No turn of a proxy with an upstream is long for any requests of one client; replies in steps are right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import redis_server
from compat.conformance.wire import request
from compat.waiting import eventually
from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.redis.pool import UpstreamPool
from tests.server.conftest import Peer
from tests.server.measured_proxy import SwapProxy
from tests.server.redis_cluster import RedisCluster
from tests.server.turns_measured import KEYS, TURN_MS_MAX, WAIT_TURNS_MAX, Attacked, filled_store

# Without steps, these took 200 to 400 ms.
MANY = 100_000
THEIRS = [b"key:%d" % at for at in range(MANY)]
OURS = [b"job:temp:%d" % (at % KEYS) for at in range(MANY)]
MIXED = [ours if at % 2 else theirs for at, (theirs, ours) in enumerate(zip(THEIRS, OURS, strict=True))]
PAIRS = [word for key in THEIRS[: MANY // 2] for word in (key, b"v")]
LONG = b"0123456789abcdef" * (4 << 20)
# A hash of 50,000 fields, which are names of keys; and 5,000 keys with one more name each.
RULES = """
[[rule]]
keys = "visits/<number>/<page>"
owner = "state"
state_key = "job:visits:<number>"
field = "<page>"

[[rule]]
keys = "temp/<number>"
owner = "state"
state_key = "job:temp:<number>"

[[rule]]
keys = "nofield/<number>"
owner = "state"
state_key = "job:temp:<number>"
field = "f"

[[rule]]
keys = "aside/<number>"
owner = "prefer-state"
state_key = "job:temp:<number>"

[[rule]]
keys = "compared/<number>"
owner = "shadow"
state_key = "job:temp:<number>"

[[rule]]
keys = "cached/<number>"
owner = "upstream"
cache = "tracking"
"""
ATTACKS: dict[str, Callable[[], bytes]] = {
    "MGET": lambda: request("MGET", *THEIRS),
    "MGET of both backends": lambda: request("MGET", *MIXED),
    "MGET of states": lambda: request("MGET", *OURS),
    "MSET": lambda: request("MSET", *PAIRS),
    "MSET with a state's key": lambda: request("MSET", *PAIRS, OURS[0], "1"),
    "DEL": lambda: request("DEL", *THEIRS),
    "EXISTS of both backends": lambda: request("EXISTS", *MIXED),
    "SUNION": lambda: request("SUNION", *THEIRS),
    "SUNION of both backends": lambda: request("SUNION", *MIXED),
    "RPUSH": lambda: request("RPUSH", "list", *THEIRS) + request("DEL", "list"),
    "WATCH": lambda: request("WATCH", *THEIRS),
    "MGET of other names": lambda: request("MGET", *(b"temp/%d" % (at % KEYS) for at in range(MANY))),
    "MGET of other names of fields": lambda: request("MGET", *(b"nofield/%d" % (at % KEYS) for at in range(MANY))),
    "MGET of prefer-state": lambda: request("MGET", *(b"aside/%d" % (at % KEYS) for at in range(1023))),
    "MGET of too many of prefer-state": lambda: request("MGET", *(b"aside/%d" % (at % KEYS) for at in range(MANY))),
    "MGET of compared keys": lambda: request("MGET", *(b"compared/%d" % (at % KEYS) for at in range(MANY))),
    "MGET of cached keys": lambda: request("MGET", *(b"cached/%d" % (at % KEYS) for at in range(MANY))),
    "EVAL": lambda: request("EVAL", "return 1", MANY, *THEIRS),
    "EVAL with a state's key": lambda: request("EVAL", "return 1", MANY, *MIXED),
    "ZUNION": lambda: request("ZUNION", MANY, *THEIRS),
    "BLPOP": lambda: request("RPUSH", "key:0", "x") + request("BLPOP", *THEIRS, "0"),
    "BLPOP with a state's key": lambda: request("BLPOP", *MIXED, "0"),
    "XREAD": lambda: request("XREAD", *THEIRS),
    "KEYS of names of fields": lambda: request("KEYS", "visits/*"),
    "KEYS of names of fields of many keys": lambda: request("KEYS", "n*"),
    "SCAN of names": lambda: request("SCAN", "1", "COUNT", "100000", "TYPE", "string"),
    "a transaction": lambda: (
        request("MULTI")
        + request("MSET", *PAIRS)
        + request("GET", OURS[0])
        + request("MGET", *THEIRS)
        + request("EXEC")
    ),
    "a transaction of many commands": lambda: (
        request("MULTI") + b"".join(request("GET", key) for key in MIXED[:30_000]) + request("EXEC")
    ),
    "a long value": lambda: request("SET", "{a}value", LONG) + request("GET", "{a}value") + request("DEL", "{a}value"),
    "a long value in a transaction": lambda: (
        request("MULTI") + request("SET", "{a}value", LONG[: 32 << 20]) + request("DEL", "{a}value") + request("EXEC")
    ),
}


@pytest.fixture(scope="module", params=["a single Redis", pytest.param("a Redis Cluster", marks=pytest.mark.slow)])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    folder: Path = tmp_path_factory.mktemp("turns")
    with ExitStack() as stack:
        (folder / "upstream").mkdir()
        if request.param == "a single Redis":
            server = stack.enter_context(redis_server(folder / "upstream"))
            url = f"redis://127.0.0.1:{server.port}"
        else:
            nodes = RedisCluster(folder / "upstream", stack).nodes
            url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        store = filled_store(folder / "store")
        proxy = SwapProxy(store, folder, url, RULES)
        eventually(lambda: Peer(proxy.server.port).ask("GET", "job:temp:1") == b"1")
        eventually(lambda: Peer(proxy.server.port).ask("EXISTS", "key") == 0)
        gc.collect()
        gc.freeze()
        yield Attacked(proxy, proxy.server.port)
        gc.unfreeze()
        proxy.stop()
        store.close()


@pytest.mark.slow  # 25 s of processor time; the replies of such requests are compared in tests/differential
@pytest.mark.parametrize("attack", ATTACKS)
def test_requests_of_one_client_cause_no_long_turn(attacked: Attacked, attack: str) -> None:
    assert attacked.longest_ms(ATTACKS[attack]()) < TURN_MS_MAX
    assert attacked.bystander.longest_wait <= WAIT_TURNS_MAX


@pytest.mark.parametrize("protocol", [2, 3])
def test_long_requests_are_answered_in_order(attacked: Attacked, protocol: int) -> None:
    peer = Peer(attacked.port)
    peer.ask("HELLO", protocol)
    names, values = THEIRS[:3_000], [b"of %b" % key for key in THEIRS[:3_000]]
    mixed = [word for at in range(1_500) for word in (names[at], OURS[at])]
    pipeline = [
        request("SET", names[0], "before"),
        request("MSET", *(word for row in zip(names, values, strict=True) for word in row)),
        request("GET", names[0]),
        request("MGET", *mixed, "none"),
        request("MGET", *names),
        request("EXISTS", *mixed, "none"),
        request("DEL", *mixed),
        request("DEL", *names),
        request("EXISTS", *names),
        request("GET", OURS[7]),
    ]
    peer.send(b"".join(pipeline))
    nil = b"$-1\r\n" if protocol == 2 else b"_\r\n"
    both = [b"$%d\r\n%b\r\n" % (len(text), text) for at in range(1_500) for text in (values[at], b"%d" % at)]
    expected = [
        b"+OK\r\n+OK\r\n",
        b"$%d\r\n%b\r\n" % (len(values[0]), values[0]),
        b"*3001\r\n" + b"".join(both) + nil,
        b"*3000\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in values),
        b":3000\r\n",
        b"-ERR key 'job:temp:0' is owned by state job:temp\r\n",
        b":3000\r\n:0\r\n$1\r\n7\r\n",
    ]
    assert peer.read(sum(map(len, expected))) == b"".join(expected)
    peer.socket.close()


@pytest.mark.compiled
def test_request_in_pieces_is_forwarded(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read of a socket gets at most 64 KiB, so a request of 100 KB always begins with an incomplete one."""
    sent: list[object] = []
    add = UpstreamPool.add

    def observed(pool: UpstreamPool, client: int, protocol: int, sent_request: UpstreamRequest) -> None:
        sent.append(sent_request.packed)  # by the general path
        add(pool, client, protocol, sent_request)

    monkeypatch.setattr(UpstreamPool, "add", observed)
    peer = Peer(attacked.port)
    peer.send(request("MGET", *(b"{a}%090d" % number for number in range(1000))) * 3)
    nothing = b"*1000\r\n" + b"$-1\r\n" * 1000
    assert peer.read(3 * len(nothing)) == 3 * nothing
    assert not any(b"MGET" in bytes(each) for each in sent if isinstance(each, bytes))
    peer.socket.close()


def test_long_request_within_transaction_is_checked_when_it_is_queued(attacked: Attacked) -> None:
    peer = Peer(attacked.port)
    names = [b"{t}%d" % at for at in range(5_000)]
    assert peer.ask("MULTI") == b"OK"
    assert peer.ask("MSET", *(word for name in names for word in (name, name))) == b"QUEUED"
    assert peer.ask("MGET", *names[:3_000], OURS[7]) == b"QUEUED"
    assert peer.ask("DEL", *names) == b"QUEUED"
    assert peer.ask("EXEC") == [b"OK", [*names[:3_000], b"7"], len(names)]
    assert peer.ask("MULTI") == b"OK"
    assert peer.ask("DEL", *names, OURS[7]) == b"ERR key 'job:temp:7' is owned by state job:temp"
    assert peer.ask("EXEC").startswith(b"EXECABORT")
    assert peer.ask("MULTI") == b"OK"
    assert peer.ask("MGET", *names, OURS[7]) == b"ERR 'mget' takes 4096 arguments of 2 MiB at once; split the request"
    assert peer.ask("EXEC").startswith(b"EXECABORT")
    peer.socket.close()


def test_user_with_rules_is_checked_for_every_key(attacked: Attacked) -> None:
    users = attacked.thread.server.context.users  # type: ignore[attr-defined]
    attacked.thread.call(lambda: users.set(b"some", [b"on", b"nopass", b"+@all", b"~{t}*", b"~job:*"]))
    peer = Peer(attacked.port)
    assert peer.ask("AUTH", "some", "x") == b"OK"
    names = [b"{t}%d" % at for at in range(5_000)]
    assert peer.ask("MSET", *(word for name in names for word in (name, b"other"))) == b"OK"
    assert peer.ask("EXISTS", *names, OURS[7]) == 5_001
    for words in (["EXISTS", *names, "other"], ["DEL", *names, "other"], ["EXISTS", *names, OURS[7], "other"]):
        assert peer.ask(*words) == b"NOPERM No permissions to access a key"
    assert peer.ask("DEL", *names) == 5_000
    peer.socket.close()


def test_tracking_client_forgets_all_after_long_read_of_both_backends(attacked: Attacked) -> None:
    peer = Peer(attacked.port)
    peer.ask("HELLO", 3)
    if b"with a Redis Cluster" in peer.ask("CLIENT", "TRACKING", "ON"):
        return
    peer.send(request("EXISTS", *MIXED[:2_000]))
    assert peer.read_until(b"$10\r\ninvalidate\r\n_\r\n").startswith(b":1000\r\n")
    peer.socket.close()
