"""A client with a cache and client-side tracking, which compares cached values with the epochs of its replies."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hiredis

from compat.waiting import WAIT_S_MAX


class CachingClient:
    """Speaks RESP3. Each value is the number of the epoch that wrote it. With OPTIN, it opts in for each read."""

    def __init__(self, port: int, *options: bytes) -> None:
        self._before = [(b"CLIENT", b"CACHING", b"YES")] if b"OPTIN" in options else []
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
        self._reader = hiredis.Reader()
        self.cache: dict[bytes, int] = {}
        self.pushes = 0
        self.nulls = 0
        self.call(b"HELLO", b"3")
        assert self.call(b"CLIENT", b"TRACKING", b"ON", *options) == b"OK"

    def close(self) -> None:
        self._socket.close()

    def call(self, *words: bytes) -> Any:
        """Send a request, process pushes before the reply, and return the reply."""
        self._socket.sendall(hiredis.pack_command(words))
        return self._reply()

    def _reply(self) -> Any:
        while True:
            found = self._reader.gets()
            if found is False:
                self._feed()
            elif isinstance(found, hiredis.PushNotification):
                self._take(found)
            else:
                return found

    def _feed(self) -> None:
        data = self._socket.recv(1 << 20)
        assert data, "the server closed the connection"
        self._reader.feed(data)

    def _take(self, push: Sequence[Any]) -> None:
        assert push[0] == b"invalidate", push
        self.pushes += 1
        if push[1] is None:
            self.nulls += 1
            self.cache.clear()
        else:
            for key in push[1]:
                self.cache.pop(key, None)

    def holds_only(self, values: Mapping[bytes, int]) -> bool:
        """Process the pushes of a moment; return whether all cached values are current."""
        self.listen(0.05)
        return all(values[key] == value for key, value in self.cache.items())

    def listen(self, seconds: float) -> None:
        """Process pushes for a time without sending a request."""
        self._socket.settimeout(seconds)
        try:
            self._feed()
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(WAIT_S_MAX)
        while (found := self._reader.gets()) is not False:
            self._take(found)

    def read(self, keys: Sequence[bytes], *, is_in_transaction: bool = False) -> list[int]:
        """Read values by GET and MGET in one write, and cache them; return them in order."""
        one, *more = random.sample(keys, min(len(keys), 4))
        reads = [(b"GET", one), *([(b"MGET", *more)] if more else [])]
        if is_in_transaction:
            requests = [*self._before, (b"MULTI",), *reads, (b"EXEC",)]
        else:
            requests = [request for read in reads for request in (*self._before, read)]
        self._socket.sendall(b"".join(map(hiredis.pack_command, requests)))
        if is_in_transaction:
            replies = [self._reply() for _ in requests][-1]
            return [self._store_rest(read, reply) for read, reply in zip(reads, replies, strict=True)]
        found = []
        for request in requests:
            reply = self._reply()
            if request in reads:
                found.append(self._store_rest(request, reply))
        return found

    def _store_rest(self, request: tuple[bytes, ...], reply: Any) -> int:
        found = dict(zip(request[1:], map(int, [reply] if request[0] == b"GET" else reply), strict=True))
        self.cache.update(found)
        return max(found.values())


def turns_of(clients: Sequence[CachingClient]) -> Iterator[int]:
    """Count turns of reads: 100 of them, and more until each client has got an invalidation."""
    for turn in range(10_000):
        if turn >= 100 and all(client.pushes for client in clients):
            return
        yield turn
