"""The interface of a store: one job generation's state, at one whole epoch at a time.

One writer applies epochs, each in one transaction; any number of readers, in any process, hold snapshots. A snapshot
answers from one epoch and one clock reading: what has expired by then does not exist in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.key_groups import KeyGroups
from state_backend.model.records import Change, runs_of
from state_backend.store.key_events import Kept, Portion

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Applied:
    """What a store holds: the last whole epoch applied to it, and counts as of then.

    epoch and term are -1 and 0 before the first epoch. Counts are without the keys that expired, once that was noted
    (see `Store.expire`); maps all of whose fields expired are counted until they are removed.
    expiring_maps are those with a field that expires, which is apart from what the whole key does (`expiring`);
    expired_keys were noted, and expired_fields removed, since the store was made; in so many portions, `removals`.
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
    removals: int = field(default=0, compare=False)  # a store takes as many portions as it likes

    @property
    def key_count(self) -> int:
        """The number of keys in all states."""
        return sum(self.keys.values())


def keys_near_any(scan: Callable[[int, int], tuple[int, list[bytes]]], slots: KeyGroups) -> Iterator[bytes | None]:
    """Scan from any position of some slots to the end, and from the beginning on; a key, or none, for each step."""
    if not slots:
        return
    cursor = slots.random_position()
    for _ in range(2):
        is_end = False
        while not is_end:
            cursor, found = scan(cursor, 1)
            yield found[0] if found else None
            is_end = not cursor


class Entry(NamedTuple):
    """What stands at a key: its state's name, its kind, and when it expires (None: never)."""

    key: bytes
    state: str
    kind: Kind
    expire_at_ms: int | None


class LongText(NamedTuple):
    """A value too long to be copied as a whole without need. Good for as long as its snapshot stays where it is.

    parts(start, stop): iterates over its bytes `start` to before `stop`, both within it, some 64 KiB at a time.
    """

    length: int
    parts: Callable[[int, int], Iterator[bytes]]


# A value of a key or a field.
Text = bytes | LongText

# A longer value is read by itself, so that what is read together is bounded (guess).
READ_TOGETHER_BYTES_MAX = 16 << 10

# Cursors of scans of large maps, sets and sorted sets are below this number, and members are spread over it evenly.
FIELD_POSITIONS = 1 << 48


def whole(text: Text) -> bytes:
    """Return all of a value; of a long one, a copy that takes its time."""
    return text if isinstance(text, bytes) else b"".join(text.parts(0, text.length))


class EpochChanges(NamedTuple):
    """One epoch as a store takes it: sorted runs of changes, and the states that it replaces as a whole."""

    epoch: int
    term: int
    clock_ms: int
    runs: Iterable[pa.RecordBatch]
    replaces: frozenset[str] = frozenset()


