"""An upstream that sentinels know: its master is found, a failover is followed, and SENTINEL names the proxy."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.sentinel import Sentinel

from compat.conformance.servers import redis_server
from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from tests.server.overlay import Overlay
from tests.server.sentinels import NAME, Sentinels


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with ExitStack() as stack:
        yield Sentinels(tmp_path, stack)


def test_failover_is_followed_with_one_sentinel_lost(overlay: Overlay, sentinels: Sentinels) -> None:
    proxy = overlay.start_at(sentinels.url.replace("//", "//127.0.0.1:1,"))  # nobody listens at the first address
    with proxy.connect() as client:
        eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
        assert overlay.info(proxy)["upstream"] == f"127.0.0.1:{sentinels.master.port}"
        with sentinels.replica.connect() as replica:
            eventually(lambda: replica.call("GET", "k").plain == b"1")
        sentinels.master.process.send_signal(signal.SIGKILL)
        sentinels.master.process.wait()
        assert client.call("GET", "job:speed:1").plain == b"10"
    with proxy.connect() as client:
        eventually(lambda: client.call("SET", "l", "2").plain == b"OK")
        assert client.call("MGET", "k", "l", "job:speed:2").plain == [b"1", b"2", b"20"]
        assert overlay.info(proxy)["upstream"] == f"127.0.0.1:{sentinels.replica.port}"


def test_connections_to_replaced_master_are_dropped(overlay: Overlay, sentinels: Sentinels) -> None:
    """The old master lives on: only its role, and the sentinels, tell."""
    proxy = overlay.start_at(sentinels.url)
    with proxy.connect() as client, proxy.connect() as blocked:
        eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
        blocked.send(b"BLPOP queue 0\r\n")
        eventually(lambda: overlay.info(proxy)["upstream_blocked"] == "1")
        with Connection(sentinels.ports[0]) as sentinel:
            eventually(lambda: sentinel.call("SENTINEL", "FAILOVER", NAME).plain == b"OK")
        assert not blocked.read_to_end().startswith(b"*2")  # its connection ends, or it gets Redis' own UNBLOCKED
        eventually(lambda: overlay.info(proxy)["upstream"] == f"127.0.0.1:{sentinels.replica.port}")
    with proxy.connect() as client:
        eventually(lambda: client.call("SET", "k", "2").plain == b"OK")
        with sentinels.replica.connect() as master:
            assert master.call("GET", "k").plain == b"2"


def test_sentinel_commands_return_proxy(overlay: Overlay, sentinels: Sentinels) -> None:
    proxy = overlay.start_at(sentinels.url)
    with proxy.connect() as client:
        eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
        address = [b"127.0.0.1", b"%d" % proxy.port]
        assert client.call("SENTINEL", "get-master-addr-by-name", NAME).plain == address
        assert client.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "another").plain is None
        assert client.call("SENTINEL", "sentinels", NAME).plain == []
        assert client.call("SENTINEL", "replicas", "another").plain == b"ERR No such master with that name"
        assert client.call("SENTINEL", "failover", NAME).is_error
    library = Sentinel([("127.0.0.1", proxy.port)])
    with library.master_for(NAME, decode_responses=True) as master:
        assert master.get("k") == "1" and master.get("job:speed:1") == "10"


def test_lost_sentinels_fail_only_upstream_keys(overlay: Overlay) -> None:
    proxy = overlay.start_at("redis+sentinel://127.0.0.1:1,127.0.0.1:2/m")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        eventually(lambda: b"the sentinel 127.0.0.1:" in client.call("GET", "k").plain)
        assert client.call("GET", "k").plain.startswith(b"TRYAGAIN the upstream m of 127.0.0.1:1,127.0.0.1:2")


@pytest.mark.parametrize("has_killed_clients", [True, False])
def test_demoted_master_is_not_used(overlay: Overlay, tmp_path: Path, has_killed_clients: bool) -> None:
    """An upstream without sentinels: one address, behind which a failover happens."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with redis_server(tmp_path / "one") as one, redis_server(tmp_path / "two") as two, one.connect() as direct:
        proxy = overlay.start_at(f"redis://127.0.0.1:{one.port}")
        with proxy.connect() as client:
            eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
            for _ in range(2):  # a script's own word for it is not enough
                assert client.call("EVAL", "return redis.error_reply('READONLY so it says')", 0).is_error
            assert client.call("SET", "k", "1").plain == b"OK"
            assert overlay.info(proxy)["upstream_losses"] == "0"
            direct.call("REPLICAOF", "127.0.0.1", two.port)
            if has_killed_clients:  # as sentinels do
                direct.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            else:
                assert client.call("SET", "k", "2").plain.startswith(b"READONLY")
            eventually(lambda: b"it is a replica now" in client.call("GET", "k").plain)
            direct.call("REPLICAOF", "NO", "ONE")
            eventually(lambda: client.call("SET", "k", "2").plain == b"OK")


@pytest.mark.parametrize("name", ["REPLICAOF", "SLAVEOF"])
def test_replicaof_no_one_through_proxy_restores_upstream(overlay: Overlay, tmp_path: Path, name: str) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with redis_server(tmp_path / "one") as one, redis_server(tmp_path / "two") as two:
        proxy = overlay.start_at(f"redis://127.0.0.1:{one.port}", "--upstream-allow", name)
        with proxy.connect() as client:
            eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
            client.send(request("SET", "k", "2") + request(name, "127.0.0.1", two.port))
            assert [client.read().plain for _ in range(2)] == [b"OK", b"OK"]
            eventually(lambda: client.call("SET", "k", "3").plain, lambda reply: b"it is a replica now" in reply)
            assert client.call(name, "NO", "ONE").plain == b"OK"
            eventually(lambda: client.call("SET", "k", "4").plain == b"OK")


def test_failover_through_proxy_answers_until_upstream_is_master_again(overlay: Overlay, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "two", "--replicaof", f"127.0.0.1 {one.port}") as two,
        one.connect() as direct,
        two.connect() as other,
    ):
        proxy = overlay.start_at(f"redis://127.0.0.1:{one.port}", "--upstream-allow", "FAILOVER")
        with proxy.connect() as client:
            eventually(lambda: client.call("SET", "k", "1").plain == b"OK")
            assert client.call("FAILOVER", "ABORT").raw == direct.call("FAILOVER", "ABORT").raw
            eventually(lambda: client.call("WAIT", 1, 1000).plain == 1)
            two.process.send_signal(signal.SIGSTOP)  # a replica that does not follow, so writes wait
            client.call("SET", "k", "1")
            assert client.call("FAILOVER").plain == b"OK"
            client.send(request("SET", "k", "2"))
            with proxy.connect() as another:
                assert another.call("GET", "k").plain == b"1"
                assert another.call("FAILOVER", "ABORT").plain == b"OK"
            assert client.read().plain == b"OK"
            two.process.send_signal(signal.SIGCONT)
            eventually(lambda: client.call("WAIT", 1, 1000).plain == 1)
            assert client.call("FAILOVER").plain == b"OK"
            eventually(
                lambda: client.call("SET", "k", "2").plain, lambda reply: b"it is a replica now" in str(reply).encode()
            )
            assert client.call("FAILOVER").raw == direct.call("FAILOVER").raw
            eventually(lambda: other.call("ROLE").plain[0] == b"master" and other.call("WAIT", 1, 1000).plain == 1)
            assert other.call("FAILOVER").plain == b"OK"
            eventually(lambda: client.call("SET", "k", "3").plain == b"OK")
            assert client.call("GET", "k").plain == b"3"
