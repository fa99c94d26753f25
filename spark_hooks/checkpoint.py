"""A query's checkpoint: the query's id, the committed batches, and their timestamps.

    metadata          {"id": the query's id}
    offsets/<batch>   written before the batch runs; the header has the batch's timestamp
    commits/<batch>   written when the batch has ended; from then on its state is valid

Used on the driver. Files are read through Hadoop's filesystems with Spark's own settings, so checkpoints may be on any
storage that Spark uses. A client of Spark Connect has no Hadoop: it reads the files with the filesystems of the change
log (`ClientCheckpoint`).
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote, urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import SparkSession

from spark_hooks.sessions import is_connect
from state_backend.checkpoint.files import NUMBER
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import CheckpointError, DescriptorError

PROVIDER_SETTING = "spark.sql.streaming.stateStore.providerClass"
MISSING_FILE = "java.io.FileNotFoundException"


class SparkCheckpoint:
    """The checkpoint of one query, read through Spark's filesystems. Thread-safe. Each call reads the files again."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        jvm: Any = spark._jvm
        self._jvm = jvm
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        try:
            path = jvm.org.apache.hadoop.fs.Path(location)
            self._filesystem = path.getFileSystem(configuration)
            self._root = self._filesystem.makeQualified(path)
        except Py4JError as error:
            raise CheckpointError(f"the checkpoint {location!r} cannot be read: {_reason(error)}") from None
        self.location: str = self._root.toString()
        if self._root.toUri().getRawPath() != self._root.toUri().getPath():
            raise _unsupported_path(location)

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint is on a local disk, where a check takes microseconds."""
        return urlsplit(self.location).scheme == "file"

    def query_id(self) -> str:
        """Return the query's id; CheckpointError if this is not a checkpoint."""
        stored = self._read("metadata")
        if stored is None:
            raise CheckpointError(f"{self.location} is not the checkpoint of a query: it has no file `metadata`")
        try:
            return str(json.loads(stored)["id"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{self.location}/metadata is not what Spark wrote") from None

    def is_committed(self, batch: int) -> bool:
        """Return whether a batch is committed, and not purged. Checks one file."""
        if self.is_local:
            return os.path.exists(f"{urlsplit(self.location).path}/commits/{batch}")
        try:
            return bool(self._filesystem.exists(self._path(f"commits/{batch}")))
        except Py4JError as error:
            raise self._unreadable(error) from None

    def newest(self) -> int | None:
        """Return the number of the last committed batch, or None."""
        return max((int(name) for name in self.names("commits") if name.isdecimal()), default=None)

    def batch_time_ms(self, batch: int) -> int | None:
        """Return the timestamp at which Spark planned a batch; None if the batch is purged.

        If the checkpoint is set back, Spark plans the batch again, with a new timestamp.
        """
        header = self._header(batch)
        return None if header is None else int(header["batchTimestampMs"])

    def uses_rocksdb(self, batch: int) -> bool:
        """Return whether RocksDB stores the state of a batch."""
        header = self._header(batch) or {}
        return str(header.get("conf", {}).get(PROVIDER_SETTING, "")).endswith("RocksDBStateStoreProvider")

    def format_version(self) -> str:
        """Return the format version of the state files: in version 2, file names have an id after the version."""
        names = [name.partition(".")[0] for name in self.names("state/0/0")]
        return "2" if any(name[:1].isdecimal() and "_" in name for name in names) else "1"

    def has_changelog(self, operator_id: int, store: str, batch: int) -> bool:
        """Return whether RocksDB wrote a changelog for a committed batch, and not only a snapshot."""
        version = batch + 1
        names = self.names(f"state/{operator_id}/0/{store}")
        return any(
            name.endswith(".changelog") and name.removesuffix(".changelog").partition("_")[0] == str(version)
            for name in names
        )

    def text(self, name: str) -> str | None:
        """Return the content of a file, or None if there is none."""
        return self._read(name)

    def name(self, path: str) -> str:
        """Return a path's full name."""
        return f"{self.location.rstrip('/')}/{path}"

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, unordered."""
        return [entry.getPath().getName() for entry in self._entries(folder) if entry.isDirectory()]

    def numbers(self, folder: str) -> list[int]:
        """Return the names in a folder that are numbers, in order."""
        return sorted(int(name) for name in self.names(folder) if NUMBER.fullmatch(name))

    def _header(self, batch: int) -> dict[str, Any] | None:
        """Return the header of a batch's offsets file, or None if the batch is purged."""
        stored = self._read(f"offsets/{batch}")
        if stored is None:
            return None
        try:
            header = json.loads(stored.splitlines()[1])  # the first line is the format's version
            return dict(header) | {"batchTimestampMs": int(header["batchTimestampMs"])}
        except (ValueError, KeyError, TypeError, IndexError):
            raise CheckpointError(
                f"{self.location}/offsets/{batch} is not in a form that this version of sparkis knows"
            ) from None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, unordered; an empty list if the folder does not exist."""
        return [entry.getPath().getName() for entry in self._entries(folder)]

    def _entries(self, folder: str) -> list[Any]:
        try:
            return list(self._filesystem.listStatus(self._path(folder)))
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() == MISSING_FILE:
                return []
            raise self._unreadable(error) from None
        except Py4JError as error:
            raise self._unreadable(error) from None

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root

    def _read(self, name: str) -> str | None:
        try:
            stream = self._filesystem.open(self._path(name))
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() == MISSING_FILE:
                return None
            raise self._unreadable(error) from None
        except Py4JError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Py4JError) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self.location} cannot be read: {_reason(error)}")


class ClientCheckpoint(SparkCheckpoint):
    """A checkpoint that a client of Spark Connect reads, from storage that the client can reach."""

    def __init__(self, location: str) -> None:
        self._files = open_filesystem(location)
        is_path = "://" not in self._files.root
        if is_path and quote(self._files.root) != self._files.root:
            raise _unsupported_path(location)
        self.location = f"file:{self._files.root}" if is_path else self._files.root

    def is_committed(self, batch: int) -> bool:
        return self._read(f"commits/{batch}") is not None

    def folders(self, folder: str) -> list[str]:
        return self._files.folders(folder)

    def names(self, folder: str) -> list[str]:
        return self._files.names(folder)

    def _read(self, name: str) -> str | None:
        stored = self._files.read(name)
        return None if stored is None else stored.decode()


def qualified(session: SparkSession | None, location: str) -> str:
    """Return a location with the scheme of Hadoop's default filesystem, unless that is the local one."""
    if session is None or is_connect(session) or urlsplit(location).scheme:
        return location
    jvm: Any = session._jvm
    filesystems = jvm.org.apache.hadoop.fs.FileSystem
    default = filesystems.getDefaultUri(session._jsparkSession.sessionState().newHadoopConf())
    path = jvm.org.apache.hadoop.fs.Path(location)
    return location if default.getScheme() == "file" else str(path.makeQualified(default, path).toString())


def checkpoint_at(session: SparkSession, location: str) -> SparkCheckpoint:
    """Return the checkpoint at a location, read through the session's Hadoop or by the client."""
    return ClientCheckpoint(location) if is_connect(session) else SparkCheckpoint(session, location)


def _unsupported_path(location: str) -> DescriptorError:
    return DescriptorError(
        f"the checkpoint {location!r} has a character in its path that URLs escape, such as a space, and Spark's state "
        f"reader does not find such a path; move the checkpoint, or give the path of a symbolic link without such "
        f"characters"
    )


def _reason(error: Py4JError) -> str:
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage())
    return str(error)
