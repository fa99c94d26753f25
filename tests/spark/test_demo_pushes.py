"""What the demo's jobs push while they run, as redis-py, ioredis and node-redis get it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cache import CacheConfig

from compat.waiting import WAIT_S_MAX, eventually
from tests.spark.processes import sparkis

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parents[1] / "clients"
# Of each carrier there is a flight in every batch.
KEY = "flights:golden:UA"
CHANNEL, EPOCHS = f"__keyspace@0__:{KEY}", "__sparkis__:epoch:flights"
MODES = ["", "NOLOOP", "OPTIN", "OPTOUT", "BCAST PREFIX flights:golden:"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The demo, slow enough to run through all of this, which notifies of everything."""
    with sparkis(
        "demo", "--speed", 1, "--port", 0, "--ui-port", 0, "--log", tmp_path_factory.mktemp("demo") / "log"
    ) as demo:
        found = int(demo.wait_for(r"state +redis://[0-9.]+:([0-9]+) ")[1])
        with redis.Redis(port=found) as client:
            assert client.config_set("notify-keyspace-events", "KEA")
            eventually(lambda: client.exists(KEY), processes=[demo.process])
        yield found
        assert demo.end(signal.SIGINT) == 0
        assert "Traceback" not in demo.printed


def check(received: dict[str, Any]) -> None:
    assert received["messages"] == ["hello", "hello"]
    assert received["notification"] == "hset"
    epoch = json.loads(received["epoch"])
    assert (epoch["job"], epoch["term"]) == ("flights", 1)
    assert epoch["epoch"] > 0
    assert received["invalidated"] == [KEY] * len(MODES)


@pytest.mark.parametrize("script", ["ioredis.mjs", "node_redis.mjs"])
def test_javascript_clients_are_notified_of_changes_of_demo(port: int, script: str) -> None:
    node = shutil.which("node")
    assert node is not None
    done = subprocess.run(
        [node, str(CLIENTS / script), "pushes", str(port), KEY, CHANNEL, EPOCHS, *MODES],
        capture_output=True, text=True, timeout=WAIT_S_MAX, cwd=CLIENTS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))


def test_redis_py_is_notified_of_changes_of_demo(port: int) -> None:
    options: dict[str, Any] = {"port": port, "protocol": 2, "decode_responses": True}
    received: dict[str, Any] = {"invalidated": []}
    with redis.Redis(**options) as connection, redis.Redis(**options).client() as client, connection.pubsub() as pubsub:

        def next_of(channel: str) -> Any:
            found = eventually(
                lambda: pubsub.get_message(ignore_subscribe_messages=True, timeout=1.0),
                lambda message: message is not None and message["channel"] == channel,
                f"a message of {channel}",
            )
            return found["data"]

        pubsub.subscribe("news", EPOCHS, "__redis__:invalidate")
        pubsub.psubscribe("__keyspace@0__:*")
        pubsub.ssubscribe("shard")
        pubsub.ping()
        client.publish("news", "hello")
        client.spublish("shard", "hello")
        received["messages"] = [next_of("news"), next_of("shard")]
        received["notification"] = next_of(CHANNEL)
        received["epoch"] = next_of(EPOCHS)
        of_told = next(each["id"] for each in client.client_list() if each["flags"] == "P")
        for mode in MODES:
            client.execute_command("CLIENT", "TRACKING", "ON", "REDIRECT", of_told, *mode.split())
            if mode == "OPTIN":
                client.execute_command("CLIENT", "CACHING", "YES")
            client.hgetall(KEY)
            while KEY not in (keys := next_of("__redis__:invalidate")):
                assert keys
            received["invalidated"].append(KEY)
            client.execute_command("CLIENT", "TRACKING", "OFF")
    check(received)


def test_cache_of_redis_py_follows_demo(port: int) -> None:
    with redis.Redis(port=port, protocol=3, cache_config=CacheConfig(), decode_responses=True) as client:
        cache = client.get_cache()
        assert cache is not None
        before = client.hgetall(KEY)
        assert cache.size == 1
        eventually(lambda: client.hgetall(KEY), lambda found: found != before)
