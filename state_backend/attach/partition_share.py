"""Reads partitions in several processes where one core is not enough: those of a large state, and of a large batch.

One core decodes and writes half a million keys per second. `python -m state_backend.attach.partition_share` is one of
the processes. It reads `PartitionShare`s from stdin until stdin is closed, and replies to each on stdout with what it
has written. Both are pickled: the pipes are between processes of one user.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from state_backend.attach.change_writer import ChangeWriter
from state_backend.attach.state_encoder import StateEncoder
from state_backend.checkpoint.checkpoint import BatchStores, Checkpoint
from state_backend.checkpoint.stores import Decoded
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.epochs import EpochContent
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import CheckpointError, SparkisError
from state_backend.process_memory import retain_free_memory

# Each process takes some hundred MB.
PROCESSES_MAX = 8
# After this time, processes read the remaining partitions. A process takes half a second to start.
PARALLEL_AFTER_S = 2.0
# The same while the processes run already (guess).
PARALLEL_AGAIN_AFTER_S = 0.2
# Processes that have had nothing to do for this time are ended (guess).
IDLE_S_MAX = 60.0

# The number of a store of a batch, and a partition of it.
StorePartition = tuple[int, int]


@dataclass(frozen=True)
class PartitionShare:
    """Some partitions of the state, and the folder of a log for their change files.

    Args:
        is_complete: The state as of the batch is read, not the changes that the batch made.
    """

    checkpoint: str
    states: tuple[StateEncoder, ...]
    batch: int
    is_complete: bool
    partitions: tuple[StorePartition, ...]
    log: str
    folder: str

    def write(self) -> EpochContent:
        """Read and write the partitions."""
        writer = ChangeWriter(self.states)
        batch_stores = Checkpoint.at(self.checkpoint).batch_stores(self.batch).only(writer.sources)
        target = ChangeFileWriter(open_filesystem(self.log), self.folder, self.batch)
        rows = rows_of(batch_stores, self.partitions, is_complete=self.is_complete)
        return writer.write(target, rows, is_complete=self.is_complete)


def partitions_of(batch_stores: BatchStores) -> list[StorePartition]:
    """Return all partitions of all stores."""
    return [(number, partition) for number, store in enumerate(batch_stores.stores) for partition in store.partitions]


def rows_of(batch_stores: BatchStores, partitions: Iterable[StorePartition], *, is_complete: bool) -> Decoded:
    """Yield the whole state of some partitions, or the changes that the batch made to them."""
    for number, group in groupby(partitions, key=itemgetter(0)):
        store = batch_stores.stores[number]
        yield from (store.whole if is_complete else store.changes)(
            (partition for _, partition in group), batch_stores.batch
        )


def processes_for(partitions: Collection[StorePartition]) -> int:
    """Return how many processes read some partitions: at most one per core, PROCESSES_MAX, and the partitions."""
    return min(os.cpu_count() or 1, len(partitions), PROCESSES_MAX)


class ShareProcesses:
    """The processes of one reader. They start when they are first needed, and stay for the next large batch.

    One thread uses them; any thread may call `close`, which waits for the current read.
    """

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._used_s = 0.0
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that were started and not ended."""
        return [child.pid for child in self._children]

    @property
    def needed_after_s(self) -> float:
        """The time after which a read on one core is continued by the processes."""
        return PARALLEL_AGAIN_AFTER_S if self._children else PARALLEL_AFTER_S

    def write(self, share: PartitionShare) -> EpochContent:
        """Divide a share among the processes; return what they wrote, as one. After an error, all are ended."""
        count = processes_for(share.partitions)
        with self._lock:
            try:
                while len(self._children) < count:
                    self._children.append(_start())
                children = self._children[:count]
                for number, child in enumerate(children):
                    _send(child, replace(share, partitions=share.partitions[number::count]))
                written = [_receive(child) for child in children]
            except BaseException:
                self._end()
                raise
            self._used_s = time.monotonic()
        return joined(written)

    def end_idle(self) -> None:
        """End the processes if they have had nothing to do for a time."""
        if self._children and time.monotonic() - self._used_s > IDLE_S_MAX:
            self.close()

    def close(self) -> None:
        """End the processes. The next `write` starts others."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        while self._children:
            # To close the pipe of a process that has ended is to write the rest to it once more.
            with suppress(BrokenPipeError), self._children.pop() as child:
                child.kill()


def joined(written: Sequence[EpochContent]) -> EpochContent:
    """Return the parts of an epoch's content as one."""
    return EpochContent(
        [file for each in written for file in each.files],
        [stream for each in written for stream in each.inline],
        sum(each.rows for each in written),
        skipped_rows=sum(each.skipped_rows for each in written),
    )


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "state_backend.attach.partition_share"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _send(child: subprocess.Popen[bytes], share: PartitionShare) -> None:
    assert child.stdin is not None
    with suppress(OSError):  # the process has ended: there is no reply
        child.stdin.write(pickle.dumps(share))
        child.stdin.flush()


def _receive(child: subprocess.Popen[bytes]) -> EpochContent:
    assert child.stdout is not None
    try:
        content = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        code = child.wait()
        raise CheckpointError(f"a process that reads a part of the state ended with the code {code}") from None
    if isinstance(content, SparkisError):
        raise content
    assert isinstance(content, EpochContent)
    return content


def main() -> None:
    """Read `PartitionShare`s from stdin, and write the partitions of each; send what was written to stdout."""
    retain_free_memory()
    while True:
        try:
            share: PartitionShare = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reply: EpochContent | SparkisError
        try:
            reply = share.write()
        except SparkisError as error:
            reply = error
        pickle.dump(reply, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
