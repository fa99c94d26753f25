"""Tests with Hadoop's YARN and HDFS: `make test-hadoop` fetches it, and runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.hadoop.daemons import Yarn, yarn


@pytest.fixture(scope="session", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yarn]:
    """A cluster of two nodes, which the tests share.

    It is there before the first test, also before one that does not need it: the tests share a JVM, which has the
    environment of the process that started it.
    """
    with yarn(tmp_path_factory.mktemp("yarn"), nodes=2) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADOOP_CONF_DIR", str(running.folder))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield running
