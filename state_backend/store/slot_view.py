"""A view of the keys in some slots, whatever slots the stores own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator

from state_backend.model.descriptor import Kind
from state_backend.model.errors import StoreError
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import HASH_BITS, SLOTS, slot_at, slot_of
from state_backend.store.keyspace import Keyspace, KeyspaceView
from state_backend.store.store import Snapshot, random_key_steps
from state_backend.store.uncommitted import OnChange

# The number of keys that one step counts, in well below a millisecond (guess).
STEP_KEYS = 512


def counts_of(scan: Callable[[int, int], tuple[int, list[bytes]]]) -> Iterator[int]:
    """Count keys by a scan, in steps: iterate over numbers that add up to the count."""
    cursor = 0
    while True:
        cursor, keys = scan(cursor, STEP_KEYS)
        yield len(keys)
        if not cursor:
            return


class SlotView(KeyspaceView):
    """The keys in some slots. A read of a key in another slot is a StoreError: "it does not exist" would be wrong."""

    def __init__(self, keyspace: Keyspace, slots: SlotSet, now_ms: int, on_change: OnChange | None = None) -> None:
        self._slots = slots
        self._lasts = [last for _, last in slots.ranges]
        self._is_served = bytearray(SLOTS)
        for first, last in slots.ranges:
            self._is_served[first : last + 1] = b"\1" * (last + 1 - first)
        super().__init__(keyspace, now_ms, on_change)

    @property
    def served_slots(self) -> bytes | None:
        return bytes(self._is_served)

    def at(self, key: bytes) -> Snapshot:
        if not self._is_served[slot_of(key)]:
            raise StoreError(f"slot {slot_of(key)} is not served by this server")
        return super().at(key)

    def scan(self, cursor: int, count: int, kinds: Collection[Kind] | None = None) -> tuple[int, list[bytes]]:
        start = self._from(cursor)
        if start is None:
            return 0, []
        next_cursor, found = super().scan(start, count, kinds)
        found = [key for key in found if self._is_served[slot_of(key)]]
        return (self._from(next_cursor) or 0 if next_cursor else 0), found

    def _from(self, position: int) -> int | None:
        """Return the first position in these slots at or after a given one; None if there is none."""
        at = bisect_left(self._lasts, slot_at(position))
        return max(position, self._slots.ranges[at][0] << HASH_BITS) if at < len(self._lasts) else None

    def key_counts(self) -> Iterator[int]:
        """Iterate over numbers that add up to the number of keys; each number takes a bounded time."""
        return counts_of(self.scan)

    @property
    def is_counted(self) -> bool:
        """Return whether all stores own exactly these slots, so that their counts are those of the view."""
        return all(snapshot.owned_slots == self._slots for _, snapshot in self.snapshots())

    def key_count(self) -> int:
        return super().key_count() if self.is_counted else sum(self.key_counts())

    def random_keys(self) -> Iterator[bytes | None]:
        return random_key_steps(self.scan, self._slots)
