"""One part of fuzzing the compiled core, as a process with sanitizers (see `native`). Prints the number of inputs.

requests   the inputs of `make fuzz`, unchanged and mutated, in any chunks, to a server over a store in LMDB
records    invalid records with valid checksums, and requests that are cut or have other bytes
pages      pages of a store with other bytes
sockets    clients that send, receive, close and reset at random, on the core's own epoll
forwarder  a proxy: clients' requests, unchanged and mutated, to two servers that reply correctly, or with any bytes
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from unittest.mock import patch

import lmdb

from compat.conformance.certificates import Authority
from compat.conformance.wire import requests
from compat.fuzz import corpus
from compat.fuzz.seeds import SCRIPTS
from compat.fuzz.subject import REQUESTS, FoundError, RecordingTransport, Subject
from compat.fuzz.targets import EPOCHS, NODE, NOW_MS, PASSWORD, PROXY, SCRIPTED, STATES, TWO, USER, fill
from resp_server import native
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.net.tls import TlsFiles
from resp_server.serving.server import Server
from resp_server.settings.server import OUTPUT_LIMITS, ServerConfig
from state_backend.codec.checksums import CHECK_BYTES, with_checksum
from state_backend.lmdb.store import LmdbStore
from state_backend.model.slots import POSITIONS
from state_backend.native import lookup
from state_backend.store.keyspace import Job, Keyspace

MAP_BYTES = 1 << 30
INPUTS_PER_SUBJECT = 300
INPUTS_PER_CORRUPTION = 300
# The maximum length of an input that is sent in chunks, because each chunk costs turns of the loop.
CHUNKED_BYTES_MAX = 1_500
KEYS = [
    b"j:v:0",
    b"j:v:7",
    b"j:v:soon",
    b"j:v:big",
    b"j:m:s",
    b"j:m:t",
    b"j:m:l",
    b"j:l:s",
    b"j:l:l",
    b"j:s:l",
    b"j:z:l",
]
KEYS += [b"j:v:none", b"", b"{", b"{}", b"j:{v}:1", b"x" * 65_536]
MEMBERS = [b"a", b"b", b"m1", b"m149", b"f0", b"f149", b"", b"0"]
NUMBERS = [b"0", b"1", b"-1", b"99", b"-999999999999999999", b"999999999999999999", b"-", b"-0", b"9" * 19]

OPTIONS = [b"WITHSCORES", b"WEIGHTS", b"AGGREGATE", b"MAX", b"LIMIT", b"ALPHA", b"DESC", b"GET", b"u8", b"i64", b"#1"]
# What searches of places begin with, and their options.
CIRCLES, CENTERS = (
    ([b"20000", b"km"], [b"0", b"m"], [b"1e7", b"mi"]),
    ([b"0", b"0"], [b"-180", b"-85"], [b"13.4", b"38"]),
)
SEARCHES: dict[bytes, list[list[bytes]]] = {
    b"geopos": [[b"m1", b"m149"], []],
    b"geohash": [[b"m1", b"m149"], []],
    b"geodist": [[b"m1", b"m149"], [b"m1", b"m149", b"ft"]],
    b"geosearch": [[b"FROMMEMBER", b"m1", b"BYRADIUS", *circle] for circle in CIRCLES]
    + [[b"BYBOX", b"5", b"40000", b"km", b"FROMLONLAT", *center] for center in CENTERS],
    b"georadius_ro": [[*center, *circle] for center in CENTERS for circle in CIRCLES],
    b"georadiusbymember_ro": [[b"m1", *circle] for circle in CIRCLES],
}
PLACE_OPTIONS = [b"WITHDIST", b"WITHHASH", b"WITHCOORD", b"DESC", b"COUNT", b"9", b"ANY"]
# Commands whose first argument is the number of their keys.
WITH_KEY_COUNT = (b"sintercard", b"zunion", b"zinter", b"zdiff", b"zintercard")


def request(rng: random.Random) -> list[bytes]:
    """Return a request of a command that the core answers, or a similar one."""
    name, least, most, *_ = rng.choice(native.rows.ROWS)  # type: ignore[union-attr]
    count = rng.randint(least, least + 3 if most < 0 else most)
    if rng.random() < 0.03:
        count = rng.choice((0, 1, 600, 1_023))
    others = rng.choice((MEMBERS, NUMBERS, KEYS))
    words = [rng.choice(KEYS), *(rng.choice(others) for _ in range(count))][:count]
    if name in WITH_KEY_COUNT:
        keys = rng.choices(KEYS, k=rng.randint(1, 4))
        words = [b"%d" % len(keys), *keys, *rng.choices([*OPTIONS, *NUMBERS], k=rng.choice((0, 0, 1, 3, 5)))]
    if name.startswith(b"geo") and rng.random() < 0.8:
        words = [rng.choice(KEYS), *rng.choice(SEARCHES[name]), *rng.choices(PLACE_OPTIONS, k=rng.choice((0, 0, 1, 4)))]
    elif len(words) == 4 and rng.random() < 0.5:
        words[3] = b"WITHSCORES"
    elif len(words) > 1 and rng.random() < 0.2:
        words[rng.randrange(1, len(words))] = rng.choice(OPTIONS)
    return [*name.split(b"|"), *words]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with some replaced, or cut anywhere, or unchanged."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 1, 4, 30))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), *b"\r\n*$0-9"))
    cut = rng.randrange(len(changed) + 1) if rng.random() < 0.5 else len(changed)
    return bytes(changed[:cut])


def store_at(folder: str) -> LmdbStore:
    """Create a store with the keys of the fuzzed servers; its sorted sets are trees of several levels."""
    store = LmdbStore(Path(folder) / f"{monotonic()}", "g", map_bytes_max=MAP_BYTES)
    with patch("state_backend.lmdb.ranks.NODE_ENTRIES_MAX", 8):
        fill(store)
    return store


def of_requests(rng: random.Random, folder: str) -> Iterator[None]:
    """Run inputs of the corpus, some with the core's own commands, against servers over LMDB."""
    inputs = [*corpus.stored(), *(data for inputs in corpus.findings() for data in inputs)]
    while True:
        subject = Subject(8)
        for _ in range(INPUTS_PER_SUBJECT):
            data = rng.choice(inputs)
            options, rest = data[:2], data[2:]
            if rng.random() < 0.5:  # use the core's own commands instead
                rest = requests([request(rng) for _ in range(rng.randrange(1, 20))])
                options = bytes((rng.choice((0, 2, 8, 16, 24, 32, 48)), rng.randrange(256)))
            data = options + mutated(rest, rng)[: CHUNKED_BYTES_MAX if options[1:] > b"\0" else 200_000]
            (Path(folder) / "last").write_bytes(data)
            _run(subject, data)
            yield
        subject.close()


