"""A filesystem that simulates the death of a process between two operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from state_backend.log.filesystems import LocalFilesystem


class Died(Exception):
    """The simulated end of the process."""


class Dying(LocalFilesystem):
    """Raises Died once so many changes of the disk have been made; `left` may be set again."""

    def __init__(self, root: Path, allowed: int = 1 << 30) -> None:
        super().__init__(root)
        self.left = allowed

    def _spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died

    def create(self, path: str, content: bytes) -> bool:
        self._spend()
        return super().create(path, content)

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        self._spend()
        with super().open_new(path) as file:
            yield file

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        self._spend()
        super().replace(path, content, is_durable=is_durable)

    def copy(self, source: str, target: str) -> bool:
        self._spend()
        return super().copy(source, target)

    def make_folder(self, path: str) -> None:
        self._spend()
        super().make_folder(path)

    def remove(self, path: str) -> None:
        self._spend()
        super().remove(path)
