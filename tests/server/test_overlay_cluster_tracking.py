"""CLIENT TRACKING with a Redis Cluster as the upstream: keys of all nodes, also after their slots have moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from compat.conformance.servers import Running
from compat.conformance.wire import Connection, Reply, request
from compat.waiting import eventually
from tests.server.overlay import Overlay
from tests.server.redis_cluster import RedisCluster

NAMES = [f"key{number}" for number in range(30)]


@pytest.fixture
def client(cluster: RedisCluster, proxy: Running) -> Iterator[Connection]:
    cluster.flush()
    with proxy.connect() as connection:
        yield connection


@pytest.fixture
def tracking(proxy: Running, client: Connection) -> Iterator[Connection]:
    """A client that tracks keys. `client` has flushed all nodes before."""
    with proxy.connect() as connection:
        connection.call("HELLO", 3)
        assert connection.call("CLIENT", "TRACKING", "ON").plain == b"OK"
        yield connection


def read_until_reply(client: Connection) -> tuple[list[Reply], Reply]:
    """Return the pushes before the next reply, and the reply."""
    pushes = []
    while (found := client.read()).type == ">":
        pushes.append(found)
    return pushes, found


def test_tracking_invalidation_of_each_node_precedes_newer_reply(cluster: RedisCluster, tracking: Connection) -> None:
    names = NAMES[:6]
    assert len({cluster.master_of(name).port for name in names}) == 3
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(cluster.master_of(name).connect()) for name in names}
        for name in names:
            tracking.call("GET", name)
        for number in range(200):
            name = names[number % len(names)]
            nodes[name].call("SET", name, number)
            tracking.send(request("GET", name))
            pushes, reply = read_until_reply(tracking)
            assert reply.plain == b"%d" % number
            assert [b"invalidate", [name.encode()]] in [each.plain for each in pushes]


def test_tracking_follows_moved_keys_to_new_node(cluster: RedisCluster, proxy: Running, tracking: Connection) -> None:
    name = "moves"
    home, new = cluster.master_of(name), cluster.add_node()
    cluster.call(home, "SET", name, "1")
    with proxy.connect() as listener:
        listener.call("HELLO", 3)
        listener.call("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "mov")
        assert tracking.call("GET", name).plain == b"1"
        cluster.move(name, new)
        tracking.send(request("GET", name))
        pushes, reply = read_until_reply(tracking)
        assert reply.plain == b"1" and [b"invalidate", None] in [each.plain for each in pushes]
        read_until(listener, None)
        # The listener follows the node when the proxy has read the new table, and forgets all keys then.
        eventually(lambda: tracking_clients(cluster, new) == 2)
        cluster.call(new, "SET", name, "2")
        read_until(tracking, [name.encode()])
        read_until(listener, [name.encode()])
        cluster.move(name, home)
        read_until(listener, [name.encode()])


@pytest.mark.parametrize("protocol", [2, 3])
def test_tracking_redirect_covers_all_nodes_and_moved_keys(
    cluster: RedisCluster, proxy: Running, client: Connection, protocol: int
) -> None:
    names, moving, new = NAMES[:6], f"moves{protocol}", cluster.add_node()
    home = cluster.master_of(moving)
    assert len({cluster.master_of(name).port for name in names}) == 3
    with proxy.connect() as listener, proxy.connect() as tracking:
        target = listener.call("CLIENT", "ID").plain
        listener.call("SUBSCRIBE", "__redis__:invalidate")
        tracking.call("HELLO", protocol)
        assert tracking.call("CLIENT", "TRACKING", "ON", "REDIRECT", target).plain == b"OK"
        for name in names:
            tracking.call("GET", name)
        client.call("MSET", *(word for name in names for word in (name, "1")))
        assert {listener.read().plain[2][0] for _ in names} == {name.encode() for name in names}
        cluster.move(moving, new)
        tracking.call("GET", moving)
        eventually(lambda: tracking_clients(cluster, new) == 1)
        # The new node tracks keys only after it has told the listener's id, and then all keys are forgotten.
        cluster.call(new, "SET", moving, "1")
        read_message_until(listener, None)
        eventually(lambda: tracking.call("GET", moving).plain == b"1")
        cluster.call(new, "SET", moving, "2")
        read_message_until(listener, [moving.encode()])
        assert tracking.call("CLIENT", "TRACKING", "OFF").plain == b"OK"
        assert tracking_clients(cluster, new) == 0  # also if the proxy has not read the new table yet
        cluster.move(moving, home)


def read_message_until(listener: Connection, keys: list[bytes] | None) -> None:
    """Read up to the message of an invalidation of keys; None: of all keys."""
    while listener.read().plain != [b"message", b"__redis__:invalidate", keys]:
        pass


def read_until(client: Connection, keys: list[bytes] | None) -> None:
    """Read up to the invalidation of keys; None: of all keys."""
    while client.read().plain != [b"invalidate", keys]:
        pass


def tracking_clients(cluster: RedisCluster, node: Running) -> int:
    """Return the number of clients that track keys at a node."""
    info = cluster.call(node, "INFO", "clients").decode()
    return int(info.partition("tracking_clients:")[2].partition("\r\n")[0])


def test_tracking_notices_moved_slots_without_request(cluster: RedisCluster, stale: Running) -> None:
    name = "unread"
    target = other_master(cluster, name)
    with stale.connect() as tracking, stale.connect() as listener:
        for each in (tracking, listener):
            each.call("HELLO", 3)
        tracking.call("CLIENT", "TRACKING", "ON")
        listener.call("CLIENT", "TRACKING", "ON", "BCAST")
        assert tracking.call("GET", name).plain is None
        cluster.move(name, target)
        read_until(tracking, None)
        read_until(listener, None)
        assert tracking.call("GET", name).plain is None
        set_in_order(target, name)
        read_until(tracking, [name.encode()])
        read_until(listener, [name.encode()])


def test_cached_reply_ends_when_slot_moves(overlay: Overlay, cluster: RedisCluster, tmp_path: Path) -> None:
    name, new = "cached", cluster.add_node()
    home = cluster.master_of(name)
    routes = tmp_path / "routes.toml"
    routes.write_text(f'[[rule]]\nkeys = "{name}"\nowner = "upstream"\ncache = "tracking"\n')
    proxy = overlay.start_before(cluster, "--routes", str(routes))

    def hits() -> int:
        assert client.call("GET", name).plain is None
        return int(overlay.info(proxy)["cache_hits"])

    with proxy.connect() as client:
        eventually(lambda: hits() > 0)
        cluster.move(name, new)
        set_in_order(new, name)
        eventually(lambda: client.call("GET", name).plain == b"2")
        cluster.move(name, home)


def test_cached_reply_of_moving_key_ends_soon(overlay: Overlay, cluster: RedisCluster, tmp_path: Path) -> None:
    name, new = "asked", cluster.add_node()
    home = cluster.master_of(name)
    cluster.call(home, "SET", name, "1")
    routes = tmp_path / "routes.toml"
    routes.write_text(f'[[rule]]\nkeys = "{name}"\nowner = "upstream"\ncache = "tracking"\n')
    proxy = overlay.start_before(cluster, "--routes", str(routes))
    with proxy.connect() as client, proxy.connect() as tracking, new.connect() as direct:
        tracking.call("HELLO", 3)
        assert tracking.call("CLIENT", "TRACKING", "ON").plain == b"OK"
        with cluster.begin_move(name, new) as source:
            cluster.move_key(source, name, new)
        assert tracking.call("GET", name).plain == client.call("GET", name).plain == b"1"
        read_until(tracking, None)  # the proxy has no connection to the node any more
        for number in range(2, 40):
            direct.send(request("ASKING") + request("SET", name, number))
            assert direct.read().plain == direct.read().plain == b"OK"
            eventually(lambda number=number: client.call("GET", name).plain == b"%d" % number)  # type: ignore[misc]
        cluster.end_move(name, new)
        cluster.move(name, home)


class ChoosingClient:
    """A client that chooses the keys that it tracks. is_redirected: in RESP2, with REDIRECT to another client."""

    def __init__(self, proxy: Running, stack: ExitStack, mode: str, *, is_redirected: bool) -> None:
        self._client = self._listener = stack.enter_context(proxy.connect())
        words: list[object] = ["CLIENT", "TRACKING", "ON", mode]
        if is_redirected:
            self._listener = stack.enter_context(proxy.connect())
            words += ["REDIRECT", self._listener.call("CLIENT", "ID").plain]
            self._listener.call("SUBSCRIBE", "__redis__:invalidate")
        else:
            self._client.call("HELLO", 3)
        assert self._client.call(*words).plain == b"OK"  # type: ignore[arg-type]

    def run(self, *lines: str) -> list[object]:
        """Send a pipeline; return its replies. Invalidations before the last one are dropped."""
        self._client.send(b"".join(request(*line.split(" ")) for line in lines))
        return [read_until_reply(self._client)[1].plain for _ in lines]

    def invalid_keys(self) -> list[bytes] | None:
        """Return the keys of the next invalidation; None: all keys."""
        return self._listener.read().plain[-1]  # type: ignore[no-any-return]

    def first_invalid_key(self) -> bytes:
        """Return the first key of the next invalidation of the upstream's keys, except of all keys."""
        while (keys := self.invalid_keys()) is None or keys[0].startswith(b"job:"):
            pass
        return keys[0]


