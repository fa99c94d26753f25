"""Cluster clients against servers of one log with a topology: they find owners, follow moves, survive a loss."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from redis.backoff import ConstantBackoff
from redis.cluster import LoadBalancingStrategy, RedisCluster
from redis.exceptions import RedisClusterException, ResponseError
from redis.retry import Retry

from compat.conformance.dataset import Dataset
from compat.waiting import WAIT_S_MAX

MANY = {f"many:{number:03d}".encode(): b"%d" % number for number in range(300)}
REPLICAS_FIRST = LoadBalancingStrategy.RANDOM_REPLICA


def client(cluster: Any, **options: Any) -> RedisCluster:
    return RedisCluster(
        host="127.0.0.1", port=cluster.port(0), retry=Retry(ConstantBackoff(0.1), 30), socket_timeout=WAIT_S_MAX, **options
    )


def cli(cluster: Any, *arguments: str) -> str:
    command = ["redis-cli", *arguments]
    environment = {**os.environ, "TERM": "dumb", "HOME": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S_MAX, env=environment, check=False)
    return (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_finds_every_key(still_cluster: Any, dataset: Dataset, protocol: int) -> None:
    with client(still_cluster, protocol=protocol) as redis:
        assert {key: redis.get(key) for key in MANY} == MANY
        assert redis.mget_nonatomic(*MANY) == list(MANY.values())
        assert redis.hgetall("hash:one") == {b"field": b"value"}
        assert (
            set(redis.scan_iter(count=100)) == set(redis.keys(target_nodes=RedisCluster.PRIMARIES)) == set(dataset.keys)
        )
        assert redis.dbsize(target_nodes=RedisCluster.PRIMARIES) == len(dataset.keys)
        assert redis.cluster_keyslot("foo") == 12182
        assert sorted(redis.cluster_nodes()) == sorted(f"127.0.0.1:{still_cluster.port(at)}" for at in range(3))
        with pytest.raises(ResponseError, match=r"command 'cluster\|addslots' is not served by sparkis"):
            redis.cluster_addslots(redis.get_default_node(), 1)
        with pytest.raises(RedisClusterException):
            redis.mget(*MANY)


def test_redis_py_reads_from_replicas(still_cluster: Any) -> None:
    with client(still_cluster, load_balancing_strategy=REPLICAS_FIRST) as redis:
        assert {key: redis.get(key) for key in MANY} == MANY
        node = redis.get_node(port=still_cluster.port(2), host="127.0.0.1")
        assert redis.info("keyspace", target_nodes=node)
        assert redis.info("commandstats", target_nodes=node)["cmdstat_get"]["calls"] > 0


def test_redis_py_follows_move_and_survives_loss(cluster: Any) -> None:
    with client(cluster) as redis:
        assert {key: redis.get(key) for key in MANY} == MANY
        cluster.show("8192-16383", "0-100,200-8191", "101-199")
        assert {key: redis.get(key) for key in MANY} == MANY
        cluster.show("0-8191", "8192-16383", "replica of 0")
        assert {key: redis.get(key) for key in MANY} == MANY
        cluster.kill(0)
        cluster.show("gone", "8192-16383", "0-8191")
        assert {key: redis.get(key) for key in MANY} == MANY


def test_reader_of_replicas_continues_without_new_topology(cluster: Any) -> None:
    with client(cluster, load_balancing_strategy=REPLICAS_FIRST) as redis:
        cluster.kill(0)
        assert {key: redis.get(key) for key in MANY} == MANY


@pytest.mark.parametrize("name", ["ioredis", pytest.param("node_redis", marks=pytest.mark.slow)])
def test_javascript_follows_move_and_survives_loss(cluster: Any, run_script: Any, name: str) -> None:
    def move_and_kill() -> None:
        cluster.show("8192-16383", "replica of 2", "0-8191")
        cluster.kill(0)
        cluster.show("gone", "8192-16383", "0-8191")

    found = run_script("cluster.mjs", "follow", cluster.servers[0], name, meanwhile=move_and_kill)
    values = [value.decode() for value in MANY.values()]
    assert found["before"] == values
    assert found["after"] == values
    assert found["many"] == ["1", None]
    assert {cluster.port(0), cluster.port(1)} <= set(found["nodes"])


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli on the PATH")
def test_redis_cli_follows_to_owner_and_finds_nothing_wrong(cluster: Any, dataset: Dataset) -> None:
    for at in range(3):
        port = str(cluster.port(at))
        assert [cli(cluster, "-c", "-p", port, "get", key.decode()) for key in list(MANY)[:9]] == [
            f"{number}\n" for number in range(9)
        ]
        checked = cli(cluster, "--cluster", "check", f"127.0.0.1:{port}")
        assert "[OK] All nodes agree about slots configuration." in checked
        assert "[OK] All 16384 slots covered." in checked
        assert f"[OK] {len(dataset.keys)} keys in 2 masters." in checked
        assert "[ERR]" not in checked
    assert cli(cluster, "-p", str(cluster.port(0)), "get", "foo") == f"MOVED 12182 127.0.0.1:{cluster.port(1)}\n\n"
    cluster.show("0-8191", "8192-16382", "replica of 0")
    assert "[ERR] Not all 16384 slots are covered by nodes." in cli(
        cluster, "--cluster", "check", f"127.0.0.1:{cluster.port(0)}"
    )


def assert_all_clients_go_on(cluster: Any, run_script: Any, change: Callable[[], None]) -> None:
    """Have every client read all keys, change the cluster under them, and have them read all keys again."""
    values = [value.decode() for value in MANY.values()]
    found: dict[str, Any] = {}

    def follow(name: str, meanwhile: Callable[[], None]) -> None:
        found[name] = run_script("cluster.mjs", "follow", cluster.servers[0], name, meanwhile=meanwhile)

    with client(cluster) as redis:
        assert {key: redis.get(key) for key in MANY} == MANY
        follow("ioredis", lambda: follow("node_redis", change))
        assert {key: redis.get(key) for key in MANY} == MANY
    for name in ("ioredis", "node_redis"):
        assert (found[name]["before"], found[name]["after"]) == (values, values), name
    key, value = next(iter(MANY.items()))
    assert cli(cluster, "-c", "-p", str(cluster.port(0)), "get", key.decode()) == f"{value.decode()}\n"


def assert_checked(cluster: Any, dataset: Dataset, masters: int) -> None:
    checked = cli(cluster, "--cluster", "check", f"127.0.0.1:{cluster.port(0)}")
    assert "[OK] All nodes agree about slots configuration." in checked
    assert "[OK] All 16384 slots covered." in checked
    assert f"[OK] {len(dataset.keys)} keys in {masters} masters." in checked


@pytest.mark.slow
def test_all_clients_follow_moved_slots_and_survive_lost_server(
    assigned: Any, run_script: Any, dataset: Dataset
) -> None:
    cluster = assigned(0)
    for slots in (("0-16383",), ("0-8191", "8192-16383")):
        cluster.start()
        cluster.wait_for(*slots)
    assert_checked(cluster, dataset, 2)

    def come_and_go() -> None:
        cluster.start()
        cluster.wait_for("0-5461", "10923-16383", "5462-10922")
        cluster.kill(1)
        cluster.wait_for("0-5461,10923-13652", "gone", "5462-10922,13653-16383")

    assert_all_clients_go_on(cluster, run_script, come_and_go)


@pytest.mark.slow
def test_all_clients_continue_when_replica_replaces_lost_master(
    assigned: Any, run_script: Any, dataset: Dataset
) -> None:
    cluster = assigned(1)
    for slots in (
        ("0-16383",),
        ("0-16383", "replica"),
        ("0-16383", "replica", "replica"),
        ("0-8191", "replica", "replica", "8192-16383"),
    ):
        cluster.start()
        cluster.wait_for(*slots)
    assert_checked(cluster, dataset, 2)

    def lose_a_master() -> None:
        cluster.kill(3)
        cluster.wait_for("0-8191", "replica", "8192-16383", "gone")

    assert_all_clients_go_on(cluster, run_script, lose_a_master)
