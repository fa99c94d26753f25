"""Results of aggregate functions in Spark's rows: the same functions over Arrow columns as without Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from state_backend.attach.aggregates import Aggregate
from state_backend.attach.states import DELETED
from state_backend.checkpoint.spark_types import arrow_type

# Prefix of a result's column while another column has the name of the result, because expressions may use both.
HIDDEN = "$result "


def field_of(name: str, kind: T.DataType) -> pa.Field:
    """Return a field of Spark as one of Arrow."""
    return pa.field(name, arrow_type(json.loads(kind.json()), name))


def with_results(rows: DataFrame, results: Mapping[str, Aggregate], buffers: list[pa.Field]) -> DataFrame:
    """Return rows with a column for each result, in the same partitions and order.

    A result with the name of another column gets the prefix HIDDEN; `renamed` removes it. Columns of types that
    Arrow lacks are left out.
    """
    if not results:
        return rows
    kept = [each for each in rows.schema if not isinstance(each.dataType, T.CalendarIntervalType)]
    names = {name: f"{HIDDEN}{name}" if name in rows.columns else name for name in results}
    schema = T.StructType(list(kept))
    for name, aggregate in results.items():
        empty = [pa.nulls(0, buffer.type) for buffer in buffers[aggregate.first : aggregate.end]]
        schema = schema.add(names[name], from_arrow_type(aggregate.evaluate(empty).type, prefer_timestamp_ntz=True))
    task = _Evaluate(tuple((names[name], aggregate) for name, aggregate in results.items()))
    return rows.select(*(f"`{each.name}`" for each in kept)).mapInArrow(task, schema)


def renamed(rows: DataFrame) -> DataFrame:
    """Return rows in which results replace the columns of their names."""
    for name in rows.columns:
        if name.startswith(HIDDEN):
            result = name.removeprefix(HIDDEN)
            rows = rows.withColumn(result, rows[f"`{name}`"]).drop(name)
    return rows


@dataclass(frozen=True)
class _Evaluate:
    """The task of `with_results`. Runs on the executors. The results of a row that deletes are null."""

    results: tuple[tuple[str, Aggregate], ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns: list[Any] = list(batch.columns)
            names = list(batch.schema.names)
            is_present = pc.invert(batch.column(DELETED))
            for name, aggregate in self.results:
                buffers = [batch.column(f"_{at}") for at in range(aggregate.first, aggregate.end)]
                columns.append(aggregate.evaluate_present(buffers, is_present))
                names.append(name)
            yield pa.RecordBatch.from_arrays(columns, names)
