"""Many tracking clients: each caches what it reads, and compares it with invalidations and replies.

Started with a port and a number of clients. Each input line is a command; a line of JSON reports its end:

    track              CLIENT TRACKING ON; of every ten clients one has BCAST, half of these with the prefix of all keys
    read               each client reads those of its keys that are not cached
    expect EPOCH N     from now on an epoch may change every Nth key; some clients read continuously
    told               wait until all changed keys are invalidated in all caches
    ask                each client reads one key

A value begins with the number of its epoch. What must not happen is said in `wrong`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import hiredis
import uvloop

from compat.waiting import eventually_async

KEYS = 1_000_000
# Each client has so many keys before it that nobody else reads as its own, and reads every fifth of them.
OWN_KEYS = 1000
OWN_STEP = 5
SHARED_STEP = 50_000
ALL = b"job:v:"
ASK_SECONDS = 0.02
WRONG_MAX = 20


def key(number: int) -> bytes:
    return ALL + b"%08d" % number


class Client(asyncio.Protocol):
    """One client. left: keys that it holds as they were before the epoch that is expected, which changes them."""

    def __init__(self, number: int, clients: Clients) -> None:
        self._clients = clients
        first = number * OWN_KEYS
        self.prefix = b"" if number % 10 else ALL if number % 20 else key(first)[:-3]
        self.asks = number % 10 == 5 or number % 100 in (0, 10)
        own = [key(each) for each in range(first, first + OWN_KEYS, OWN_STEP)]
        shared = [key(each) for each in range(0, KEYS, SHARED_STEP)]
        self.keys = list(dict.fromkeys(own if self.prefix not in (b"", ALL) else own + shared))
        self.held: dict[bytes, int] = {}
        self.left: set[bytes] = set()
        self.told: set[bytes] = set()
        self.is_all_told = False
        self.asked: deque[tuple[bytes, float]] = deque()
        self._reader = hiredis.Reader()
        self._next = number

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(hiredis.pack_command((b"HELLO", b"3")))
        self.expect_plain()

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.is_wrong(f"a connection was lost: {error}")

    def expect_plain(self) -> None:
        """Wait for a reply that is no value."""
        self.asked.append((b"", 0.0))
        self._clients.waits_for += 1

    def track(self) -> None:
        options = (b"BCAST", b"PREFIX", self.prefix) if self.prefix else ()
        self._transport.write(hiredis.pack_command((b"CLIENT", b"TRACKING", b"ON", *options)))
        self.expect_plain()

    def get(self, keys: list[bytes]) -> None:
        now = perf_counter()
        self._transport.write(b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(each), each) for each in keys]))
        self.asked += [(each, now) for each in keys]
        self._clients.waits_for += len(keys)

    def get_next(self) -> None:
        self._next += 1
        self.get([self.keys[self._next % len(self.keys)]])

    def expect(self) -> None:
        """Begin to wait for the epoch that the clients expect."""
        self.told, self.is_all_told = set(), False
        self.left = {each for each in self.held if self._clients.changes(each)}
        assert self.left
        if self.asks:
            self.get_next()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        was_left = bool(self.left)
        while (found := self._reader.gets()) is not False:
            if isinstance(found, hiredis.PushNotification):
                self._take_told(*found)
            else:
                self._take_reply(found)
        if was_left and not self.left:
            self._clients.told_at.append(perf_counter())

    def _take_told(self, kind: bytes, keys: list[bytes] | None) -> None:
        if kind != b"invalidate":
            self._clients.is_wrong(f"{kind!r} was pushed")
        elif keys is None:
            self._clients.nulls += 1
            self.is_all_told = True
            self.held.clear()
            self.left.clear()
        else:
            self._clients.keys_told += len(keys)
            self.told.update(keys)
            self.left.difference_update(keys)
            for each in keys:
                self.held.pop(each, None)

    def _take_reply(self, value: Any) -> None:
        asked, since = self.asked.popleft()
        clients = self._clients
        clients.waits_for -= 1
        if isinstance(value, Exception):
            clients.is_wrong(f"{asked!r} was answered by {value}")
            return
        if not asked:
            return
        epoch, _, rest = value.partition(b":")
        number = int(epoch)
        if rest != asked[len(ALL) :] or number > clients.epoch:
            clients.is_wrong(f"{asked!r} was answered by {value!r}")
        if number == clients.epoch and self.left:
            clients.is_wrong(f"{asked!r} was answered from epoch {number} before {len(self.left)} keys were told")
        if number < clients.epoch and clients.changes(asked):
            if self.is_all_told or asked in self.told:
                clients.is_wrong(f"{asked!r} was answered from epoch {number} when it was told to be invalid")
            self.left.add(asked)
        self.held[asked] = number
        clients.longest_s = max(clients.longest_s, perf_counter() - since)
        if self.asks and clients.is_asking:
            asyncio.get_running_loop().call_later(ASK_SECONDS, self._ask_again)

    def _ask_again(self) -> None:
        if self._clients.is_asking:
            self.get_next()


class Clients:
    """All of them, and what they have seen since the last word of it."""

    def __init__(self) -> None:
        self.all: list[Client] = []
        self.epoch = 1  # that all keys are of at first
        self.every = 1
        self.waits_for = 0
        self.is_asking = False
        self.forget()

    def forget(self) -> None:
        self.wrong: list[str] = []
        self.told_at: list[float] = []
        self.nulls = self.keys_told = 0
        self.longest_s = 0.0

    def changes(self, name: bytes) -> bool:
        """Return whether the epoch that is expected changes a key."""
        return int(name[len(ALL) :]) % self.every == 0

    def is_wrong(self, what: str) -> None:
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(what)

    async def _until(self, is_so: Callable[[], bool], awaited: str) -> None:
        """Wait until something is so, or is wrong."""
        await eventually_async(lambda: is_so() or self.wrong, awaited=awaited, timeout_s=600, interval_s=0.001)

    async def answered(self) -> None:
        await self._until(lambda: not self.waits_for, "all replies")

    async def connect(self, port: int, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            client = Client(number, self)
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
            self.all.append(client)
        await self.answered()

    async def track(self) -> None:
        for client in self.all:
            client.track()
        await self.answered()

    async def read(self) -> None:
        for client in self.all:
            client.get([each for each in client.keys if each not in client.held])
        await self.answered()

    async def expect(self, epoch: str, every: str) -> None:
        self.epoch, self.every, self.is_asking = int(epoch), int(every), True
        for client in self.all:
            client.expect()

    async def told(self) -> None:
        await self._until(lambda: len(self.told_at) >= len(self.all), "all invalidations")
        self.is_asking = False
        await self.answered()

    async def ask(self) -> None:
        for client in self.all:
            client.get(client.keys[:1])
        await self.answered()

    def report(self) -> str:
        """Say what was seen since the last report."""
        spread_ms = (max(self.told_at) - min(self.told_at)) * 1e3 if self.told_at else 0.0
        seen = {
            "wrong": self.wrong,
            "held": sum(len(each.held) for each in self.all),
            "clients_told": len(self.told_at),
            "nulls": self.nulls,
            "keys_told": self.keys_told,
            "first_to_last_told_ms": spread_ms,
            "longest_reply_ms": self.longest_s * 1e3,
        }
        self.forget()
        return json.dumps(seen)


async def main(port: int, count: int) -> None:
    clients = Clients()
    await clients.connect(port, count)
    print(clients.report(), flush=True)
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        await getattr(clients, words[0])(*words[1:])
        print(clients.report(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
