"""The DataStreamWriter of `freshness="record"`: rows go to servers, and an attachment makes the committed values."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from spark_hooks.attach.automatic import listen_for_queries, start_run
from spark_hooks.attach.plans import Results, results_of
from spark_hooks.attach.start import attach
from spark_hooks.publish.column_names import column_of
from spark_hooks.publish.publisher import SinkOptions
from spark_hooks.publish.sink_checks import CHECKPOINT_OPTION, SinkChecks
from spark_hooks.real_time import checks
from spark_hooks.real_time.jvm_writer import JvmWriter
from spark_hooks.real_time.servers import Servers, servers_of
from state_backend.attach.states import PARTS_OF_WINDOW, AttachedState
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import DescriptorError, SparkisError

logger = logging.getLogger("sparkis.sink")

# How often the driver asks for the addresses of state servers beside executors, which come and go (guess).
SERVERS_INTERVAL_S = 1.0
# Operators with state that Real-Time Mode runs, in an optimized plan.
AGGREGATE = "Aggregate"
WITH_STATE = (AGGREGATE, "Deduplicate")
TRIGGER_MISSING = (
    "freshness='record' is for Real-Time Mode, where rows leave the query before their commit: give the query "
    ".trigger(realTime='5 minutes'), or use freshness='commit'"
)


class RecordWriter(SinkChecks, DataStreamWriter):
    """Spark's DataStreamWriter with the JVM writer as its sink. Made by `of`."""

    @classmethod
    def of(cls, df: DataFrame, sink_options: SinkOptions, columns: Mapping[str, str] | None) -> RecordWriter:
        """Check a query, and return its writer; DescriptorError."""
        checks.check_arguments(sink_options)
        plan = optimized_plan(df)
        found, operators = results_of(plan), list(_streaming_operators(plan))
        checks.check_operators(operators, len(found))
        checks.check_sources(_sources(plan))
        used = list(dict.fromkeys(name for state in sink_options.states for name in _columns_of(state)))
        short = {name: _short(name) for name in used}
        if twice := [name for name in used if list(short.values()).count(short[name]) > 1]:
            raise DescriptorError(f"the columns {' and '.join(map(repr, twice))} would have one name; rename one")
        expressions = dict(columns or {})
        for name in used:
            expressions |= _matched(name, found[0], expressions)
        writer = cls(df.select(*(column_of(df, name).alias(short[name]) for name in used)), sink_options)
        # Spark numbers the operators with state from the sink to the sources.
        operator = [name for name in operators if name in WITH_STATE].index(AGGREGATE)
        writer._attached = tuple(
            replace(_attached(state, short, expressions, skips=sink_options.skips_bad_rows), operator=operator)
            for state in sink_options.states
        )
        return writer

    def __init__(self, df: DataFrame, sink_options: SinkOptions) -> None:
        super().__init__(df, sink_options)
        self._schema = df.schema.json()
        self._attached: tuple[AttachedState, ...] = ()
        self._is_real_time = False

    def trigger(self, **trigger: Any) -> DataStreamWriter:
        """Set the trigger, which has to be that of Real-Time Mode."""
        if trigger.get("realTime") is None:
            raise DescriptorError(TRIGGER_MISSING)
        self._is_real_time = True
        return DataStreamWriter.trigger(self, **trigger)

    def start(self, *args: Any, **options: Any) -> StreamingQuery:
        """Start the query and its attachment; DescriptorError for what it lacks."""
        self._check_start(args, options)
        if not self._is_real_time:
            raise DescriptorError(TRIGGER_MISSING)
        if self._checkpoint_location(self._session) is None:
            raise DescriptorError(
                f"freshness='record' takes the committed values from the query's checkpoint: give the query "
                f".option({CHECKPOINT_OPTION!r}, '/a/permanent/folder')"
            )
        checks.check_settings(self._session)
        spark, chosen = self._session, self._sink_options
        job = chosen.job or self._name
        assert job is not None
        servers = servers_of(spark, chosen.log)
        writer = JvmWriter(spark, job, self._schema, servers)
        writer.set_on(self)
        listen_for_queries(spark)
        query = super().start(*args, **options)
        start = partial(
            attach,
            query,
            states=self._attached,
            job=job,
            log=chosen.log,
            takeover=chosen.takeover,
            progress=chosen.has_progress,
            catch_up_timeout=chosen.catch_up_timeout_s,
            timeout_s=float("inf"),
        )
        start_run(spark, query, start)
        follow = (spark, query, chosen.log, writer, servers)
        threading.Thread(target=_follow_servers, args=follow, name=f"sparkis-servers-{job}", daemon=True).start()
        return query


