"""A Redis Cluster as the upstream: one address, redirects that no client sees, and requests for several slots."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.cluster import RedisCluster as ClusterClient

from compat.conformance.servers import Running
from compat.conformance.wire import Connection, replies_to, request, scanned
from compat.waiting import eventually
from state_backend.model.slots import slot_of
from tests.server.overlay import Overlay
from tests.server.redis_cluster import RedisCluster

NAMES = [f"key{number}" for number in range(300)]


@pytest.fixture
def client(cluster: RedisCluster, proxy: Running) -> Iterator[Connection]:
    cluster.flush()
    with proxy.connect() as connection:
        yield connection


def test_cluster_write_with_states_key_runs_at_no_node(client: Connection) -> None:
    client.call("MSET", "a", "1", "b", "2")
    assert client.call("DEL", "a", "b", "job:speed:1").plain == b"ERR key 'job:speed:1' is owned by state job:speed"
    assert client.call("EXISTS", "a", "b").plain == 2


def test_cluster_long_request_delays_later_requests(proxy: Running, client: Connection) -> None:
    names = [b"long%d" % number for number in range(20_000)]
    pipeline = [
        [b"SET", names[-1], b"before"],
        [b"MSET", *(word for name in names for word in (name, name))],
        [b"GET", names[-1]],
        [b"DEL", *names],
        [b"EXISTS", *names],
    ]
    found = [each.plain for each in replies_to(proxy.port, pipeline)]
    assert found == [b"OK", b"OK", names[-1], len(names), 0]


def test_cluster_long_replies_arrive_also_of_forwarded_transactions(proxy: Running, client: Connection) -> None:
    long = b"x" * (3 << 20)
    assert client.call("SET", "{l}", long).plain == b"OK"
    for number in range(3):  # the first request opens a connection, the later ones are forwarded
        assert client.call("GET", f"{{l}}{number}").plain is None
    assert client.call("GET", "{l}").plain == long
    found = [each.plain for each in replies_to(proxy.port, [[b"GET", b"{l}"], [b"MULTI"], [b"GET", b"{l}"], [b"EXEC"]])]
    assert found == [long, b"OK", b"QUEUED", [long]]


def test_cluster_unsplittable_request_of_several_slots_is_crossslot(client: Connection) -> None:
    for line in ("SUNION a b", "RENAME a b", "MSETNX a 1 b 2", "EVAL return(1) 2 a b", "BLPOP a b 1"):
        assert client.call(*line.split(" ")).plain == b"CROSSSLOT Keys in request don't hash to the same slot", line
    assert client.call("RENAME", "{t}a", "{t}b").plain == b"ERR no such key"


def test_cluster_scan_dbsize_and_flush_cover_all_masters(client: Connection) -> None:
    client.call("MSET", *(word for name in NAMES for word in (name, "x")))
    found = scanned(client, "COUNT", 20)
    expected = {name.encode() for name in NAMES} | {b"dash/7/apdex"} | {b"job:speed:%d" % at for at in range(8)}
    assert set(found) == expected and len(found) == len(expected)
    assert set(client.call("KEYS", "*").plain) == expected
    assert client.call("DBSIZE").plain == len(expected)
    assert {client.call("RANDOMKEY").plain for _ in range(50)} <= expected
    assert client.call("FLUSHDB").plain == b"OK"
    assert client.call("DBSIZE").plain == 9


def test_cluster_script_load_covers_all_masters(client: Connection) -> None:
    sha = client.call("SCRIPT", "LOAD", "return redis.call('incr', KEYS[1])").plain
    assert [client.call("EVALSHA", sha, 1, name).plain for name in NAMES[:20]] == [1] * 20
    assert client.call("SCRIPT", "EXISTS", sha, "0" * 40).plain == [1, 0]
    assert client.call("SCRIPT", "FLUSH").plain == b"OK"
    assert client.call("EVALSHA", sha, 1, "a").plain.startswith(b"NOSCRIPT")


def test_cluster_script_kill_ends_script_at_any_node(cluster: RedisCluster, proxy: Running, client: Connection) -> None:
    for name in ("a", "b", "c"):
        node = cluster.master_of(name)
        cluster.call(node, "CONFIG", "SET", "busy-reply-threshold", 50)
        client.send(request("EVAL", "while true do end", 1, name))
        with node.connect() as direct, proxy.connect() as killer:
            eventually(lambda direct=direct: direct.call("PING").raw.startswith(b"-BUSY "))  # type: ignore[misc]
            assert killer.call("SCRIPT", "KILL").plain == b"OK"
        assert b"Script killed by user" in client.read().plain
        cluster.call(node, "CONFIG", "SET", "busy-reply-threshold", 5000)


def test_cluster_transaction_runs_at_master_of_its_keys(proxy: Running, client: Connection) -> None:
    for name in ("t1", "t2", "t3"):
        found = [client.call(*line.split()).plain for line in (f"WATCH {{{name}}}", "MULTI", f"INCR {{{name}}}")]
        assert found == [b"OK", b"OK", b"QUEUED"]
        assert client.call("GET", "job:speed:2").plain == b"QUEUED"
        assert client.call("PUBLISH", "channel", "x").plain == b"QUEUED"
        assert client.call("RPUSH", f"{{{name}}}list", "x").plain == b"QUEUED"
        assert client.call("EXEC").plain == [1, b"20", 0, 1]
        assert client.call("WATCH", name).plain == b"OK"
        with proxy.connect() as other:
            other.call("SET", name, "changed")
        assert [client.call(*line.split()).plain for line in ("MULTI", f"GET {name}", "EXEC")] == [
            b"OK",
            b"QUEUED",
            None,
        ]
    assert [client.call(*line.split()).plain for line in ("WATCH t2", "WATCH", "WATCH t1", "UNWATCH")] == [
        b"OK",
        b"ERR wrong number of arguments for 'watch' command",
        b"CROSSSLOT Keys in request don't hash to the same slot",
        b"OK",
    ]
    client.call("MULTI")
    client.call("SET", "a", "1")
    client.call("SET", "b", "1")
    assert client.call("EXEC").plain.startswith(b"EXECABORT")
    assert client.call("EXISTS", "a", "b").plain == 0


NAMES_OF_NODES = ("a", "b", "c")  # each is in a slot of another node


@pytest.fixture
def notifying(cluster: RedisCluster) -> None:
    assert len({cluster.master_of(name).port for name in NAMES_OF_NODES}) == 3
    for node in cluster.nodes:
        cluster.call(node, "CONFIG", "SET", "notify-keyspace-events", "KEA")


def test_cluster_subscriber_of_resp2_is_refused_at_all_nodes(client: Connection, notifying: None) -> None:
    assert client.call("SUBSCRIBE", "news").plain == [b"subscribe", b"news", 1]
    for name in NAMES_OF_NODES:
        assert client.call("GET", name).plain.startswith(b"ERR Can't execute 'get': only (P|S)SUBSCRIBE")
        assert client.call("GET").plain == b"ERR wrong number of arguments for 'get' command"


@pytest.mark.parametrize("channel", ["SUBSCRIBE news", "SSUBSCRIBE news", "SUBSCRIBE __keyevent@0__:set"])
def test_cluster_subscriber_of_resp2_cannot_monitor(client: Connection, notifying: None, channel: str) -> None:
    assert client.call(*channel.split(" ")).plain[2] == 1
    assert client.call("MONITOR").plain.startswith(b"ERR Can't execute 'monitor': only (P|S)SUBSCRIBE")
    assert client.call("CLIENT", "TRACKING", "ON").plain.startswith(b"ERR Can't execute 'client|tracking': only (P|S)")
    assert client.call("PING").plain == [b"pong", b""]


def test_cluster_watch_of_moved_slot_is_retried(cluster: RedisCluster, overlay: Overlay, client: Connection) -> None:
    name = "watched"
    home, target = cluster.master_of(name), next(each for each in cluster.nodes if each is not cluster.master_of(name))
    with overlay.start_before(cluster).connect() as stale:
        assert stale.call("SET", name, "1").plain == b"OK"
        cluster.move(name, target)
        assert stale.call("WATCH", name).raw.startswith(b"-TRYAGAIN ")
        eventually(lambda: stale.call("WATCH", name).plain, lambda found: found == b"OK" or b"CROSSSLOT" in found)
        assert [stale.call(*line.split()).plain for line in ("MULTI", f"GET {name}", "EXEC")][-1] == [b"1"]
        cluster.move(name, home)


def test_cluster_transactions_in_pipeline_follow_their_moved_slot(cluster: RedisCluster, overlay: Overlay) -> None:
    home = cluster.master_of("follows")
    target = next(each for each in cluster.nodes if each is not home)
    transaction = ["MULTI", "INCR {follows}1", "GET {follows}1", "EXEC"]
    with overlay.start_before(cluster).connect() as stale:
        assert stale.call("SET", "{follows}1", 1).plain == b"OK"  # its connection to the node is open
        cluster.move("{follows}1", target)
        found = stale.call_each(*transaction, "INCR {follows}1", *transaction, "GET {follows}1")
    assert found == [b"OK", *[b"QUEUED"] * 2, [2, b"2"], 3, b"OK", *[b"QUEUED"] * 2, [4, b"4"], b"4"]
    with overlay.start_before(cluster).connect() as stale:
        assert stale.call_each("GET {follows}1", "MULTI") == [b"4", b"OK"]
        assert stale.call_each("INCR {follows}1") == [b"QUEUED"]
        cluster.move("{follows}1", home)
        assert stale.call_each("EXEC", "GET {follows}1") == [[5], b"5"]


def test_cluster_transaction_of_migrating_slot_runs_nothing(cluster: RedisCluster, client: Connection) -> None:
    home = cluster.master_of("asks")
    target = next(each for each in cluster.nodes if each is not home)
    pipeline = ["SET {asks}2 1", "MULTI", "SET {asks}2 2", "INCR {asks}1", "EXEC", "GET {asks}2"]
    assert client.call("SET", "{asks}2", 0).plain == b"OK"
    with cluster.begin_move("{asks}1", target) as source:
        found = client.call_each(*pipeline)
        assert found[:4] == [b"OK", b"OK", b"QUEUED", b"QUEUED"]
        assert found[4].startswith(b"EXECABORT ") and found[5] == b"1"
        cluster.move_key(source, "{asks}2", target)
    cluster.end_move("{asks}1", target)
    assert client.call_each(*pipeline) == [b"OK", b"OK", b"QUEUED", b"QUEUED", [b"OK", 1], b"2"]
    cluster.move("{asks}2", home)


def test_cluster_transaction_has_errors_of_refusing_node(client: Connection) -> None:
    assert client.call("SET", "a", 1).plain == b"OK"
    found = client.call_each("MULTI", "SET a", "SET a 2", "EXEC", "GET a")
    assert found[1:3] == [b"ERR wrong number of arguments for 'set' command", b"QUEUED"]
    assert found[3].startswith(b"EXECABORT ") and found[4] == b"1"
    found = client.call_each("MULTI", "SET a 2", "SET b 2", "EXEC", "GET a")  # a and b are at two nodes
    assert found[3].startswith(b"EXECABORT ") and found[4] == b"1"
    found = client.call_each("MULTI", "LPUSH a 1", "SET a 2", "EXEC")
    assert found[3] == [b"WRONGTYPE Operation against a key holding the wrong kind of value", b"OK"]


def test_cluster_moved_channel_ends_subscriber(cluster: RedisCluster, proxy: Running, client: Connection) -> None:
    client.call("HELLO", 3)
    assert client.call("SET", "{moved}1", "v").plain == b"OK"
    assert client.call("SSUBSCRIBE", "moved").plain == [b"ssubscribe", b"moved", 1]
    target = next(node for node in cluster.nodes if node is not cluster.master_of("moved"))
    cluster.move("{moved}1", target)
    assert client.read_to_end() == b""
    with proxy.connect() as again, proxy.connect() as other:
        again.call("HELLO", 3)
        eventually(lambda: not again.call("SSUBSCRIBE", "moved").is_error)
        assert other.call("SPUBLISH", "moved", "x").plain == 1
        assert again.read().plain == [b"smessage", b"moved", b"x"]


def test_cluster_monitor_shows_requests_at_all_nodes(cluster: RedisCluster, proxy: Running, client: Connection) -> None:
    assert client.call("MONITOR").plain == b"OK"
    for name in NAMES_OF_NODES:
        cluster.call(cluster.master_of(name), "GET", name)
        line = client.read().raw
        while b'"GET"' not in line:
            line = client.read().raw
        assert line.endswith(b'"GET" "%b"\r\n' % name.encode())


def test_cluster_wait_covers_all_masters(cluster: RedisCluster, proxy: Running, client: Connection) -> None:
    with ExitStack() as stack:
        monitors = [stack.enter_context(cluster.master_of(name).connect()) for name in NAMES_OF_NODES]
        for each in monitors:
            assert each.call("MONITOR").plain == b"OK"
        assert client.call("SET", "a", "1").plain == b"OK"
        assert client.call("WAIT", "0", "100").plain == 0
        for each in monitors:  # a write on the client's own connection, after its writes over others
            while b'"SET" "sparkis:wait:' not in (line := each.read().raw):
                assert line
            while b'"WAIT" "0" "100"' not in (line := each.read().raw):
                assert line
    client.send(request("CLIENT", "ID") + request("WAIT", "1", "0"))
    own = client.read().plain
    with proxy.connect() as other:
        eventually(lambda: other.call("CLIENT", "UNBLOCK", own).plain == 1)
    assert client.read().plain == 0
    assert client.call("GET", "a").plain == b"1"
    assert client.call("WAIT", "x", "0").plain == b"ERR value is not an integer or out of range"


def test_cluster_slot_moves_while_its_keys_are_read_and_written(cluster: RedisCluster, proxy: Running) -> None:
    names = [f"{{moving}}{number}" for number in range(20)]
    with proxy.connect() as client:
        for name in names:
            client.call("SET", name, 0)
        target = next(node for node in cluster.nodes if node is not cluster.master_of(names[0]))
        source = cluster.begin_move(names[0], target)

        def count() -> None:
            """Increment and read all keys, pipelined: the order of requests about one key is kept."""
            nonlocal turns
            turns += 1
            pipeline = [words for name in names for words in ([b"INCR", name.encode()], [b"GET", name.encode()])]
            found = [each.plain for each in replies_to(proxy.port, pipeline)]
            assert found == [turns, b"%d" % turns] * len(names)

        turns = 0
        count()
        for name in names:  # ASK for the keys that have moved
            cluster.move_key(source, name, target)
            count()
        assert client.call("SET", "{moving}new", "1").plain == b"OK"
        assert client.call("GET", "{moving}new").plain == b"1"
        cluster.end_move(names[0], target)  # MOVED from now on
        count()
        assert cluster.master_of(names[0]) is target
        count()
        eventually(lambda: client.call("GET", names[0]).plain == b"%d" % turns)


def test_cluster_slots_are_one_node(proxy: Running, client: Connection) -> None:
    (row,) = client.call("CLUSTER", "SLOTS").plain
    assert row[:2] == [0, 16383] and row[2][:2] == [b"127.0.0.1", proxy.port]
    assert b"cluster_state:ok" in client.call("CLUSTER", "INFO").plain
    assert client.call("CLUSTER", "NODES").plain.count(b"\n") == 1
    assert client.call("CLUSTER", "KEYSLOT", "a").plain == slot_of(b"a")
    assert [client.call(name).plain for name in ("READONLY", "READWRITE", "ASKING")] == [b"OK"] * 3
    assert client.call("CLUSTER", "COUNTKEYSINSLOT", 1).is_error


def test_cluster_exec_has_error_of_command_with_unknown_keys(client: Connection) -> None:
    assert [client.call(*line.split()).plain for line in ("MULTI", "SET a 1", "EVAL x 2 a", "EXEC")][-1] == [
        b"OK",
        b"ERR Number of keys can't be greater than number of args",
    ]


def test_redis_py_cluster_client_works_unchanged(proxy: Running) -> None:
    with ClusterClient(host="127.0.0.1", port=proxy.port, decode_responses=True) as library:
        library.mset_nonatomic({"x": "1", "y": "2", "z": "3"})
        assert library.mget_nonatomic("x", "y", "z", "job:speed:3") == ["1", "2", "3", "30"]
        with library.pipeline() as pipeline:
            assert pipeline.set("x", "5").get("x").get("job:speed:4").execute() == [True, "5", "40"]


def test_cluster_lost_master_fails_only_its_slots_until_failover(tmp_path: Path, overlay: Overlay) -> None:
    with ExitStack() as stack:
        cluster = RedisCluster(tmp_path, stack)
        replica = cluster.start_replica(cluster.nodes[1])
        proxy = overlay.start_at(cluster.url)
        names = [f"name{number}" for number in range(30)]
        with proxy.connect() as client:
            eventually(lambda: client.call("MSET", *(w for name in names for w in (name, name))).plain == b"OK")
            lost = [name for name in names if cluster.master_of(name) is cluster.nodes[1]]
            eventually(lambda: cluster.call(replica, "DBSIZE") == cluster.call(cluster.nodes[1], "DBSIZE"))
            cluster.nodes[1].process.send_signal(signal.SIGKILL)
            cluster.nodes[1].process.wait()
        with proxy.connect() as client:
            for name in set(names) - set(lost):
                assert client.call("GET", name).plain == name.encode()
                assert client.call("GET", "job:speed:1").plain == b"10"
            eventually(lambda: client.call("GET", lost[0]).plain == lost[0].encode())
            # Nodes learn one after another that the cluster is whole again.
            expected = [name.encode() for name in names]
            eventually(lambda: client.call("MGET", *names).plain == expected)
            assert client.call("SET", lost[0], "new").plain == b"OK"
        assert overlay.info(proxy)["upstream_nodes"] == "3"


def test_cluster_without_nodes_fails_only_upstream_keys(overlay: Overlay) -> None:
    proxy = overlay.start_at("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        for words in (("GET", "a"), ("MGET", "a", "b"), ("SCRIPT", "LOAD", "x"), ("DBSIZE",), ("BLPOP", "a", "0")):
            assert client.call(*words).plain.startswith(b"TRYAGAIN the upstream 127.0.0.1:1,127.0.0.1:2"), words
        assert overlay.info(proxy)["upstream_status"] == "down"
