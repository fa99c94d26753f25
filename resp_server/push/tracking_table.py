"""Client-side caching: records which client read which key, and enqueues invalidations when keys change. No sockets.

    default   the clients that read a key are recorded until the key changes
    BCAST     nothing is recorded: a client gets each changed key that begins with one of its prefixes

If too many keys changed, or if the changed keys are unknown, everything is invalidated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from resp_server.session.epoch_feed import EpochFeed
from resp_server.session.tracking import EVERYTHING, Invalidation, TrackingState

# Redis' default of tracking-table-max-keys.
KEYS_MAX = 1_000_000
# The memory of the table; long keys, or keys that many clients cache, exceed it before KEYS_MAX.
TABLE_BYTES_MAX = 256 << 20
# The overhead of a key (CPython 3.11: the object's header, and the dictionary's row at its usual filling), and of each
# client of a key that has more than one.
KEY_OVERHEAD_BYTES = 150
CLIENT_OF_KEY_BYTES = 16
# If more clients cache a key, its invalidation goes to all clients: for those without the key it is harmless (guess).
CLIENTS_PER_KEY_MAX = 64
# The keys that are evicted at once, within 1.5 ms (guess).
EVICTED_KEYS_MAX = 1024
# The invalidations that one change may enqueue for all clients together; beyond this, everything is invalidated.
# Enqueueing so many takes about 10 ms. Sending them takes much longer, and goes client by client.
INVALIDATIONS_PER_CHANGE_MAX = 50_000
INVALIDATION_BYTES_PER_CHANGE_MAX = 64 << 20
# Entries that are freed at a time.
FREED_PER_STEP = 1024

# The memory for the prefixes of one client, each with its overhead (guess; Redis has no limit).
PREFIX_BYTES_MAX = 64 << 10
PREFIX_OVERHEAD_BYTES = 100


# The clients that cache a key; if there is only one, its `as_tuple`.
CachingClients = tuple[TrackingState, ...]
ALL_CLIENTS: CachingClients = ()


class TrackingTable:
    """The tracking clients of one process, and the keys that they cache.

    Attributes:
        full_invalidations: The number of times that everything was invalidated. Keys of replies that were requested
            before the last time are not recorded.
    """

    def __init__(self, keys_max: int = KEYS_MAX, bytes_max: int = TABLE_BYTES_MAX) -> None:
        self.keys_max = keys_max
        self.clients: dict[TrackingState, None] = {}
        self.pending_clients: dict[TrackingState, None] = {}
        self.listeners: dict[EpochFeed, None] = {}
        # The number of (key, client) pairs.
        self.items = 0
        self.full_invalidations = 0
        # `on_begin` is called for each new client; `on_use` when the table gets its first client or loses its last one.
        self.on_begin: Callable[[], None] = lambda: None
        self.on_use: Callable[[bool], None] = lambda is_used: None
        # Calls back once all changes that are made from now on reach this table: behind a proxy, servers report them.
        self.when_followed: Callable[[Callable[[], None]], None] = lambda then: then()
        self._bytes_max = bytes_max
        self._bytes = 0
        self.clients_by_key: dict[bytes, CachingClients] = {}
        self._by_prefix: dict[bytes, dict[TrackingState, None]] = {}
        self._prefix_lengths: list[int] = []
        self._unfreed: list[dict[bytes, CachingClients]] = []

    @property
    def keys(self) -> int:
        """The number of recorded keys."""
        return len(self.clients_by_key)

    @property
    def prefixes(self) -> int:
        """The number of tracked prefixes."""
        return len(self._by_prefix)

    @property
    def is_idle(self) -> bool:
        """Return whether no client tracks keys and no listener wants changes."""
        return not self.clients and not self.listeners

    # -- clients ------------------------------------------------------------------------------------------------------

    def begin(self, client: TrackingState, prefixes: Iterable[bytes] = ()) -> None:
        """Track for a client from now on; for BCAST, add these prefixes."""
        client.is_on = True
        if not self.clients:
            self.on_use(True)
        self.clients[client] = None
        for prefix in prefixes:
            client.prefixes.add(prefix)
            self._by_prefix.setdefault(prefix, {})[client] = None
        self._measure_prefixes()
        self.on_begin()

    def end(self, client: TrackingState) -> None:
        """Stop tracking for a client. Its keys are removed when they change or are evicted."""
        for prefix in client.prefixes:
            clients = self._by_prefix[prefix]
            clients.pop(client, None)
            if not clients:
                del self._by_prefix[prefix]
        client.end()
        del self.clients[client]
        self.pending_clients.pop(client, None)
        self._measure_prefixes()
        if not self.clients:
            self._remove_all()
            self.on_use(False)

    def _measure_prefixes(self) -> None:
        self._prefix_lengths = sorted({len(each) for each in self._by_prefix})

    # -- read keys ----------------------------------------------------------------------------------------------------

    def record_keys(self, client: TrackingState, keys: Iterable[bytes]) -> None:
        """Record that a client read keys, also missing ones."""
        clients_by_key = self.clients_by_key
        for key in keys if client.is_on else ():
            clients = clients_by_key.get(key)
            if clients is None:
                clients_by_key[key] = client.as_tuple
                self.items += 1
                self._bytes += len(key) + KEY_OVERHEAD_BYTES
            elif clients is not ALL_CLIENTS and client not in clients:
                self._add(key, clients, client)
        if self._unfreed:
            self.free()
        if (0 < self.keys_max < len(clients_by_key)) or self._bytes > self._bytes_max:
            self._evict()

    def has(self, client: TrackingState, key: bytes) -> bool:
        """Return whether a key is recorded for a client."""
        clients = self.clients_by_key.get(key)
        return clients is not None and (clients is ALL_CLIENTS or client in clients)

    def _add(self, key: bytes, clients: CachingClients, client: TrackingState) -> None:
        if len(clients) >= CLIENTS_PER_KEY_MAX:
            live = tuple(each for each in clients if each.is_on)
            self._count(clients, -1)
            clients = live
            self._count(clients, 1)
        new = ALL_CLIENTS if len(clients) >= CLIENTS_PER_KEY_MAX else (*clients, client)
        self._count(clients, -1)
        self._count(new, 1)
        self.clients_by_key[key] = new

    def _count(self, clients: CachingClients, sign: int) -> None:
        self.items += sign * (len(clients) or CLIENTS_PER_KEY_MAX)
        if len(clients) > 1:
            self._bytes += sign * len(clients) * CLIENT_OF_KEY_BYTES

    def _evict(self) -> None:
        """Evict the oldest keys, and invalidate them for their clients."""
        while (0 < self.keys_max < len(self.clients_by_key)) or self._bytes > self._bytes_max:
            count = min(EVICTED_KEYS_MAX, 1 + len(self.clients_by_key) // EVICTED_KEYS_MAX)
            self._enqueue_for_keys(list(islice(self.clients_by_key, count)))

    def limit(self, keys_max: int) -> None:
        """Set how many keys are recorded; 0: only memory limits them."""
        self.keys_max = keys_max
        self._evict()

    def _remove_all(self) -> None:
        """Remove all keys. They are freed later, as freeing them at once could block the event loop."""
        if self.clients_by_key:
            self._unfreed.append(self.clients_by_key)
        self.clients_by_key = {}
        self.items = self._bytes = 0

    @property
    def is_freeing(self) -> bool:
        """Return whether removed keys are still to be freed."""
        return bool(self._unfreed)

    def free(self) -> None:
        """Free a part of the removed keys."""
        if self._unfreed:
            last = self._unfreed[-1]
            for _ in range(min(FREED_PER_STEP, len(last))):
                last.popitem()
            if not last:
                self._unfreed.pop()

    # -- changed keys -------------------------------------------------------------------------------------------------

    def changed(self, keys: Sequence[bytes] | None) -> None:
        """Enqueue invalidations for changed keys; None: any key may have changed."""
        for listener in self.listeners:
            listener.record_changes(keys)
        if not self.clients:
            return
        if keys is None:
            self.invalidate_all()
        elif keys:
            self._enqueue_for_keys(keys)
            self._enqueue_for_prefixes(keys)

    def invalidate_all(self) -> None:
        """Invalidate everything for all clients."""
        self.full_invalidations += 1
        self._remove_all()
        for client in self.clients:
            self.enqueue(client, EVERYTHING)

    def enqueue(self, client: TrackingState, invalidation: Invalidation, *, is_after_reply: bool = False) -> None:
        """Enqueue an invalidation for a client.

        Args:
            is_after_reply: To be sent only after the reply that is sent next.
        """
        if client.is_on:
            if is_after_reply:
                client.resend.append(invalidation)
            else:
                client.enqueue(invalidation)
            self.pending_clients[client] = None

    def enqueue_resend(self, client: TrackingState, keys: Sequence[bytes] | None) -> None:
        """Enqueue keys for a client, to be sent after the reply that begins now; None: all keys."""
        if (keys or keys is None) and client.is_on and not client.is_bcast:
            client.resend.append(EVERYTHING if keys is None else Invalidation(list(dict.fromkeys(keys))))
            self.pending_clients[client] = None

    def take(self, client: TrackingState, prefix: bytes, *, is_reply_pending: bool = False) -> bytes:
        """Return the frames to send to a client now (see `TrackingState.take`); `prefix` is PUSH or MESSAGE."""
        taken = client.take(is_reply_pending=is_reply_pending)
        if not client.has_pending:
            self.pending_clients.pop(client, None)
        return b"".join([each.frames(prefix) for each in taken])

    def _enqueue_for_keys(self, keys: Iterable[bytes]) -> None:
        keys_by_clients: dict[CachingClients, list[bytes]] = {}
        for key in keys:
            clients = self.clients_by_key.pop(key, None)
            if clients is not None:
                keys_by_clients.setdefault(clients, []).append(key)
                self._count(clients, -1)
                self._bytes -= len(key) + KEY_OVERHEAD_BYTES
        rows = [(clients or tuple(self.clients), Invalidation(some)) for clients, some in keys_by_clients.items()]
        if self._invalidates_all(rows):
            return
        for clients, invalidation in rows:
            for client in clients:
                if not client.is_bcast:
                    self.enqueue(client, invalidation)

    def _enqueue_for_prefixes(self, keys: Sequence[bytes]) -> None:
        if not self._by_prefix:
            return
        by_prefix: dict[bytes, list[bytes]] = {}
        for key in sorted(set(keys)):
            for length in self._prefix_lengths:
                if length > len(key):
                    break
                if key[:length] in self._by_prefix:
                    by_prefix.setdefault(key[:length], []).append(key)
        rows = [
            (tuple(self._by_prefix[prefix]), Invalidation(some, is_one_frame=True))
            for prefix, some in sorted(by_prefix.items())
        ]
        if self._invalidates_all(rows):
            return
        for clients, invalidation in rows:
            by_user: dict[int, Invalidation] = {}
            for client in clients:
                user = client.user()
                if user is None or user.reads_all_keys:
                    self.enqueue(client, invalidation)
                    continue
                readable = by_user.get(id(user))
                if readable is None:
                    keys = [key for key in invalidation.keys or () if user.can_read(key)]
                    readable = by_user[id(user)] = Invalidation(keys, is_one_frame=True)
                if readable.keys:
                    self.enqueue(client, readable)

    def _invalidates_all(self, rows: Sequence[tuple[CachingClients, Invalidation]]) -> bool:
        """Invalidate everything if there is too much to enqueue; return whether this was done."""
        count = sum(len(clients) for clients, _ in rows)
        size = sum(len(clients) * each.bytes for clients, each in rows)
        is_too_much = count > INVALIDATIONS_PER_CHANGE_MAX or size > INVALIDATION_BYTES_PER_CHANGE_MAX
        if is_too_much:
            self.invalidate_all()
        return is_too_much
