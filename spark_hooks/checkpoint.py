"""A query's checkpoint as a reader needs it: which query it is of, which batches are committed, and when each began.

    metadata          {"id": the query's id}
    offsets/<batch>   written before a batch runs; its header has the batch's timestamp
    commits/<batch>   written when the batch is over: from then on its state counts

Runs on the driver. Files are read through Hadoop's filesystems, as Spark itself reads them, so any place that can hold
a checkpoint can be read here, with the settings that Spark has for it. A client of Spark Connect has none of them: it
reads the files as those of a log (`ClientCheckpoint`).
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import SparkSession

from spark_hooks.sessions import is_connect
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import DescriptorError, SparkisError

PROVIDER_SETTING = "spark.sql.streaming.stateStore.providerClass"
MISSING_FILE = "java.io.FileNotFoundException"


class CheckpointError(SparkisError):
    """A checkpoint cannot be read."""


class Checkpoint:
    """The folder of one query's checkpoint. Any thread may ask; every answer is read anew."""

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
            raise _odd_path(location)

    @property
    def is_local(self) -> bool:
        """Tell whether it lies on a disk of this machine, where looking costs nothing."""
        return urlsplit(self.location).scheme == "file"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return unquote(self._root.getName())

    def query_id(self) -> str:
        """Return the id of the query whose checkpoint this is; CheckpointError if it is none."""
        stored = self._read("metadata")
        if stored is None:
            raise CheckpointError(f"{self.location} is not the checkpoint of a query: it has no file `metadata`")
        try:
            return str(json.loads(stored)["id"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{self.location}/metadata is not what Spark wrote") from None

    def is_committed(self, batch: int) -> bool:
        """Tell whether a batch is over and not yet purged; one look at one file."""
        if self.is_local:
            return os.path.exists(f"{urlsplit(self.location).path}/commits/{batch}")
        try:
            return bool(self._filesystem.exists(self._path(f"commits/{batch}")))
        except Py4JError as error:
            raise self._unreadable(error) from None

    def newest(self) -> int | None:
        """Return the last committed batch, or None if there is none."""
        return max((int(name) for name in self._names("commits") if name.isdecimal()), default=None)

    def batch_time_ms(self, batch: int) -> int | None:
        """Return the timestamp that a batch was given when it was planned, or None if it is purged.

        A batch that was planned anew, after a checkpoint was set back, has another one.
        """
        header = self._header(batch)
        return None if header is None else int(header["batchTimestampMs"])

    def uses_rocksdb(self, batch: int) -> bool:
        """Tell whether a batch's state is kept by RocksDB."""
        header = self._header(batch) or {}
        return str(header.get("conf", {}).get(PROVIDER_SETTING, "")).endswith("RocksDBStateStoreProvider")

    def format_version(self) -> str:
        """Return which layout the state's files have: in the second their names hold an id beside the version."""
        names = [name.partition(".")[0] for name in self._names("state/0/0")]
        return "2" if any(name[:1].isdecimal() and "_" in name for name in names) else "1"

    def has_changelog(self, operator_id: int, store: str, batch: int) -> bool:
        """Tell whether RocksDB wrote down the changes of a committed batch, and not only a copy of its files."""
        version = batch + 1
        names = self._names(f"state/{operator_id}/0/{store}")
        return any(
            name.endswith(".changelog") and name.removesuffix(".changelog").partition("_")[0] == str(version)
            for name in names
        )

    def text(self, name: str) -> str | None:
        """Return the content of a file, or None if there is none."""
        return self._read(name)

    def _header(self, batch: int) -> dict[str, Any] | None:
        """Return what stands before a batch's offsets, or None if it is purged."""
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

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""
        try:
            return [entry.getPath().getName() for entry in self._filesystem.listStatus(self._path(folder))]
        except Py4JJavaError as error:
            if error.java_exception.getClass().getName() == MISSING_FILE:
                return []
            raise self._unreadable(error) from None
        except Py4JError as error:
            raise self._unreadable(error) from None

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

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


class ClientCheckpoint(Checkpoint):
    """A checkpoint that a client of Spark Connect reads by itself; it must be where the client reaches it."""

    def __init__(self, location: str) -> None:
        self._files = open_filesystem(location)
        is_path = "://" not in self._files.root
        if is_path and quote(self._files.root) != self._files.root:
            raise _odd_path(location)
        self.location = f"file:{self._files.root}" if is_path else self._files.root

    @property
    def name(self) -> str:
        return self.location.rstrip("/").rpartition("/")[2]

    def is_committed(self, batch: int) -> bool:
        return self._read(f"commits/{batch}") is not None

    def _names(self, folder: str) -> list[str]:
        return self._files.names(folder)

    def _read(self, name: str) -> str | None:
        stored = self._files.read(name)
        return None if stored is None else stored.decode()


def checkpoint_at(session: SparkSession, location: str) -> Checkpoint:
    """Return the checkpoint at a place, to be read as the session can."""
    return ClientCheckpoint(location) if is_connect(session) else Checkpoint(session, location)


def _odd_path(location: str) -> DescriptorError:
    return DescriptorError(
        f"the checkpoint {location!r} has a character in its path that is written in another way in a URL, such as a "
        f"space, and Spark's state reader does not find it there; move the checkpoint, or reach it by a symbolic link "
        f"with a plain name"
    )


def _reason(error: Py4JError) -> str:
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.getMessage())
    return str(error)
