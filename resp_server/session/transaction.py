"""The transaction of one connection: queued commands, watched keys, and the epochs that EXEC reads at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import ARGUMENT_OVERHEAD_BYTES, LongRequest, Request

# The limits of queued commands between MULTI and EXEC (guesses; in Redis the query buffer limits them, to a gigabyte).
QUEUED_REQUESTS_MAX = 65_536
QUEUED_BYTES_MAX = 64 << 20
# The limits of one client's watched keys (guesses).
WATCHED_KEYS_MAX = 16_384
WATCHED_BYTES_MAX = 16 << 20

# The beginning of a record's digest, which other digests do not have.
OF_RECORD = "record:"
RECORD_DIGEST_BYTES = 16

# The reply to a request that is queued.
QUEUED = b"+QUEUED\r\n"


class Transaction:
    """The commands that a client queued since MULTI.

    Attributes:
        is_aborted: A command was refused, so EXEC will be refused, too.
        needs_state: A command cannot run while jobs are loading, so EXEC replies LOADING then.
        slots: The slots of the queued commands' keys, in order.
        db: The database that a queued SELECT names, at a proxy with an upstream. None: there is no such command.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.size_bytes = 0
        self.is_aborted = False
        self.needs_state = False
        self.db: int | None = None
        self.slots: dict[int, None] = {}

    def queue(self, request: Request, *, needs_state: bool = False, slots: Iterable[int] = ()) -> None:
        """Queue a request, unless EXEC will be refused anyway; GenericError if too much is queued.

        Args:
            needs_state: It cannot run while jobs are loading.
            slots: Those of its keys, at a node of a cluster.
        """
        if self.is_aborted:
            return
        if type(request) is LongRequest:
            size_bytes = request.size_bytes
        else:
            size_bytes = sum(map(len, request)) + ARGUMENT_OVERHEAD_BYTES * len(request)
        requests_left, bytes_left = self.room
        if not requests_left or size_bytes > bytes_left:
            raise GenericError(
                f"a transaction may have {QUEUED_REQUESTS_MAX} commands and {QUEUED_BYTES_MAX >> 20} MiB; split it"
            )
        self.requests.append(request)
        self.size_bytes += size_bytes
        self.needs_state |= needs_state
        self.slots.update(dict.fromkeys(slots))

    @property
    def room(self) -> tuple[int, int]:
        """The number of requests that may be added, and their size."""
        return QUEUED_REQUESTS_MAX - len(self.requests), QUEUED_BYTES_MAX - self.size_bytes

    def extend(self, requests: Sequence[Request], size_bytes: int, *, needs_state: bool) -> None:
        """Queue requests for which there is room: those that the compiled core and the forwarder have cut."""
        self.requests += requests
        self.size_bytes += size_bytes
        self.needs_state |= needs_state


def record_digest(record: bytes) -> str:
    """Return the digest of a key's record, for another process that reads the same store."""
    return OF_RECORD + blake2b(record, digest_size=RECORD_DIGEST_BYTES).hexdigest()


class WatchedVersion(NamedTuple):
    """A watched key's digest and epoch (see `pipeline.watch`).

    Args:
        digest: Bytes are those of the key's record in the store: the compiled core's marks, which are plain tuples.
            Other processes get the digest of such a record.
        covers_value: The digest covers the key's value.
    """

    lineage: str
    epoch: int
    digest: str | bytes
    covers_value: bool

    @property
    def text(self) -> bytes:
        """The reply of STATE MARK."""
        digest = record_digest(self.digest) if isinstance(self.digest, bytes) else self.digest
        return f"{self.epoch} {int(self.covers_value)} {digest} {self.lineage}".encode()

    @classmethod
    def parse(cls, text: bytes) -> WatchedVersion:
        """Parse a reply of STATE MARK; GenericError if it is none."""
        words = text.decode("utf-8", "replace").split(" ", 3)
        if len(words) != 4 or not words[0].lstrip("-").isdecimal() or words[1] not in ("0", "1"):
            raise GenericError("a mark is the unchanged reply of STATE MARK")
        return cls(words[3], int(words[0]), words[2], words[1] == "1")


def check_watch_limits(watched: Collection[tuple[int, bytes]], new: Collection[bytes]) -> None:
    """Raise GenericError if a client would watch too many keys.

    Args:
        watched: Its keys so far, each with its database.
    """
    has_too_many = len(watched) + len(new) > WATCHED_KEYS_MAX
    if has_too_many or sum(len(key) for _, key in watched) + sum(map(len, new)) > WATCHED_BYTES_MAX:
        raise GenericError(
            f"a client may watch {WATCHED_KEYS_MAX} keys of {WATCHED_BYTES_MAX >> 20} MiB; UNWATCH, or watch fewer"
        )


class ReadPoint(NamedTuple):
    """The (term, epoch) of each job, and the clock reading, at which the next EXEC reads (STATE AT)."""

    epochs: Mapping[str, tuple[int, int]]
    clock_ms: int
