"""Write the tables of HyperLogLog++ that an installed PySpark has, for `state_backend/attach/distinct_counts.py`.

    python scripts/hyperloglog_tables.py

The tables are numbers from the appendix of "HyperLogLog in Practice", for precisions from 4 to 18.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

TARGET = Path(__file__).parents[1] / "state_backend" / "attach" / "hyperloglog.json"


def main() -> None:
    """Write the file."""
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    jvm: Any = spark._jvm
    helper = jvm.org.apache.spark.sql.catalyst.util.HyperLogLogPlusPlusHelper
    tables = {
        "thresholds": list(helper.THRESHOLDS()),
        "estimates": [list(row) for row in helper.RAW_ESTIMATE_DATA()],
        "biases": [list(row) for row in helper.BIAS_DATA()],
    }
    spark.stop()
    TARGET.write_text(json.dumps(tables, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
