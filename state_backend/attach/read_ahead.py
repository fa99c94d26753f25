"""Reads the changes of a batch before its commit, so that little is left to do after it.

A task of Spark gives a state file its name when the file is complete, and Spark commits a batch after all of its tasks.
So a thread reads each file when it appears, one partition after the other, and writes a change file. No epoch lists the
change file before the commit. A batch that runs again replaces its state files. So what was read counts only if, after
the commit, each name still belongs to the file that was read. If many partitions are left some time after the commit,
the thread leaves them to several processes (see `partition_share`).

Only local checkpoints are read ahead, because each check for a file in an object store costs a request. Two kinds of
state are not read ahead: column families of RocksDB, because their numbers are in another file; and checkpoint format
2, because only the commit has the names of the state files.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from state_backend.attach.attachment import ChangeFiles
from state_backend.attach.change_writer import ChangeWriter
from state_backend.attach.partition_share import StorePartition, partitions_of, rows_of
from state_backend.checkpoint.checkpoint import BatchStores, Checkpoint
from state_backend.checkpoint.files import FileIdentity
from state_backend.checkpoint.metadata import BatchCommit
from state_backend.checkpoint.stores import StateStore
from state_backend.folder_watch import FolderWatch
from state_backend.log.epochs import EpochContent

logger = logging.getLogger("sparkis.attach")

Found = TypeVar("Found")
WITHOUT_IDS = BatchCommit({})


class ReadAhead:
    """A thread that reads the changes of one batch, and writes them as change files.

    Args:
        watch: For this thread only.
    """

    def __init__(
        self, checkpoint: Checkpoint, records: ChangeWriter, writer: ChangeFiles, batch: int, watch: FolderWatch
    ) -> None:
        self.folder_and_batch = (writer.folder, batch)
        self._checkpoint = checkpoint
        self._records = records
        self._target = writer.change_files(batch)
        self._batch = batch
        self._watch = watch
        self._is_committed = False
        self._is_stopped = False
        self._ends_s = math.inf
        self._batch_stores: BatchStores | None = None
        self._read: dict[StorePartition, FileIdentity] = {}
        self._content: EpochContent | None = None
        self._thread = threading.Thread(target=self._run, name=f"sparkis-read-ahead-{batch}", daemon=True)
        self._thread.start()

    @property
    def partitions(self) -> Collection[StorePartition]:
        """The partitions that were read."""
        return self._read.keys()

    def content(self, batch_stores: BatchStores, ends_s: float) -> EpochContent | None:
        """Return what was written of `partitions`, once the batch is committed; None if all has to be read again.

        Args:
            ends_s: When no further partition is begun, by the monotonic clock.
        """
        self._ends_s = ends_s
        self._is_committed = True
        self._watch.wake()
        self._thread.join()
        if self._content is None or self._batch_stores is None:
            return None
        is_same_plan = (
            _stores(self._batch_stores) == _stores(batch_stores) and not self._checkpoint.commit(self._batch).ids
        )
        if is_same_plan and all(
            batch_stores.stores[number].identity_of_changes(partition, self._batch) == identity
            for (number, partition), identity in self._read.items()
        ):
            return self._content
        logger.info("%s: batch %d ran again, so its state is read again", self._checkpoint.location, self._batch)
        return None

    def stop(self) -> None:
        """End the thread; wait for it."""
        self._is_stopped = True
        self._watch.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._wait_for_plan()
            batch_stores = self._checkpoint.batch_stores(self._batch).only(self._records.sources)
            if not self._has_known_names(batch_stores):
                return
            batch_stores = replace(batch_stores, stores=tuple(_stores(batch_stores)))
            decoded = rows_of(batch_stores, self._partitions_as_written(batch_stores), is_complete=False)
            self._content = self._records.write(self._target, decoded, is_complete=False)
            self._batch_stores = batch_stores
        except _Cancelled:
            pass
        except Exception as error:  # the read after the commit meets the same error, or none
            logger.debug("%s: batch %d is read after its commit: %s", self._checkpoint.location, self._batch, error)

    def _has_known_names(self, batch_stores: BatchStores) -> bool:
        """Return whether the names of the files with the changes are known before the commit."""
        is_format_1 = not self._checkpoint.commit(self._batch - 1).ids
        return is_format_1 and all(state.family is None for state in batch_stores.states)

    def _wait_for_plan(self) -> None:
        if not self._checkpoint.is_planned(self._batch):
            self._wait_for(self._checkpoint.plans_folder, lambda: self._checkpoint.is_planned(self._batch) or None)

    def _partitions_as_written(self, batch_stores: BatchStores) -> Iterator[StorePartition]:
        """Yield the partitions in order, each when its file is there."""
        for number, partition in partitions_of(batch_stores):
            store = batch_stores.stores[number]
            look = partial(store.identity_of_changes, partition, self._batch)
            identity = look() or self._wait_for(store.files.name(store.folder(partition)), look)
            if self._is_stopped:
                raise _Cancelled
            if time.monotonic() >= self._ends_s:
                return
            self._read[number, partition] = identity
            yield number, partition

    def _wait_for(self, folder: str, look: Callable[[], Found | None]) -> Found:
        """Wait for a file in a folder; _Cancelled if it is missing after the commit, or the thread is to end."""
        self._watch.watch(folder)
        while True:
            is_last = self._is_committed or self._is_stopped
            if (found := look()) is not None:
                self._watch.found()
                return found
            if is_last:
                raise _Cancelled
            self._watch.wait()


class _Cancelled(Exception):
    """The batch is not read ahead."""


def _stores(batch_stores: BatchStores) -> list[StateStore]:
    """Return the stores of a batch in a form that can be compared."""
    return [replace(store, commit_of=_no_commit) for store in batch_stores.stores]


def _no_commit(batch: int) -> BatchCommit:
    return WITHOUT_IDS
