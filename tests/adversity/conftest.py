"""Shared by tests that kill processes: drivers, servers, input files, and a reader that checks replies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversity.fleet import Fleet
from tests.adversity.scene import Scene

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A job's folders and processes, which end with the test."""
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A growing log and the processes that serve it, which end with the test."""
    made = Fleet(tmp_path)
    yield made
    made.close()


@pytest.fixture
def doubled(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet with a replica of each shard."""
    made = Fleet(tmp_path, replicas=1)
    yield made
    made.close()
