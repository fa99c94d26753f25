"""HDFS, through pyarrow and libhdfs.

pyarrow has no exclusive create for HDFS, and its `move` of a file onto a file deletes the target first. The move of a
folder is exclusive: if the name is taken, HDFS moves it *into* the folder that has the name, under one lock, and a
POSIX filesystem refuses it. So `create` makes a folder with one file in it:

    epochs/7.json/content                       of the writer that got the name
    epochs/7.json/.7.json.<uuid>.tmp/content    of a later writer, until it removes the folder again; never read

`replace` and `open_new` make plain files. `replace` of an existing file is not atomic, because pyarrow has no atomic
move on HDFS: the file is missing for a moment, or until the writer's next start if the writer dies in that moment.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import pyarrow as pa
import pyarrow.fs
from pyarrow.fs import FileType

from state_backend.log.filesystems.filesystem import Filesystem

CONTENT = "content"


class ArrowFilesystem(Filesystem):
    """A filesystem of pyarrow that can move folders."""

    def __init__(self, filesystem: pyarrow.fs.FileSystem, root: str, uri: str) -> None:
        self._filesystem = filesystem
        self._base = root.rstrip("/")
        self.root = uri

    def _full(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base

    def _info(self, full: str) -> pyarrow.fs.FileInfo:
        (info,) = self._filesystem.get_file_info([full])
        return info

    def _file(self, path: str) -> pyarrow.fs.FileInfo | None:
        """Return the info of the file that has the content of a path; None if there is no such file."""
        info = self._info(self._full(path))
        if info.type == FileType.Directory:
            info = self._info(f"{self._full(path)}/{CONTENT}")
        return info if info.type == FileType.File else None

    def read(self, path: str) -> bytes | None:
        buffer = self.open_input(path)
        return None if buffer is None else buffer.to_pybytes()

    def open_input(self, path: str) -> pa.Buffer | None:
        with self._translated_errors("read", path):
            try:
                file = self._file(path)
                if file is None:
                    return None
                with self._filesystem.open_input_stream(file.path, compression=None) as stream:
                    return stream.read_buffer()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, path: str, content: bytes) -> bool:
        with self._translated_errors("create", path), self._temporary(path) as temporary:
            self._filesystem.create_dir(temporary, recursive=True)
            with self._filesystem.open_output_stream(f"{temporary}/{CONTENT}", compression=None) as stream:
                stream.write(content)
            return self._move_folder(temporary, self._full(path))

    def _move_folder(self, temporary: str, target: str) -> bool:
        """Move a folder to its name; False if the name is taken."""
        try:
            self._filesystem.move(temporary, target)
        except OSError:
            if self._info(target).type == FileType.NotFound:
                raise
            return False
        inside = f"{target}/{temporary.rpartition('/')[2]}"
        if self._info(inside).type == FileType.NotFound:
            return True
        self._filesystem.delete_dir(inside)
        return False

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        with self._translated_errors("write", path), self._written(path) as stream:
            yield stream

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        with self._translated_errors("replace", path), self._written(path) as stream:
            stream.write(content)

    @contextmanager
    def _written(self, path: str) -> Iterator[BinaryIO]:
        """Open a temporary file that gets its name, or replaces a file, when the block ends without an error."""
        with self._temporary(path) as temporary:
            with self._filesystem.open_output_stream(temporary, compression=None) as stream:
                yield stream
            self._filesystem.move(temporary, self._full(path))

    @contextmanager
    def _temporary(self, path: str) -> Iterator[str]:
        """Yield a temporary path in the folder of a file; remove the temporary at the end."""
        folder, _, name = self._full(path).rpartition("/")
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
        try:
            yield temporary
        finally:
            with suppress(OSError):
                self._remove(temporary)

    def names(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            selector = pyarrow.fs.FileSelector(self._full(path), allow_not_found=True)
            return [info.base_name for info in self._filesystem.get_file_info(selector)]

    def folders(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            selector = pyarrow.fs.FileSelector(self._full(path), allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        return [info.base_name for info in found if info.type == FileType.Directory]

    def size(self, path: str) -> int | None:
        with self._translated_errors("look at", path):
            file = self._file(path)
            return None if file is None else int(file.size)

    def modified_ns(self, path: str) -> int | None:
        with self._translated_errors("look at", path):
            file = self._file(path)
            return None if file is None else int(file.mtime_ns)

    def copy(self, source: str, target: str) -> bool:
        content = self.open_input(source)
        if content is None:
            return False
        if self.size(target) is None:
            with self.open_new(target) as file:
                file.write(content)
        return True

    def make_folder(self, path: str) -> None:
        with self._translated_errors("make the folder", path):
            self._filesystem.create_dir(self._full(path), recursive=True)

    def remove(self, path: str) -> None:
        with self._translated_errors("remove", path):
            self._remove(self._full(path))

    def _remove(self, full: str) -> None:
        with suppress(FileNotFoundError):
            info = self._info(full)
            if info.type == FileType.Directory:
                self._filesystem.delete_dir(full)
            elif info.type == FileType.File:
                self._filesystem.delete_file(full)
