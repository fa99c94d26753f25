"""Watched keys: one watcher for each user, however many tabs watch.

A key is read once, on a connection whose reads the server tracks (client-side caching). It is read again only when the
server has invalidated it. Keys of a pattern are found by a page of SCAN at the beginning, and by keyspace
notifications, if the server sends them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparkis_ui.client import (
    Client,
    Endpoint,
    Listener,
    LostError,
    RedirectError,
    RefusedError,
    RequestError,
    TrackedReader,
)
from sparkis_ui.facts import Node, integer, text_of
from sparkis_ui.text import numeric
from sparkis_ui.values import read_keys, scored

KEYS_MAX = 100  # of all tabs of a user together
PATTERNS_MAX = 10
NUMBERS_MAX = 12  # of a key with a graph
POINTS = 120
POINTS_MIN = 30  # the width of a graph that has fewer
EVENTS_MAX = 100
WANTED_S = 10.0
RETRY_S = 1.0
CONFIRMED_S_MAX = 10.0  # as long as the reply to any other request may take
TEXT_BYTES = 512
INVALIDATE = b"__redis__:invalidate"
CHANNEL = b"__keyspace@0__:"


class KeyEvent(NamedTuple):
    """A keyspace notification, and the patterns for which it came."""

    at_s: float
    key: bytes
    name: str
    patterns: set[bytes]


@dataclass
class Watched:
    """A key and its last values.

    Args:
        rows: Names and values; a name is a field or a member, or empty for a string.
    """

    key: bytes
    kind: str = ""
    length: int = 0
    rows: list[tuple[bytes, bytes | float]] = field(default_factory=list)
    numbers: dict[bytes, deque[float | None]] = field(default_factory=dict)
    changes: int = 0
    changed_s: float = 0.0
    ranks: dict[bytes, int] = field(default_factory=dict)
    ranks_before: dict[bytes, int] = field(default_factory=dict)
    error: str = ""

    def take(self, kind: str, length: int, rows: Sequence[tuple[bytes, bytes | float]]) -> None:
        """Record a value that was read."""
        if self.kind:
            self.changes += 1
        self.kind, self.length, self.rows, self.error = kind, length, list(rows), ""
        self.changed_s = time.time()
        self.ranks_before = self.ranks
        self.ranks = {name: index for index, (name, _) in enumerate(rows)} if kind == "zset" else {}
        for name, value in rows[:NUMBERS_MAX] if kind in ("string", "hash", "zset") else ((b"", float(length)),):
            found = value if isinstance(value, float) else numeric(value)
            if found is not None:
                self.numbers.setdefault(name, deque(maxlen=POINTS)).append(found)


class Tracking:
    """A server's connections for a watcher: one reads, the other one listens."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.reader = TrackedReader(endpoint)
        self.listener = Listener(endpoint)
        self.patterns: set[bytes] = set()
        self._unconfirmed = 0
        self._confirmed = asyncio.Event()

    async def start(self) -> None:
        """Connect both; the server then sends the reader's invalidations to the listener."""
        await self.listener.send("CLIENT", "ID")
        listener = await self.listener.receive()
        await self.listener.send("SUBSCRIBE", INVALIDATE)
        await self.listener.receive()
        await self.reader.execute("CLIENT", "TRACKING", "ON", "REDIRECT", listener)

    async def subscribe(self, patterns: set[bytes]) -> None:
        """Get the notifications of keys that match these patterns, and no others. TimeoutError: it is not confirmed.

        A key that is written after this returns is notified, so keys that are looked for from then on are complete.
        """
        for pattern in patterns - self.patterns:
            self._unconfirmed += 1
            await self.listener.send("PSUBSCRIBE", CHANNEL + pattern)
        for pattern in self.patterns - patterns:
            await self.listener.send("PUNSUBSCRIBE", CHANNEL + pattern)
        self.patterns = set(patterns)
        if self._unconfirmed:
            self._confirmed.clear()
            async with asyncio.timeout(CONFIRMED_S_MAX):
                await self._confirmed.wait()

    def confirm(self) -> None:
        """Note that the server has confirmed a subscription."""
        self._unconfirmed -= 1
        if not self._unconfirmed:
            self._confirmed.set()

    async def close(self) -> None:
        """Close both connections."""
        await self.reader.close()
        await self.listener.close()


