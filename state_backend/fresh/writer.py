"""The batches that one process receives rows of: what makes values of a frame, for each partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from state_backend.fresh.row_encoder import RowEncoder
from state_backend.fresh.values import FreshValues
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError
from state_backend.store.store import Snapshot

# Arrow imports pandas, if it is installed, when it first makes an array of Python objects. That takes longer than the
# imports above. So it happens here: a server imports this module in a thread.
pa.array([])

# More partitions than this would be a mistake, or an attack: Spark runs all of them at once (guess).
PARTITIONS_MAX = 1 << 16


@dataclass(frozen=True)
class _OpenBatch:
    run: str
    batch: int
    encoder: RowEncoder


class FreshWriter:
    """Writes rows into the fresh values of a job.

    Args:
        states: Those of the job.
    """

    def __init__(self, values: FreshValues, job: str, states: Sequence[StateDescriptor]) -> None:
        self.values, self.states = values, states
        self._job = job
        self._open: dict[int, _OpenBatch] = {}
        self._encoders: dict[bytes, RowEncoder] = {}  # the last one, by its schema

    def open_batch(self, run: str, batch: int, partition: int, schema: bytes, applied_epoch: int) -> None:
        """Begin a partition's part of a batch. DescriptorError: the rows do not make the states of the job."""
        if schema not in self._encoders:
            self._encoders = {schema: RowEncoder(self._job, self.states, schema)}
        if len(self._open) >= PARTITIONS_MAX:
            self._open.clear()
        self._open[partition] = _OpenBatch(run, batch, self._encoders[schema])
        self.values.open_batch(run, applied_epoch)

    def put(self, run: str, batch: int, partition: int, frame: bytes, committed: Snapshot, now_ms: int) -> None:
        """Write a frame of rows. StoreError: the batch was not opened here, or there is no room.

        Args:
            committed: The job's newest epoch.
        """
        found = self._open.get(partition)
        if found is None or (found.run, found.batch) != (run, batch):
            raise StoreError(f"batch {batch} of partition {partition} was not opened here; send STATE FRESH OPEN first")
        applied = committed.applied.epoch
        if batch > applied:
            slots = committed.owned_slots
            runs = found.encoder.changes(frame, slots)
            self.values.put(run, batch, runs, self.states, applied, now_ms, slots)

    def close_batch(self, run: str, batch: int, partition: int, dropped: int) -> None:
        """End a partition's part of a batch.

        Args:
            dropped: The rows that the query's writer did not send.
        """
        self._open.pop(partition, None)
        if dropped:
            self.values.set_incomplete(run, batch)