def optimized_plan(df: DataFrame) -> Any:
    """Return a DataFrame's plan as Spark's optimizer leaves it."""
    session: Any = df.sparkSession._jsparkSession
    return session.sessionState().optimizer().execute(df._jdf.queryExecution().analyzed())


def _streaming_operators(plan: Any) -> Iterator[str]:
    """Yield the names of a plan's operators; of joins those of two streams only."""
    children = [plan.children().apply(index) for index in range(plan.children().size())]
    name = str(plan.nodeName())
    if "Join" not in name or all(child.isStreaming() for child in children):
        yield name
    for child in children:
        yield from _streaming_operators(child)


def _sources(plan: Any) -> Iterator[tuple[str, str]]:
    """Yield the operator of each streaming source in a plan, and the source's name."""
    leaves = plan.collectLeaves()
    for leaf in (leaves.apply(index) for index in range(leaves.size())):
        if leaf.isStreaming():
            yield str(leaf.nodeName()), str(leaf.sourceName()) if "StreamingRelation" in leaf.nodeName() else ""


def _columns_of(state: StateDescriptor) -> list[str]:
    return [*state.format_for("job").columns, *state.value]


def _short(name: str) -> str:
    """Return the name of a column in the rows: the start of a window has its own, as in an attachment."""
    return name.rpartition(".")[2]


def _matched(name: str, results: Results, expressions: Mapping[str, str]) -> dict[str, str]:
    """Return the expression by which an attachment makes a column, if it needs one; DescriptorError."""
    whole, _, part = name.rpartition(".")
    if name in expressions or name in results.functions or (whole in results.keys and part in PARTS_OF_WINDOW):
        return {}
    if name in results.keys:
        return {} if results.keys[name] == name else {name: results.keys[name]}
    known = sorted({*results.keys, *results.functions})
    raise DescriptorError(
        f"freshness='record': the column {name!r} is computed after the aggregation, so that the checkpoint does not "
        f"have it: say how with columns={{{name!r}: '...'}}, an expression over {', '.join(known)}"
    )


def _attached(
    state: StateDescriptor, short: Mapping[str, str], expressions: Mapping[str, str], *, skips: bool
) -> AttachedState:
    """Return the state as an attachment reads it."""
    form = state.format_for("job")
    key_format = None
    if state.key_format is not None:
        key_format = replace(form, columns=tuple(short[name] for name in form.columns)).text
    used = {short[name] for name in _columns_of(state)}
    return AttachedState(
        state.name,
        key=tuple(short[name] for name in state.key),
        key_format=key_format,
        separator=state.separator,
        value=tuple(short[name] for name in state.value),
        kind=state.kind if len(state.value) > 1 or state.kind is Kind.MAP else None,
        columns={name: text for name, text in expressions.items() if name in used} or None,
        encoding=state.encoding,
        json_decimals=state.json_decimals,
        on_bad_key="skip" if skips else "fail",
    )


def _follow_servers(spark: SparkSession, query: StreamingQuery, log: str, writer: JvmWriter, servers: Servers) -> None:
    """Send the next batches to the servers that there are, until the query ends. Runs in a thread of its own."""
    with suppress(Exception):  # a stopped Spark raises many kinds of errors
        while query.isActive:
            time.sleep(SERVERS_INTERVAL_S)
            try:
                found = servers_of(spark, log)
            except (SparkisError, OSError) as error:
                logger.debug("the servers of %s are unknown: %s", log, error)
                continue
            if found.urls and found != servers:
                writer.set_servers(found)
                servers = found
