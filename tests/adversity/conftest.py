"""What the tests that kill share: drivers and servers as processes, input files, and a reader that watches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Fleet
from scene import Scene

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Folders, and whatever is started in them; all of it has ended when the test has."""
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A log that grows, and whatever is started to serve it; all of it has ended when the test has."""
    made = Fleet(tmp_path)
    yield made
    made.close()


@pytest.fixture
def doubled(tmp_path: Path) -> Iterator[Fleet]:
    """The same with a replica of each shard."""
    made = Fleet(tmp_path, replicas=1)
    yield made
    made.close()