def _run(subject: Subject, data: bytes) -> None:
    try:
        subject.run(data)
    except FoundError as error:
        raise SystemExit(f"{error!r} ({error.__cause__!r}) by {corpus.store_finding([data])}") from error


# Replies of servers to a proxy's plain reads: valid or nearly valid ones.
REPLIES = [
    b"$1\r\na\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b":1\r\n",
    b":-9\r\n",
    b"+OK\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"_\r\n",
]
REPLIES += [b"*%d\r\n" % count + b"$1\r\nb\r\n" * count for count in (1, 2, 3, 4, 9)]
REPLIES += [b"*2\r\n" * 12 + b":1\r\n" * 13, b"$70000\r\n" + b"x" * 70_000 + b"\r\n", b"*999999999\r\n", *SCRIPTS]
# The indexes of those of REQUESTS that go through the forwarder.
PLAIN = [at for at, chosen in enumerate(REQUESTS) if any(words[0] in (b"GET", b"MGET") for words in chosen)]


def of_forwarder(rng: random.Random, folder: str) -> Iterator[None]:
    """Let clients send reads to a proxy whose servers reply correctly or with arbitrary bytes."""
    while True:
        subject = Subject(8)
        for _ in range(INPUTS_PER_SUBJECT):
            chunk_bytes = rng.choice((0, 0, rng.randrange(256)))
            if rng.random() < 0.5:
                options = SCRIPTED | rng.choice((0, TWO)) | rng.choice((0, 0, PASSWORD, NODE))
                replies = b"".join(rng.choice(REPLIES) for _ in range(rng.randrange(1, 12)))
                rest = bytes((rng.choice(PLAIN),)) + (mutated(replies, rng) if rng.random() < 0.7 else replies)
            else:
                options = PROXY | rng.choice((0, EPOCHS)) | rng.choice((0, TWO)) | rng.choice((0, 0, USER, NODE))
                rest = requests([request(rng) for _ in range(rng.choice((1, 4, 40)))])
                rest = mutated(rest, rng) if rng.random() < 0.5 else rest
            _run(subject, bytes((options, chunk_bytes)) + rest[: CHUNKED_BYTES_MAX if chunk_bytes else 100_000])
            yield
        subject.close()


