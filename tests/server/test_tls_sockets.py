"""Encrypted clients on the compiled core's own epoll and on asyncio's: cut records, slow readers, goodbyes, garbage."""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from compat.conformance.certificates import Authority
from compat.waiting import WAIT_S_MAX, eventually
from resp_server import native
from resp_server.net.tls import TlsFiles
from state_backend.lmdb.store import LmdbStore
from tests.server.conftest import OWN_SOCKETS
from tests.server.socket_requests import (
    GET_LARGE,
    LARGE,
    PAIR,
    PAIR_REPLIES,
    PING,
    PONG,
    STATES,
    bulk,
    get,
    mixture,
    packed,
)

Start = Callable[..., Any]


class TlsPeer:
    """A client that encrypts in memory, so that a test decides which bytes of its records go when."""

    def __init__(self, port: int, authority: Authority, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        context = authority.context()
        context.maximum_version = version
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")
        self._until(self.tls.do_handshake)
        self.send_sealed(self.outgoing.read())

    def _until(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                if self.outgoing.pending:  # else it waits for room, for nothing
                    self.socket.sendall(self.outgoing.read())
                received = self.socket.recv(1 << 20)
                if received:
                    self.incoming.write(received)
                else:
                    self.incoming.write_eof()

    def seal(self, data: bytes) -> bytes:
        """Return data as the bytes of TLS records."""
        self.tls.write(data)
        return self.outgoing.read()

    def send_sealed(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send(self, data: bytes) -> None:
        self.send_sealed(self.seal(data))

    def read(self, size: int) -> bytes:
        """Read so many bytes, or up to the server's goodbye."""
        data = bytearray()
        while len(data) < size and (some := self._until(partial(self.tls.read, min(1 << 16, size - len(data))))):
            data += some
        return bytes(data)


@pytest.fixture(params=[OWN_SOCKETS, "asyncio", "pure"])
def start(
    request: pytest.FixtureRequest,
    serve: Callable[..., Any],
    lmdb: LmdbStore,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> Start:
    """Start servers that speak TLS: on the core's own epoll; the core behind asyncio; without the core."""
    if request.param == "pure":
        monkeypatch.setattr(native, "core", None)
    if request.param != "own":
        monkeypatch.setattr(native, "sockets", None)
    cert, key = authority.issue("server")

    def started(**settings: Any) -> Any:
        return serve(lmdb, STATES, tls=TlsFiles(str(cert), str(key)), **settings)

    return started


def connect(running: Any, authority: Authority, **given: Any) -> TlsPeer:
    return TlsPeer(running.server.tls_port, authority, **given)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_records_may_come_byte_by_byte(start: Start, authority: Authority, version: ssl.TLSVersion) -> None:
    peer = connect(start(), authority, version=version)
    sent, expected = mixture(random.Random(1), 20)
    peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in peer.seal(sent[:100]) + peer.seal(sent[100:]):
        peer.send_sealed(bytes([byte]))
    assert peer.read(len(expected)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_records_and_requests_may_be_cut_anywhere(start: Start, authority: Authority, seed: int) -> None:
    dice = random.Random(seed)
    running = start()
    peers = [connect(running, authority) for _ in range(4)]
    talks = [mixture(dice, 400) for _ in peers]
    sealed = []
    for peer, (sent, _) in zip(peers, talks, strict=True):
        records = b""
        while sent:
            size = dice.choice((1, 7, 100, 3_000, 70_000))
            records += peer.seal(sent[:size])
            sent = sent[size:]
        sealed.append(records)
    while any(sealed):
        at = dice.randrange(len(sealed))
        size = dice.choice((1, 7, 100, 3_000, 70_000))
        peers[at].send_sealed(sealed[at][:size])
        sealed[at] = sealed[at][size:]
    for peer, (_, expected) in zip(peers, talks, strict=True):
        assert peer.read(len(expected)) == expected


def test_first_request_may_come_with_end_of_handshake(start: Start, authority: Authority) -> None:
    running = start()
    context = authority.context()
    peer = TlsPeer.__new__(TlsPeer)
    peer.socket = socket.create_connection(("127.0.0.1", running.server.tls_port), WAIT_S_MAX)
    peer.incoming, peer.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer.tls = context.wrap_bio(peer.incoming, peer.outgoing, server_hostname="localhost")
    peer._until(peer.tls.do_handshake)
    peer.tls.write(get(7))
    peer.send_sealed(peer.outgoing.read())  # the client's Finished, and a request behind it
    assert peer.read(len(bulk(b"7"))) == bulk(b"7")


def test_pipelines_longer_than_one_read_are_answered_in_order(start: Start, authority: Authority) -> None:
    peer = connect(start(), authority)
    numbers = [at * 7 % 2_000 for at in range(20_000)]  # 0.6 MB
    expected = b"".join(bulk(b"%d" % number) for number in numbers)
    peer.send(b"".join(map(get, numbers)))
    assert peer.read(len(expected)) == expected


def test_client_that_sends_all_before_it_reads_gets_all_replies(start: Start, authority: Authority) -> None:
    running = start()
    slow, other = connect(running, authority), connect(running, authority)
    for _ in range(1_000):
        slow.send(PAIR)
    other.send(PING)
    assert other.read(len(PONG)) == PONG
    assert running.call(lambda: max(each.output.size_bytes for each in running.server._connections.values())) < 8 << 20
    assert slow.read(1_000 * len(PAIR_REPLIES)) == PAIR_REPLIES * 1_000


def test_close_notify_is_answered_with_close_notify(start: Start, authority: Authority) -> None:
    running = start()
    peer = connect(running, authority)
    peer.tls.write(get(3))
    with suppress(ssl.SSLWantReadError):
        peer.tls.unwrap()
    peer.send_sealed(peer.outgoing.read())  # a request, and the goodbye behind it
    read = b""
    with suppress(ssl.SSLZeroReturnError):
        read = peer.read(100)
    assert read in (bulk(b"3"), b"")  # one end closes both: what was asked before may be lost
    eventually(lambda: running.call(lambda: not running.server._connections))


def test_server_sends_close_notify_after_its_last_reply(start: Start, authority: Authority) -> None:
    peer = connect(start(), authority)
    peer.send(get(1) + packed(b"QUIT"))
    assert peer.read(100) == bulk(b"1") + b"+OK\r\n"
    assert peer._until(lambda: peer.tls.read(1)) == b""  # of a connection that was cut this is an SSLEOFError


@pytest.mark.parametrize("garbage", [b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x17\x03\x03\x00\x20" + b"x" * 32])
def test_invalid_tls_record_ends_its_connection_alone(start: Start, authority: Authority, garbage: bytes) -> None:
    running = start()
    stays, breaks = connect(running, authority), connect(running, authority)
    breaks.send(PING)
    assert breaks.read(len(PONG)) == PONG
    breaks.send_sealed(garbage)
    eventually(lambda: running.call(lambda: len(running.server._connections)) == 1)
    stays.send(PING)
    assert stays.read(len(PONG)) == PONG
    assert running.call(lambda: running.server.context.stats.internal_errors) == 0


def test_client_that_closes_without_close_notify_is_disconnected(start: Start, authority: Authority) -> None:
    running = start()
    for sealed in (lambda peer: b"", lambda peer: peer.seal(GET_LARGE * 300), lambda peer: peer.seal(PING)[:-3]):
        peer = connect(running, authority)
        peer.send_sealed(sealed(peer))
        peer.socket.close()
    eventually(lambda: running.call(lambda: not running.server._connections))
    assert running.call(lambda: running.server.context.stats.internal_errors) == 0


def test_messages_reach_encrypted_subscriber(start: Start, authority: Authority) -> None:
    running = start()
    reader, speaker = connect(running, authority), connect(running, authority)
    reader.send(packed(b"SUBSCRIBE", b"news"))
    hello = b"*3\r\n" + bulk(b"subscribe") + bulk(b"news") + b":1\r\n"
    assert reader.read(len(hello)) == hello
    speaker.send(packed(b"PUBLISH", b"news", LARGE))
    message = b"*3\r\n" + bulk(b"message") + bulk(b"news") + bulk(LARGE)
    assert reader.read(len(message)) == message
