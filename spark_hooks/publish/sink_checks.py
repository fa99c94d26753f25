"""What a writer of the sink refuses before its query starts, whether the session is classic or one of Spark Connect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.publish.publisher import NAME_MISSING, Publication
from state_backend.model.descriptor import check_name
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.sink")

CHECKPOINT_OPTION = "checkpointLocation"
CHECKPOINT_SETTING = "spark.sql.streaming.checkpointLocation"

SINK_TAKEN = (
    "sparkis.queryable is the sink of this query; for several sinks use a foreachBatch function of your own "
    "and call sparkis.publish in it"
)


@contextmanager
def logged() -> Iterator[None]:
    """Say in one line why a batch failed: Spark reports it inside a Java traceback."""
    try:
        yield
    except SparkisError as error:
        logger.error("%s", error)
        raise


# Classic Spark and Spark Connect each have a DataStreamWriter of their own; the checks go before either.
if TYPE_CHECKING:
    _Writer = DataStreamWriter
else:
    _Writer = object


class SinkChecks(_Writer):
    """Refuses, before the query starts, what the sink cannot do. Goes before a DataStreamWriter among the bases."""

    def __init__(self, df: DataFrame, told: Publication) -> None:
        vars(self).update(vars(df.writeStream))
        self._session = df.sparkSession
        self._told = told
        self._name: str | None = None
        self._checkpoint: str | None = None
        super().outputMode(told.mode)

    def outputMode(self, outputMode: str) -> DataStreamWriter:
        """Refuse another mode than the one `queryable` was told."""
        if outputMode != self._told.mode:
            raise DescriptorError(f"the mode is {self._told.mode!r}; pass mode={outputMode!r} to sparkis.queryable")
        return self

    def foreachBatch(self, func: Callable[[DataFrame, int], None]) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"foreachBatch: {SINK_TAKEN}")

    def foreach(self, f: Any) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"foreach: {SINK_TAKEN}")

    def format(self, source: str) -> DataStreamWriter:
        """Refuse a second sink."""
        raise DescriptorError(f"format({source!r}): {SINK_TAKEN}")

    def toTable(self, *args: Any, **options: Any) -> StreamingQuery:
        """Refuse a second sink."""
        raise DescriptorError(f"toTable: {SINK_TAKEN}")

    def queryName(self, queryName: str) -> DataStreamWriter:
        """Set the query's name, which is the job's name unless job= was given."""
        if self._told.job is None:
            check_name("query", queryName)
        self._name = queryName
        return super().queryName(queryName)

    def option(self, key: str, value: Any) -> DataStreamWriter:
        """Set an option of the query; the checkpoint's place is remembered."""
        if key.lower() == CHECKPOINT_OPTION.lower() and value is not None:
            self._checkpoint = str(value)
        return super().option(key, value)

    def options(self, **options: Any) -> DataStreamWriter:
        """Set options of the query."""
        for key, value in options.items():
            self.option(key, value)
        return self

    def trigger(self, **trigger: Any) -> DataStreamWriter:
        """Set the trigger; those without micro-batches are refused."""
        for kind in ("continuous", "realTime"):
            if trigger.get(kind) is not None:
                raise DescriptorError(
                    f"trigger({kind}=...) has no micro-batches that end in a commit, so there is no epoch that readers "
                    f"could see as a whole; use processingTime= or availableNow=True"
                )
        return super().trigger(**trigger)

    def _check_start(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take the name from the arguments of `start`, if it is there; there must be one."""
        name = options.get("queryName") or (args[4] if len(args) > 4 else None)
        if name is not None:
            self.queryName(name)
        if self._name is None and self._told.job is None:
            raise DescriptorError(NAME_MISSING)
        for key in [key for key in options if key.lower() == CHECKPOINT_OPTION.lower()]:
            self.option(key, options.pop(key))

    def _checkpoint_location(self, session: SparkSession) -> str | None:
        """Return where the query's checkpoint will be; None if Spark makes a temporary one."""
        root = session.conf.get(CHECKPOINT_SETTING, None)
        if self._checkpoint is not None or root is None:
            return self._checkpoint
        return None if self._name is None else f"{root}/{self._name}"
