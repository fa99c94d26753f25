"""The slowest requests, for SLOWLOG. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

# Standard: the limits of Redis for a stored request.
ARGUMENTS_MAX = 32
ARGUMENT_BYTES_MAX = 128


class SlowRequest(NamedTuple):
    """One slow request. Ids are unique among the processes of a server, and increase."""

    id: int
    at_ms: int
    microseconds: int
    arguments: Sequence[bytes]
    address: str
    name: bytes

    def to_json(self) -> list[Any]:
        """Return the entry as JSON, for another process of the server."""
        arguments = [argument.decode("latin-1") for argument in self.arguments]
        return [*self[:3], arguments, self.address, self.name.decode("latin-1")]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Parse the output of `to_json`."""
        number, at_ms, microseconds, arguments, address, name = row
        arguments = [argument.encode("latin-1") for argument in arguments]
        return cls(number, at_ms, microseconds, arguments, address, name.encode("latin-1"))


class SlowLog:
    """The last slow requests of a process."""

    def __init__(self) -> None:
        self._entries: deque[SlowRequest] = deque()
        self._next_id = 0
        self._step = 1

    def __len__(self) -> int:
        return len(self._entries)

    def set_id_sequence(self, first: int, step: int) -> None:
        """Use the ids `first`, `first + step`, ...: each process of a server has a sequence of its own."""
        self._next_id, self._step = first, step

    def add(
        self, at_ms: int, microseconds: int, arguments: Sequence[bytes], address: str, name: bytes, entries_max: int
    ) -> None:
        """Add a request; the log has at most `entries_max` requests."""
        self._entries.appendleft(SlowRequest(self._next_id, at_ms, microseconds, truncated(arguments), address, name))
        self._next_id += self._step
        self.cut(entries_max)

    def cut(self, entries_max: int) -> None:
        """Remove all but the newest `entries_max` requests."""
        while len(self._entries) > entries_max:
            self._entries.pop()

    def clear(self) -> None:
        """Remove all requests; ids continue."""
        self._entries.clear()

    def newest(self, count: int) -> list[SlowRequest]:
        """Return the last requests, newest first."""
        return list(islice(self._entries, count))


def batch_entry(requests: Sequence[Sequence[bytes]]) -> Sequence[bytes]:
    """Return the log entry of a batch of requests: the first one, and the number of the others."""
    more = len(requests) - 1
    return [*requests[0], b"... (%d more requests)" % more] if more else requests[0]


def truncated(
    arguments: Sequence[bytes], arguments_max: int = ARGUMENTS_MAX, bytes_max: int = ARGUMENT_BYTES_MAX
) -> list[bytes]:
    """Return a request's arguments cut to the limits of a log."""
    first = list(arguments[:arguments_max])
    if len(arguments) > arguments_max:
        first[-1] = b"... (%d more arguments)" % (len(arguments) - arguments_max + 1)
    return [_truncated(bytes(argument), bytes_max) for argument in first]


def _truncated(argument: bytes, bytes_max: int) -> bytes:
    left_out = len(argument) - bytes_max
    return argument if left_out <= 0 else b"%b... (%d more bytes)" % (argument[:bytes_max], left_out)
