"""Reads a large state in several processes, each of which reads some partitions.

One core decodes and writes half a million keys per second. `python -m state_backend.attach.shard` is one of the
processes. It reads a `Share` from stdin, and writes the result to stdout. Both are pickled: the pipes are between
processes of one user.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from state_backend.attach.record_writer import RecordWriter
from state_backend.attach.rows import BoundState
from state_backend.checkpoint.checkpoint import Checkpoint, Layout
from state_backend.checkpoint.stores import Decoded
from state_backend.log.epochs import EpochContent
from state_backend.log.filesystems import open_filesystem
from state_backend.log.log_writer import ChangeFileWriter
from state_backend.model.errors import CheckpointError, SparkisError

# Each process takes some hundred MB.
PROCESSES_MAX = 8

# The number of a store in a layout, and a partition of it.
Place = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """Some partitions of the state as of a batch, and the folder of a log for their change files."""

    checkpoint: str
    states: tuple[BoundState, ...]
    batch: int
    places: tuple[Place, ...]
    log: str
    folder: str

    def write(self) -> EpochContent:
        """Read and write the partitions."""
        layout = Checkpoint.at(self.checkpoint).layout(self.batch)
        target = ChangeFileWriter(open_filesystem(self.log), self.folder, self.batch)
        return RecordWriter(self.states).write(target, rows_at(layout, self.places), is_whole=True)


def places_of(layout: Layout) -> list[Place]:
    """Return all partitions of all stores."""
    return [(number, partition) for number, store in enumerate(layout.stores) for partition in store.partitions]


def rows_at(layout: Layout, places: Iterable[Place]) -> Decoded:
    """Yield the whole state of some partitions."""
    for number, group in groupby(places, key=itemgetter(0)):
        yield from layout.stores[number].whole((partition for _, partition in group), layout.batch)


def processes_for(places: Collection[Place]) -> int:
    """Return how many processes read some partitions: one per core, but not more than partitions or PROCESSES_MAX."""
    return min(os.cpu_count() or 1, len(places), PROCESSES_MAX)


def write_in_processes(share: Share) -> EpochContent:
    """Divide a share among processes; return what they wrote, as one."""
    count = processes_for(share.places)
    command = [sys.executable, "-m", "state_backend.attach.shard"]
    with ExitStack() as running:
        children = []
        for number in range(count):
            child = running.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            running.callback(child.kill)
            assert child.stdin is not None
            with child.stdin:
                pickle.dump(replace(share, places=share.places[number::count]), child.stdin)
            children.append(child)
        written = [_answer(child) for child in children]
    return joined(written)


def joined(written: Sequence[EpochContent]) -> EpochContent:
    """Return the parts of an epoch's content as one."""
    return EpochContent(
        [file for each in written for file in each.files],
        [stream for each in written for stream in each.inline],
        sum(each.rows for each in written),
    )


def _answer(child: subprocess.Popen[bytes]) -> EpochContent:
    assert child.stdout is not None
    answer = child.stdout.read()
    if not answer:
        raise CheckpointError(f"a process that reads a part of the state ended with the code {child.wait()}")
    content = pickle.loads(answer)
    if isinstance(content, SparkisError):
        raise content
    assert isinstance(content, EpochContent)
    return content


def main() -> None:
    """Read a `Share` from stdin, write its partitions, and send the result to stdout."""
    share: Share = pickle.load(sys.stdin.buffer)
    answer: EpochContent | SparkisError
    try:
        answer = share.write()
    except SparkisError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
