"""The demo's jobs on executors: every key is answered as by one server, whichever client asks, and in whichever way."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from redis.cluster import RedisCluster

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net import children
from spark_hooks import demo
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark import placing
from tests.spark.micro_batches import local_session
from tests.spark.placing import ByHand
from tests.spark.processes import served

pytestmark = pytest.mark.cluster

CLIENTS = Path(__file__).parents[1] / "clients"
# A month: each airport and carrier, and most planes.
DEMO_END = pa.scalar(datetime(2013, 2, 1, tzinfo=UTC), pa.timestamp("us", "UTC"))
READERS = {"string": ["GET"], "hash": ["HGETALL"], "list": ["LRANGE", "0", "-1"]}

Request = list[str]


def of_a_month(table: pa.Table) -> pa.Table:
    return table.filter(pc.less(table.column("time"), DEMO_END))


def requests_for(url: str) -> list[Request]:
    """Return what reads each key."""
    with placing.redis.Redis.from_url(url, decode_responses=True) as client:
        kinds = {key: client.type(key) for key in sorted(client.scan_iter(count=1000))}
    return [[READERS[kind][0], key, *READERS[kind][1:]] for key, kind in kinds.items()]


def plain(reply: Any) -> Any:
    """Return a reply as all clients have it: fields and values in turn, in the order of the fields."""
    if isinstance(reply, dict):
        return [word for pair in sorted(reply.items()) for word in pair]
    return reply


def in_order(request: Request, reply: Any) -> Any:
    """Return a reply with a map's fields in order."""
    if request[0] != "HGETALL" or isinstance(reply, dict):
        return plain(reply)
    return plain(dict(zip(reply[::2], reply[1::2], strict=True)))


def by_redis_py(endpoint: ExecutorsEndpoint, requests: Sequence[Request]) -> list[Any]:
    host, port = placing.addresses(endpoint)[0]
    with RedisCluster(host=host, port=port, decode_responses=True) as client:
        return [client.execute_command(*request) for request in requests]


def by_proxy(endpoint: ExecutorsEndpoint, requests: Sequence[Request]) -> list[Any]:
    with placing.redis.Redis.from_url(endpoint.url, decode_responses=True) as client:
        return [client.execute_command(*request) for request in requests]


def by_hand(endpoint: ExecutorsEndpoint, requests: Sequence[Request]) -> list[Any]:
    client = ByHand(placing.addresses(endpoint)[0])
    try:
        return [client.ask(*request) for request in requests]
    finally:
        client.close()


def by_javascript(name: str) -> Callable[[ExecutorsEndpoint, Sequence[Request]], list[Any]]:
    def ask(endpoint: ExecutorsEndpoint, requests: Sequence[Request]) -> list[Any]:
        node = shutil.which("node")
        assert node is not None
        _, port = placing.addresses(endpoint)[0]
        done = subprocess.run(
            [node, str(CLIENTS / "cluster.mjs"), "everything", str(port), name],
            input=json.dumps(requests), capture_output=True, text=True, timeout=WAIT_S_MAX, cwd=CLIENTS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    return ask


def by_redis_cli(endpoint: ExecutorsEndpoint, requests: Sequence[Request]) -> list[Any]:
    host, port = placing.addresses(endpoint)[0]
    lines = "".join(" ".join(json.dumps(word) for word in request) + "\n" for request in requests)
    done = subprocess.run(
        ["redis-cli", "-c", "-h", host, "-p", str(port), "--json", "-2"],
        input=lines, capture_output=True, text=True, timeout=WAIT_S_MAX, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"', "{", "n"))]


CLIENT_KINDS: dict[str, Callable[[ExecutorsEndpoint, Sequence[Request]], list[Any]]] = {
    "the proxy": by_proxy,
    "redis-py": by_redis_py,
    "ioredis": by_javascript("ioredis"),
    "node-redis": by_javascript("node_redis"),
    "redis-cli -c": by_redis_cli,
    "MOVED, by hand": by_hand,
}


@pytest.mark.parametrize("executors", [2, 3])
def test_demo_is_answered_as_by_one_server_to_every_client(tmp_path: Path, executors: int) -> None:
    spark = local_session(
        f"local-cluster[{executors},1,1024]",
        **{"spark.executor.memory": "512m", "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"]},
    )
    try:
        tables = {"weather": of_a_month(demo.weather_table()), "flights": of_a_month(demo.flights_table())}
        endpoint = sparkis.serve(spark, log=tmp_path / "log")
        assert isinstance(endpoint, ExecutorsEndpoint)
        feeder = demo.Feeder(tmp_path, tables, 0)
        feeder.start()
        assert feeder.is_done.wait(WAIT_S_MAX)
        queries = demo.start_queries(spark, tmp_path, tmp_path / "checkpoints")
        for query in queries:
            query.processAllAvailable()
        eventually(lambda: len(placing.addresses(endpoint)), lambda count: count == executors)
        with served("--log", tmp_path / "log", "--store", tmp_path / "store") as url:
            expected = eventually(lambda: placing.values_or_error(url), lambda answers: isinstance(answers, dict))
            requests = [request for request in requests_for(url) if "weather:latest" not in request[1]]  # it expires
        assert len(requests) > 2_000
        eventually(lambda: placing.values_or_error(endpoint.url), lambda answers: isinstance(answers, dict))
        for name, ask in CLIENT_KINDS.items():
            replies = ask(endpoint, requests)
            assert len(replies) == len(requests), name
            wrong = [
                (request, reply)
                for request, reply in zip(requests, replies, strict=True)
                if in_order(request, reply) != plain(expected[request[1]])
            ]
            assert not wrong, (name, wrong[:5])
        for query in queries:
            query.stop()
        endpoint.stop()
    finally:
        spark.stop()
