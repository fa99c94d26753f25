"""The local filesystem for pyarrow, with the rename rules of HDFS (FSDirRenameOp and pyarrow's `hdfs.cc`).

A move to an existing folder goes into it. A move of a file onto a file deletes the target first: pyarrow
does that, HDFS itself refuses. Both are atomic for others: HDFS holds its lock meanwhile, as does a lock here.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from pyarrow.fs import FileSelector, FileSystemHandler, FileType, LocalFileSystem, PyFileSystem


class _Handler(FileSystemHandler):
    def __init__(self) -> None:
        self._local = LocalFileSystem()
        self._lock = threading.Lock()

    def get_type_name(self) -> str:
        return "like-hdfs"

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: FileSelector) -> Any:
        return self._local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._local.delete_file(path)

    def copy_file(self, src: str, dest: str) -> None:
        self._local.copy_file(src, dest)

    def move(self, src: str, dest: str) -> None:
        with self._lock:
            source, target = self._local.get_file_info([src, dest])
            if target.type == FileType.Directory:
                os.rename(src, os.path.join(dest, os.path.basename(src)))
            elif target.type == FileType.File and source.type == FileType.Directory:
                raise OSError(f"cannot rename {src} to {dest}")
            else:
                os.replace(src, dest)

    def normalize_path(self, path: str) -> str:
        return str(self._local.normalize_path(path))

    def open_input_stream(self, path: str) -> Any:
        return self._local.open_input_stream(path, compression=None)

    def open_input_file(self, path: str) -> Any:
        return self._local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._local.open_output_stream(path, compression=None)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


def like_hdfs() -> PyFileSystem:
    """Return a pyarrow filesystem that renames as HDFS does."""
    return PyFileSystem(_Handler())
