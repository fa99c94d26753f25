"""A local folder, or a folder that is mounted on all machines."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from state_backend.log.filesystems.filesystem import Filesystem

if TYPE_CHECKING:
    import pyarrow as pa

# The errors of `link` on filesystems without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
NO_EXCLUSIVE_CREATE = (
    "its filesystem has neither hard links nor a rename that does not overwrite, so two writers could not detect each "
    "other. If an object store is mounted there, give its own address (s3://, gs://, abfss://) instead; otherwise put "
    "the log on a local disk or on NFS"
)
# From linux/fcntl.h and linux/fs.h.
AT_FDCWD = -100
RENAME_NOREPLACE = 1


class LocalFilesystem(Filesystem):
    """A folder. A new file is written under a temporary name. After fsync it gets its name, and its folder fsync."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().absolute()
        self.root = str(self._root)

    def local_folder(self, path: str) -> str | None:
        return str(self._root / path)

    def read(self, path: str) -> bytes | None:
        with self._translated_errors("read", path):
            try:
                return (self._root / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open_input(self, path: str) -> pa.Buffer | None:
        import pyarrow as pa

        with self._translated_errors("read", path):
            try:
                with pa.memory_map(str(self._root / path)) as mapped:
                    return mapped.read_buffer()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(self, path: str, content: bytes) -> bool:
        with self._translated_errors("create", path), self._temporary(path, content, is_durable=True) as temporary:
            try:
                _name_file(temporary, self._root / path)
            except FileExistsError:
                return False
            self._sync_folder(path)
        return True

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        target = self._root / path
        temporary = _temporary_of(target)
        with self._translated_errors("write", path):
            try:
                with open(temporary, "xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                _name_file(temporary, target)
                self._sync_folder(path)
            finally:
                temporary.unlink(missing_ok=True)

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        with self._translated_errors("replace", path), self._temporary(path, content, is_durable) as temporary:
            os.replace(temporary, self._root / path)
            if is_durable:
                self._sync_folder(path)

    def names(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            try:
                return os.listdir(self._root / path)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def folders(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            try:
                with os.scandir(self._root / path) as entries:
                    return [entry.name for entry in entries if entry.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, path: str) -> int | None:
        found = self._stat(path)
        return None if found is None else found.st_size

    def modified_ns(self, path: str) -> int | None:
        found = self._stat(path)
        return None if found is None else found.st_mtime_ns

    def _stat(self, path: str) -> os.stat_result | None:
        with self._translated_errors("look at", path):
            try:
                return os.stat(self._root / path)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def copy(self, source: str, target: str) -> bool:
        with self._translated_errors("copy", source):
            try:
                try:
                    os.link(self._root / source, self._root / target)
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    with self._temporary(target, (self._root / source).read_bytes(), is_durable=True) as temporary:
                        _name_file(temporary, self._root / target)
            except FileExistsError:
                pass
            except FileNotFoundError:
                if (self._root / source).exists():
                    raise  # the target's folder is missing
                return False
            self._sync_folder(target)
        return True

    def make_folder(self, path: str) -> None:
        with self._translated_errors("make the folder", path):
            target = self._root / path
            above = [folder for folder in self._root.parents if not folder.exists()]
            target.mkdir(parents=True, exist_ok=True)
            inside = [target, *target.parents]
            for folder in [*inside[: inside.index(self._root) + 1], *above]:
                self._sync_folder(folder)

    def remove(self, path: str) -> None:
        with self._translated_errors("remove", path):
            target = self._root / path
            while target.is_dir():
                with suppress(FileNotFoundError):  # another process removed part of it
                    shutil.rmtree(target)
            target.unlink(missing_ok=True)

    @contextmanager
    def _temporary(self, path: str, content: bytes, is_durable: bool) -> Iterator[Path]:
        temporary = _temporary_of(self._root / path)
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

    def _sync_folder(self, path: str | Path) -> None:
        """Make a name in the folder that holds `path` durable."""
        target = self._root / path
        try:
            folder = os.open(target.parent, os.O_RDONLY)
        except PermissionError:
            if target != self._root:
                raise
            return  # another user made the root, and this user cannot open its parent
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _temporary_of(target: Path) -> Path:
    """Return a new path beside a file. It contains the file's name, so that a sweep can remove it after a crash."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")


def _name_file(temporary: Path, target: Path) -> None:
    """Give a temporary file its name; FileExistsError if the name is taken. The temporary name may remain.

    Every POSIX filesystem refuses a hard link if the name is taken. Filesystems without hard links (FAT, some CIFS and
    FUSE mounts) may have a rename that does not replace. A filesystem with neither cannot exclude a second writer: it
    copies a file to rename it, or checks the name before it writes.
    """
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        _rename_exclusively(temporary, target)


def _rename_exclusively(source: Path, target: Path) -> None:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        raise OSError(errno.ENOTSUP, NO_EXCLUSIVE_CREATE) from None
    if rename(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE) == 0:
        return
    number = ctypes.get_errno()
    if number in NO_LINKS or number == errno.EINVAL:
        raise OSError(errno.ENOTSUP, NO_EXCLUSIVE_CREATE)
    raise OSError(number, os.strerror(number))
