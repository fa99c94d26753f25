"""The files of Spark's RocksDB state store provider, in a folder of one store and partition.

    format 1  N.changelog, N.zip              overwritten if a batch runs again
    format 2  N_<id>.changelog, N_<id>.zip    the commit of batch N - 1 has the id; a change log's header names the ids
                                              of the versions before it, back to the last snapshot

A version has a change log, unless the query writes none; then each version has a zip. Version N is the state after
batch N - 1. Version 0 is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa

from state_backend.checkpoint.changes_over_snapshot import merge_changes
from state_backend.checkpoint.compression import decompressed
from state_backend.checkpoint.decoding import RowFormat, without_delete_checksums
from state_backend.checkpoint.difference import difference
from state_backend.checkpoint.files import CheckpointFiles
from state_backend.checkpoint.records import Records, change_log_records, lineage_of
from state_backend.checkpoint.snapshots import SnapshotZip, read_snapshot_zip, snapshot_records
from state_backend.model.errors import PurgedVersionError

ZIP = re.compile(r"(\d{1,18})(?:_[\w-]+)?\.zip")


class RocksDbStore:
    """The versions of one store in one partition."""

    def __init__(self, files: CheckpointFiles, folder: str, has_checksums: bool) -> None:
        self._files = files
        self._folder = folder
        self._format = RowFormat(has_version=True, has_checksums=has_checksums, name=files.name(folder))

    def name_of_changes(self, version: int, unique_id: str | None) -> str:
        """Return the name of a version's change log."""
        return f"{_stem(version, unique_id)}.changelog"

    def has_changes(self, version: int, unique_id: str | None, committed_ns: int | None) -> bool | None:
        """Return whether a version has a change log that counts; None if only other partitions can tell.

        In format 1, an earlier run of the batch may have left one, if the query has stopped writing them, or begun. As
        in Spark, a zip counts more than the change log of its version. A query with change logs writes zips later, and
        from them: so a zip that is newer than the batch's commit agrees with the change log. A zip that is older is of
        a query without change logs, or of a batch that took long: Spark's maintenance does not wait for the commit.
        """
        path = f"{self._folder}/{_stem(version, unique_id)}"
        log_ns = self._files.modified_ns(f"{path}.changelog")
        if log_ns is None:
            # The error of a missing file names the change log, which is the usual one.
            return self._files.size(f"{path}.zip") is None
        if unique_id is not None or committed_ns is None:
            return True
        zip_ns = self._files.modified_ns(f"{path}.zip")
        return True if zip_ns is None or zip_ns > committed_ns else None

    def changes(self, version: int, unique_id: str | None) -> Iterator[Records]:
        """Yield the changes that made a version, in their order."""
        name = _stem(version, unique_id)
        content = self._files.buffer(f"{self._folder}/{name}.changelog")
        if content is None:
            raise self._gone(f"{name}.changelog")
        return self._records(name, content)

    def has_snapshot(self, version: int, unique_id: str | None) -> bool:
        """Return whether a version has a zip."""
        return self._files.size(f"{self._folder}/{_stem(version, unique_id)}.zip") is not None

    def difference(self, version: int, unique_id: str | None, id_before: str | None) -> Iterator[Records]:
        """Yield the changes that made a version, found by comparing its zip with the one before."""
        older = () if version == 1 else self._pairs(version - 1, id_before)
        return difference(older, self._pairs(version, unique_id))

    def _pairs(self, version: int, unique_id: str | None) -> Iterator[Records]:
        return snapshot_records(self._files, self._snapshot(f"{_stem(version, unique_id)}.zip"))

    def whole(self, version: int, unique_id: str | None) -> Iterator[Records]:
        """Yield the whole state as of a version: puts of distinct keys."""
        if version == 0:
            return iter(())
        base, names = self._chain(version, unique_id)
        change_logs = [self._change_log(name) for name in names]
        return merge_changes(() if base is None else snapshot_records(self._files, self._snapshot(base)), change_logs)

    def families(self) -> dict[str, int]:
        """Return the numbers of the column families by name, as the newest snapshot has them."""
        names = sorted(self._zips(), key=lambda name: int(name.partition("_")[0].partition(".")[0]), reverse=True)
        for name in names:
            return self._snapshot(name).families
        raise self._gone("the first snapshot, which names the column families,")

    def _chain(self, version: int, unique_id: str | None) -> tuple[str | None, list[str]]:
        """Return the zip to begin with, and the change logs after it up to a version, oldest first."""
        names: list[str] = []
        zips = set(self._zips())
        while version > 0 and f"{_stem(version, unique_id)}.zip" not in zips:
            name = _stem(version, unique_id)
            names.append(name)
            if unique_id is not None:
                unique_id = self._id_before(name, version)
            version -= 1
        return (f"{_stem(version, unique_id)}.zip" if version else None), names[::-1]

    def _id_before(self, name: str, version: int) -> str | None:
        """Return the id of the version before; None if that version is of format 1, or version 0."""
        path = f"{self._folder}/{name}.changelog"
        content = self._files.buffer(path)
        if content is None:
            raise self._gone(f"{name}.changelog")
        lineage = lineage_of(decompressed(content, self._files.name(path)), self._files.name(path))
        return dict(lineage).get(version - 1)

    def _change_log(self, name: str) -> Callable[[], Iterator[Records]]:
        """Open a change log, and return what reads its records. Another file may get its name meanwhile."""
        content = self._files.buffer(f"{self._folder}/{name}.changelog")
        if content is None:
            raise self._gone(f"{name}.changelog")
        return partial(self._records, name, content)

    def _records(self, name: str, content: pa.Buffer) -> Iterator[Records]:
        full_name = self._files.name(f"{self._folder}/{name}.changelog")
        return without_delete_checksums(change_log_records(decompressed(content, full_name), full_name), self._format)

    def _zips(self) -> list[str]:
        return [name for name in self._files.names(self._folder) if ZIP.fullmatch(name)]

    def _snapshot(self, name: str) -> SnapshotZip:
        return read_snapshot_zip(self._files, self._folder, name)

    def _gone(self, name: str) -> PurgedVersionError:
        return PurgedVersionError(
            f"{self._files.name(self._folder)}/{name} is gone: Spark has removed it, or never wrote it"
        )


def _stem(version: int, unique_id: str | None) -> str:
    return str(version) if unique_id is None else f"{version}_{unique_id}"
