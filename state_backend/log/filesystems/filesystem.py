"""The file operations that a change log needs: the interface of all filesystems.

`create` never overwrites: one of several writers of a name wins, and readers never see an incomplete file. `open_new`
is for names that only one writer uses. `replace` overwrites the full file. All three are durable when they return.

    LocalFilesystem         a folder of this machine, or one mounted on all of them
    ObjectStoreFilesystem   s3://, gs://, abfss:// and the like, by conditional PUTs; needs the extra `object-store`
    ArrowFilesystem         hdfs://, through pyarrow
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from state_backend.model.errors import LogUnavailableError

if TYPE_CHECKING:
    import pyarrow as pa


class Filesystem(ABC):
    """File operations below one root.

    Args:
        heartbeat_interval_s: The interval of a writer's heartbeats.
        probe_interval_s_max, jobs_interval_s_max: The longest intervals at which readers poll for epochs, and for jobs.
        probe_interval_s: The one after news; it doubles while there is none.
        probe_interval_s_min: The shortest one, while an epoch is expected. Polling is cheap in a folder, and costs
            money in an object store.
        checks_interval_s: The time between two polls that also look for a new writer and for missing epochs; polls in
            between look for the next epoch only.
        reads_at_a_time: Above 1 where a request takes long, and several of them take no longer.
    """

    root: str
    heartbeat_interval_s: float = 1.0
    probe_interval_s_min: float = 0.02
    # Much less than a proxy waits for the last of its servers to find an epoch (`state_cluster.TIMEOUT_S`), also where
    # an applier has to be started first.
    probe_interval_s: float = 0.25
    probe_interval_s_max: float = 0.25
    jobs_interval_s_max: float = 1.0
    checks_interval_s: float = 0.0
    reads_at_a_time: int = 1

    def local_folder(self, path: str) -> str | None:
        """Return the path of a folder in this machine's file tree; None if it is elsewhere."""
        return None

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""

    @abstractmethod
    def open_input(self, path: str) -> pa.Buffer | None:
        """Return the content of a file as a buffer, memory-mapped where possible; None if there is no such file."""

    def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of calls of this filesystem, in their order. They run at once if `reads_at_a_time` > 1."""
        return [call() for call in calls]

    @abstractmethod
    def create(self, path: str, content: bytes) -> bool:
        """Write a new file; if the name is taken, change nothing and return False."""

    @abstractmethod
    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; it gets its name when the block ends without an error."""
        raise NotImplementedError
        yield

    @abstractmethod
    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        """Write a file; an existing one is overwritten."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the names in a folder, unordered; empty if there is no such folder."""

    @abstractmethod
    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder, unordered; empty if there is no such folder."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, without reading it; None if there is no such file."""

    @abstractmethod
    def modified_ns(self, path: str) -> int | None:
        """Return when a file was last written, in nanoseconds since 1970; None if there is no such file.

        Some storage knows whole seconds only.
        """

    @abstractmethod
    def copy(self, source: str, target: str) -> bool:
        """Copy a file that is never written again; False if there is no such file. A hard link, where possible.

        An existing target stays: it is the same file, from an earlier try. The copy is durable when the call returns.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and its parents, unless they exist."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content, if it exists. Others may remove it at the same time."""

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files, which may be missing. Cheaper than `remove` if each request is slow."""
        for path in paths:
            self.remove(path)

    @contextmanager
    def _translated_errors(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise LogUnavailableError(f"cannot {doing} {path or '.'} in the log {self.root}: {reason}") from error
