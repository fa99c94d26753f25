"""The interface of a store: the state of one generation of a job, at one complete epoch at a time.

One writer applies epochs, each in one transaction. Any number of readers, in any process, have snapshots. A snapshot
reads one epoch at one clock reading: a key that has expired by then does not exist in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.records import Change, runs_of
from state_backend.model.slot_set import SlotSet
from state_backend.store.key_events import EventBatch, StoredEventBatches

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class AppliedEpoch:
    """The last epoch that a store applied, and the counts after it.

    Args:
        epoch, term: -1 and 0 before the first epoch.
        keys: The number of keys of each state, without announced keys (see `Store.expire`); a map whose fields have all
            expired is counted until it is removed.
        expiring: The number of keys that expire.
        expiring_maps: The number of maps with fields that expire.
        expired_keys, expired_fields: The numbers of announced keys and of removed fields since the store was made.
        expiry_batches: The number of announced batches of expired keys.
    """

    generation: str
    epoch: int = -1
    term: int = 0
    clock_ms: int = 0
    keys: Mapping[str, int] = field(default_factory=dict)
    expiring: int = 0
    expiring_maps: int = 0
    expired_keys: int = 0
    expired_fields: int = 0
    expiry_batches: int = field(default=0, compare=False)  # batches of one clock differ between stores

    @property
    def key_count(self) -> int:
        """The number of keys in all states."""
        return sum(self.keys.values())


def random_key_steps(scan: Callable[[int, int], tuple[int, list[bytes]]], slots: SlotSet) -> Iterator[bytes | None]:
    """Scan from a random position of some slots, then from the beginning; yield a key, or None, for each call."""
    if not slots:
        return
    cursor = slots.random_position()
    for _ in range(2):
        is_end = False
        while not is_end:
            cursor, found = scan(cursor, 1)
            yield found[0] if found else None
            is_end = not cursor


class KeyInfo(NamedTuple):
    """A key, the name of its state, its kind, and when it expires (None: never)."""

    key: bytes
    state: str
    kind: Kind
    expire_at_ms: int | None


class LongValue(NamedTuple):
    """A long value that is not copied until it is needed. It is valid until its snapshot is renewed or closed.

    chunks(start, stop): iterates over its bytes `start` to before `stop`, both within the value, some 64 KiB at a time.
    """

    length: int
    chunks: Callable[[int, int], Iterator[bytes]]


# A value of a key or a field.
Value = bytes | LongValue

# A longer value is read alone, so that the size of values that are read together is bounded (guess).
READ_TOGETHER_BYTES_MAX = 16 << 10

# Cursors of scans of large maps, sets and sorted sets are below this number. Members are spread evenly over them.
FIELD_POSITIONS = 1 << 48


def as_bytes(value: Value) -> bytes:
    """Return a value as bytes; a long value is copied."""
    return value if isinstance(value, bytes) else b"".join(value.chunks(0, value.length))


class EpochChanges(NamedTuple):
    """The changes of one epoch, as sorted runs.

    Args:
        replaces: States of which the runs have the full content.
    """

    epoch: int
    term: int
    clock_ms: int
    runs: Iterable[pa.RecordBatch]
    replaces: frozenset[str] = frozenset()


class Snapshot(ABC):
    """A view of one epoch of a job at one clock reading. For one thread at a time.

    A missing or expired key reads as None, an empty iterator, or zero. A clock reading before the epoch's is replaced
    by the epoch's: what has expired in the log has expired for every reader. A snapshot is a context manager that
    closes it.

    Attributes:
        version: A number that changes when the snapshot is renewed after a commit: of an epoch, or of expired keys.

    Raises:
        WrongKindError: A key has another kind than the method reads, such as a map where a value is read.

    Examples:
        >>> states = [sparkis.StateDescriptor("stock", key="shop", field="item", value="count")]
        >>> with sparkis.LogWriter(path, "shops", states) as writer:
        ...     epoch = writer.publish(
        ...         sparkis.Change("stock", sparkis.Op.PUT, b"shops:stock:1", field, value)
        ...         for field, value in ((b"apples", b"7"), (b"pears", b"2"))
        ...     )
        >>> with sparkis.read_snapshot(path, "shops") as snapshot:
        ...     snapshot.field(b"shops:stock:1", b"apples")
        ...     snapshot.map_size(b"shops:stock:1")
        ...     dict(snapshot.map_pairs(b"shops:stock:1"))
        ...     list(snapshot.members(b"shops:online"))
        b'7'
        2
        {b'apples': b'7', b'pears': b'2'}
        []
    """

    version: int
    # The store's pages, for the compiled core; None if it cannot read them.
    pages: Any = None

    @abstractmethod
    def renew(self, now_ms: int) -> None:
        """Move to the newest epoch and a new clock reading. Cheap: meant for every input buffer."""

    @abstractmethod
    def close(self) -> None:
        """Release the epoch: the store may reuse its pages."""

    @abstractmethod
    def at_time(self, now_ms: int, on_close: Callable[[], None]) -> Self:
        """Return a snapshot of the same epoch at another clock reading. Closing it only calls `on_close`.

        It is valid until this one is renewed or closed, and must not be renewed itself.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    @abstractmethod
    def now_ms(self) -> int:
        """The clock reading: what has expired by then is missing."""

    @property
    @abstractmethod
    def applied(self) -> AppliedEpoch:
        """The epoch of this snapshot, and its counts."""

    @property
    @abstractmethod
    def owned_slots(self) -> SlotSet:
        """The slots that the store owned at this epoch. Counts and scans include only keys in these.

        Reads of a key in another slot may return anything, because the slot may be partly loaded, or partly removed.
        """

    def stored_event_batches(self) -> StoredEventBatches | None:
        """Return which batches of events are stored (see `key_events`); None if events are not recorded."""
        return None

    def events(self, serial: int) -> EventBatch | None:
        """Return a batch of events; None if it is deleted, or not yet written at this epoch."""
        return None

    @abstractmethod
    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        """Return the keys that epochs after `epoch` put or deleted; None if they are not stored.

        They are stored for the last few epochs, if these changed few enough keys and the owned slots stayed the same.
        Expired keys are not among them.
        """

    @abstractmethod
    def expired_since(self, expiry_batches: int) -> Sequence[bytes] | None:
        """Return the keys that were announced, themselves or fields of them, after the first `expiry_batches` batches.

        None if they are not stored. The last few batches are stored, if they have few enough keys. A key reads as
        missing as soon as it has expired; it is announced within a bounded time after that.
        """

    @abstractmethod
    def key_info(self, key: bytes) -> KeyInfo | None:
        """Return the state, kind and expiry of a key; None for a missing key."""

    def stored_record(self, key: bytes) -> bytes | None:
        """Return a key's record as it is stored; None for a missing key, and if the store has no records."""
        return None

    @abstractmethod
    def stored_sizes(self, key: bytes, items_max: int) -> Iterator[int]:
        """Iterate over numbers that add up to the size of a key in the store, in bytes; none for a missing key.

        Each number takes a bounded time. About `items_max` items of a large map, list or set are read; the size of the
        others is extrapolated.
        """

    @abstractmethod
    def lazy_value(self, key: bytes) -> Value | None:
        """Return the value of a key of a value state; a long value is not copied."""

    @abstractmethod
    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]:
        """Return the values of the first of these keys: at least one value, and a long one alone.

        Stops before a key of another kind; WrongKindError if it is the first one.
        """

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a key of a value state as bytes."""
        value = self.lazy_value(key)
        return value if value is None else as_bytes(value)

    @abstractmethod
    def lazy_fields(self, key: bytes, names: Sequence[bytes]) -> list[Value | None]:
        """Return several fields of a map; None for a missing field. Long values are not copied."""

    def field(self, key: bytes, name: bytes) -> bytes | None:
        """Return one field of a map as bytes; None if it is missing."""
        return self.fields(key, (name,))[0]

    def fields(self, key: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        """Return several fields of a map as bytes; None for a missing field."""
        return [value if value is None else as_bytes(value) for value in self.lazy_fields(key, names)]

    @abstractmethod
    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        """Return when fields of a map expire, in milliseconds since 1970 UTC; 0: never, None: the field is missing."""

    @abstractmethod
    def map_sizes(self, key: bytes) -> Iterator[int]:
        """Iterate over numbers that add up to the number of fields of a map; each takes a bounded time.

        There are several numbers while fields have expired and are not yet removed.
        """

    def map_size(self, key: bytes) -> int:
        """Return the number of fields of a map; 0 for a missing key."""
        return sum(self.map_sizes(key))

    @abstractmethod
    def lazy_map_pairs(self, key: bytes) -> Iterator[tuple[bytes, Value]]:
        """Iterate over (field, value) of a map, in an order that is the same within an epoch. Copies no long value."""

    def map_pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (field, value) of a map, values as bytes."""
        return ((name, as_bytes(value)) for name, value in self.lazy_map_pairs(key))

    @abstractmethod
    def packed_map(self, key: bytes) -> bytes | None:
        """Return a small map as it is stored (see `packed_map`); None for a missing key and for a large map."""

    @abstractmethod
    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, Value]]]:
        """Return the next cursor (0 at the end) and about `count` pairs; all pairs of a small map at once, as in Redis.

        There may be fewer, even none, where many fields have expired or are large: the time of a call is bounded.
        """

    @abstractmethod
    def list_size(self, key: bytes) -> int:
        """Return the number of elements of a list; 0 for a missing key."""

    @abstractmethod
    def list_bulk_strings(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over the elements `start` to before `stop`, within the list, as RESP bulk strings, many at a time.

        See `packed_list`. Only the blocks of these elements are read.
        """

    @abstractmethod
    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over the elements `start` to before `stop`, within the list."""

    @abstractmethod
    def set_size(self, key: bytes) -> int:
        """Return the number of members of a set; 0 for a missing key."""

    @abstractmethod
    def members(self, key: bytes) -> Iterator[bytes]:
        """Iterate over a set's members, in an order that stays the same within an epoch."""

    @abstractmethod
    def are_members(self, key: bytes, members: Sequence[bytes]) -> list[bool]:
        """Return for each name whether it is a member of a set."""

    @abstractmethod
    def packed_set(self, key: bytes) -> bytes | None:
        """Return a small set as it is stored: its members in byte order, as a `packed_list`.

        None for a missing key and for a large set.
        """

    @abstractmethod
    def scan_set(self, key: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor (0 at the end) and about `count` members; all members of a small set at once.

        There may be fewer where members are long: the time of a call is bounded. Any number below `FIELD_POSITIONS` is
        a cursor, here and for `scan_map`. To find a random member, scan a dozen from a random cursor and choose one of
        them, because the gaps between members differ (Redis does about the same); if the scan finds none, scan from 0.
        """

    @abstractmethod
    def sorted_size(self, key: bytes) -> int:
        """Return the number of members of a sorted set; 0 for a missing key."""

    @abstractmethod
    def scores(self, key: bytes, members: Sequence[bytes]) -> list[float | None]:
        """Return the scores of several members of a sorted set; None for a missing member. No score is -0.0 or NaN."""

    @abstractmethod
    def ranks(self, key: bytes, members: Sequence[bytes]) -> list[int | None]:
        """Return the ranks of several members of a sorted set, by score, then by bytes; None for a missing member."""

    @abstractmethod
    def rank_of_score(self, key: bytes, score: float, is_after: bool) -> int:
        """Return how many members have a lower score; with `is_after`, a lower or the same score."""

    @abstractmethod
    def rank_of_member(self, key: bytes, member: bytes, is_after: bool) -> int:
        """Return how many members are less than `member` by bytes; with `is_after`, less or equal.

        `member` need not be in the set. Meant for sorted sets whose scores are all equal; in others, only the members
        with the lowest score are compared.
        """

    @abstractmethod
    def sorted_members(
        self, key: bytes, start: int, stop: int, is_reversed: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        """Iterate over (member, score) of the ranks `start` to before `stop`, within the sorted set.

        With `is_reversed` from the last to the first. Only the blocks of these members are read.
        """

    @abstractmethod
    def packed_sorted(self, key: bytes) -> bytes | None:
        """Return a small sorted set as it is stored (see `packed_sorted`); None for a missing key and a large set."""

    @abstractmethod
    def scan_sorted(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        """Return the next cursor (0 at the end) and about `count` (member, score), in any order.

        All members of a small set at once, as in `scan_set`.
        """

    @abstractmethod
    def scan(
        self, cursor: int, count: int, kinds: Collection[Kind] | None = None, *, only_expiring: bool = False
    ) -> tuple[int, list[bytes]]:
        """Visit about `count` keys in slot order; return the next cursor (0 at the end) and the keys of some kinds.

        Fewer keys are visited, even none, where many have expired or are large: the time of a call is bounded.

        A cursor is the first position that was not visited yet. A call never ends within a position. So a key that
        exists during the full scan is returned exactly once, on any server that has it.

        Args:
            kinds: None for all.
            only_expiring: Only keys that expire.
        """

    @abstractmethod
    def changes(self) -> Iterator[Change]:
        """Iterate over the changes that build this state from an empty store, in store order.

        Keys that expired at or before the clock of the epoch are left out. The snapshot's own clock does not matter, so
        all servers return the same changes for an epoch.
        """

    def runs(self, states: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Iterate over `changes` as sorted runs.

        Args:
            states: The names of all states, for the runs' dictionary.
        """
        return runs_of(self.changes(), states)

    @abstractmethod
    def random_keys(self) -> Iterator[bytes | None]:
        """Search a random key in short steps: yield None for each step, and a key at last.

        All keys are about equally likely.
        """


class Store(ABC):
    """The state of one generation of a job. `apply` and `expire` are for the one writer, `snapshot` is for readers."""

    @abstractmethod
    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        """Apply one epoch in one transaction; return about how many changes made a difference (0: none did).

        In a replaced state, keys that the epoch does not name are deleted; in the keys that it names, so are fields
        that it does not name. After a KeyConflictError or StoreFullError the store is unchanged.
        """

    @abstractmethod
    def expire(self, now_ms: int, removals_max: int) -> int:
        """Announce keys and fields that have expired by a clock, and remove those that have expired by the log's clock.

        Announced keys are in no count, and are reported (`Snapshot.expired_since`, `Snapshot.events`). They are removed
        once the clock of an epoch has passed their expiry: until then an epoch may fold into them, and the result of an
        epoch must not depend on a server's clock. The call stops after about `removals_max` keys and fields, and
        returns how many it processed; if these are fewer, nothing remains to be done.
        """

    @abstractmethod
    def snapshot(self, now_ms: int) -> Snapshot:
        """Open a view of the newest epoch."""

    @property
    @abstractmethod
    def applied(self) -> AppliedEpoch:
        """The newest epoch, and the counts after it."""

    def used_bytes(self) -> tuple[int, int]:
        """Return the used and the free bytes of the store's files; zeros if it has no files."""
        return 0, 0

    def suspect(self) -> None:  # noqa: B027  # a store in memory cannot be damaged
        """Ask the writer of the store to verify it: a reader found damage."""

    @property
    @abstractmethod
    def lineage(self) -> str:
        """The store's name, the same in all processes. The same epoch number in two lineages may be two epochs."""

    @abstractmethod
    def close(self) -> None:
        """Close the store; snapshots must be closed before."""
