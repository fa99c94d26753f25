"""The files of Spark's HDFS-backed state store provider, in a folder of one store and partition.

    N.delta      the changes of version N
    N.snapshot   the whole state as of version N

Version N is the state after batch N - 1. Version 0 is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from state_backend.checkpoint.changes_over_snapshot import merge_changes
from state_backend.checkpoint.compression import decompressed
from state_backend.checkpoint.decoding import RowFormat, without_delete_checksums
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.records import Records, delta_records
from state_backend.model.errors import PurgedVersionError

SNAPSHOT = re.compile(r"(\d{1,18})\.snapshot")


class HdfsStore:
    """The versions of one store in one partition."""

    def __init__(self, files: CheckpointFiles, folder: str, has_checksums: bool) -> None:
        self._files = files
        self._folder = folder
        self._format = RowFormat(has_version=False, has_checksums=has_checksums, name=files.name(folder))

    def name_of_changes(self, version: int, unique_id: str | None) -> str:
        """Return the name of a version's delta."""
        return f"{version}.delta"

    def has_changes(self, version: int, unique_id: str | None, committed_ns: int | None) -> bool:
        """Return True: this provider writes the changes of each version."""
        return True

    def changes(self, version: int, unique_id: str | None) -> Iterator[Records]:
        """Yield the changes that made a version, in their order."""
        return self._opened(self.name_of_changes(version, unique_id))()

    def has_snapshot(self, version: int, unique_id: str | None) -> bool:
        """Return whether a version has a snapshot."""
        return self._files.size(f"{self._folder}/{version}.snapshot") is not None

    def difference(self, version: int, unique_id: str | None, id_before: str | None) -> Iterator[Records]:
        """Never called, because `has_changes` is true."""
        raise NotImplementedError

    def whole(self, version: int, unique_id: str | None) -> Iterator[Records]:
        """Yield the whole state as of a version: puts of distinct keys."""
        names = self._files.names(self._folder)
        snapshots = [int(match[1]) for name in names if (match := SNAPSHOT.fullmatch(name))]
        base = max((number for number in snapshots if number <= version), default=0)
        deltas = [self._opened(f"{each}.delta") for each in range(base + 1, version + 1)]
        return merge_changes(self._opened(f"{base}.snapshot")() if base else (), deltas)

    def families(self) -> dict[str, int]:
        """Return nothing: this provider has no column families."""
        return {}

    def _opened(self, name: str) -> Callable[[], Iterator[Records]]:
        """Open a file, and return what reads its records. Another file may get its name meanwhile."""
        path = f"{self._folder}/{name}"
        content = self._files.buffer(path)
        full_name = self._files.name(path)
        if content is None:
            raise PurgedVersionError(f"{full_name} is gone: Spark has removed it, or it was never written")

        def read() -> Iterator[Records]:
            return without_delete_checksums(delta_records(decompressed(content, full_name), full_name), self._format)

        return read
