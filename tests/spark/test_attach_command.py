"""`sparkis attach`: a checkpoint is listed, followed and served by a process of its own."""

from __future__ import annotations

import re
import shutil
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


HINT = (
    "sum, count may be the buffers of avg, or of other functions: name all of the query's, in order: "
    '--column mean="avg(price)"'
)
READERS = pytest.mark.parametrize("reader", ["files", "spark"])


@READERS
def test_states_of_checkpoint_are_listed(checkpoint: Path, reader: str):
    done = listed("--checkpoint", checkpoint, "--list", "--reader", reader)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "operator 0 (stateStoreSave)",
        "  columns  window, window_end, k, start, end, _0, _1, sum, count",
        "  hash     JOB:aggregation:<window>:<k>  sum, count",
        f"  hint     {HINT}",
    ]


@READERS
def test_checkpoint_is_followed_and_served_until_signal(checkpoint: Path, tmp_path: Path, reader: str):
    log = tmp_path / "log"
    state = ("--reader", reader, "--state", "mean", "--key", "k", "--field", "window", "--column", "mean=_0 / _1")
    with command(
        "attach", "--checkpoint", checkpoint, "--job", "j", "--log", log, "--serve", "--port", 0, *state
    ) as running:
        running.wait_for(r"attached: j:mean:<k> \(hash\); log .*log")
        url = running.wait_for(r"redis-cli -u (\S+)")[1]
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.hgetall("j:mean:a") == {"2026-01-01T00:00:00Z": "2"}
        assert running.end(signal.SIGTERM) == 0


@READERS
def test_queries_of_folder_are_followed_through_full_refresh(checkpoint: Path, tmp_path: Path, reader: str):
    folder = tmp_path / "queries"
    flow = folder / "_checkpoints" / "catalog" / "schema" / "mean" / "mean"
    for each in (folder / "team" / "one", flow / "0"):
        shutil.copytree(checkpoint, each)
    done = listed("--checkpoint", folder, "--list", "--reader", reader)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"hash +(\S+)", done.stdout) == [
        f"{job}:aggregation:<window>:<k>" for job in ("mean", "team.one")
    ]
    options = ("--log", tmp_path / "log", "--serve", "--port", 0, "--reader", reader, "--catch-up-timeout", 0)
    with command("attach", "--checkpoint", folder, *options) as running:
        url = running.wait_for(r"redis-cli -u (\S+)")[1]
        with redis.Redis.from_url(url, decode_responses=True) as client:
            for job in ("mean", "team.one"):
                assert client.hget(f"{job}:aggregation:2026-01-01T00:00:00Z:a", "count") == "2"
            refreshed = Path(shutil.copytree(checkpoint, folder / ".refreshed"))
            (refreshed / "metadata").write_text('{"id":"2f6b3a4e-7f67-4f5d-9a31-6d5b9c7a0c11"}')
            refreshed.rename(flow / "1")
            running.wait_for(r"job mean: a full refresh has begun \S+/mean/mean/1")
            assert client.hget("mean:aggregation:2026-01-01T00:00:00Z:a", "count") == "2"
        assert running.end(signal.SIGTERM) == 0


def test_job_has_name_of_folder_and_log_its_given_place(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with command("attach", "--checkpoint", checkpoint) as running:
        found = running.wait_for(r"attached: (\S+) \(hash\); log (\S+)")
        assert found.groups() == ("checkpoint:aggregation:<window>:<k>", str(tmp_path / "state/sparkis/log"))
        assert running.end(signal.SIGINT) == 0


def test_mistake_is_reported_in_one_line(checkpoint: Path, tmp_path: Path):
    def refusal(*arguments: object) -> str:
        done = listed(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        return line.removeprefix("sparkis attach: ")

    assert "nothing is not the checkpoint of a query: it is empty, or does not exist" in refusal(
        "--checkpoint", tmp_path / "nothing"
    )
    assert "is inside of the checkpoint" in refusal("--checkpoint", checkpoint, "--log", checkpoint / "log")
    assert refusal("--checkpoint", checkpoint, "--conf", "a=b") == (
        "--master and --conf are settings of Spark, which is used with --reader spark"
    )
    assert "columns= has the expression 'sqrt(_0)', which sparkis does not read" in refusal(
        "--checkpoint", checkpoint, "--log", tmp_path / "log", "--column", "x=sqrt(_0)"
    )
