"""WATCH records a mark for each key; EXEC compares the marks with the keys.

A mark has the epoch at which the key was read, and a digest. The digest covers the key's kind, expiry and size, and its
value unless that is large; the compiled core takes the key's record in the store instead, and other processes get a
digest of that. EXEC computes the digest again. If it differs, the key has changed: by an epoch, or because it expired.
If it is equal, EXEC asks the store which keys the epochs since then changed. The store does not know this if the epochs
changed too many keys, if it was rebuilt, or if slots moved. Then the key is unchanged if the digest covers its value,
and otherwise counts as changed.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b
from itertools import islice
from typing import assert_never

from resp_server.session.transaction import OF_RECORD, WatchedVersion, record_digest
from state_backend.codec.packed_list import ELEMENTS_MAX
from state_backend.model.descriptor import Kind
from state_backend.model.errors import StoreError
from state_backend.store.keyspace import KeyspaceView
from state_backend.store.store import LongValue, Snapshot, Store

# The digest of a longer value covers only its size. Digesting this many bytes takes 0.1 ms (guess).
VALUE_BYTES_MAX = 64 << 10
DIGEST_BYTES = 16
# Steps of counting a map's fields when some have expired; each takes well below a millisecond.
COUNT_STEPS_MAX = 4

# Stands for the digest of a map that cannot be counted in time; it never matches.
NO_DIGEST = "?"


def watched_version_of(run_id: str, view: KeyspaceView, key: bytes) -> WatchedVersion:
    """Return a key's mark, of its committed value; StoreError if the key cannot be read here."""
    snapshot = view.committed.at(key)
    digest, covers_value = _digest_of(snapshot, key)
    return WatchedVersion(lineage_of(run_id, view.store_of(key)), snapshot.applied.epoch, digest, covers_value)


def watch_point_of(run_id: str, view: KeyspaceView, job: str) -> tuple[str, int]:
    """Return the lineage of a job's store and its epoch in a view, for the compiled core's marks."""
    return lineage_of(run_id, view.store_of_job(job)), view.snapshot_of(job).applied.epoch


def lineage_of(run_id: str, store: Store | None) -> str:
    """Return the name of the lineage of a store. In stores of one lineage, an epoch number means one epoch."""
    return "" if store is None else f"{run_id}/{store.lineage}"


def _digest_of(snapshot: Snapshot, key: bytes) -> tuple[str, bool]:
    info = snapshot.key_info(key)
    if info is None:
        return "", True
    content, size = None, 0
    match info.kind:
        case Kind.VALUE:
            text = snapshot.lazy_value(key)
            if isinstance(text, LongValue):
                size = text.length
            else:
                content, size = text, len(text or b"")
        case Kind.MAP:
            content = snapshot.packed_map(key)
            if content is None:
                sizes = snapshot.map_sizes(key)
                size = sum(islice(sizes, COUNT_STEPS_MAX))
                if next(sizes, None) is not None:
                    return NO_DIGEST, False
        case Kind.LIST:
            size = snapshot.list_size(key)
            if size <= ELEMENTS_MAX:
                content = b"".join(snapshot.list_bulk_strings(key, 0, size))
        case Kind.SET:
            size, content = snapshot.set_size(key), snapshot.packed_set(key)
        case Kind.SORTED_SET:
            size, content = snapshot.sorted_size(key), snapshot.packed_sorted(key)
        case _:
            assert_never(info.kind)
    covers_value = content is not None and len(content) <= VALUE_BYTES_MAX
    digest = blake2b(repr((info.state, info.kind.name, info.expire_at_ms, size)).encode(), digest_size=DIGEST_BYTES)
    if covers_value and content is not None:
        digest.update(content)
    return digest.hexdigest(), covers_value


def _digest_like(digest: str | bytes, snapshot: Snapshot, key: bytes) -> str | bytes | None:
    """Return a key's digest of the same kind as that of a mark."""
    if not isinstance(digest, bytes) and not digest.startswith(OF_RECORD):
        return _digest_of(snapshot, key)[0]
    record = snapshot.stored_record(key)
    return record if record is None or isinstance(digest, bytes) else record_digest(record)


class Watch:
    """Compares watched keys with their marks, in one view."""

    def __init__(self, run_id: str, view: KeyspaceView) -> None:
        self._run_id = run_id
        self._view = view
        self._changed: dict[tuple[str, int], Collection[bytes] | None] = {}

    def is_changed(self, key: bytes, mark: WatchedVersion) -> bool:
        """Return whether a key has changed since its mark, or may have."""
        try:
            snapshot = self._view.at(key)
            digest = _digest_like(mark.digest, snapshot, key)
            lineage = lineage_of(self._run_id, self._view.store_of(key))
        except StoreError:
            return True  # it cannot be read here now
        if digest != mark.digest or digest == NO_DIGEST:
            return True
        changed = self._keys_changed(key, mark) if lineage == mark.lineage else None
        return not mark.covers_value if changed is None else key in changed

    def _keys_changed(self, key: bytes, mark: WatchedVersion) -> Collection[bytes] | None:
        """Return the keys of its job that later epochs changed; None if the store does not know."""
        if not mark.lineage:
            return None
        since = mark.lineage, mark.epoch
        if since not in self._changed:
            keys = self._view.at(key).changed_since(mark.epoch)
            self._changed[since] = None if keys is None else frozenset(keys)
        return self._changed[since]
