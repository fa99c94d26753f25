"""A bucket of S3, Google Cloud Storage or Azure, or of a store with the protocol of one of them.

All requests use `obstore`, because its PUT can be conditional (`If-None-Match: *` on S3 and Azure, generation 0 on
Google's): one of several writers of a name wins. In all three stores a write is visible to listings and reads as soon
as it returns.

A response can be lost: the store has executed a conditional PUT, and the retry finds the name taken. So each `create`
writes a unique id as metadata of the object. If the name is taken, it reads the id to recognize its own object.

A folder is a prefix, and need not be made.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar, cast

from state_backend.log.filesystems import credentials
from state_backend.log.filesystems.filesystem import Filesystem
from state_backend.model.errors import LogUnavailableError

if TYPE_CHECKING:
    import pyarrow as pa
    from obstore import WritableFile
    from obstore.store import ObjectStore

# A file up to this size is one request; a larger one has parts of this size. S3 allows 10,000 parts of at least 5 MiB.
PART_BYTES = 16 << 20
# The number of parts that are sent at the same time; each takes PART_BYTES of memory.
PARTS_AT_A_TIME = 4
# obstore retries a request for so long after server errors and lost connections. Then the caller gets an error: a
# server continues to serve its last state; a micro-batch fails, and Spark runs it again.
RETRY_TIMEOUT_S = 20.0
# Pauses before retries of a request whose response was lost (guess).
RETRY_PAUSES_S = (0.1, 0.5, 2.0)
# The time limit of one request with its body: enough for a part at 300 KB/s.
REQUEST_TIMEOUT_S = 60.0
# The name of the metadata that identifies a `create`. Azure refuses hyphens in it, and proxies drop underscores.
ATTEMPT = "attempt"

Response = TypeVar("Response")


class ObjectStoreFilesystem(Filesystem):
    """Objects below a prefix of one bucket."""

    # Requests cost money (see docs/object-stores.md); a PUT costs as much as twelve GETs.
    heartbeat_interval_s = 20.0
    probe_interval_s_min = 0.1
    probe_interval_s = 1.0
    probe_interval_s_max = 15.0
    jobs_interval_s_max = 60.0
    checks_interval_s = 15.0
    reads_at_a_time = 16
    _checked: ClassVar[set[str]] = set()  # roots whose store honors conditions, checked in this process

    def __init__(self, uri: str, location: str, **options: Any) -> None:
        """Open a bucket.

        Args:
            uri: The address as the user wrote it, for messages and for other processes.
            location: The address for obstore.
            options: For obstore's store, beyond those from the environment.
        """
        import obstore.store  # imported here because it is an extra

        self.root = uri
        self._obstore = obstore
        self._readers = ThreadPoolExecutor(self.reads_at_a_time, "sparkis-reads")  # starts threads when they are needed
        with self._translated_errors("open", ""):
            self._store: ObjectStore = obstore.store.from_url(
                location,
                **{
                    "client_options": {"timeout": timedelta(seconds=REQUEST_TIMEOUT_S)} | credentials.client_options(),
                    "retry_config": {"retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)},
                    **credentials.options(location),
                    **options,
                },
            )

    def read(self, path: str) -> bytes | None:
        content = self._content(path)
        return None if content is None else bytes(memoryview(content))

    def open_input(self, path: str) -> pa.Buffer | None:
        import pyarrow as pa

        content = self._content(path)
        return None if content is None else pa.py_buffer(content)

    def at_once(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        others = [self._readers.submit(call) for call in calls[1:]]  # a thread for the first one would only cost time
        return [*(call() for call in calls[:1]), *(each.result() for each in others)]

    def _content(self, path: str) -> Any:
        with self._translated_errors("read", path):
            try:
                return self._obstore.get(self._store, path).buffer()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                    raise
                return None

    def create(self, path: str, content: bytes) -> bool:
        if self.root not in self._checked:
            self._check_conditions()
        return self._create(path, content)

    def _check_conditions(self) -> None:
        """Raise LogUnavailableError if the store ignores the condition of a PUT, like old versions of some stores."""
        probe = f".{uuid.uuid4().hex}.probe"
        try:
            is_honored = self._create(probe, b"first") and not self._create(probe, b"second")
        finally:
            with suppress(LogUnavailableError):
                self.remove_files([probe])
        if not is_honored:
            raise LogUnavailableError(
                f"the log {self.root} cannot be written: its store ignores the condition of a PUT and overwrites an "
                f"existing file, so two writers could not detect each other; use another store, or a newer version"
            )
        self._checked.add(self.root)

    def _create(self, path: str, content: bytes) -> bool:
        attempt = uuid.uuid4().hex

        def put() -> bool:
            try:
                self._put(path, content, mode="create", attributes={ATTEMPT: attempt})
            except self._obstore.exceptions.AlreadyExistsError:
                return self._attempt(path) == attempt
            return True

        with self._translated_errors("create", path):
            return self._with_retries(put)

    def _attempt(self, path: str) -> str | None:
        """Return the id of the `create` that wrote an object."""
        try:
            return self._obstore.get(self._store, path).attributes.get(ATTEMPT)
        except FileNotFoundError:  # removed meanwhile
            return None

    def _with_retries(self, request: Callable[[], Response]) -> Response:
        """Retry a request whose response was lost: obstore does not retry a write that may have been executed."""
        for pause_s in RETRY_PAUSES_S:
            try:
                return request()
            except self._obstore.exceptions.GenericError:
                time.sleep(pause_s)
        return request()

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file: one PUT when the block ends, or several parts, which are aborted if the block fails.

        The PUT is not conditional: the name has a UUID, so no other writer uses it.
        """
        with (
            self._translated_errors("write", path),
            self._obstore.open_writer(
                self._store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_A_TIME
            ) as writer,
        ):
            yield cast(BinaryIO, _ByteFile(writer))

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        with self._translated_errors("replace", path):
            self._put(path, content)

    def _put(self, path: str, content: bytes, **more: Any) -> None:
        self._obstore.put(self._store, path, content, use_multipart=False, **more)

    def names(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            listed = self._obstore.list_with_delimiter(self._store, path or None)
        paths = [*listed["common_prefixes"], *(each["path"] for each in listed["objects"])]
        return [each.rpartition("/")[2] for each in paths]

    def folders(self, path: str) -> list[str]:
        with self._translated_errors("list", path):
            listed = self._obstore.list_with_delimiter(self._store, path or None)
        return [each.rpartition("/")[2] for each in listed["common_prefixes"]]

    def size(self, path: str) -> int | None:
        found = self._head(path)
        return None if found is None else int(found["size"])

    def modified_ns(self, path: str) -> int | None:
        found = self._head(path)
        return None if found is None else int(found["last_modified"].timestamp()) * 10**9

    def _head(self, path: str) -> Any:
        """Return the store's facts of a file; None if there is no such file."""
        with self._translated_errors("look at", path):
            try:
                return self._obstore.head(self._store, path)
            except FileNotFoundError:
                return None

    def copy(self, source: str, target: str) -> bool:
        with self._translated_errors("copy", source):
            try:
                self._obstore.copy(self._store, source, target)
            except FileNotFoundError:
                return False
        return True

    def make_folder(self, path: str) -> None:
        """Do nothing: a folder exists if it has a file."""

    def remove(self, path: str) -> None:
        with self._translated_errors("remove", path):
            self._remove_all([path])
            for listed in self._obstore.list(self._store, path):
                self._remove_all([each["path"] for each in listed])

    def remove_files(self, paths: Sequence[str]) -> None:
        with self._translated_errors("remove", paths[0] if paths else ""):
            self._remove_all(list(paths))

    def _remove_all(self, paths: list[str]) -> None:
        try:
            if paths:
                self._with_retries(partial(self._obstore.delete, self._store, paths))
        except FileNotFoundError:  # Google and Azure report a missing file, and may leave the others
            for path in paths:
                with suppress(FileNotFoundError):
                    self._with_retries(partial(self._obstore.delete, self._store, path))

    @contextmanager
    def _translated_errors(self, doing: str, path: str) -> Iterator[None]:
        # A bad address is a ValueError, a bad bucket an OSError.
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            where = f"{path} in the log {self.root}" if path else f"the log {self.root}"
            raise LogUnavailableError(f"cannot {doing} {where}: {_reason(error)}") from None


class _ByteFile:
    """The file object of `open_new`. It casts Arrow's buffers to unsigned bytes: obstore takes no other format."""

    closed = False

    def __init__(self, writer: WritableFile) -> None:
        self._writer = writer

    def write(self, content: bytes | memoryview) -> int:
        return self._writer.write(memoryview(content).cast("B"))

    def flush(self) -> None:
        """Do nothing: only full parts can be sent."""


def _reason(error: Exception) -> str:
    """Return the text of an obstore error in one line: the store's own message, if there is one."""
    first = str(error).partition("\n\nDebug source:")[0].strip()
    message = re.search(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", first, re.DOTALL)
    status = re.search(r"status code: (\d+[^:\n]*)", first)
    if message:
        return f"{status[1].strip() + ': ' if status else ''}{message[1]}: {' '.join(message[2].split())}"
    return " ".join(first.split()) or type(error).__name__
