"""Values that are not committed yet, as a view of a keyspace reads them (see `state_backend.fresh`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from state_backend.store.store import Snapshot

# Called with the keys whose cached values are no longer valid; None: all keys.
OnChange = Callable[[Sequence[bytes] | None], None]


class FreshFacts(NamedTuple):
    """What is known of a job's fresh values, in this process.

    Args:
        keys_of: The number of keys of each state; a key that two batches have counts twice.
        batch: The newest batch that has values; None: there are none.
        since_ms: When the oldest batch that has values began to send them; None: there are none.
        is_incomplete: The newest batch lacks rows: its writer dropped some, or there was no room for them.
    """

    keys_of: Mapping[str, int] = {}
    batch: int | None = None
    since_ms: int | None = None
    is_incomplete: bool = False

    @property
    def keys(self) -> int:
        """The number of keys of all states."""
        return sum(self.keys_of.values())


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


class FreshLayers:
    """The views of fresh values that one view of a keyspace has, by job."""

    def __init__(self) -> None:
        self._tables: dict[str, FreshTable] = {}
        self._open: dict[str, Sequence[FreshSnapshot]] = {}
        self._epochs: dict[str, list[int]] = {}  # of these views, at the last report
        self._shown: dict[str, tuple[FreshSnapshot, ...]] = {}

    @property
    def names(self) -> Set[str]:
        """The jobs that may have fresh values."""
        return self._tables.keys()

    def shown(self, name: str) -> tuple[FreshSnapshot, ...]:
        """Return the views of a job whose values are not settled, the newest first."""
        return self._shown.get(name, ())

    def route(self, tables: Mapping[str, FreshTable]) -> None:
        """Set the jobs with fresh values, and close the views of others."""
        for name in [name for name, table in self._tables.items() if tables.get(name) is not table]:
            self._shown.pop(name, None)
            self._epochs.pop(name, None)
            for layer in self._open.pop(name, ()):
                layer.close()
        self._tables = dict(tables)

    def renew(self, name: str, now_ms: int, on_change: OnChange | None) -> None:
        """Open or renew the views of a job, and report the keys that have changed in them."""
        layers = self._open.get(name)
        if layers is None:
            layers = self._open[name] = self._tables[name].snapshots(now_ms)
            self._epochs[name] = [layer.applied.epoch for layer in layers]
            return
        epochs = self._epochs[name]
        for index, layer in enumerate(layers):
            layer.renew(now_ms)
            if layer.applied.epoch != epochs[index]:
                if on_change is not None:
                    on_change(layer.changed_since(epochs[index]))
                epochs[index] = layer.applied.epoch

    def settle(self, name: str, applied_epoch: int) -> None:
        """Show no values of batches up to an epoch, which the view of the job's store has."""
        layers = [layer for layer in self._open[name] if layer.batch > applied_epoch]
        self._shown[name] = tuple(sorted(layers, key=lambda layer: -layer.batch))
