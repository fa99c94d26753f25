"""What `freshness="record"` refuses before the query starts: queries without Real-Time Mode, and other states."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

import pyspark
from pyspark.sql import DataFrame, SparkSession

from spark_hooks.publish.publisher import SinkOptions
from spark_hooks.sessions import SPARK_VERSION, is_connect
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import DescriptorError

WAY_OUT = "use freshness='commit' with micro-batches"
ATTACH = "or read its state at each commit with sparkis.attach(query)"
# Operators of Python in an optimized plan.
PYTHON = re.compile(r"Python|Pandas|Arrow")
# Operators that Real-Time Mode does not run before or after an aggregation.
NOT_RUN = ("DeduplicateWithinWatermark", "GlobalLimit")
# Sources that Real-Time Mode does not read: those of Spark's first interface, such as files, and those for tests.
V1_SOURCE = "StreamingRelation"
OTHER_SOURCES = ("rate", "rate-micro-batch", "socket")
# The arguments of a state that an aggregation's result can have.
ARGUMENTS = ("name", "key", "value", "key_format", "separator", "field", "kind", "encoding", "json_decimals", "columns")
STORE = "spark.sql.streaming.stateStore"
PROVIDER_SETTING, FORMAT_SETTING = f"{STORE}.providerClass", f"{STORE}.checkpointFormatVersion"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def check_session(df: DataFrame) -> None:
    """Raise DescriptorError for a Spark that has no Real-Time Mode for aggregations."""
    if is_connect(df):
        raise DescriptorError(
            f"freshness='record' sets a writer in the query's JVM, which Spark Connect gives no access to: "
            f"run the query in a classic session, or {WAY_OUT}"
        )
    if SPARK_VERSION < (4, 3):
        raise DescriptorError(
            f"freshness='record' needs Spark 4.3, the first with aggregations in Real-Time Mode, and this is Spark "
            f"{pyspark.__version__}: {WAY_OUT}"
        )


def check_arguments(sink_options: SinkOptions) -> None:
    """Raise DescriptorError for arguments that have no effect on rows of an aggregation."""
    if sink_options.mode != "update":
        raise DescriptorError(
            f"mode={sink_options.mode!r}: Real-Time Mode has the output mode 'update' alone; {WAY_OUT}"
        )
    without = {
        "wait_for_visibility": sink_options.visibility_timeout_s > 0,
        "on_rewind": sink_options.on_rewind != "refuse",
        "record_time": sink_options.record_time is not None,
    }
    for name in (name for name, is_given in without.items() if is_given):
        raise DescriptorError(
            f"{name}= has no effect with freshness='record', whose epochs an attachment writes; leave it out"
        )
    for state in sink_options.states:
        _check_state(state)


def _check_state(state: StateDescriptor) -> None:
    defaults = StateDescriptor(state.name, key="k", value="v")
    for field in fields(StateDescriptor):
        if field.name not in ARGUMENTS and getattr(state, field.name) != getattr(defaults, field.name):
            raise DescriptorError(
                f"state {state.name!r}: {field.name}= does not go with freshness='record': the value is the row that "
                f"the aggregation emits; leave it out, or {WAY_OUT}"
            )
    if state.kind not in (Kind.VALUE, Kind.MAP) or state.field is not None:
        given = "field=" if state.field is not None else f"kind={state.kind.value!r}"
        raise DescriptorError(
            f"state {state.name!r}: {given}: with freshness='record' a state is a value, or a hash of the columns of "
            f"one row; {WAY_OUT}"
        )


def check_operators(names: Iterable[str], aggregations: int) -> None:
    """Raise DescriptorError for a plan that is not one aggregation of one stream.

    Args:
        names: The streaming operators of the optimized plan.
    """
    names = list(names)
    if python := next((name for name in names if PYTHON.search(name)), None):
        raise DescriptorError(
            f"Real-Time Mode runs no Python in a query, and the query's plan has {python}: write it with Spark's "
            f"functions, or {WAY_OUT}"
        )
    if any(name.startswith(("Join", "AsOfJoin")) for name in names):
        raise DescriptorError(f"Real-Time Mode runs no joins of streams: {WAY_OUT}")
    if other := next((name for name in names if name in NOT_RUN), None):
        raise DescriptorError(f"Real-Time Mode does not run the operator {other} of the query's plan: {WAY_OUT}")
    if aggregations != 1:
        found = "no aggregation" if not aggregations else f"{aggregations} aggregations"
        raise DescriptorError(
            f"freshness='record' is for a query with one aggregation, whose state has the committed values, and this "
            f"one has {found}: {WAY_OUT}, {ATTACH}"
        )


def check_sources(sources: Iterable[tuple[str, str]]) -> None:
    """Raise DescriptorError for a source that Spark does not read in Real-Time Mode.

    Args:
        sources: The operator of each source in the plan, and the source's name.
    """
    for operator, source in sources:
        if operator == V1_SOURCE or source in OTHER_SOURCES:
            raise DescriptorError(
                f"Real-Time Mode does not read the source {source!r}: read a topic of Kafka, or {WAY_OUT}"
            )


def check_settings(spark: SparkSession) -> None:
    """Raise DescriptorError for settings with which Spark refuses state in Real-Time Mode."""
    wrong = []
    if spark.conf.get(PROVIDER_SETTING, None) != PROVIDER:
        wrong.append(f"{PROVIDER_SETTING}={PROVIDER}")
    if spark.conf.get(FORMAT_SETTING, None) != "2":
        wrong.append(f"{FORMAT_SETTING}=2")
    if wrong:
        raise DescriptorError(f"Real-Time Mode needs these settings of Spark: {', '.join(wrong)}")
