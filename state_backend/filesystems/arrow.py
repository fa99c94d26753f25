"""Any other filesystem that pyarrow knows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import pyarrow as pa
import pyarrow.fs

from state_backend.filesystems.filesystem import Filesystem

OBJECT_STORES = ("s3", "gcs", "abfs")


class ArrowFilesystem(Filesystem):
    """Any filesystem of pyarrow.

    In an object store a file appears as a whole when its stream is closed; elsewhere it is written under another name.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, root: str, uri: str) -> None:
        self._filesystem = filesystem
        self._base = root.rstrip("/")
        self._has_whole_puts = filesystem.type_name in OBJECT_STORES
        self.root = uri

    def _full(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _is_there(self, path: str) -> bool:
        (info,) = self._filesystem.get_file_info([self._full(path)])
        return bool(info.type != pyarrow.fs.FileType.NotFound)

    def read(self, path: str) -> bytes | None:
        buffer = self.open_input(path)
        return None if buffer is None else buffer.to_pybytes()

    def open_input(self, path: str) -> pa.Buffer | None:
        with self._explained("read", path):
            try:
                with self._filesystem.open_input_stream(self._full(path), compression=None) as stream:
                    return stream.read_buffer()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, path: str, content: bytes) -> bool:
        with self._explained("create", path):
            if self._is_there(path):
                return False
            with self._written(path) as stream:
                stream.write(content)
        return True

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        with self._explained("write", path), self._written(path) as stream:
            yield stream

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        with self._explained("replace", path), self._written(path) as stream:
            stream.write(content)

    @contextmanager
    def _written(self, path: str) -> Iterator[BinaryIO]:
        """Open a file that gets its name, or another one's place, when the block ends without an error.

        An object store keeps what was written before an error, under the name; only change files are written in more
        than one piece, and one that no epoch lists does not exist.
        """
        target = self._full(path)
        if self._has_whole_puts:
            with self._filesystem.open_output_stream(target, compression=None) as stream:
                yield stream
            return
        temporary = f"{target.rpartition('/')[0]}/.{uuid.uuid4().hex}.tmp"
        try:
            with self._filesystem.open_output_stream(temporary, compression=None) as stream:
                yield stream
            self._move_over(temporary, target)
        finally:
            with suppress(OSError):
                self._filesystem.delete_file(temporary)

    def _move_over(self, temporary: str, target: str) -> None:
        try:
            self._filesystem.move(temporary, target)
        except OSError:  # HDFS does not move onto a file
            self._filesystem.delete_file(target)
            self._filesystem.move(temporary, target)

    def names(self, path: str) -> list[str]:
        with self._explained("list", path):
            selector = pyarrow.fs.FileSelector(self._full(path), allow_not_found=True)
            return [info.base_name for info in self._filesystem.get_file_info(selector)]

    def size(self, path: str) -> int | None:
        with self._explained("look at", path):
            (info,) = self._filesystem.get_file_info([self._full(path)])
            return int(info.size) if info.type == pyarrow.fs.FileType.File else None

    def copy(self, source: str, target: str) -> bool:
        with self._explained("copy", source):
            if not self._is_there(source):
                return False
            if not self._is_there(target):
                self._filesystem.copy_file(self._full(source), self._full(target))
        return True

    def make_folder(self, path: str) -> None:
        with self._explained("make the folder", path):
            self._filesystem.create_dir(self._full(path), recursive=True)

    def remove(self, path: str) -> None:
        with self._explained("remove", path), suppress(FileNotFoundError):
            (info,) = self._filesystem.get_file_info([self._full(path)])
            if info.type == pyarrow.fs.FileType.Directory:
                self._filesystem.delete_dir(self._full(path))
            elif info.type == pyarrow.fs.FileType.File:
                self._filesystem.delete_file(self._full(path))