class Snapshot(ABC):
    """A read view of one epoch of a job at one clock reading. Not to be shared between threads.

    A missing or expired key reads as None, an empty iterator, or zero. A clock that is behind that of the epoch counts
    as the epoch's: what the log is past has expired for every reader. It is a context manager whose end is `close`.

    Attributes:
        version: Another number after each move to where something was committed since, be it an epoch or a removal of
            what has expired. Looking at it costs nothing.

    Raises:
        WrongKindError: A reader asked for a value at a key that holds a map, or the other way round.

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
    # What the compiled core reads of it; None: nothing.
    pages: Any = None

    @abstractmethod
    def renew(self, now_ms: int) -> None:
        """Move to the newest epoch and a new clock reading. Cheap: meant for every input buffer."""

    @abstractmethod
    def close(self) -> None:
        """Give the epoch up. The store may reuse its pages."""

    @abstractmethod
    def lend(self, now_ms: int, on_close: Callable[[], None]) -> Self:
        """Return a snapshot of the same epoch at another clock reading. To close it only calls `on_close`.

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
    def applied(self) -> Applied:
        """The epoch that this snapshot shows."""

    @property
    @abstractmethod
    def key_groups(self) -> KeyGroups:
        """The slots that the store owns at this moment. Counts and scans are of these alone.

        What is asked of a key in another slot may get any answer: it may be half loaded, or half removed.
        """

    def events_kept(self) -> Kept | None:
        """Return which portions there are of what epochs did to keys; None if that is not kept."""
        return None

    def events(self, serial: int) -> Portion | None:
        """Return a portion of what epochs did to keys, none of them later than this one; None if it is not there."""
        return None

    @abstractmethod
    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        """Return the keys that the epochs after that one changed, made or deleted; None if that is not known.

        It is known of the last few epochs, if they changed few enough keys, and the slots stayed the same. Expiry is
        no change.
        """

    @abstractmethod
    def expired_since(self, removals: int) -> Sequence[bytes] | None:
        """Return the keys that expired, or whose fields did, in the portions after so many; None if that is not known.

        It is known of the last few, if these were few enough keys. A key reads as missing as soon as it has expired;
        that this is noted comes after that, within a bounded time.
        """

    @abstractmethod
    def entry(self, key: bytes) -> Entry | None:
        """Describe what stands at a key."""

    @abstractmethod
    def stored_sizes(self, key: bytes, items_max: int) -> Iterator[int]:
        """Iterate over numbers that add up to the bytes that a key takes in the store; none for a missing key.

        Each takes a bounded time. Of a large map, list or set about so many items are looked at, and the rest is taken
        to be like them.
        """

    @abstractmethod
    def text(self, key: bytes) -> Text | None:
        """Return the value of a value state's key, of no matter what length."""

    @abstractmethod
    def texts(self, keys: Sequence[bytes]) -> list[Text | None]:
        """Return the values of the first of some keys, one at least; what is long, or raises, comes by itself."""

    def value(self, key: bytes) -> bytes | None:
        """Return the value of a value state's key as a whole."""
        text = self.text(key)
        return text if text is None else whole(text)

    @abstractmethod
    def field_texts(self, key: bytes, names: Sequence[bytes]) -> list[Text | None]:
        """Return several fields of a map, of no matter what length, None for a missing one."""

    def field(self, key: bytes, name: bytes) -> bytes | None:
        """Return one field of a map as a whole."""
        return self.fields(key, (name,))[0]

    def fields(self, key: bytes, names: Sequence[bytes]) -> list[bytes | None]:
        """Return several fields of a map as a whole, None for a missing one."""
        return [text if text is None else whole(text) for text in self.field_texts(key, names)]

    @abstractmethod
    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        """Return when fields of a map expire, milliseconds since 1970 UTC: 0 for never, None for a missing field."""

    @abstractmethod
    def map_sizes(self, key: bytes) -> Iterator[int]:
        """Iterate over numbers that add up to the number of fields of a map; each takes a bounded time.

        There are more than one while fields have expired and are not yet removed.
        """

    def map_size(self, key: bytes) -> int:
        """Return the number of fields of a map; 0 for a missing key."""
        return sum(self.map_sizes(key))

    @abstractmethod
    def map_texts(self, key: bytes) -> Iterator[tuple[bytes, Text]]:
        """Iterate over a map's (field, value); the order is the store's own and stays the same within an epoch."""

    def map_pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over a map's (field, value as a whole)."""
        return ((name, whole(text)) for name, text in self.map_texts(key))

    @abstractmethod
    def packed_map(self, key: bytes) -> bytes | None:
        """Return a small map as it lies (see `packed_map`); None for a missing key and for a large map."""

    @abstractmethod
    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, Text]]]:
        """Return the next cursor (0 at the end) and about `count` pairs; a small map comes whole, as in Redis.

        There may be fewer, even none, where much has expired or is large: a step's time is bounded.
        """

    @abstractmethod
    def list_size(self, key: bytes) -> int:
        """Return the number of elements of a list; 0 for a missing key."""

    @abstractmethod
    def list_parts(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over the elements `start` to before `stop`, within the list, as runs of length-prefixed texts.

        See `packed_list`; only the blocks that hold them are touched.
        """

    @abstractmethod
    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over the elements `start` to before `stop`, within the list."""

    @abstractmethod
    def set_size(self, key: bytes) -> int:
        """Return the number of members of a set; 0 for a missing key."""

    @abstractmethod
    def members(self, key: bytes) -> Iterator[bytes]:
        """Iterate over a set's members; the order is the store's own and stays the same within an epoch."""

    @abstractmethod
    def are_members(self, key: bytes, members: Sequence[bytes]) -> list[bool]:
        """Tell of each text whether it is a member of a set."""

    @abstractmethod
    def packed_set(self, key: bytes) -> bytes | None:
        """Return a small set as it lies: its members in byte order, as a `packed_list`.

        None for a missing key and for a large set.
        """

    @abstractmethod
    def scan_set(self, key: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor (0 at the end) and about `count` members; a small set comes whole.

        There may be fewer where members are long: a step's time is bounded. Any number below `FIELD_POSITIONS` is a
        cursor, here and for `scan_map`. Whoever wants a member at random begins at one at random, takes a dozen,
        because the gaps between members differ, and chooses among them (about what Redis does); where there is none
        behind it, the next step begins at 0.
        """

    @abstractmethod
    def sorted_size(self, key: bytes) -> int:
        """Return the number of members of a sorted set; 0 for a missing key."""

    @abstractmethod
    def scores(self, key: bytes, members: Sequence[bytes]) -> list[float | None]:
        """Return the scores of several members of a sorted set, None for a missing one. No score is -0.0 or NaN."""

    @abstractmethod
    def ranks(self, key: bytes, members: Sequence[bytes]) -> list[int | None]:
        """Return how many members are before each of some, by score, then by bytes; None for a missing one."""

    @abstractmethod
    def rank_of_score(self, key: bytes, score: float, is_after: bool) -> int:
        """Return how many members have a lower score; with `is_after`, a score as high or lower."""

    @abstractmethod
    def rank_of_member(self, key: bytes, member: bytes, is_after: bool) -> int:
        """Return how many members are before a text by their bytes; with `is_after`, itself included.

        It need not be a member. For sorted sets whose scores are all the same; of others, it is among those with the
        lowest score.
        """

    @abstractmethod
    def sorted_members(
        self, key: bytes, start: int, stop: int, is_reversed: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        """Iterate over (member, score) of the ranks `start` to before `stop`, within the sorted set.

        With `is_reversed` the last of them comes first. Only the blocks that hold them are touched.
        """

    @abstractmethod
    def packed_sorted(self, key: bytes) -> bytes | None:
        """Return a small sorted set as it lies (see `packed_sorted`); None for a missing key and for a large one."""

    @abstractmethod
    def scan_sorted(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        """Return the next cursor (0 at the end) and about `count` (member, score), in any order; a small one whole."""

    @abstractmethod
    def scan(
        self, cursor: int, count: int, kinds: Collection[Kind] | None = None, *, only_expiring: bool = False
    ) -> tuple[int, list[bytes]]:
        """Return the next cursor (0 at the end) and those of about `count` keys, in slot order, that are of some kinds.

        There may be fewer, even none, where much has expired or is large: a step's time is bounded. kinds: None: all.
        only_expiring: those alone that expire some time.

        A cursor is a position: the first one not yet visited. A step never ends inside one position, so that keys that
        stay over the whole scan are returned exactly once, on any server that holds them.
        """

    @abstractmethod
    def changes(self) -> Iterator[Change]:
        """Iterate over changes that make this state out of nothing, in store order.

        What expired at or before the clock of the last epoch is left out; this view's own clock does not matter, so
        that what is written of an epoch is the same on every server.
        """

    def runs(self, states: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Iterate over `changes` as sorted runs; `states` are the names of all states, in an order."""
        return runs_of(self.changes(), states)

    @abstractmethod
    def random_keys(self) -> Iterator[bytes | None]:
        """Iterate over steps of bounded time towards some key, any with about the same likelihood: the first that is
        not None."""


class Store(ABC):
    """One job generation's state. `apply` and `expire` are for the one writer; `snapshot` is for all."""

    @abstractmethod
    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        """Apply one epoch in one transaction and return about how many changes made a difference (0: none did).

        What a replaced state held and the epoch does not name goes: keys, and fields of the keys that it names.
        Raises KeyConflictError or StoreFullError, and then holds what it held before.
        """

    @abstractmethod
    def expire(self, now_ms: int, most: int) -> int:
        """Note what has expired by a clock, and remove what has expired by the log's: about so much; return how much.

        What is noted is in no count, and is told of (`Snapshot.expired_since`, `Snapshot.events`). It is removed once
        an epoch's clock has passed it: until then an epoch may still fold into it, and what an epoch makes of a state
        must not depend on when a server looked at its clock. Less than `most` means that nothing is left to do.
        """

    @abstractmethod
    def snapshot(self, now_ms: int) -> Snapshot:
        """Open a view of the newest epoch."""

    @property
    @abstractmethod
    def applied(self) -> Applied:
        """The newest epoch."""

    def used_bytes(self) -> tuple[int, int]:
        """Return how much of its files is in use, and how much waits to be used again; zeros if it has none."""
        return 0, 0

    def suspect(self) -> None:  # noqa: B027  # a store that nobody else writes to has nothing to say
        """Have the store verified by whoever writes it: a reader met something that is not what was written."""

    @property
    @abstractmethod
    def lineage(self) -> str:
        """A name for its epochs, the same in all processes: under another one the same numbers may be other epochs."""

    @abstractmethod
    def close(self) -> None:
        """Close the store; snapshots must be closed before."""
