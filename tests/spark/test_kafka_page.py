"""The job of docs/kafka.md runs, with a folder of files in place of Kafka, and its states are those of the page.

`make test-kafka` runs it with a broker.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from compat.conformance.servers import free_port
from compat.waiting import WAIT_S_MAX
from spark_hooks.serving import endpoints

pytestmark = pytest.mark.usefixtures("no_log_left_over")

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
[JOB] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MESSAGES = re.findall(r"^>(.*)$", PAGE, re.MULTILINE)
READS = re.findall(r"^\$ (redis-cli .*)\n((?:(?:\d\) )?\".*\n)*)", PAGE, re.MULTILINE)
SOURCE = re.compile(r'format\("kafka"\).*?\.load\(\)', re.DOTALL)
PAGE_PORT = "7379"
# The columns of a message; the offset is that of the last line.
COLUMNS = (
    "value",
    "'orders' AS topic",
    "0 AS partition",
    "3L AS offset",
    "timestamp '2026-05-01 10:01:00' AS timestamp",
)


def test_job_of_page_has_shown_output(spark: SparkSession, tmp_path: Path) -> None:
    topic = tmp_path / "topic"
    topic.mkdir()
    (topic / "1.txt").write_text("\n".join(MESSAGES))
    port = str(free_port())
    local, sources = SOURCE.subn(
        f'text("{topic}").selectExpr{COLUMNS}', JOB.replace(PAGE_PORT, port).replace("/data/", f"{tmp_path}/")
    )
    assert sources == 1
    job, waits, rest = local.partition("query.awaitTermination()")
    assert waits and not rest.strip()
    names: dict[str, object] = {}
    exec(compile(job, "docs/kafka.md", "exec"), names)
    query = names["query"]
    try:
        query.processAllAvailable()  # type: ignore[attr-defined]
        assert len(READS) == 4
        for command, printed in READS:
            assert read(command.replace(PAGE_PORT, port)) == printed
    finally:
        query.stop()  # type: ignore[attr-defined]
        for endpoint in endpoints.of_log(str(tmp_path / "sparkis-log")):
            assert isinstance(endpoint, endpoints.ServedEndpoint)
            endpoint.stop()  # with a port of its own it would outlive the tests


def read(command: str) -> str:
    """Return what redis-cli prints on a terminal."""
    environment = os.environ | {"FAKETTY": "1"}
    done = subprocess.run(command.split(), env=environment, capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert done.returncode == 0, done
    return done.stdout
