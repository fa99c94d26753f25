"""Readers that read all the time: connections to proxies, each reading its share of the keys in turn.

A connection reads keys of neighbouring slots, which one server owns, so a slow server does not delay other keys. When
it is refused or broken, the reader connects to the next proxy, as a client with several addresses does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import hiredis

from benchmarks.chaos.judge import FIELDS, GROUPS, PAIR, Found, Judge, ReaderPosition, Window, key
from state_backend.model.slots import slot_of

CONNECTIONS = 16
# Gives a few thousand requests a second in all, and leaves processor time for the other processes.
PAUSE_S = 0.004
PAUSE_AFTER_FAILURE_S = 0.02
ANSWER_S_MAX = 20.0
READ_BYTES = 1 << 16
# Of so many requests one is a transaction over this group and a group at another server, one an MGET of both, and
# one reads a hash.
ROUND = 16

Address = tuple[str, int]


class Readers:
    """Runs the readers in its own thread.

    Args:
        network: What the thread enters, such as another host's network.
        pause_s: How long a connection pauses after each reply.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        network: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._addresses = list(addresses)
        self._network, self._pause_s = network, pause_s
        self._judge = Judge(time.monotonic())
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="readers", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> int:
        """The newest epoch that any reader saw."""
        return self._judge.newest

    @property
    def reads(self) -> int:
        """The reads of this window so far."""
        return self._judge.window.reads

    def begin(self) -> Window:
        """Begin a new window; return the one before."""
        with self._lock:
            return self._judge.begin(time.monotonic())

    def is_at(self, epoch: int) -> bool:
        """Return whether all keys were read at an epoch or a later one."""
        with self._lock:
            return self._judge.is_at(epoch)

    def allow_step_back(self) -> None:
        """Let each connection go back once, as when the log's storage goes away."""
        with self._lock:
            self._judge.allow_step_back()

    def record_uncommitted(self) -> None:
        """Count a reply from an uncommitted epoch."""
        with self._lock:
            self._judge.record_uncommitted()

    def stop(self) -> None:
        """Stop reading."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with self._network():
            self._loop.run_until_complete(self._read_all())

    async def _read_all(self) -> None:
        ordered = sorted(range(GROUPS), key=lambda group: slot_of(key(group, "a")))
        share = GROUPS // CONNECTIONS
        tasks = [
            asyncio.create_task(self._read_loop(number, ordered[number * share : (number + 1) * share]))
            for number in range(CONNECTIONS)
        ]
        await self._stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_loop(self, number: int, groups: Sequence[int]) -> None:
        address = number
        turns = cycle(enumerate(groups, number))
        while True:
            host, port = self._addresses[address % len(self._addresses)]
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                self._failed(f"connect: {error.strerror or error}")
                address += 1
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
                continue
            connection = Connection(reader, writer)
            try:
                await self._read_group(connection, turns, number)
            except (OSError, EOFError, TimeoutError) as error:
                self._failed(f"{type(error).__name__}: {error}")
                address += 1
            finally:
                writer.close()

    async def _read_group(self, connection: Connection, turns: cycle[tuple[int, int]], number: int) -> None:
        seen = ReaderPosition()
        count = number
        while True:
            _, group = next(turns)
            count += 1
            found, error = await self._read(connection, group, count % ROUND)
            if error is not None:
                self._failed(str(error))
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
                continue
            with self._lock:
                is_one_epoch = count % ROUND != ROUND // 2
                self._judge.record_reply(group, found, seen, time.monotonic(), is_one_epoch=is_one_epoch)
            await asyncio.sleep(self._pause_s)

    async def _read(self, connection: Connection, group: int, turn: int) -> tuple[list[Found], object]:
        """Send the request of a turn; return what was found, and an error if there is one."""
        names = [key(group, "a"), key((group + GROUPS // 2) % GROUPS, "a")]
        if turn == 0:
            reply = await connection.transaction([[b"GET", name] for name in names])
        elif turn == ROUND // 2:
            reply = await connection.call([b"MGET", *names])
        elif turn == ROUND // 4:
            names = [key(group, "b", PAIR)] * len(FIELDS)
            reply = await connection.call([b"HGETALL", names[0]])
            if isinstance(reply, list):
                fields = dict(zip(reply[::2], reply[1::2], strict=True))
                reply = [fields.get(name.encode()) for name in FIELDS]
        else:
            names = [key(group, "a"), key(group, "b")]
            reply = await connection.call([b"MGET", *names])
        values: list[Any] = reply if isinstance(reply, list) else [reply]
        error: object = next((each for each in values if isinstance(each, hiredis.ReplyError)), None)
        if values == [None]:
            error = "EXEC without a reply"
        return ([], error) if error is not None else ([*zip(names, values, strict=True)], None)

    def _failed(self, reason: str) -> None:
        with self._lock:
            self._judge.record_failure(reason)


class Connection:
    """A minimal client, which never retries, so that the judge sees every error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._replies = hiredis.Reader()

    async def call(self, words: Sequence[bytes]) -> object:
        """Send a request and return the reply, errors as values; OSError, EOFError or TimeoutError without a reply."""
        self._writer.write(hiredis.pack_command(tuple(words)))  # type: ignore[arg-type]  # hiredis' stub: one word
        return await self._reply()

    async def transaction(self, requests: Sequence[Sequence[bytes]]) -> object:
        """Send requests in MULTI and EXEC; return the reply to EXEC."""
        words = [(b"MULTI",), *map(tuple, requests), (b"EXEC",)]
        self._writer.write(b"".join(map(hiredis.pack_command, words)))  # type: ignore[arg-type]
        replies = [await self._reply() for _ in words]
        return next((reply for reply in replies if isinstance(reply, hiredis.ReplyError)), replies[-1])

    async def _reply(self) -> object:
        while (reply := self._replies.gets()) is False:
            async with asyncio.timeout(ANSWER_S_MAX):  # wait_for of Python 3.11 may let a cancellation be lost
                data = await self._reader.read(READ_BYTES)
            if not data:
                raise EOFError("the connection was closed")
            self._replies.feed(data)
        return reply
