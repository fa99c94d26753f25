"""Writes the changes of one task: a few rows inline in the epoch's file, more as a change file (see `epochs`)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from itertools import chain
from typing import BinaryIO
from zlib import crc32

import pyarrow as pa

from state_backend.log.epochs import ChangeFile, slots_of_run, to_stream
from state_backend.log.filesystems import Filesystem
from state_backend.model.records import schema

# Up to this size a task's changes are inline in the epoch's file, so that a small epoch is one file.
INLINE_BYTES_MAX = 64 << 10
# A whole state, in a snapshot or from a checkpoint, is written in files of about this size (guess).
STATE_FILE_BYTES_MAX = 256 << 20


class _ChecksummedFile:
    """A file object that computes the size and the checksum of the written bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0
        self.checksum = 0
        self.closed = False

    def write(self, content: bytes | memoryview) -> int:
        self.checksum = crc32(content, self.checksum)
        self.size += len(content)
        self._file.write(content)
        return len(content)

    def flush(self) -> None:
        self._file.flush()


class ChangeFileWriter:
    """Writes one task's runs: a few as an inline stream of the epoch, more as a change file.

    Used on executors. If the task fails, no epoch lists its file.
    """

    def __init__(self, filesystem: Filesystem, folder: str, epoch: int) -> None:
        self._filesystem = filesystem
        self._folder = folder
        self._epoch = epoch

    def write(self, runs: Iterable[pa.RecordBatch]) -> tuple[ChangeFile | None, bytes | None]:
        """Write all runs; return (file, None), (None, Arrow stream for the epoch), or two Nones if there is no row."""
        buffered: list[pa.RecordBatch] = []
        size = 0
        not_empty = (run for run in runs if run.num_rows)
        for run in not_empty:
            buffered.append(run)
            size += run.nbytes
            if size > INLINE_BYTES_MAX:
                return self.write_file(chain(buffered, not_empty)), None
        return None, to_stream(buffered) if buffered else None

    def write_file(self, runs: Iterable[pa.RecordBatch]) -> ChangeFile:
        """Write runs as a file, even if there are few."""
        name = f"{self._epoch}-{uuid.uuid4().hex}.arrow"
        slots: list[tuple[int, int, int]] = []
        with self._filesystem.open_new(f"{self._folder}/{name}") as file:
            checksummed = _ChecksummedFile(file)
            with pa.ipc.new_file(pa.PythonFile(checksummed, mode="w"), schema()) as writer:
                for run in runs:
                    writer.write_batch(run)
                    slots.append(slots_of_run(run))
        rows = sum(run_rows for _, _, run_rows in slots)
        return ChangeFile(name, checksummed.size, checksummed.checksum, rows, tuple(slots))
