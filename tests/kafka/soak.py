"""Values before their commit, for an hour at 5,000 messages a second: the memory of both sides stays flat.

    python -m tests.kafka.soak --minutes 60

`make soak-real-time` fetches Kafka, and runs it. Each line shows, after a collection of garbage, the heap of the driver
whose executor has the writer; the anonymous memory of the state server and of the driver's Python; and the files of the
server. The last third of a run may exceed the middle third by the larger of GROWTH_SHARE_MAX and GROWTH_BYTES_MAX.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import redis
from pyspark.sql import SparkSession

import sparkis
from benchmarks import processes
from spark_hooks.serving.detached_endpoint import DetachedEndpoint
from tests.kafka.broker import CONNECTOR, broker
from tests.kafka.job import ATTACHED, FOR_REAL_TIME, PROVIDER, PROVIDERS, Orders, by_key, messages
from tests.kafka.scene import Producing
from tests.spark.micro_batches import local_session

TOPIC = "soak"
PARTITIONS = 4
BATCH = "10 seconds"
SAMPLES = 30
MIB = 1 << 20
GROWTH_SHARE_MAX, GROWTH_BYTES_MAX = 0.15, 16 * MIB


class Sample(NamedTuple):
    """Sizes in bytes at one moment."""

    jvm_heap: int
    python: int
    server: int
    store: int


def sample(spark: SparkSession, endpoint: DetachedEndpoint, store: Path) -> Sample:
    """Measure both sides."""
    jvm: Any = spark._jvm
    heap = jvm.java.lang.management.ManagementFactory.getMemoryMXBean()
    heap.gc()
    files = sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())
    anonymous = (processes.memory(pid).anonymous_bytes for pid in (os.getpid(), endpoint.pid))
    return Sample(heap.getHeapMemoryUsage().getUsed(), *anonymous, files)


def growth(samples: list[Sample]) -> list[str]:
    """Return what has grown from the middle third to the last one."""
    third = len(samples) // 3
    grown = []
    for name in Sample._fields:
        sizes = [getattr(each, name) for each in samples]
        middle, last = median(sizes[third:-third]), median(sizes[-third:])
        if last - middle > max(GROWTH_SHARE_MAX * middle, GROWTH_BYTES_MAX):
            grown.append(f"{name} grew from {middle / MIB:.0f} to {last / MIB:.0f} MiB")
    return grown


def run(minutes: float, rate: int, folder: Path) -> list[str]:
    """Run for some minutes; return what has grown."""
    settings = {
        **FOR_REAL_TIME,
        PROVIDER: PROVIDERS["rocksdb"],
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.jars": ",".join(map(str, sorted(CONNECTOR.glob("*.jar")))),
    }
    spark = local_session("local[8,4]", **settings)
    samples: list[Sample] = []
    with (
        broker(folder) as kafka,
        sparkis.serve(
            spark, log=folder / "log", placement=sparkis.Driver(store=folder / "store", linger=0)
        ) as endpoint,
        redis.Redis(port=endpoint.port) as client,
    ):
        assert isinstance(endpoint, DetachedEndpoint)
        kafka.create(TOPIC, PARTITIONS, retention_ms="60000", segment_ms="30000")
        orders = Orders(kafka.address, TOPIC, str(folder / "log"), str(folder), "rocksdb", BATCH)
        results = by_key(messages(spark, orders))
        writer = sparkis.queryable(results, "facts", key="k", value=["count", "sum", "last"], freshness="record")
        trigger: Any = {"realTime": BATCH}
        writer = writer.queryName(ATTACHED).option("checkpointLocation", str(folder / "checkpoint"))
        query = writer.trigger(**trigger).start()
        producing = Producing(kafka, TOPIC, rate)
        began_s = time.monotonic()
        try:
            for number in range(1, SAMPLES + 1):
                time.sleep(max(0.0, began_s + number * minutes * 60 / SAMPLES - time.monotonic()))
                assert query.isActive, query.exception()
                samples.append(sample(spark, endpoint, folder / "store"))
                sizes = ", ".join(f"{name} {size / MIB:.0f}" for name, size in samples[-1]._asdict().items())
                epochs = [dict(each)[b"applied"] for each in client.execute_command("STATE", "LAG")]
                elapsed_s = time.monotonic() - began_s
                rate_seen = f"{producing.written / elapsed_s:,.0f} messages a second"
                print(f"{elapsed_s / 60:5.1f} min  epoch {epochs}, {rate_seen}  MiB: {sizes}", flush=True)
        finally:
            producing.stop()
            query.stop()
    return growth(samples)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kafka.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="duration (default %(default)g)")
    parser.add_argument(
        "--rate", type=int, default=5_000, help="messages a second, as far as the machine can (default %(default)s)"
    )
    given = parser.parse_args()
    with TemporaryDirectory(prefix="sparkis-soak-", ignore_cleanup_errors=True) as folder:
        grown = run(given.minutes, given.rate, Path(folder))
    print("\n".join(grown) or "the memory of both sides is flat")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
