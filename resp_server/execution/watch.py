"""What WATCH remembers of a key, and how EXEC tells whether the key has changed since.

A mark says which epoch the key was looked at, and what was seen: that it is missing; or its kind, its expiry and either
all of its value, as a digest, or, of something large, its size. EXEC looks again. If something else is seen the key has
changed: by an epoch, or because it expired. If the same is seen, the store is asked which keys the epochs between have
changed; where it does not know (there were too many, it was built anew, or slots moved) a whole digest is proof that
the key reads as before, and what is only known by its size is taken as changed.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from itertools import islice

from resp_server.session.transaction import Mark
from state_backend.codec.packed_list import ELEMENTS_MAX
from state_backend.model.descriptor import Kind
from state_backend.model.errors import StoreError
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongText, Snapshot

# A value of more bytes is known by its length: to digest this much takes 0.1 ms (guess).
VALUE_BYTES_MAX = 64 << 10
DIGEST_BYTES = 16
# Steps of counting a map's fields while some have expired; each is well below a millisecond.
COUNT_STEPS_MAX = 4

# Of a map that cannot be counted in time: never the same twice.
NOT_SEEN = "?"


def mark_of(run_id: str, view: KeyspaceView, key: bytes) -> Mark:
    """Look at a key; StoreError if it cannot be read here."""
    snapshot = view.at(key)
    seen, is_whole = _look(snapshot, key)
    return Mark(lineage_at(run_id, view, key), snapshot.applied.epoch, seen, is_whole)


def lineage_at(run_id: str, view: KeyspaceView, key: bytes) -> str:
    """Name the store that a key's job has: epochs with the same number in stores of one name are the same."""
    store = view.store_at(key)
    return "" if store is None else f"{run_id}/{store.lineage}"


def _look(snapshot: Snapshot, key: bytes) -> tuple[str, bool]:
    entry = snapshot.entry(key)
    if entry is None:
        return "", True
    content, size = None, 0
    match entry.kind:
        case Kind.VALUE:
            text = snapshot.text(key)
            if isinstance(text, LongText):
                size = text.length
            else:
                content, size = text, len(text or b"")
        case Kind.MAP:
            content = snapshot.packed_map(key)
            if content is None:
                sizes = snapshot.map_sizes(key)
                size = sum(islice(sizes, COUNT_STEPS_MAX))
                if next(sizes, None) is not None:
                    return NOT_SEEN, False
        case Kind.LIST:
            size = snapshot.list_size(key)
            if size <= ELEMENTS_MAX:
                content = b"".join(snapshot.list_parts(key, 0, size))
        case Kind.SET:
            size, content = snapshot.set_size(key), snapshot.packed_set(key)
        case Kind.SORTED_SET:
            size, content = snapshot.sorted_size(key), snapshot.packed_sorted(key)
    is_whole = content is not None and len(content) <= VALUE_BYTES_MAX
    seen = blake2b(repr((entry.state, entry.kind.name, entry.expire_at_ms, size)).encode(), digest_size=DIGEST_BYTES)
    if is_whole and content is not None:
        seen.update(content)
    return seen.hexdigest(), is_whole


class Watch:
    """Tells of one view which keys are not what their marks say."""

    def __init__(self, run_id: str, view: KeyspaceView) -> None:
        self._run_id = run_id
        self._view = view
        self._changed: dict[tuple[str, int], Collection[bytes] | None] = {}

    def is_changed(self, key: bytes, mark: Mark) -> bool:
        """Tell whether a key has changed since, or may have."""
        try:
            now = mark_of(self._run_id, self._view, key)
        except StoreError:
            return True  # it cannot be read here any more, or not yet
        if now.seen != mark.seen or now.seen == NOT_SEEN:
            return True
        changed = self._keys_changed(key, mark) if now.lineage == mark.lineage else None
        return not mark.is_whole if changed is None else key in changed

    def _keys_changed(self, key: bytes, mark: Mark) -> Collection[bytes] | None:
        """Return the keys of its job that epochs after the mark's changed; None if that is not known."""
        if not mark.lineage:
            return None
        asked = mark.lineage, mark.epoch
        if asked not in self._changed:
            keys = self._view.at(key).changed_since(mark.epoch)
            self._changed[asked] = None if keys is None else frozenset(keys)
        return self._changed[asked]
