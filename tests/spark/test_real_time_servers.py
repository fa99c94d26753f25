"""Servers that get the rows of a query in Real-Time Mode: with TLS, with users, alone, and as nodes of a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.conformance.certificates import Authority
from compat.conformance.servers import free_port, sparkis_server
from compat.waiting import eventually
from spark_hooks.real_time.servers import SERVERS_SETTING, servers_of
from sparkis import DescriptorError
from tests.spark.micro_batches import Settings
from tests.spark.real_time import SETTINGS, MemoryRows, tls_of

pytestmark = pytest.mark.usefixtures("no_log_left_over")

Fresh = Callable[[Path], Any]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "authority")
    made.issue("node")
    return made


@pytest.fixture
def fresh(spark: SparkSession, settings: Settings, tmp_path: Path) -> Iterator[Fresh]:
    """Start a query whose first batch does not end: what is read of it is not committed. A row is added by `add`."""
    settings(SETTINGS)
    rows = MemoryRows(spark, "k string, n int")

    def run(log: Path) -> MemoryRows:
        log.mkdir(exist_ok=True)
        counts = rows.df.groupBy("k").agg(F.count("*").alias("n"))
        writer = sparkis.queryable(counts, "counts", key="k", value="n", freshness="record", log=log)
        writer.queryName("real").option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            realTime="10 minutes"
        ).start()
        return rows

    yield run
    for query in spark.streams.active:
        query.stop()


def wait_for_value(rows: MemoryRows, client: redis.Redis, checkpoint: Path) -> None:
    """Add rows until a value is readable, before any commit. Rows are lost until the server knows the job."""
    sent = 0

    def one_more() -> int:
        nonlocal sent
        sent += 1
        rows.add({"k": "a", "n": 1})
        try:
            return int(client.get("real:counts:a") or 0)
        except redis.BusyLoadingError:  # the server opens the job
            return 0

    assert 1 <= eventually(one_more, bool) <= sent
    assert not list(checkpoint.glob("commits/[0-9]*"))


@pytest.mark.parametrize("with_ca", [True, False], ids=["a CA", "its certificate alone"])
def test_values_of_first_batch_are_readable_at_server_with_tls(
    spark: SparkSession, fresh: Fresh, authority: Authority, tmp_path: Path, *, with_ca: bool
) -> None:
    log = tmp_path / "log"
    with (
        sparkis.serve(spark, log=log, tls=tls_of(authority, with_ca=with_ca)) as endpoint,
        redis.Redis.from_url(endpoint.url, decode_responses=True, **authority.client("reader")) as client,
    ):
        wait_for_value(fresh(log), client, tmp_path / "checkpoint")


def test_server_that_user_has_started_gets_rows_of_user(
    spark: SparkSession, fresh: Fresh, settings: Settings, tmp_path: Path
) -> None:
    log, users = tmp_path / "log", tmp_path / "users.acl"
    log.mkdir()
    users.write_text("user default off\nuser writer on >s:ecret ~* &* +@all\n")
    with (
        sparkis_server(tmp_path / "store", log, "--aclfile", str(users), is_loaded=False) as server,
        redis.Redis(port=server.port, username="writer", password="s:ecret", decode_responses=True) as client,
    ):
        settings({SERVERS_SETTING: f"redis://127.0.0.1:{server.port}"})
        with pytest.raises(DescriptorError, match=r"spark\.sparkis\.stateServers: 127.* wants a password"):
            servers_of(spark, str(log))
        settings({SERVERS_SETTING: f"redis://writer:s%3Aecret@127.0.0.1:{server.port}"})
        wait_for_value(fresh(log), client, tmp_path / "checkpoint")


def test_one_node_names_all_nodes_of_its_cluster(spark: SparkSession, settings: Settings, tmp_path: Path) -> None:
    log, path, port = tmp_path / "log", tmp_path / "cluster.json", free_port()
    log.mkdir()
    nodes = [
        {"host": "127.0.0.1", "port": port, "slots": "0-8191"},
        {"host": "other.example.org", "port": 7001, "slots": "8192-16383"},
    ]
    path.write_text(json.dumps({"version": 1, "nodes": nodes}))
    options = ("--cluster", str(path), "--cluster-node", f"127.0.0.1:{port}")
    with sparkis_server(tmp_path / "store", log, *options, port=port, is_loaded=False):
        settings({SERVERS_SETTING: f"redis://127.0.0.1:{port}"})
        assert servers_of(spark, str(log)).urls == [f"redis://127.0.0.1:{port}", "redis://other.example.org:7001"]


def test_key_in_form_that_java_does_not_read_is_refused(
    spark: SparkSession, authority: Authority, tmp_path: Path
) -> None:
    folder, log = authority.folder, tmp_path / "log"
    tls = sparkis.Tls(cert_file=folder / "node.crt", key_file=folder / "node.key", ca_cert_file=authority.ca)
    with sparkis.serve(spark, log=log, tls=tls), pytest.raises(DescriptorError, match=r"PKCS#8, which Java reads"):
        servers_of(spark, str(log))


def test_server_of_driver_with_users_of_its_own_needs_setting(spark: SparkSession, tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user default off\nuser writer on >secret ~* &* +@all\n")
    log = tmp_path / "log"
    with (
        sparkis.serve(spark, log=log, acl_file=users) as endpoint,
        pytest.raises(
            DescriptorError, match=rf"set spark\.sparkis\.stateServers=redis://USER:PASSWORD@.*{endpoint.port}$"
        ),
    ):
        servers_of(spark, str(log))
