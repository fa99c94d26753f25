"""The Spark task of an attachment: it writes one partition of the changes of some batches. Runs in Python workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from spark_hooks.publish import task
from spark_hooks.serving.placement import ServerPlan, ensure_state_server
from state_backend.attach.states import BATCH
from state_backend.codec.row_encoding import RowPlan, split_by

# The schema of the rows that a task returns, one for each batch with changes, as Spark's DDL.
RESULT = f"{task.RESULT}, batch long"


@dataclass(frozen=True)
class BatchesTask:
    """Writes one partition of several epochs in one pass; picklable."""

    log: str
    folder: str
    row_plans: tuple[RowPlan, ...]
    server_plan: ServerPlan | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition's changes, which are sorted by batch. May run several times for one partition."""
        ensure_state_server(self.server_plan)
        for batch, parts in groupby(_by_batch(batches), key=itemgetter(0)):
            of_batch = task.Task(self.log, self.folder, batch, self.row_plans)
            for result in of_batch(part for _, part in parts):
                yield result.append_column("batch", pa.array([batch], pa.int64()))


def _by_batch(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split Arrow's batches where the number of the micro-batch changes."""
    for rows in batches:
        if rows.num_rows:
            yield from split_by(rows, rows.column(BATCH).to_numpy())
