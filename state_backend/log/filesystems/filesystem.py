"""The file operations that a change log needs: what every kind of filesystem promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from state_backend.model.errors import LogUnavailableError

if TYPE_CHECKING:
    import pyarrow as pa


class Filesystem(ABC):
    """File operations below one root.

    beat_interval_s: how often a writer shows a sign of life here; `probe_interval_s_max` and `jobs_interval_s_max`: how
    rarely readers look for epochs, and for jobs, while nothing is new. Looking costs nothing to speak of in a folder,
    and money in an object store.
    """

    root: str
    beat_interval_s: float = 1.0
    probe_interval_s_max: float = 1.0
    jobs_interval_s_max: float = 1.0

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
    def size(self, path: str) -> int | None:
        """Return how many bytes a file has, or None if there is none; nothing is read of it."""

    @abstractmethod
    def copy(self, source: str, target: str) -> bool:
        """Give a file that is never written again a second name; False if there is no such file.

        A target that is there stays: it is the same file, of an earlier try. Durable when it returns.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; it may be there."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all in it, if it is there. Others may remove it at the same time."""

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files that may be gone already: cheaper than `remove` where each request takes its time."""
        for path in paths:
            self.remove(path)

    @contextmanager
    def _explained(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise LogUnavailableError(f"cannot {doing} {path or '.'} in the log {self.root}: {reason}") from error
