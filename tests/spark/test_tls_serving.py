"""What a driver serves speaks TLS with clients, and among its parts, when it is given certificates."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis
from compat.conformance.certificates import Authority
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.tls import TlsError
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark.micro_batches import Batches, Settings, start

pytestmark = pytest.mark.usefixtures("no_log_left_over")

Make = Callable[[str], Batches]
ROWS = 40
ANSWERS = [str(number) for number in range(ROWS)]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "authority")
    made.issue("node")
    return made


def tls_of(authority: Authority) -> sparkis.Tls:
    folder = authority.folder
    return sparkis.Tls(cert_file=folder / "node.crt", key_file=folder / "node.key", ca_cert_file=authority.ca)


def publish(batches: Make, checkpoint: Path) -> None:
    """Run a job to the moment when its first rows can be read."""
    rows = batches("k string, v int")
    rows.add(*({"k": f"k{number}", "v": number} for number in range(ROWS)))
    writer = sparkis.queryable(rows.df, "s", key="k", value="v", mode="append", wait_for_visibility=WAIT_S_MAX)
    start(writer, "job", checkpoint)


def read(url: str, authority: Authority) -> list[Any]:
    with redis.Redis.from_url(url, decode_responses=True, **authority.client("reader")) as client:
        try:
            return [client.get(f"job:s:k{number}") for number in range(ROWS)]
        except redis.RedisError as error:
            return [error]


def test_server_beside_driver_speaks_tls(
    spark: SparkSession, batches: Make, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with sparkis.serve(spark, log=tmp_path / "log", tls=tls_of(authority)) as endpoint:
        assert endpoint.url.startswith("rediss://")
        publish(batches, tmp_path / "checkpoint")
        assert read(endpoint.url, authority) == ANSWERS
        assert "was not readable" not in caplog.text  # the server answered the driver over TLS
        with redis.Redis(port=endpoint.port) as plain, pytest.raises(redis.ConnectionError):
            plain.ping()


@pytest.mark.cluster
def test_servers_on_executors_and_their_parts_speak_tls(
    spark: SparkSession, batches: Make, settings: Settings, authority: Authority, tmp_path: Path
):
    settings(
        {
            "spark.sparkis.tls.certFile": str(authority.folder / "node.crt"),
            "spark.sparkis.tls.keyFile": str(authority.folder / "node.key"),
            "spark.sparkis.tls.caCertFile": str(authority.ca),
        }
    )
    with sparkis.serve(spark, log=tmp_path / "log", placement="executors") as endpoint:
        assert isinstance(endpoint, ExecutorsEndpoint)
        publish(batches, tmp_path / "checkpoint")
        eventually(lambda: read(endpoint.url, authority), lambda answers: answers == ANSWERS)
        (member,) = endpoint.members()
        assert read(f"rediss://{member['address']}", authority) == ANSWERS
        with redis.Redis.from_url(f"redis://{member['address']}") as plain, pytest.raises(redis.ConnectionError):
            plain.ping()
        assert (authority.folder / "node.key").read_bytes()[100:140] not in pickle.dumps(endpoint.plan)


def test_unusable_files_are_refused_before_start(spark: SparkSession, authority: Authority, tmp_path: Path):
    files = tls_of(authority)
    with pytest.raises(TlsError, match="--tls-cert-file needs --tls-key-file"):
        sparkis.serve(spark, log=tmp_path / "log", tls=sparkis.Tls(cert_file=files.cert_file))
    with pytest.raises(TlsError, match="--tls-cert-file /nowhere: No such file"):
        sparkis.serve(spark, log=tmp_path / "log", tls=replace(files, cert_file="/nowhere"))
    with pytest.raises(ValueError, match="as well"):
        sparkis.serve(spark, log=tmp_path / "log", tls=sparkis.Tls(ca_cert_file=files.ca_cert_file))