class Watcher:
    """The watched keys of a user."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.keys: dict[bytes, Watched] = {}
        self.events: deque[KeyEvent] = deque(maxlen=EVENTS_MAX)
        self.version = 0
        self.error = ""
        self._changed = asyncio.Condition()
        self._wanted_keys: dict[bytes, float] = {}
        self._wanted_patterns: dict[bytes, float] = {}
        self._keys_of: dict[bytes, dict[bytes, None]] = {}
        self._nodes: Sequence[Node] = ()
        self._tracking: dict[str, Tracking] = {}
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._homes: dict[bytes, Endpoint] = {}
        self._due: dict[bytes, None] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def want(self, keys: Iterable[bytes], patterns: Iterable[bytes], nodes: Sequence[Node] = ()) -> None:
        """Watch keys and patterns for the next `WANTED_S` seconds.

        Args:
            nodes: The masters of a cluster.
        """
        now_s = time.monotonic()
        self._nodes = nodes
        for key in keys:
            self._want_key(key, now_s)
        for pattern in list(patterns)[:PATTERNS_MAX]:
            if pattern not in self._wanted_patterns:
                self._wake.set()
            self._wanted_patterns[pattern] = now_s
            for key in self._keys_of.get(pattern, ()):
                if self.keys[key].kind != "none":  # a key that is gone makes room for others
                    self._wanted_keys[key] = now_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def matching(self, pattern: bytes) -> list[bytes]:
        """Return the keys that were found for a pattern, those that changed last first."""
        return sorted(self._keys_of.get(pattern, ()), key=lambda key: -self.keys[key].changed_s)

    def events_of(self, patterns: Iterable[bytes]) -> list[KeyEvent]:
        """Return the notifications of keys that match some patterns, the last one first."""
        wanted = set(patterns)
        return [event for event in self.events if event.patterns & wanted]

    @property
    def is_full(self) -> bool:
        """Whether as many keys are watched as possible: others are left out."""
        return len(self.keys) >= KEYS_MAX

    async def wait_for_change(self, version: int) -> None:
        """Wait until something has changed since a version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)

    async def close(self) -> None:
        """End watching and close the connections."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._disconnect()

    def _want_key(self, key: bytes, now_s: float) -> None:
        if key not in self._wanted_keys and len(self._wanted_keys) >= KEYS_MAX:
            return
        self._wanted_keys[key] = now_s
        if key not in self.keys:
            self.keys[key] = Watched(key)
            self._due[key] = None
            self._wake.set()

    async def _run(self) -> None:
        try:
            while self._wanted_keys or self._wanted_patterns:
                try:
                    await self._turn()
                    if self.error:
                        self.error = ""
                        await self._notify()
                except (RequestError, TimeoutError) as error:
                    self.error = str(error) or "no reply in time"
                    await self._disconnect()
                    self._due |= dict.fromkeys(self.keys)
                    await self._notify()
                    await asyncio.sleep(RETRY_S)
        finally:
            await self._disconnect()

    async def _turn(self) -> None:
        self._forget()
        patterns = set(self._wanted_patterns)
        for endpoint in self._endpoints(patterns):
            await (await self._tracking_of(endpoint)).subscribe(patterns)
        for pattern in patterns - self._keys_of.keys():
            found = await read_keys(self._client, pattern, nodes=self._nodes, count_min=KEYS_MAX)
            self._keys_of.setdefault(pattern, {})  # it has the keys that were notified meanwhile
            for key, _ in found.keys[:KEYS_MAX]:
                self._found(pattern, key)
        due, self._due = self._due, {}
        for key in due:
            if key in self.keys:
                await self._read(self.keys[key])
        if due:
            await self._notify()
        for task in self._listening.values():
            if task.done():
                raise task.exception() or LostError("the connection for changes has ended")
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._wake.wait()
        self._wake.clear()

    def _endpoints(self, patterns: set[bytes]) -> list[Endpoint]:
        """Return the servers to listen to: for patterns all masters of a cluster, otherwise the endpoint."""
        nodes = [self._client.at(node.host, node.port).endpoint for node in self._nodes] if patterns else []
        return nodes or [self._client.endpoint]

    def _forget(self) -> None:
        """Remove keys and patterns that no page has wanted for `WANTED_S` seconds."""
        oldest_s = time.monotonic() - WANTED_S
        for pattern in [each for each, wanted_s in self._wanted_patterns.items() if wanted_s < oldest_s]:
            del self._wanted_patterns[pattern]
            self._keys_of.pop(pattern, None)
        for key in [each for each, wanted_s in self._wanted_keys.items() if wanted_s < oldest_s]:
            del self._wanted_keys[key], self.keys[key]
            for keys in self._keys_of.values():
                keys.pop(key, None)

    def _found(self, pattern: bytes, key: bytes) -> None:
        self._want_key(key, time.monotonic())
        if key in self.keys:
            self._keys_of.setdefault(pattern, {})[key] = None

    async def _tracking_of(self, endpoint: Endpoint) -> Tracking:
        if endpoint.address not in self._tracking:
            tracking = self._tracking[endpoint.address] = Tracking(endpoint)
            await tracking.start()
            self._listening[endpoint.address] = asyncio.create_task(self._listen(tracking))
        return self._tracking[endpoint.address]

    async def _listen(self, tracking: Tracking) -> None:
        try:
            while True:
                message = await tracking.listener.receive()
                if message[0] == b"psubscribe":
                    tracking.confirm()
                self._take(message)
        finally:
            self._wake.set()

    def _take(self, message: Any) -> None:
        """Take a pushed message: an invalidation, or a notification."""
        if message[0] == b"message" and message[1] == INVALIDATE:
            keys = self.keys if message[2] is None else [key for key in message[2] if key in self.keys]
            self._due |= dict.fromkeys(keys)
        elif message[0] == b"pmessage":
            pattern, key = message[1].removeprefix(CHANNEL), message[2].removeprefix(CHANNEL)
            self._take_event(pattern, key, text_of(message[3]))
            if pattern in self._wanted_patterns:
                self._found(pattern, key)
        self._wake.set()

    def _take_event(self, pattern: bytes, key: bytes, name: str) -> None:
        """Record a notification, which comes once for each of its patterns, one message after the other."""
        last = self.events[0] if self.events else None
        if last is not None and (last.key, last.name) == (key, name) and pattern not in last.patterns:
            last.patterns.add(pattern)
        else:
            self.events.appendleft(KeyEvent(time.time(), key, name, {pattern}))

    async def _read(self, watched: Watched) -> None:
        for _ in range(3):  # one stale address is normal after a move
            tracking = await self._tracking_of(self._homes.get(watched.key, self._client.endpoint))
            try:
                kind, length, rows = await read_small(tracking.reader, watched.key)
            except RedirectError as moved:
                self._homes[watched.key] = self._client.at(moved.host, moved.port).endpoint
                continue
            except RefusedError as error:
                watched.error = str(error)
                return
            if (kind, length, rows) != (watched.kind, watched.length, watched.rows):
                watched.take(kind, length, rows)
            return

    async def _notify(self) -> None:
        async with self._changed:
            self.version += 1
            self._changed.notify_all()

    async def _disconnect(self) -> None:
        tasks, self._listening = self._listening, {}
        for task in tasks.values():
            task.cancel()
            with suppress(asyncio.CancelledError, RequestError):
                await task
        trackings, self._tracking = self._tracking, {}
        self._homes.clear()
        for tracking in trackings.values():
            await tracking.close()


async def read_small(reader: TrackedReader, key: bytes) -> tuple[str, int, list[tuple[bytes, bytes | float]]]:
    """Return a key's type, its length, and the beginning of its value; of a list the end."""
    kind = text_of(await reader.execute("TYPE", key))
    if kind == "string":
        return (
            kind,
            await reader.execute("STRLEN", key),
            [(b"", await reader.execute("GETRANGE", key, 0, TEXT_BYTES - 1))],
        )
    if kind == "hash":
        _, flat = await reader.execute("HSCAN", key, 0, "COUNT", NUMBERS_MAX)
        pairs = list(zip(flat[::2], flat[1::2], strict=True))[:NUMBERS_MAX]
        return kind, await reader.execute("HLEN", key), [(name, value[:TEXT_BYTES]) for name, value in pairs]
    if kind == "zset":
        reply = await reader.execute("ZREVRANGE", key, 0, NUMBERS_MAX - 1, "WITHSCORES")
        return kind, await reader.execute("ZCARD", key), list(scored(reply))
    if kind == "list":
        last = await reader.execute("LRANGE", key, -3, -1)
        return kind, await reader.execute("LLEN", key), [(b"", each[:TEXT_BYTES]) for each in reversed(last)]
    if kind == "set":
        return kind, integer(await reader.execute("SCARD", key)) or 0, []
    return kind, 0, []
