"""Values that are not committed yet, as a view of a keyspace reads them (see `state_backend.fresh`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from state_backend.store.store import Snapshot


class FreshFacts(NamedTuple):
    """What is known of a job's fresh values, in this process.

    Args:
        keys: The number of keys; a key that two batches have counts twice.
        batch: The newest batch that has values; None: there are none.
        since_ms: When the oldest batch that has values began to send them; None: there are none.
        is_incomplete: The newest batch lacks rows: its writer dropped some, or there was no room for them.
    """

    keys: int = 0
    batch: int | None = None
    since_ms: int | None = None
    is_incomplete: bool = False


class FreshSnapshot(Snapshot):
    """A view of the fresh values of some successive batches."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """The newest batch that has values here; -1: there are none. They count until its epoch is applied."""

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Return whether a key has a value here. It may have expired, and then hides the committed one."""


class FreshTable(Protocol):
    """The fresh values of one generation of a job, in all processes of a server."""

    def snapshots(self, now_ms: int) -> Sequence[FreshSnapshot]:
        """Open views of them. Which one has the newer batches changes from version to version."""
        ...

    def facts(self, applied_epoch: int) -> FreshFacts:
        """Return what is known of values that an epoch has not settled."""
        ...

    def settle(self, applied_epoch: int) -> None:
        """Drop the values of batches up to an epoch, which is applied."""
        ...

    def clear(self) -> None:
        """Drop all values: their query has ended."""
        ...
