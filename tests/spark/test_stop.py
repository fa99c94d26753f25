"""A query that is stopped in the middle of a micro-batch ends in peace, and runs that batch again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX

ROOT = Path(__file__).parents[2]

# In a process of its own: what Spark prints comes from the JVM, whose threads have a stack here that a long text in
# Spark's way to tell a stop from a failure overflows for sure. With usual ones it does so now and then.
SCRIPT = """
import sys, time
from pathlib import Path
from tests.spark.micro_batches import Batches, local_session
from pyspark.sql import functions as F
import redis, sparkis

place = Path(sys.argv[1])
marker = place / "slow"
spark = local_session("local[2]", **{"spark.driver.extraJavaOptions": "-Xss512k"})
endpoint = sparkis.serve(spark, log=place / "log")
client = redis.Redis.from_url(endpoint.url, decode_responses=True)
stream = Batches(spark, place / "stream", "k string, v string")

@F.udf("string")
def slowly(value):
    if marker.exists():
        time.sleep(60)
    return value

def start():
    rows = stream.df.withColumn("v", slowly("v"))
    writer = sparkis.queryable(rows, "last", key="k", value="v", mode="append").queryName("stopped")
    return writer.option("checkpointLocation", str(place / "checkpoint")).start()

query = start()
stream.add({"k": "a", "v": "1"})
query.processAllAvailable()
marker.touch()
stream.add({"k": "a", "v": "2"})
while not spark.sparkContext.statusTracker().getActiveJobsIds():
    time.sleep(0.05)
query.stop()
print("stopped with", query.exception(), "and", client.get("stopped:last:a"))
marker.unlink()
query = start()
query.processAllAvailable()
query.stop()
print("went on to", client.get("stopped:last:a"))
endpoint.stop()
spark.stop()
"""


def test_stop_amid_batch_is_no_failure_and_prints_no_traceback(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout.splitlines() == ["stopped with None and 1", "went on to 2"], done.stderr
    assert "StackOverflowError" not in done.stderr
    assert "\tat " not in done.stderr
