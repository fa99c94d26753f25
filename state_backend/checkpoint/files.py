"""The files of one checkpoint, by paths relative to it. Errors of the storage become errors of the checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from state_backend.log.filesystems import Filesystem, open_filesystem
from state_backend.model.errors import CheckpointUnavailableError, LogUnavailableError

NUMBER = re.compile(r"\d{1,18}")

# Of a local file: its device and number, its size, and the times of its last changes.
FileIdentity = tuple[int, int, int, int, int]


class CheckpointFiles:
    """Reads files and folders. Each call reads the storage again."""

    def __init__(self, filesystem: Filesystem) -> None:
        self._filesystem = filesystem
        self.location = filesystem.root
        self.is_remote = "://" in self.location  # each request takes tens of milliseconds

    @classmethod
    def at(cls, location: str) -> CheckpointFiles:
        """Return the files at a path, or at an address such as s3://bucket/path."""
        try:
            return cls(open_filesystem(location))
        except LogUnavailableError as error:
            raise CheckpointUnavailableError(str(error).replace("the log", "the checkpoint", 1)) from None

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if there is no such file."""
        with self._translated():
            return self._filesystem.read(path)

    def buffer(self, path: str) -> pa.Buffer | None:
        """Return the content of a file, memory-mapped where possible; None if there is no such file."""
        with self._translated():
            return self._filesystem.open_input(path)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, unordered."""
        with self._translated():
            return self._filesystem.names(folder)

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, unordered."""
        with self._translated():
            return self._filesystem.folders(folder)

    def numbers(self, folder: str) -> list[int]:
        """Return the names in a folder that are numbers, in order: batches, operators, partitions."""
        return sorted(int(name) for name in self.names(folder) if NUMBER.fullmatch(name))

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        with self._translated():
            return self._filesystem.size(path)

    def modified_ns(self, path: str) -> int | None:
        """Return when a file was last written, in nanoseconds since 1970; None if there is no such file."""
        with self._translated():
            return self._filesystem.modified_ns(path)

    def identity(self, path: str) -> FileIdentity | None:
        """Return the identity of a local file; None if there is no such file.

        Another file that gets the path has another identity. The file is opened, because NFS may answer a look at a
        path from its cache.
        """
        try:
            file = os.open(self.name(path), os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointUnavailableError(f"cannot read {self.name(path)}: {error}") from error
        try:
            found = os.fstat(file)
        finally:
            os.close(file)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def name(self, path: str) -> str:
        """Return a file's full name, for errors."""
        return f"{self.location.rstrip('/')}/{path}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except LogUnavailableError as error:
            raise CheckpointUnavailableError(
                str(error).replace("in the log", "in the checkpoint", 1)
            ) from error.__cause__
