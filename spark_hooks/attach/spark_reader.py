"""The reader of an attachment that runs jobs of Spark: Spark's own state reader, and tasks that write change files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark_hooks.attach.state_query import StateQuery
from spark_hooks.attach.task import RESULT, BatchesTask
from spark_hooks.checkpoint import SparkCheckpoint
from spark_hooks.publish import task
from spark_hooks.serving import placement
from spark_hooks.sessions import describe_jobs, is_stopped, parallelism_of
from state_backend.attach.attachment import ChangeFiles, StateReader
from state_backend.attach.files_reader import CHANGELOG_SETTING
from state_backend.log.epochs import EpochContent
from state_backend.model.errors import DescriptorError

# One Spark job reads at most this many pending batches (guess).
BATCHES_MAX = 16
# Reading one batch costs about the same as reading several (measured by the benchmark `attach`). So each read is
# followed by a pause, in which fast batches accumulate: a multiple of the read's time, up to a maximum.
READ_PAUSE_FACTOR = 2.0
READ_PAUSE_S_MAX = 0.75


class ChangesMissingError(DescriptorError):
    """The changes of the last batch cannot be read, because the state store has no changelog."""


class SparkReader(StateReader):
    """Runs one Spark job for each read, in the attachment's thread."""

    batches_max = BATCHES_MAX

    def __init__(
        self, session: SparkSession, checkpoint: SparkCheckpoint, states: Sequence[StateQuery], job: str, log: str
    ) -> None:
        self.descriptors = tuple(state.descriptor for state in states)
        self.identities = {state.descriptor.name: state.identity for state in states}
        self._session = session
        self._checkpoint = checkpoint
        self._states = tuple(states)
        self._job = job
        self._log = log
        self._partitions = parallelism_of(session)

    def snapshot(self, writer: ChangeFiles, batch: int) -> EpochContent:
        """Write the whole state as of a batch."""
        reads = [
            (state, state.snapshot(self._session, self._checkpoint, batch, self._partitions)) for state in self._states
        ]
        results = self._run(writer, reads, f"a snapshot of the state as of batch {batch}")
        return task.changes_of(results, replaces=tuple(state.name for state in self.descriptors))

    def changes(self, writer: ChangeFiles, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order."""
        reads = [
            (state, state.changes(self._session, self._checkpoint, first, last, self._partitions))
            for state in self._states
        ]
        try:
            results = self._run(writer, reads, f"the changes of batches {first} to {last}")
        except (PySparkException, Py4JError):
            for batch in range(first, last + 1):
                check_changes(self._checkpoint, batch, self._states)
            raise
        for batch in range(first, last + 1):
            yield batch, task.changes_of([result for result in results if result.batch == batch])

    def pause_s(self, read_s: float) -> float:
        """Return the pause after a read that took `read_s` seconds."""
        return min(READ_PAUSE_S_MAX, READ_PAUSE_FACTOR * read_s)

    def has_ended(self) -> bool:
        """Return whether Spark has been stopped; the attachment ends with it."""
        return is_stopped(self._session)

    def describe(self, error: Exception) -> str:
        """Return an error's first line, without Java's class names and traces."""
        if isinstance(error, Py4JJavaError):
            return str(error.java_exception.getMessage()).partition("\n")[0]
        return super().describe(error)

    def _run(self, writer: ChangeFiles, reads: Sequence[tuple[StateQuery, DataFrame]], description: str) -> list[Any]:
        """Write the rows of all states, in one Spark job."""
        describe_jobs(self._session, f"sparkis attach {self._job}: {description}")
        plan = placement.plan_of(self._log)
        written = [
            rows.mapInArrow(BatchesTask(self._log, writer.folder, state.shuffle_plan.row_plans, plan), RESULT)
            for state, rows in reads
        ]
        try:
            results = reduce(DataFrame.union, written).collect()
        except (PySparkException, Py4JError) as error:
            task.check_workers(error)
            raise
        task.check(results, self._job)
        return results


def check_changes(checkpoint: SparkCheckpoint, batch: int, states: Sequence[StateQuery]) -> None:
    """Raise ChangesMissingError if RocksDB stores only snapshots: finding changes would mean to read all state."""
    if not checkpoint.uses_rocksdb(batch):
        return
    for source in (state.source for state in states):
        store = dict(source.options).get("storeName", "")
        if not checkpoint.has_changelog(source.operator_id, store, batch):
            raise ChangesMissingError(
                f"{source} keeps its state in RocksDB without a changelog, so Spark cannot read a batch's changes: "
                f"start the query with {CHANGELOG_SETTING}=true, and attach after it has committed a batch; or use "
                f"reader='files'"
            )
