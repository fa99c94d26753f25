"""`sparkis.attach` to queries of Scala: mapGroupsWithState and transformWithState."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pyspark
import pytest
import redis

from compat.waiting import WAIT_S_MAX, eventually
from tests.spark.attaching import Attach, attached, values_of_job

__all__ = ["attached"]

pytestmark = [pytest.mark.usefixtures("endpoint"), pytest.mark.slow]

SPARK = Path(pyspark.__file__).parent
QUERIES = Path(__file__).with_name("queries.scala")
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


def test_state_of_scala_queries_is_read_whole_and_by_its_changes(client: redis.Redis, attached: Attach, tmp_path: Path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "1.json").write_text('{"k":"a","v":1.5}\n{"k":"b","v":2.5}\n{"k":"a","v":2}\n')
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    with (
        QUERIES.open() as statements,
        (tmp_path / "printed").open("w") as printed,
        subprocess.Popen(
            [SPARK / "bin" / "spark-shell", "--master", "local[2]", *settings],
            cwd=tmp_path,
            env=os.environ | {"SPARK_HOME": str(SPARK)},
            stdin=statements,
            stdout=printed,
            stderr=subprocess.STDOUT,
        ) as shell,
    ):
        try:
            eventually(lambda: (tmp_path / "ready").exists() or shell.poll() is not None)
            assert shell.poll() is None, (tmp_path / "printed").read_text()
            groups = attached(checkpoint=tmp_path / "groups", job="groups")
            machines = attached(checkpoint=tmp_path / "machines", job="machines")
            assert groups.wait(timeout_s=WAIT_S_MAX)
            assert machines.wait(timeout_s=WAIT_S_MAX)
            assert values_of_job(client, "groups") == {
                "groups:groupState:a": {"n": "2", "sum": "3.5"},
                "groups:groupState:b": {"n": "1", "sum": "2.5"},
            }
            (tmp_path / "input" / "2.json").write_text('{"k":"a","v":4}\n')
            (tmp_path / "go").touch()
            shell.wait(WAIT_S_MAX)
        finally:
            shell.kill()
    assert groups.wait(1, WAIT_S_MAX)
    assert values_of_job(client, "groups")["groups:groupState:a"] == {"n": "3", "sum": "7.5"}
    assert machines.wait(1, WAIT_S_MAX)
    assert values_of_job(client, "machines") == {
        "machines:last:a": "4",
        "machines:last:b": "2.5",
        "machines:total:a": {"n": "3", "sum": "7.5"},
        "machines:total:b": {"n": "1", "sum": "2.5"},
        "machines:recent:a": ["1.5", "2", "4"],
        "machines:recent:b": ["2.5"],
        "machines:days:a": {
            "day1": '{"n":1,"sum":1.5}',
            "day2": '{"n":1,"sum":2.0}',
            "day4": '{"n":1,"sum":4.0}',
        },
        "machines:days:b": {"day2": '{"n":1,"sum":2.5}'},
    }
    assert client.pttl("machines:last:a") > 0
