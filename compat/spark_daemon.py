"""Spark's own Python daemon, with the modules loaded that its workers import: `spark.python.daemon.module` names it.

Spark's daemon forks a worker, which then imports pandas, PyArrow and PySpark: half a second of processor time for each
of a hundred workers that the tests have. This one has imported them before it forks. All else is Spark's.
"""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyspark.worker
from pyspark.daemon import manager

IMPORTED = (pd, pa, pyspark.worker)

if __name__ == "__main__":
    manager()