@pytest.fixture(params=[False, True], ids=["resp3", "redirect"])
def is_redirected(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def stale(overlay: Overlay, cluster: RedisCluster) -> Running:
    """A proxy that reads the table of slots again when it gets a MOVED, or some seconds after a client tracks keys."""
    return overlay.start_before(cluster)


def other_master(cluster: RedisCluster, name: str) -> Running:
    home = cluster.master_of(name)
    return next(node for node in cluster.nodes if node is not home)


def redirects(cluster: RedisCluster, node: Running, error: str = "MOVED") -> int:
    """Return how many redirects a node has sent."""
    found = cluster.call(node, "INFO", "errorstats").decode().partition(f"errorstat_{error}:count=")[2]
    return int(found.partition("\r\n")[0] or 0)


def set_in_order(node: Running, *names: str) -> None:
    """Set keys at a node over one connection, so that it invalidates them in this order."""
    with node.connect() as connection:
        for name in names:
            assert connection.call("SET", name, "2").plain == b"OK"


@pytest.mark.parametrize(
    ("mode", "pipeline", "replies"),
    [
        ("OPTIN", ["CLIENT CACHING YES", "GET {%s}a", "GET {%s}b"], [b"OK", b"1", None]),
        ("OPTIN", ["GET {%s}b", "CLIENT CACHING YES", "GET {%s}a"], [None, b"OK", b"1"]),
        ("OPTIN", ["CLIENT CACHING YES", "MGET {%s}a other {%s}c", "GET {%s}b"], [b"OK", [b"1", None, None], None]),
        ("OPTOUT", ["CLIENT CACHING NO", "GET {%s}b", "GET {%s}a"], [b"OK", None, b"1"]),
        ("OPTOUT", ["GET {%s}a", "CLIENT CACHING NO", "GET {%s}b"], [b"1", b"OK", None]),
    ],
)
def test_client_caching_applies_after_redirect(
    cluster: RedisCluster, stale: Running, is_redirected: bool, mode: str, pipeline: Sequence[str], replies: object
) -> None:
    name = f"{mode}{len(pipeline[0])}{is_redirected}"
    home, target = cluster.master_of(name), other_master(cluster, name)
    cluster.call(home, "SET", f"{{{name}}}a", "1")
    with ExitStack() as stack:
        cluster.move(f"{{{name}}}a", target)
        client = ChoosingClient(stale, stack, mode, is_redirected=is_redirected)
        before = redirects(cluster, home)
        assert client.run(*(line.replace("%s", name) for line in pipeline)) == replies
        # 1: the turn that sends the pipeline was interrupted, and the proxy had learned of the new master meanwhile.
        assert redirects(cluster, home) - before in (1, 2)
        set_in_order(target, f"{{{name}}}b", f"{{{name}}}a")
        assert client.first_invalid_key() == b"{%b}a" % name.encode()  # b was not tracked


@pytest.mark.parametrize(
    ("mode", "pipeline"),
    [
        ("OPTIN", ["CLIENT CACHING YES", "GET %s", "GET other"]),
        ("OPTOUT", ["GET %s", "CLIENT CACHING NO", "GET other"]),
        ("NOLOOP", ["GET %s", "GET other"]),
    ],
)
def test_tracking_of_moving_key_is_complete_or_invalidated(
    cluster: RedisCluster, proxy: Running, client: Connection, is_redirected: bool, mode: str, pipeline: Sequence[str]
) -> None:
    name = f"ask{mode}{is_redirected}"
    home, target = cluster.master_of(name), other_master(cluster, name)
    cluster.call(home, "SET", name, "1")
    with ExitStack() as stack, cluster.begin_move(name, target) as source:
        caching = ChoosingClient(proxy, stack, mode, is_redirected=is_redirected)
        cluster.move_key(source, name, target)
        before = redirects(cluster, home, "ASK")
        assert b"1" in caching.run(*(line.replace("%s", name) for line in pipeline))
        assert redirects(cluster, home, "ASK") - before == 1
        if mode == "OPTIN":  # a node forgets CLIENT CACHING when it gets ASKING
            assert caching.invalid_keys() is None
        else:
            assert client.call("SET", name, "2").plain == b"OK"
            assert caching.first_invalid_key() == name.encode()
        cluster.end_move(name, target)


def test_client_caching_applies_at_unknown_node(cluster: RedisCluster, stale: Running, is_redirected: bool) -> None:
    name, new = f"new{is_redirected}", cluster.add_node()
    home = cluster.master_of(name)
    cluster.call(home, "SET", name, "1")
    with ExitStack() as stack:
        cluster.move(name, new)
        client = ChoosingClient(stale, stack, "OPTIN", is_redirected=is_redirected)
        assert client.run("CLIENT CACHING YES", f"GET {name}") == [b"OK", b"1"]
        if is_redirected:  # the node tracks keys only after it has told the listener's id, and then all are forgotten
            eventually(lambda: tracking_clients(cluster, new) == 1)
            assert client.invalid_keys() is client.invalid_keys() is None
            assert client.run("CLIENT CACHING YES", f"GET {name}") == [b"OK", b"1"]
        set_in_order(new, name)
        assert client.first_invalid_key() == name.encode()
        cluster.move(name, home)


@pytest.mark.parametrize("others", [0, 20_000])
def test_tracking_covers_all_parts_of_split_read(
    cluster: RedisCluster, proxy: Running, client: Connection, is_redirected: bool, others: int
) -> None:
    with ExitStack() as stack:
        caching = ChoosingClient(proxy, stack, "OPTIN", is_redirected=is_redirected)
        read = " ".join(["MGET", *NAMES, *(f"other{number}" for number in range(others))])
        replies = caching.run("CLIENT CACHING YES", read, "GET other")
        assert replies == [b"OK", [None] * (len(NAMES) + others), None]
        client.call("MSET", *(word for name in ["other", *NAMES] for word in (name, "1")))
        assert {caching.first_invalid_key() for _ in NAMES} == {name.encode() for name in NAMES}


def test_client_caching_covers_whole_transaction(cluster: RedisCluster, stale: Running, is_redirected: bool) -> None:
    name = f"exec{is_redirected}"
    home, target = cluster.master_of(name), other_master(cluster, name)
    cluster.call(home, "SET", f"{{{name}}}a", "1")
    with ExitStack() as stack:
        cluster.move(f"{{{name}}}a", target)
        client = ChoosingClient(stale, stack, "OPTIN", is_redirected=is_redirected)
        lines = ["CLIENT CACHING YES", "MULTI", f"GET {{{name}}}a", "GET job:speed:2", "EXEC", f"GET {{{name}}}b"]
        assert bytes(client.run(*lines)[-2]).startswith(b"EXECABORT")  # type: ignore[call-overload]
        eventually(lambda: client.run(f"GET {{{name}}}b") == [None])
        assert client.run(*lines)[-2:] == [[b"1", b"20"], None]
        set_in_order(target, f"{{{name}}}b", f"{{{name}}}a")
        assert client.first_invalid_key() == b"{%b}a" % name.encode()


@pytest.mark.parametrize("lost", ["own", "listener"])
def test_tracking_lost_at_node_ends_client(
    cluster: RedisCluster, proxy: Running, client: Connection, lost: str
) -> None:
    name = NAMES[0]
    node = cluster.master_of(name)
    with proxy.connect() as listener, proxy.connect() as tracking:
        target = listener.call("CLIENT", "ID").plain
        tracking.call("CLIENT", "TRACKING", "ON", "REDIRECT", target)
        tracking.call("GET", name)
        lines = cluster.call(node, "CLIENT", "LIST").decode().splitlines()
        clients = [dict(word.partition("=")[::2] for word in line.split(" ")) for line in lines]
        (fields,) = (each for each in clients if int(each["redir"]) > 0)
        assert cluster.call(node, "CLIENT", "KILL", "ID", fields["id" if lost == "own" else "redir"]) == b"1"
        assert tracking.read_to_end() == b""
