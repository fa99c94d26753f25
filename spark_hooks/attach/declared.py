"""Which states the processors of a query declare (see `processor`), as the query's plan tells on the driver.

Also the runs of such queries that `automatic` follows, for `attach`, which then has nothing left to do.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.attach.attachment import Attachment
from spark_hooks.attach.processor import declared_in
from spark_hooks.attach.rows import AttachedState
from spark_hooks.checkpoint import Checkpoint, CheckpointError
from state_backend.model.errors import DescriptorError

# Spark's name of the operator, in a query's plan as in a micro-batch's.
OPERATOR = "TransformWithStateInPySpark"
LOOK_INTERVAL_S = 0.1


def states_of(query: StreamingQuery) -> list[tuple[AttachedState, ...]]:
    """Return what a query declares, a tuple for each processor that does; DescriptorError if that cannot be."""
    found = [states for _, states in _processors(_execution(query).analyzedPlan()) if states]
    names = [str(state.name) for states in found for state in states]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DescriptorError(
            f"query {query.name!r}: its processors declare the state {twice[0]!r} more than once (they declare "
            f"{', '.join(names)}); give each a name of its own, in states="
        )
    return found


def located_states(query: StreamingQuery, checkpoint: Checkpoint, timeout_s: float) -> list[AttachedState]:
    """Return what a query declares, with the operators' numbers if the query has several processors.

    Spark numbers operators when it plans a micro-batch, so this waits until the query has committed one since its
    start. CheckpointError if it ends before, or the time has passed.
    """
    declared = [state for states in states_of(query) for state in states]
    if not declared or sum(1 for _ in _processors(_execution(query).analyzedPlan())) == 1:
        return declared
    deadline = time.monotonic() + timeout_s
    last: Any = None  # what Spark made of a micro-batch
    while last is None or not checkpoint.is_committed(last.currentBatchId()):
        # The plan of a batch that has only begun is not asked for: that would be to make it, in this thread.
        last = last or _execution(query).lastExecution()
        if time.monotonic() >= deadline or not (query.isActive or last is not None):
            raise CheckpointError(
                f"query {query.name!r} has several processors, and which operator each one is can be seen when the "
                f"query has committed a micro-batch since its start; it has not yet"
            )
        time.sleep(LOOK_INTERVAL_S)
    located = [
        replace(state, operator=operator.stateInfo().get().operatorId())
        for operator, states in _processors(last.executedPlan())
        for state in states
    ]
    if {state.name for state in located} != {state.name for state in declared}:
        raise DescriptorError(
            f"query {query.name!r}: a processor that declares states is not in what Spark made of the query; attach "
            f"to the others by sparkis.attach(query, states=[...])"
        )
    return located


def _execution(query: StreamingQuery) -> Any:
    running: Any = query
    return running._jsq.streamingQuery()


def _processors(plan: Any) -> Iterator[tuple[Any, tuple[AttachedState, ...]]]:
    """Return the operators of a plan that have a processor, and what it declares."""
    if plan.nodeName() == OPERATOR:
        jvm: Any = SparkContext._jvm
        pickled = plan.functionExpr().func().command().toArray(jvm.scala.reflect.ClassTag.Byte())
        yield plan, tuple(AttachedState(**described) for described in declared_in(bytes(pickled)))
    children = plan.children()
    for index in range(children.size()):
        yield from _processors(children.apply(index))


class DeclaredRun(ABC):
    """A run of a query that declares states, which somebody attaches to."""

    run_id: str
    error: Exception | None

    @abstractmethod
    def attachment(self, timeout_s: float) -> Attachment:
        """Return the attachment once it is made; raises what keeps it from being made."""


# By the query's id: a query has one run at a time.
runs: dict[str, DeclaredRun] = {}


def run_of(query: StreamingQuery) -> DeclaredRun | None:
    """Return who attaches to this run of a query because of what it declares."""
    run = runs.get(str(query.id))
    return run if run is not None and run.run_id == str(query.runId) else None
