"""`sparkis attach`: a checkpoint is listed, followed and served by a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from compat.waiting import WAIT_S_MAX
from tests.spark.attaching import SCHEMA
from tests.spark.micro_batches import Batches, start
from tests.spark.processes import sparkis as command

pytestmark = pytest.mark.slow

Make = Callable[[str], Batches]


@pytest.fixture
def checkpoint(spark: SparkSession, batches: Make, tmp_path: Path) -> Path:
    """The checkpoint of a query that ran over one batch and may run on."""
    rows = batches(SCHEMA)
    rows.add({"k": "a", "v": 1.5, "t": "2026-01-01T00:00:01Z"}, {"k": "b", "v": 2, "t": "2026-01-01T00:00:01Z"})
    windows = rows.df.groupBy(F.window("t", "1 minute"), "k").agg(F.avg("v"))
    query = start(windows.writeStream.outputMode("update").format("noop"), "q", tmp_path / "checkpoint")
    rows.add({"k": "a", "v": 2.5, "t": "2026-01-01T00:00:01Z"})
    query.processAllAvailable()
    return tmp_path / "checkpoint"


def listed(*arguments: object) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "sparkis", "attach", *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)


def test_what_a_checkpoint_holds_is_listed(checkpoint: Path):
    done = listed("--checkpoint", checkpoint, "--list")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "operator 0 (stateStoreSave)",
        "  columns  window, window_end, k, _0, _1, sum, count",
        "  hash     JOB:aggregation:<window>:<k>  sum, count",
    ]


def test_a_checkpoint_is_followed_and_served_until_a_signal(checkpoint: Path, tmp_path: Path):
    log = tmp_path / "log"
    state = ("--state", "mean", "--key", "k", "--field", "window", "--column", "mean=_0 / _1")
    with command(
        "attach", "--checkpoint", checkpoint, "--job", "j", "--log", log, "--serve", "--port", 0, *state
    ) as running:
        running.wait_for(r"attached: j:mean:<k> \(hash\); log .*log")
        url = running.wait_for(r"redis-cli -u (\S+)")[1]
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.hgetall("j:mean:a") == {"2026-01-01T00:00:00Z": "2"}
        assert running.end(signal.SIGTERM) == 0


def test_what_is_missing_is_said_in_one_line(tmp_path: Path):
    done = listed("--checkpoint", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("sparkis attach: --job and --log are required")
