"""A Scala job in Real-Time Mode, as docs/real-time.md prints it: its rows are readable before their commit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pyspark
import pytest
import redis

import sparkis
from compat.waiting import eventually
from spark_hooks.real_time.jvm_writer import JAR
from tests.spark.attaching import Attach, attached
from tests.spark.real_time import SETTINGS

__all__ = ["attached"]

pytestmark = pytest.mark.slow

SPARK = Path(pyspark.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "real-time.md").read_text()
[STATEMENTS] = re.findall(r"^```scala\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAM_AROUND_EXAMPLE = Path(__file__).with_name("real_time.scala").read_text()
OPTIONS = {
    **SETTINGS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def test_rows_of_scala_job_are_readable_before_their_commit(
    endpoint: sparkis.ServedEndpoint, client: redis.Redis, attached: Attach, tmp_path: Path
) -> None:
    statements = STATEMENTS.replace("127.0.0.1:7379", f"127.0.0.1:{endpoint.port}")
    statements = statements.replace("5 minutes", "2 seconds").replace("/data/", f"{tmp_path}/")
    program = tmp_path / "program.scala"
    program.write_text(PROGRAM_AROUND_EXAMPLE.replace("// PAGE\n", statements))
    settings = [word for name, value in OPTIONS.items() for word in ("--conf", f"{name}={value}")]
    with (
        program.open() as typed,
        (tmp_path / "printed").open("w") as printed,
        subprocess.Popen(
            [SPARK / "bin" / "spark-shell", "--master", "local[4]", "--jars", JAR, *settings],
            cwd=tmp_path,
            env=os.environ | {"SPARK_HOME": str(SPARK)},
            stdin=typed,
            stdout=printed,
            stderr=subprocess.STDOUT,
        ) as shell,
        redis.Redis(port=endpoint.port, decode_responses=True, single_connection_client=True) as committed,
    ):
        try:
            commits = tmp_path / "checkpoints" / "shop" / "commits"
            eventually(lambda: list(commits.glob("[0-9]*")) or shell.poll() is not None)
            assert shell.poll() is None, (tmp_path / "printed").read_text()
            attached(checkpoint=commits.parent, job="shop", state="orders", key="customer", value=["count", "max"])
            committed.execute_command("STATE", "FRESHNESS", "COMMITTED")

            def is_ahead() -> bool:
                """Return whether a value is readable that no commit has."""
                try:
                    newest, confirmed = (each.hget("shop:orders:0", "count") for each in (client, committed))
                except redis.BusyLoadingError:  # the server opens the job
                    return False
                return confirmed is not None and int(newest or 0) > int(confirmed)

            eventually(is_ahead, bool, processes=[shell])
        finally:
            (tmp_path / "stop").touch()
            shell.kill()
