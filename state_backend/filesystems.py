"""Where a change log lies: the few file operations it needs, atomic and durable, once per kind of filesystem.

`create` and `open_new` never overwrite: of two writers of one name one wins, and nobody sees half a file. `replace`
overwrites as a whole. Both are on the disk when they return. (Seen: pyarrow's own `open_output_stream` and `move`
overwrite silently, so they are not used for this on a local disk.)

    LocalFilesystem   a folder of this machine, or one mounted on all of them
    ArrowFilesystem   any other filesystem that pyarrow knows by a URI: s3://, gs://, hdfs:// ...; one PUT is atomic
                      there, but pyarrow has no conditional PUT: `create` looks first, and the writer's term (see
                      `change_log`) is what keeps two writers apart

All paths are relative to the log's root, with `/`. An OSError becomes LogUnavailableError; a missing file does not.
"""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from state_backend.errors import LogUnavailableError

OBJECT_STORES = ("s3", "gcs", "abfs")


class Filesystem(ABC):
    """File operations below one root."""

    root: str

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return a whole file, or None if there is none."""

    @abstractmethod
    def open_input(self, path: str) -> pa.Buffer | None:
        """Return a whole file as a buffer, mapped where that is possible, or None if there is none."""

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Write a new file; False, and nothing is changed, if the name is taken."""

    @abstractmethod
    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; it gets its name when the block ends without an error."""
        raise NotImplementedError
        yield

    @abstractmethod
    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        """Write a file, whether or not it is there."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the names in a folder, unordered; empty if there is no such folder."""

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; it may be there."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it, if it is there. Others may remove it at the same time."""

    @contextmanager
    def _explained(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise LogUnavailableError(f"cannot {doing} {path or '.'} in the log {self.root}: {reason}") from error


class LocalFilesystem(Filesystem):
    """A folder: temporary file, fsync, link (which fails if the name is taken), fsync of the folder."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().absolute()
        self.root = str(self._root)

    def read(self, path: str) -> bytes | None:
        with self._explained("read", path):
            try:
                return (self._root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open_input(self, path: str) -> pa.Buffer | None:
        with self._explained("read", path):
            try:
                with pa.memory_map(str(self._root / path)) as mapped:
                    return mapped.read_buffer()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, path: str, content: bytes) -> bool:
        with self._explained("create", path), self._temporary(path, content, is_durable=True) as temporary:
            try:
                os.link(temporary, self._root / path)
            except FileExistsError:
                return False
            self._sync_folder(path)
        return True

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        target = self._root / path
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        with self._explained("write", path):
            try:
                with open(temporary, "xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, target)
                self._sync_folder(path)
            finally:
                temporary.unlink(missing_ok=True)

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        with self._explained("replace", path), self._temporary(path, content, is_durable) as temporary:
            os.replace(temporary, self._root / path)
            if is_durable:
                self._sync_folder(path)

    def names(self, path: str) -> list[str]:
        with self._explained("list", path):
            try:
                return os.listdir(self._root / path)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def make_folder(self, path: str) -> None:
        with self._explained("make the folder", path):
            (self._root / path).mkdir(parents=True, exist_ok=True)
            for folder in [path, *map(str, PurePosixPath(path).parents)][:-1]:
                self._sync_folder(folder)

    def remove(self, path: str) -> None:
        with self._explained("remove", path):
            target = self._root / path
            while target.is_dir():
                with suppress(FileNotFoundError):  # somebody else removed part of it
                    shutil.rmtree(target)
            target.unlink(missing_ok=True)

    @contextmanager
    def _temporary(self, path: str, content: bytes, is_durable: bool) -> Iterator[Path]:
        temporary = (self._root / path).with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
            yield temporary
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _sync_folder(self, path: str) -> None:
        """Make a name in the folder that holds `path` durable."""
        folder = os.open((self._root / path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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


def open_filesystem(root: str | Path) -> Filesystem:
    """Return the filesystem for a log root: a path, a file:// URI, or any URI that pyarrow knows."""
    text = str(root)
    if text.startswith("file:"):  # file:/path, as Hadoop writes it, or file:///path
        return LocalFilesystem(unquote(urlsplit(text).path))
    if "://" not in text:
        return LocalFilesystem(text)
    try:
        filesystem, base = pyarrow.fs.FileSystem.from_uri(text)
    except (pa.ArrowInvalid, OSError) as error:
        raise LogUnavailableError(f"cannot open the log {text}: {error}") from error
    return ArrowFilesystem(filesystem, base, text)
