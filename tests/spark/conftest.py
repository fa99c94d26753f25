"""Shared by tests with a real Spark: one session, one server per module, and streams that grow on demand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis
from compat.waiting import WAIT_S_MAX
from spark_hooks.publish import publisher, sink, table
from spark_hooks.serving import placement, supervised_process
from tests.spark.micro_batches import Batches, Settings, end_shared_session, shared_session

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


# What a user waits for no longer than this a test waits for to the end: on a machine that runs thirty other things the
# first micro-batch alone takes minutes. (Which tests are about these limits give their own.)
PATIENCE = (
    (placement, "START_TIMEOUT_S"),
    (supervised_process, "START_TIMEOUT_S"),
    (publisher, "FIRST_VISIBILITY_TIMEOUT_S"),
    (sink, "VISIBILITY_TIMEOUT_S"),
    (table, "VISIBILITY_TIMEOUT_S"),
)


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Raise timeouts of the code under test, as the machine may be slow."""
    with pytest.MonkeyPatch.context() as patched:
        for module, name in PATIENCE:
            patched.setattr(module, name, WAIT_S_MAX)
        yield


@pytest.fixture(scope="session", autouse=True)
def spark_ends() -> Iterator[None]:
    """Stop the session that modules share when all have ended."""
    yield
    end_shared_session()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A local Spark of two cores, which modules share."""
    with shared_session() as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own: what is remembered of a server for each log is not left in the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def endpoint(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sparkis.ServedEndpoint]:
    """A server of the module's own log; the log is the session's."""
    served = sparkis.serve(spark, log=tmp_path_factory.mktemp("log"))
    yield served
    served.stop()


@pytest.fixture(scope="module")
def client(endpoint: sparkis.ServedEndpoint) -> Iterator[redis.Redis]:
    """A redis-py client of the module's server."""
    with redis.Redis.from_url(endpoint.url, decode_responses=True) as connected:
        yield connected


@pytest.fixture
def batches(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., Batches]]:
    """Make streams of JSON rows, one file a micro-batch; their queries end with the test."""
    made = 0

    def make(schema: str) -> Batches:
        nonlocal made
        made += 1
        return Batches(spark, tmp_path / f"input-{made}", schema)

    yield make
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[Settings]:
    """Set options of the session until the end of the test."""
    made: dict[str, str] = {}

    def set_all(given: dict[str, str]) -> None:
        made.update(given)
        for name, value in given.items():
            spark.conf.set(name, value)

    yield set_all
    for name in made:
        spark.conf.unset(name)


@pytest.fixture
def no_log_left_over(spark: SparkSession) -> Iterator[None]:
    """Remove the session's log that `sparkis.serve` has set."""
    yield
    spark.conf.unset("spark.sparkis.log")
