"""The owners of keys at a proxy with an upstream, as STATE OWNERS shows them, and CONFIRM and RELEASE change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resp_server.protocol.errors import PlainError
from resp_server.protocol.replies import Reply
from resp_server.upstream.ownership import Ownership, UnknownJobError


class OwnershipControl:
    """Shows and changes the owners of keys."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership

    def owners(self) -> Reply:
        """Return a map for each job: its name, status, key formats, and examples of keys that it waits for."""
        return [
            {
                b"job": row.job.encode(),
                b"status": row.status.encode(),
                b"key_formats": [text.encode() for text in row.formats],
                b"examples": list(row.examples),
            }
            for row in self._ownership.jobs()
        ]

    def confirm(self, job: bytes) -> Reply:
        """Give a job's keys to its states; return its key formats."""
        return _formats(self._ownership.confirm, job)

    def release(self, job: bytes) -> Reply:
        """Give a job's keys to the upstream; return its key formats."""
        return _formats(self._ownership.release, job)


def _formats(change: Callable[[str], Sequence[str]], job: bytes) -> Reply:
    try:
        return [text.encode() for text in change(job.decode("utf-8", "surrogateescape"))]
    except UnknownJobError as error:
        raise PlainError(str(error)) from None
