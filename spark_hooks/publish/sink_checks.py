"""The sink's checks before its query starts, for classic Spark and Spark Connect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.publish.publisher import NAME_MISSING, SinkOptions
from state_backend.model.descriptor import check_name
from state_backend.model.errors import DescriptorError

CHECKPOINT_OPTION = "checkpointLocation"
CHECKPOINT_SETTING = "spark.sql.streaming.checkpointLocation"

SINK_TAKEN = (
    "sparkis.queryable is the sink of this query; for several sinks write a foreachBatch function "
    "that calls sparkis.publish"
)


# Classic Spark and Spark Connect have different DataStreamWriters; the checks are mixed into both.
if TYPE_CHECKING:
    _Writer = DataStreamWriter
else:
    _Writer = object


class SinkChecks(_Writer):
    """A mixin, to be listed before a DataStreamWriter among the bases. It raises DescriptorErrors."""

    def __init__(self, df: DataFrame, sink_options: SinkOptions) -> None:
        vars(self).update(vars(df.writeStream))
        self._session = df.sparkSession
        self._sink_options = sink_options
        self._name: str | None = None
        self._checkpoint: str | None = None
        super().outputMode(sink_options.mode)

    def outputMode(self, outputMode: str) -> DataStreamWriter:
        """Refuse any mode but that of `queryable`."""
        if outputMode != self._sink_options.mode:
            raise DescriptorError(
                f"the mode is {self._sink_options.mode!r}; pass mode={outputMode!r} to sparkis.queryable"
            )
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
        """Set the query's name, which is also the job's name unless job= was given."""
        if self._sink_options.job is None:
            check_name("query", queryName)
        self._name = queryName
        return super().queryName(queryName)

    def option(self, key: str, value: Any) -> DataStreamWriter:
        """Set an option of the query; remember the checkpoint's location."""
        if key.lower() == CHECKPOINT_OPTION.lower() and value is not None:
            self._checkpoint = str(value)
        return super().option(key, value)

    def options(self, **options: Any) -> DataStreamWriter:
        """Set options of the query."""
        for key, value in options.items():
            self.option(key, value)
        return self

    def trigger(self, **trigger: Any) -> DataStreamWriter:
        """Set the trigger; refuse those with which Spark has no foreachBatch."""
        if trigger.get("continuous") is not None:
            raise DescriptorError(
                "trigger(continuous=...) has no micro-batches that end in a commit, and an epoch is one such "
                "micro-batch; use processingTime= or availableNow=True"
            )
        if trigger.get("realTime") is not None:
            raise DescriptorError(
                "trigger(realTime=...): Spark refuses foreachBatch with this trigger, and this sink is a foreachBatch "
                "function. Pass freshness='record' to sparkis.queryable for an aggregation; or start the query with a "
                "sink of Real-Time Mode (Kafka, console, foreach), and read its state with sparkis.attach(query); or "
                "use processingTime= or availableNow=True here"
            )
        return super().trigger(**trigger)

    def _check_start(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take the name and the checkpoint from the arguments of `start`; DescriptorError if there is no name."""
        name = options.get("queryName") or (args[4] if len(args) > 4 else None)
        if name is not None:
            self.queryName(name)
        if self._name is None and self._sink_options.job is None:
            raise DescriptorError(NAME_MISSING)
        for key in [key for key in options if key.lower() == CHECKPOINT_OPTION.lower()]:
            self.option(key, options.pop(key))

    def _checkpoint_location(self, session: SparkSession) -> str | None:
        """Return the location of the query's checkpoint; None if Spark will make a temporary one."""
        root = session.conf.get(CHECKPOINT_SETTING, None)
        if self._checkpoint is not None or root is None:
            return self._checkpoint
        return None if self._name is None else f"{root}/{self._name}"
