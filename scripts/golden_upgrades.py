"""Make golden checkpoints that one version of Spark began and another one continued.

    python scripts/golden_upgrades.py FOLDER PYTHON

Run it with the Python of the newer version; PYTHON is that of the older one (`scripts/spark_venv.sh` makes both). It
writes FOLDER/<older>-<newer>/.., as `golden_checkpoints.py` does. The newer version runs the batches from FIRST_OF_NEW
on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import golden_checkpoints as golden
import pyspark

FIRST_OF_NEW = 3
NAMES = (
    "hdfs-aggregation",
    "hdfs-sessions",
    "hdfs-dedupe-within",
    "hdfs-grouped",
    "rocksdb-grouped",
    "rocksdb-sessions",
    "rocksdb-join",
    "format2-aggregation",
    "transform",
    "transform-ttl",
)


def run(scratch: Path, batches: range, *, reads: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the jobs for some batches in a folder; return files and rows if this is the last run."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # the functions of the jobs are imported by the workers
    spark = golden.session(str(scratch))
    inputs = golden.write_inputs(scratch, batches)
    files: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for job in golden.JOBS:
        checkpoint = scratch / "checkpoints" / job.name
        if job.name not in NAMES or job.since > golden.VERSION or (batches.start and not checkpoint.exists()):
            continue
        golden.run_job(spark, job, inputs, checkpoint)
        if reads:
            files[job.name] = golden.files_of(checkpoint)
            rows[job.name] = golden.read_all(spark, checkpoint)
        print(f"{pyspark.__version__} {job.name}: batches {batches.start} to {batches.stop - 1}", flush=True)
    spark.stop()
    return files, rows


def main(folder: str, older_python: str) -> None:
    """Begin with the older version, continue with this one, and write the results."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [older_python, __file__, "--begin", scratch]
        older = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
        files, rows = run(Path(scratch), range(FIRST_OF_NEW, golden.BATCHES), reads=True)
    golden.write_made(Path(folder) / f"{older}-{pyspark.__version__}", files, rows)


if __name__ == "__main__":
    if sys.argv[1] == "--begin":
        run(Path(sys.argv[2]), range(FIRST_OF_NEW), reads=False)
        print(pyspark.__version__)
    else:
        main(*sys.argv[1:])