def of_records(rng: random.Random, folder: str) -> Iterator[None]:
    """Have the core read invalid records, which no store writes."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    while True:
        store = store_at(folder)
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, store))

        async def send_inputs(keyspace: Keyspace, store: LmdbStore, taken: list[None]) -> None:
            server = Server(keyspace, ServerConfig(), pipeline_of_stores, clock=lambda: NOW_MS)
            connection = Connection(server)
            connection.connection_made(RecordingTransport())  # type: ignore[arg-type]
            reads: Any = server.pipeline.compiled
            for _ in range(4):
                _corrupt_records(store, rng)
                connection.session.protocol = rng.choice((2, 3))
                server.context.renew()
                with store.snapshot(NOW_MS) as snapshot:
                    _scan(snapshot.pages, rng)
                for _ in range(INPUTS_PER_CORRUPTION):
                    data = requests([request(rng) for _ in range(rng.choice((1, 5, 60)))])
                    data = mutated(data, rng) if rng.random() < 0.3 else data
                    while data:
                        _, _, left = reads.answer(connection.session, data)
                        if left == data:
                            break
                        data = left
                    taken.append(None)
            server.context.close()

        taken: list[None] = []
        loop.run_until_complete(send_inputs(keyspace, store, taken))
        store.close()
        yield from taken


def _corrupt_records(store: LmdbStore, rng: random.Random) -> None:
    """Change bytes in a store's records, and recompute their checksums."""
    with store._env.begin(write=True) as txn:
        for table in (store.tables.keys, store.tables.fields, store.tables.blocks):
            rows = [row for row in txn.cursor(db=table) if len(row[1]) > CHECK_BYTES]
            for name, record in rng.sample(rows, len(rows) // 3):
                body = bytearray(record[:-CHECK_BYTES])
                for _ in range(rng.choice((1, 1, 3))):
                    at = rng.choice((rng.randrange(len(body)), min(len(body) - 1, rng.randrange(40))))
                    body[at] = rng.choice((0, 1, 255, 128, rng.randrange(256)))
                if rng.random() < 0.2:
                    body = body[: rng.randrange(len(body) + 1)]
                txn.put(name, with_checksum(bytes(body)), db=table)


def _scan(pages: lookup.Pages, rng: random.Random) -> None:
    """Scan all keys, or those of some slots, until a step needs LMDB."""
    count, forms, only_expiring = rng.choice((1, 3, 1000)), rng.choice((1023, 1, 32)), rng.random() < 0.5
    cuts = sorted(rng.randrange(POSITIONS) for _ in range(rng.choice((0, 2, 6))))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=True)) or [(0, POSITIONS)]
    cursor = -1
    while (step := pages.scan(ranges, count, 100, 1 << 20, NOW_MS, forms, only_expiring)) is not None and step[0]:
        assert step[0] > cursor
        cursor = step[0]
        ranges = [(max(start, cursor), end) for start, end in ranges if end > cursor]


