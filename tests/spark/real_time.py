"""Queries in Real-Time Mode whose source is in memory."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.conformance.certificates import Authority
from tests.spark.attaching import ROCKSDB, STORE

SETTINGS = {
    **ROCKSDB,
    f"{STORE}checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.streaming.realTimeMode.minBatchDuration": "1s",
}


def tls_of(authority: Authority, *, with_ca: bool = True) -> sparkis.Tls:
    """Return files of TLS for a server and for the writer of rows; Java reads the key."""
    cert, key = authority.issue("node")
    converted = key.with_suffix(".pkcs8")
    subprocess.run(["openssl", "pkey", "-in", key, "-out", converted], check=True)
    return sparkis.Tls(cert_file=cert, key_file=converted, ca_cert_file=authority.ca if with_ca else None)


class MemoryRows:
    """A stream of rows in the driver's memory, in one partition.

    A task reads, another one aggregates: both run at the same time, on two cores.
    """

    def __init__(self, spark: SparkSession, schema: str) -> None:
        self._jvm: Any = spark._jvm
        jvm, session = self._jvm, spark._jsparkSession
        source = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
        self._stream = source.singlePartition(session, jvm.org.apache.spark.sql.Encoders.STRING())
        texts = DataFrame(self._stream.toDF(), spark)
        self.df = texts.select(F.from_json("value", schema).alias("row")).select("row.*")

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, which a running batch reads at once."""
        self._stream.addData(self._jvm.PythonUtils.toSeq([json.dumps(row) for row in rows]))
