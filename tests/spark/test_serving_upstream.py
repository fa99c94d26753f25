"""`sparkis.serve(spark, upstream=...)`: keys of a job's states and of a real Redis at one address."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis
from compat.conformance.certificates import Authority
from compat.conformance.servers import Running, redis_server
from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark.micro_batches import Batches, start

pytestmark = pytest.mark.usefixtures("no_log_left_over")

Make = Callable[[str], Batches]


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Running]:
    """A Redis with a session."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    with redis_server(folder) as server:
        with server.connect() as connection:
            connection.call("SET", "session:1", "ada")
        yield server


def publish(batches: Make, checkpoint: Path) -> Batches:
    """Run a job to the moment when the state server has its first row."""
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", wait_for_visibility=WAIT_S_MAX)
    start(writer, "job", checkpoint)
    return rows


def wait_for(client: redis.Redis, key: str, value: str) -> None:
    def found() -> str | None:
        try:
            return client.get(key)
        except redis.RedisError as error:
            return str(error)

    eventually(found, lambda text: text == value)


def test_job_and_redis_have_one_address_also_when_their_server_was_killed(
    spark: SparkSession, batches: Make, upstream: Running, tmp_path: Path
):
    url, file = f"redis://127.0.0.1:{upstream.port}", tmp_path / "owners.json"
    with (
        sparkis.serve(
            spark, log=tmp_path / "log", upstream=sparkis.Upstream(url, ownership=file), workers=2
        ) as endpoint,
        redis.Redis.from_url(endpoint.url, decode_responses=True) as client,
    ):
        assert isinstance(endpoint, DetachedEndpoint)
        again = sparkis.serve(spark, log=tmp_path / "log", upstream=sparkis.Upstream(url, ownership=file), workers=2)
        assert again is endpoint
        rows = publish(batches, tmp_path / "checkpoint")
        wait_for(client, "job:s:a", "1")
        assert client.get("session:1") == "ada"
        assert client.set("session:2", "bob")
        assert client.mget("session:2", "job:s:a", "job:s:b") == ["bob", "1", None]
        with pytest.raises(redis.ResponseError, match="is owned by state job:s"):
            client.set("job:s:a", "7")

        pid, before = endpoint.pid, endpoint.url
        assert url not in Path(f"/proc/{pid}/cmdline").read_text()  # it may have a password
        (state_server,) = children_of(pid)
        os.kill(state_server, signal.SIGKILL)
        rows.add({"k": "a", "v": 2})
        wait_for(client, "job:s:a", "2")
        assert client.get("session:2") == "bob"
        assert endpoint.pid == pid

        os.kill(pid, signal.SIGKILL)
        eventually(lambda: endpoint.pid != pid)
        rows.add({"k": "a", "v": 3})
        wait_for(client, "job:s:a", "3")
        assert client.get("session:2") == "bob"
        assert endpoint.url == before
        with redis.Redis(port=upstream.port, decode_responses=True) as alone:
            assert sorted(alone.keys()) == ["session:1", "session:2"]
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_tls_clients_read_published_epoch_after_driver_waited(
    spark: SparkSession, batches: Make, upstream: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    authority = Authority(tmp_path / "authority")
    cert, key = authority.issue("node")
    with sparkis.serve(
        spark,
        log=tmp_path / "log",
        password="secret",
        tls=sparkis.Tls(cert_file=cert, key_file=key, ca_cert_file=authority.ca),
        upstream=sparkis.Upstream(f"redis://127.0.0.1:{upstream.port}", ownership=tmp_path / "owners.json"),
    ) as endpoint:
        assert endpoint.url.startswith("rediss://:secret@")
        publish(batches, tmp_path / "checkpoint")
        assert "was not readable" not in caplog.text
        given = authority.client("reader")
        with redis.Redis.from_url(endpoint.url, decode_responses=True, **given) as client:
            wait_for(client, "job:s:a", "1")
            assert client.get("session:1") == "ada"


def test_proxy_of_servers_on_executors_has_upstream(
    spark: SparkSession, batches: Make, upstream: Running, tmp_path: Path
):
    with (
        sparkis.serve(
            spark,
            log=tmp_path / "log",
            placement="executors",
            upstream=sparkis.Upstream(
                f"redis://127.0.0.1:{upstream.port}", ownership=tmp_path / "owners.json", transactions="strict"
            ),
        ) as endpoint,
        redis.Redis.from_url(endpoint.url, decode_responses=True) as client,
    ):
        assert isinstance(endpoint, ExecutorsEndpoint)
        publish(batches, tmp_path / "checkpoint")
        wait_for(client, "job:s:a", "1")
        wait_for(client, "session:1", "ada")
        with pytest.raises(redis.exceptions.ExecAbortError), client.pipeline() as pipeline:
            pipeline.get("job:s:a").get("session:1").execute()


@pytest.mark.parametrize("placement", ["driver", "executors"])
@pytest.mark.parametrize(
    ("given", "errors"),
    [
        ({"upstream": sparkis.Upstream(ownership="owners.json")}, ["Upstream.ownership has no use without upstream"]),
        (
            {"upstream": sparkis.Upstream("http://cache", auth="client"), "password": "x"},
            [
                "upstream: ",
                "with Upstream.auth client the upstream has the users",
                "upstream needs Upstream.ownership: without",
            ],
        ),
        (
            {"upstream": sparkis.Upstream("redis://cache", new_jobs="ask")},  # type: ignore[arg-type]
            ["argument Upstream.new_jobs: invalid choice: 'ask'"],
        ),
        (
            {"upstream": sparkis.Upstream("redis://cache", timeout_ms=0)},
            ["argument Upstream.timeout_ms: '0' is not"],
        ),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_started(
    spark: SparkSession, tmp_path: Path, placement: Any, given: dict[str, Any], errors: list[str]
):
    with pytest.raises(ValueError, match=re.escape(errors[0])) as raised:
        sparkis.serve(spark, log=tmp_path / "log", placement=placement, **given)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(errors)
    assert all(line.startswith(begins) for line, begins in zip(lines, errors, strict=True))


def test_role_is_refused_with_upstream(spark: SparkSession, tmp_path: Path):
    with pytest.raises(ValueError, match="role='slave' has no effect with upstream"):
        sparkis.serve(
            spark,
            log=tmp_path / "log",
            placement=sparkis.Driver(role="slave"),
            upstream=sparkis.Upstream("redis://cache", ownership=tmp_path / "o.json"),
        )