def of_pages(rng: random.Random, folder: str) -> Iterator[None]:
    """Look up names in corrupted pages: all pages except the one from which LMDB itself reads the tables."""
    store = store_at(folder)
    names: dict[str, list[bytes]] = {}
    with store._env.begin() as txn:
        for table in ("keys", "fields", "blocks"):
            names[table] = [name for name, _ in txn.cursor(db=getattr(store.tables, table))]
    path = store.path
    store.close()
    file = path / "data.mdb"
    intact = file.read_bytes()
    pages = [at for at in range(8192, len(intact), 4096) if b"expiry" not in intact[at : at + 4096]]
    while True:
        content = bytearray(intact)
        for _ in range(rng.choice((1, 8, 64, 300))):
            at = rng.choice(pages) + rng.choice((rng.randrange(64), rng.randrange(4096)))
            content[at] = rng.choice((0, 255, 16, rng.randrange(256)))
        with file.open("r+b") as damaged:
            damaged.write(content)
        environment = lmdb.open(str(path), readonly=True, max_dbs=8, lock=False, map_size=MAP_BYTES)
        for table in names:
            environment.open_db(table.encode(), create=False)
        descriptor = os.open(file, os.O_RDONLY)
        lookup_pages = lookup.Pages(environment, descriptor)
        with environment.begin() as txn:
            if lookup_pages.learn(txn):
                for table, present in names.items():
                    for _ in range(4):
                        with suppress(ValueError):
                            lookup.look_up(lookup_pages, table, [rng.choice(present) for _ in range(40)])
                for turn in range(80):
                    with suppress(ValueError):
                        lookup.look_up_block(lookup_pages, rng.choice(names["blocks"]), turn // 8)
                _scan(lookup_pages, rng)
        os.close(descriptor)
        environment.close()
        yield


def of_sockets(rng: random.Random, folder: str) -> Iterator[None]:
    """Let clients act at random; each action is an input."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    store = store_at(folder)
    keyspace = Keyspace()
    keyspace.put(Job("j", "g", STATES, store))
    authority = Authority(Path(folder) / "authority")
    cert, key = authority.issue("server")
    files = TlsFiles(str(cert), str(key))
    while True:
        config = ServerConfig(
            port=0,
            hosts=("127.0.0.1",),
            maxclients=50,
            client_output_buffer_limit={**OUTPUT_LIMITS, "normal": (rng.choice((1 << 18, 1 << 25)), 0, 0)},
            tls=files,
            tls_port=0,
        )
        server = Server(keyspace, config, pipeline_of_stores, clock=lambda: NOW_MS)
        loop.run_until_complete(server.start())
        clients: list[socket.socket | EncryptedClient] = []
        for _ in range(INPUTS_PER_CORRUPTION * 5):
            if not clients or (len(clients) < 40 and rng.random() < 0.05):
                is_plain = rng.random() < 0.5
                client = socket.create_connection(("127.0.0.1", server.port if is_plain else server.tls_port))
                client.setblocking(False)
                clients.append(client if is_plain else EncryptedClient(client, authority, rng))
            else:
                _act(clients, rng)
            for _ in range(rng.choice((0, 1, 3))):
                loop.run_until_complete(asyncio.sleep(0))
            yield
        for each in clients:
            each.close()
        loop.run_until_complete(server.stop())
        if raised:
            raise SystemExit(f"an exception in the event loop: {raised[0]}")


SOCKET_REQUESTS = [
    b"HELLO 3",
    b"SUBSCRIBE a",
    b"UNSUBSCRIBE",
    b"PUBLISH a " + b"x" * 3000,
    b"CLIENT KILL ID 3",
    b"QUIT",
    b"RESET",
]
SOCKET_REQUESTS += [
    b"CLIENT TRACKING ON",
    b"HGETALL j:m:l",
    b"LRANGE j:l:l 0 -1",
    b"MULTI",
    b"EXEC",
    b"CLIENT KILL TYPE normal",
]
SOCKET_REQUESTS += [b"CLIENT PAUSE 1", b"CLIENT UNPAUSE", b"CLIENT REPLY SKIP", b"KEYS *", b"NOPE"]


class EncryptedClient:
    """A socket's methods over TLS. Sending continues the handshake; a record may be damaged, or sent in part."""

    def __init__(self, client: socket.socket, authority: Authority, rng: random.Random) -> None:
        self._socket, self._rng = client, rng
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = authority.context().wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self._has_begun = False

    def send(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = self._do(self._tls.do_handshake)
        if self._has_begun:
            self._do(lambda: self._tls.write(data))

    def recv(self, size: int) -> None:
        self._incoming.write(self._socket.recv(size))
        self._do(lambda: self._tls.read(size))

    def shutdown(self, how: int) -> None:
        self._do(self._tls.unwrap)

    def setsockopt(self, *given: Any) -> None:
        self._socket.setsockopt(*given)

    def close(self) -> None:
        self._socket.close()

    def _do(self, step: Callable[[], object]) -> bool:
        """Run a step of TLS and return whether it is done; send its output as far as the socket takes it."""
        try:
            step()
            return True
        except ssl.SSLWantReadError:
            with suppress(BlockingIOError):
                self._incoming.write(self._socket.recv(1 << 16))
            return False
        finally:
            encrypted = self._outgoing.read()
            self._socket.send(mutated(encrypted, self._rng) if self._rng.random() < 0.01 else encrypted)


def _act(clients: list[socket.socket | EncryptedClient], rng: random.Random) -> None:
    """Run a random action of a client."""
    client = rng.choice(clients)
    chance = rng.random()
    with suppress(OSError):
        if chance < 0.55:
            data = requests([request(rng) for _ in range(rng.choice((1, 3, 30, 400)))])
            client.send(mutated(data, rng) if rng.random() < 0.1 else data)
        elif chance < 0.7:
            client.send(rng.choice(SOCKET_REQUESTS) + b"\r\n")
        elif chance < 0.95:
            client.recv(rng.choice((1, 4096, 1 << 20)))
        elif chance < 0.96:
            client.shutdown(socket.SHUT_WR)
        else:
            if rng.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            clients.remove(client)
            client.close()


PARTS: dict[str, Callable[[random.Random, str], Iterator[None]]] = {
    "requests": of_requests,
    "records": of_records,
    "pages": of_pages,
    "sockets": of_sockets,
    "forwarder": of_forwarder,
}


def main() -> None:
    """Fuzz for some seconds, and print the number of inputs after every hundred."""
    part, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if native.core is None or native.sockets is None or os.getcwd() not in str(native.core.__file__):
        raise SystemExit("not the core that was built with sanitizers")
    logging.getLogger("sparkis").setLevel(logging.CRITICAL)
    ends_s, inputs = monotonic() + seconds, 0
    with TemporaryDirectory(prefix="sparkis-native-") as folder:
        for _ in PARTS[part](random.Random(seed), folder):
            inputs += 1
            if inputs % 100 == 0:
                print(inputs, flush=True)
            if monotonic() > ends_s:
                break
    print(inputs, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
