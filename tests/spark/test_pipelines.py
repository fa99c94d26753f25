"""`sparkis attach` and `sparkis inspect` with the storage of a pipeline, which Spark's own `spark-pipelines` runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import redis

from compat.waiting import WAIT_S_MAX, eventually
from state_backend.log.change_log import ChangeLog
from tests.spark.processes import Command
from tests.spark.processes import sparkis as command

pytestmark = pytest.mark.slow

SPEC = """
name: shop
storage: file://{folder}/storage
catalog: spark_catalog
database: default
configuration:
  spark.sql.shuffle.partitions: "2"
libraries:
  - glob:
      include: transformations/**
"""
FLOWS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()


def rows():
    return spark.readStream.schema("id int, city string, at timestamp").json("{folder}/input")


@dp.table
def orders():
    return rows().dropDuplicates(["id"])


@dp.table
def per_city():
    return rows().withWatermark("at", "1 hour").groupBy(F.window("at", "1 hour"), "city").count()


@dp.table
def plain():
    return rows().select("id")


dp.create_sink("alerts", format="noop")


@dp.append_flow(target="alerts", name="`to the north`")
def north():
    return rows().where("city < 'm'").dropDuplicates(["city"])
"""
NEW_FLOW = """

@dp.table
def fresh():
    return rows().dropDuplicates(["city"])
"""
# A catalog that outlives a run.
HIVE = "spark.sql.catalogImplementation=hive"


class Pipeline:
    """A pipeline's folder: its definition, its input, its storage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = folder / "storage"
        for name in ("input", "transformations"):
            (folder / name).mkdir(parents=True)
        (folder / "spark-pipeline.yml").write_text(SPEC.format(folder=folder))
        self.flows = folder / "transformations" / "flows.py"
        self.flows.write_text(FLOWS.format(folder=folder))

    def add(self, name: str, *rows: dict[str, object]) -> None:
        """Write a file of the input."""
        (self.folder / "input" / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(self, *arguments: str) -> None:
        """Run the pipeline until its flows have read the input."""
        done = subprocess.run(
            [Path(sys.executable).parent / "spark-pipelines", "run", "--conf", HIVE, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=3 * WAIT_S_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A pipeline that has run once. The tests follow it in their order, because a run takes long."""
    made = Pipeline(tmp_path_factory.mktemp("pipeline") / "shop")
    made.add("1.json", row(1, "ayr"), row(2, "york"))
    made.run()
    return made


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of all attachments."""
    return tmp_path_factory.mktemp("attached") / "log"


def row(number: int, city: str) -> dict[str, object]:
    return {"id": number, "city": city, "at": f"2026-01-01T00:00:{number:02d}Z"}


def keys(client: redis.Redis) -> dict[str, str]:
    return {key: client.get(key) for key in client.scan_iter() if ":_" not in key}


def generations(log: Path, job: str) -> int:
    terms = ChangeLog(str(log)).job(job).terms
    last = terms.newest()
    assert last is not None
    return len({term.generation for term in terms.down_from(last.term) if not term.is_void})


def attach(pipeline: Pipeline, log: Path) -> AbstractContextManager[Command]:
    return command(
        "attach", "--checkpoint", pipeline.storage, "--log", log, "--serve", "--port", 0, "--catch-up-timeout", 0
    )


def connected(running: Command) -> redis.Redis:
    return redis.Redis.from_url(running.wait_for(r"redis-cli -u (\S+)")[1], decode_responses=True)


def inspected(pipeline: Pipeline) -> dict[str, str]:
    """Return the number of each flow that `sparkis inspect` shows."""
    words = [sys.executable, "-m", "sparkis", "inspect", pipeline.storage, "--json"]
    shown = subprocess.run(words, capture_output=True, timeout=WAIT_S_MAX, check=True)
    locations = [Path(page["location"]) for page in json.loads(shown.stdout)]
    return {location.parent.name: location.name for location in locations}


WINDOW = "2026-01-01T00:00:00Z"
WINDOWS = [f"per_city:aggregation:{WINDOW}:{city}" for city in ("ayr", "york")]


def test_state_of_all_flows_is_readable_after_run(pipeline: Pipeline, log: Path):
    with attach(pipeline, log) as running:
        running.wait_for(r"plain/plain/0 is left out: the query of .* has no state that can be read")
        with connected(running) as client:
            seen = ("orders:seen:1", "orders:seen:2", "alerts.to_the_north:seen:ayr")
            assert keys(client) == dict.fromkeys([*seen, *WINDOWS], "1")
        assert running.end() == 0
    names = ("orders", "per_city", "plain", "to%20the%20north")
    assert inspected(pipeline) == dict.fromkeys(names, "0")


def test_full_refresh_and_new_flow_are_followed_while_pipeline_runs(pipeline: Pipeline, log: Path):
    (pipeline.folder / "input" / "1.json").unlink()
    pipeline.add("2.json", row(3, "ayr"), row(4, "york"))
    with pipeline.flows.open("a") as flows:
        flows.write(NEW_FLOW.format(folder=pipeline.folder))
    seen = ("orders:seen:3", "orders:seen:4", "fresh:seen:ayr", "fresh:seen:york", "alerts.to_the_north:seen:ayr")
    expected = dict.fromkeys(seen, "1") | dict.fromkeys(WINDOWS, "2")
    with attach(pipeline, log) as running:
        with connected(running) as client:
            pipeline.run("--full-refresh", "orders", "--refresh", "per_city,fresh")
            eventually(lambda: keys(client), lambda found: found == expected)
        running.wait_for(r"job orders: a full refresh has begun .*/orders/orders/1")
        assert running.end() == 0
    with attach(pipeline, log) as running:
        with connected(running) as client:
            assert keys(client) == expected
        assert running.end() == 0
    assert (generations(log, "orders"), generations(log, "per_city")) == (2, 1)
    assert {name: number for name, number in inspected(pipeline).items() if number != "0"} == {"orders": "1"}
