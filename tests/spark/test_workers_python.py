"""Spark's Python workers are another interpreter than the driver's, one that has no sparkis."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
import sparkis
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
rows = rows.selectExpr("value AS k", "value AS v")
query = (sparkis.queryable(rows, "s", key="k", value="v", mode="append", job="j", log=sys.argv[2])
         .option("checkpointLocation", sys.argv[3]).start())
try:
    query.awaitTermination()
except Exception as error:
    print(error)
"""


def test_workers_without_sparkis_get_error_in_one_line(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "PYSPARK_PYTHON": str(tmp_path / "bare" / "bin" / "python"),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(tmp_path / "log"), str(tmp_path / "checkpoint")],
        cwd=tmp_path,  # workers find what lies in their folder
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    line = done.stdout.splitlines()[-1]
    assert line.startswith("the Python of Spark's workers has no sparkis")
    assert f"set that to {sys.executable}" in line
