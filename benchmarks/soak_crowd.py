"""The crowd of `make soak`: clients of good and bad manners. Each role is a process; it ends with its input.

    python -m benchmarks.soak_crowd calm PORT CLIENTS     many clients, each of which now and then reads the epoch
    python -m benchmarks.soak_crowd slow PORT CLIENTS     send more than they read, and read it later
    python -m benchmarks.soak_crowd flood PORT CLIENTS    pipelines of a thousand reads, one after another
    python -m benchmarks.soak_crowd garbage PORT CLIENTS  random bytes, over ever new connections
    python -m benchmarks.soak_crowd look URL METRICS      a browser's requests of the page, and a scraper of the metrics

On standard output: `{"compared"}` about once a second, with the number of replies looked at, and `{"wrong"}` before it
ends with an error. Only `garbage` may provoke errors.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle
from random import Random

from benchmarks.soak_model import JOB, MARKER, SIZES, key
from benchmarks.soak_readers import REPORT_EVERY_S, is_running
from resp_server.net.client import pack_request
from resp_server.net.listeners import raise_file_limit

READ_MARKER = pack_request("GET", MARKER)
# All calm clients together send so many requests a second.
CALM_PER_S = 500
CONNECTED_AT_ONCE = 200
UNREAD_REQUESTS = 3_000
UNREAD_S = 3.0
FLOOD_REQUESTS = 1_000
FLOOD_PAUSE_S = 0.2
GARBAGE_PAUSE_S = 0.05
GARBAGE_BYTES_MAX = 5_000
GARBAGE_WAIT_S = 1.0
STARTS = (b"", b"*3\r\n$3\r\nGET\r\n", b"*-5\r\n", b"*2\r\n$9999999999\r\n", READ_MARKER, b"GET \x00\xff\r\n")
LOOK_PAUSE_S = 2.0
REPLY_S_MAX = 60.0


class CrowdError(Exception):
    """Something happened to a client that must not."""


class Counts:
    """Counts replies, and prints the count about once a second."""

    def __init__(self) -> None:
        self._compared = 0
        self._reported_s = 0.0

    def add(self, compared: int = 1) -> None:
        """Count replies."""
        self._compared += compared
        if time.monotonic() - self._reported_s > REPORT_EVERY_S:
            self._reported_s = time.monotonic()
            print(json.dumps({"compared": self._compared}), flush=True)
            self._compared = 0


class Client:
    """A connection that reads the epoch, which must not go back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._epoch = -1

    @classmethod
    async def connect(cls, port: int) -> Client:
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def read_epoch(self) -> None:
        """Read the reply to a request of the epoch."""
        async with asyncio.timeout(REPLY_S_MAX):
            header = await self.reader.readline()
            text = await self.reader.readline() if header.startswith(b"$") else b""
        if not text.strip().isdigit():
            raise CrowdError(f"the reply to GET of the epoch is {header + text!r}")
        if int(text) < self._epoch:
            raise CrowdError(f"a client that had seen epoch {self._epoch} then read epoch {int(text)}")
        self._epoch = int(text)

    async def read_replies(self, count: int) -> None:
        """Read replies of one line, or of a string; CrowdError for an error."""
        async with asyncio.timeout(REPLY_S_MAX):
            for _ in range(count):
                header = await self.reader.readline()
                if not header or header.startswith(b"-"):
                    raise CrowdError(f"the reply to a read is {header!r}")
                if header.startswith(b"$") and int(header[1:]) >= 0:
                    await self.reader.readexactly(int(header[1:]) + 2)


async def be_calm(port: int, clients: int, counts: Counts) -> None:
    """Hold connections, and read the epoch over one after another."""
    held: list[Client] = []
    while len(held) < clients and is_running():
        count = min(CONNECTED_AT_ONCE, clients - len(held))
        held += await asyncio.gather(*(Client.connect(port) for _ in range(count)))
    for each in cycle(held):
        if not is_running():
            return
        each.writer.write(READ_MARKER)
        await each.read_epoch()
        counts.add()
        await asyncio.sleep(1 / CALM_PER_S)


async def be_slow(port: int, clients: int, counts: Counts) -> None:
    """Send requests without reading, wait, and read all replies."""

    async def one(number: int) -> None:
        client = await Client.connect(port)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        chosen = Random(number)
        while is_running():
            names = [key("value", chosen.randrange(SIZES["value"])) for _ in range(UNREAD_REQUESTS)]
            client.writer.write(b"".join(pack_request("GET", name) for name in names))
            await asyncio.sleep(UNREAD_S)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            await client.read_replies(UNREAD_REQUESTS)
            counts.add(UNREAD_REQUESTS)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]

    await _all(clients, one)


async def flood(port: int, clients: int, counts: Counts) -> None:
    """Send long pipelines, and read their replies at once."""

    async def one(number: int) -> None:
        client = await Client.connect(port)
        chosen = Random(number)
        while is_running():
            names = [key("value", chosen.randrange(SIZES["value"])) for _ in range(FLOOD_REQUESTS)]
            client.writer.write(b"".join(pack_request("GET", name) for name in names))
            await client.read_replies(FLOOD_REQUESTS)
            counts.add(FLOOD_REQUESTS)
            await asyncio.sleep(FLOOD_PAUSE_S)

    await _all(clients, one)


async def send_garbage(port: int, clients: int, counts: Counts) -> None:
    """Send random bytes over new connections, and read whatever comes."""

    async def one(number: int) -> None:
        chosen = Random(number)
        while is_running():
            client = await Client.connect(port)
            with suppress(ConnectionError, TimeoutError):
                client.writer.write(_garbage(chosen))
                async with asyncio.timeout(GARBAGE_WAIT_S):
                    while await client.reader.read(65_536):
                        counts.add()
            client.writer.close()
            await asyncio.sleep(GARBAGE_PAUSE_S)

    await _all(clients, one)


def _garbage(chosen: Random) -> bytes:
    """Return random bytes, often after the start of a request."""
    start = chosen.choice(STARTS)
    return start + chosen.randbytes(chosen.randrange(GARBAGE_BYTES_MAX)) + b"\r\n"


async def look(page: str, metrics: str, counts: Counts) -> None:
    """Ask for the page as a browser does, and for the metrics as Prometheus does."""
    while is_running():
        for url, words in ((f"{page}/overview", JOB), (f"{page}/slow", "<title>Slow"), (metrics, "sparkis_")):
            text = await asyncio.to_thread(_text_of, url)
            if words not in text:
                raise CrowdError(f"{url} does not show {words!r}, but {text[:200]!r}")
            counts.add()
        await asyncio.sleep(LOOK_PAUSE_S)


def _text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=REPLY_S_MAX) as reply:  # http, of this machine
        found: bytes = reply.read()
    return found.decode()


async def _all(clients: int, one: Callable[[int], Awaitable[None]]) -> None:
    await asyncio.gather(*(one(os.getpid() * 1000 + number) for number in range(clients)))


def main(arguments: Sequence[str]) -> int:
    """Play a role; return the exit code."""
    role, *given = arguments
    counts = Counts()
    roles = {"calm": be_calm, "slow": be_slow, "flood": flood, "garbage": send_garbage}
    try:
        if role == "look":
            asyncio.run(look(given[0], given[1], counts))
        else:
            raise_file_limit(int(given[1]))
            asyncio.run(roles[role](int(given[0]), int(given[1]), counts))
    except (CrowdError, OSError, asyncio.IncompleteReadError) as error:
        print(json.dumps({"wrong": str(error) or type(error).__name__}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
