"""What a classic Spark session and one of Spark Connect do in different ways; all else is written once for both."""

from __future__ import annotations

from functools import lru_cache

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

# More ids than any Spark has cores; a range of them is spread over as many partitions as the application has cores.
SPREAD_IDS = 1 << 16


def is_connect(of: object) -> bool:
    """Tell whether a session, a DataFrame or a query is one of Spark Connect."""
    return type(of).__module__.startswith("pyspark.sql.connect.")


def parallelism_of(session: SparkSession) -> int:
    """Return how many tasks the application runs at once. Under Spark Connect a small Spark job finds out."""
    return _found_parallelism(session) if is_connect(session) else session.sparkContext.defaultParallelism


@lru_cache(maxsize=8)
def _found_parallelism(session: SparkSession) -> int:
    ids = session.range(SPREAD_IDS).select(F.spark_partition_id().alias("partition"))
    (found,) = ids.agg(F.max("partition")).collect()
    return int(found[0]) + 1
