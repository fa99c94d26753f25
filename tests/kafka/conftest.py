"""Tests with a real Kafka broker: `make test-kafka` fetches it, and runs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession

import sparkis
from tests.spark.micro_batches import end_shared_session, local_session

if TYPE_CHECKING:
    from tests.kafka.broker import Broker


if importlib.util.find_spec("confluent_kafka") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker, which the tests share; each has its own topics."""
    from tests.kafka.broker import broker  # its client is there only after `make test-kafka`

    with broker(tmp_path_factory.mktemp("kafka")) as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark with its Kafka package."""
    from tests.kafka.broker import CONNECTOR

    yield local_session("local[2]", **{"spark.jars": ",".join(map(str, sorted(CONNECTOR.glob("*.jar"))))})
    end_shared_session()


@pytest.fixture
def url(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """The address of a server of the test's own log, which is the session's."""
    endpoint = sparkis.serve(spark, log=tmp_path / "log")
    yield endpoint.url
    for query in spark.streams.active:
        query.stop()
    endpoint.stop()
    spark.conf.unset("spark.sparkis.log")
