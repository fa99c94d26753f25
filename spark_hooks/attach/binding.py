"""Binds the requested states of an attachment to the states that Spark's state reader finds in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import SparkSession

from spark_hooks.attach.operators import OperatorState, operator_states
from spark_hooks.attach.state_query import StateQuery, buffers_of
from spark_hooks.checkpoint import SparkCheckpoint
from state_backend.attach.aggregates import PlannedFunction, planned_of
from state_backend.attach.states import AttachedState, for_each, index_of
from state_backend.model.descriptor import check_states

FORMAT_SETTING = "spark.sql.streaming.stateStore.checkpointFormatVersion"


def reading_session(spark: SparkSession) -> SparkSession:
    """Return a session for reading state, which the user's settings do not affect."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    session.conf.set("spark.sql.caseSensitive", "true")
    return session


def bind(
    session: SparkSession,
    checkpoint: SparkCheckpoint,
    batch: int,
    job: str,
    requested: Sequence[AttachedState],
    functions: Sequence[Sequence[PlannedFunction]] = (),
) -> list[StateQuery]:
    """Return the requested states, each bound to the operator state that it reads; all states if none is requested.

    Args:
        functions: Of each aggregation of the query, in the order of their operators' numbers, if its plan is known.
    """
    session.conf.set(FORMAT_SETTING, checkpoint.format_version())
    found = operator_states(session, checkpoint, batch)
    planned = planned_of({each.operator_id: buffers for each in found if (buffers := buffers_of(each))}, functions)
    chosen = (
        [(_requested(found, each), each) for each in requested]
        if (of_each := for_each(requested)) is None
        else [(source, of_each) for source in found]
    )
    bound = [
        StateQuery.of(source, each, job, session, checkpoint, batch, planned.get(source.operator_id))
        for source, each in chosen
    ]
    check_states(job, [state.descriptor for state in bound])
    return bound


def _requested(found: Sequence[OperatorState], requested: AttachedState) -> OperatorState:
    origins = [(source.operator_id, source.variable) for source in found]
    return found[index_of(list(map(str, found)), origins, requested)]
