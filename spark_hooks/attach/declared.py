"""Reads the states that a query's processors declare (see `processor`) from the query's plan, on the driver.

Also has the registry of the query runs that `automatic` attaches to; `attach` returns their attachments.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach.declaration import processor_states
from state_backend.attach.attachment import Attachment, FollowedCheckpoint
from state_backend.attach.states import AttachedState
from state_backend.model.errors import CheckpointError, DescriptorError

logger = logging.getLogger("sparkis.attach")

# The operator's names in the plans of queries and of micro-batches; Spark 4.0 has the first only. The third is Scala's.
OPERATORS = ("TransformWithStateInPandas", "TransformWithStateInPySpark")
SCALA_OPERATOR = "TransformWithState"
POLL_INTERVAL_S = 0.1


def states_of(query: StreamingQuery) -> list[tuple[AttachedState, ...]]:
    """Return the declared states of a query, a tuple for each declaring processor; DescriptorError for equal names."""
    found = [states for _, states in _processors(_execution(query).analyzedPlan()) if states]
    names = [str(state.name) for states in found for state in states]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DescriptorError(
            f"query {query.name!r}: its processors declare the state {twice[0]!r} more than once (they declare "
            f"{', '.join(names)}); give each state another name in states="
        )
    return found


def states_with_operators(
    query: StreamingQuery, checkpoint: FollowedCheckpoint, timeout_s: float
) -> list[AttachedState]:
    """Return the declared states of a query, with their operators' numbers if the query has several processors.

    Spark numbers operators when it plans a micro-batch. So with several processors this waits until the query has
    committed a micro-batch since its start. CheckpointError if the query ends before that, or after `timeout_s`.
    """
    declared = [state for states in states_of(query) for state in states]
    if not declared or sum(1 for _ in _processors(_execution(query).analyzedPlan())) == 1:
        return declared
    deadline = time.monotonic() + timeout_s
    last: Any = None  # Spark's execution of a micro-batch
    while last is None or not checkpoint.is_committed(last.currentBatchId()):
        # Only plans of committed batches are read: reading another plan would make Spark plan the batch in this thread.
        last = last or _execution(query).lastExecution()
        if time.monotonic() >= deadline or not (query.isActive or last is not None):
            raise CheckpointError(
                f"query {query.name!r} has several processors, and the numbers of their operators are known only after "
                f"the query has committed a micro-batch since its start; it has not yet"
            )
        time.sleep(POLL_INTERVAL_S)
    located = [
        replace(state, operator=operator.stateInfo().get().operatorId())
        for operator, states in _processors(last.executedPlan())
        for state in states
    ]
    if {state.name for state in located} != {state.name for state in declared}:
        raise DescriptorError(
            f"query {query.name!r}: Spark's optimizer has removed a processor that declares states; attach to the "
            f"others by sparkis.attach(query, states=[...])"
        )
    return located


def _execution(query: StreamingQuery) -> Any:
    running: Any = query
    return running._jsq.streamingQuery()


def _processors(plan: Any) -> Iterator[tuple[Any, tuple[AttachedState, ...]]]:
    """Yield the operators of a plan that have a processor, with the states that it declares."""
    name = str(plan.nodeName())
    if name.startswith(SCALA_OPERATOR) and name not in (SCALA_OPERATOR, *OPERATORS):
        logger.warning(
            "the query's plan has the operator %s, which this version of sparkis does not know: states that its "
            "processor declares are not readable. Attach to them with sparkis.attach(query, states=processor.states)",
            name,
        )
    if name in OPERATORS:
        jvm: Any = SparkContext._jvm
        pickled = plan.functionExpr().func().command().toArray(jvm.scala.reflect.ClassTag.Byte())
        yield plan, tuple(AttachedState(**described) for described in processor_states(bytes(pickled)))
    children = plan.children()
    for index in range(children.size()):
        yield from _processors(children.apply(index))


class DeclaredRun(ABC):
    """A run of a query with declared states, and its attachment."""

    run_id: str
    session: SparkSession
    error: Exception | None

    @abstractmethod
    def is_own_thread(self) -> bool:
        """Return whether the calling thread is the run's own thread, which makes the attachment."""

    @abstractmethod
    def attachment(self, timeout_s: float) -> Attachment:
        """Wait for the attachment and return it. Raises the error that prevents it."""


# By the query's id: a query has one run at a time.
runs: dict[str, DeclaredRun] = {}


def run_of(query: StreamingQuery) -> DeclaredRun | None:
    """Return the registered run of a query, or None."""
    run = runs.get(str(query.id))
    return run if run is not None and run.run_id == str(query.runId) else None
