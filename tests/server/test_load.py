"""The load generator of the benchmarks: what it sends, how it counts replies, and which it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from benchmarks import load
from compat.conformance.wire import request
from state_backend.codec import packed_list, packed_map
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.native import compiled_module
from state_backend.store.memory_store import MemoryStore
from tests.builders import apply_epoch
from tests.server.conftest import NOW_MS, Running

pytestmark = pytest.mark.compiled
native: Any = compiled_module("benchmarks.native.load")

KEYS = 1000
STATES = [
    StateDescriptor("value", key="key", value="value"),
    StateDescriptor("map", key="key", value=("low", "high")),
    StateDescriptor("list", key="key", value="value", kind="list", duplicates="any"),
]
VALUE, MAP, LIST = (f"job:{state.name}:__rand_int__" for state in STATES)


@pytest.fixture
def running(serve: Callable[..., Running]) -> Running:
    """A server with keys of 12 digits, as the load generator asks for them."""
    pairs = [(b"low", b"1"), (b"high", b"x" * 300)]
    changes = [
        *(Change("value", Op.PUT, b"job:value:%012d" % i, value=b"v" * (i % 50)) for i in range(KEYS)),
        *(Change("map", Op.PUT, b"job:map:%012d" % i, value=packed_map.pack(pairs)) for i in range(KEYS)),
        *(Change("list", Op.PUT, b"job:list:%012d" % i, value=packed_list.pack([b"a", b""] * 50)) for i in range(KEYS)),
    ]
    store = MemoryStore("g1")
    apply_epoch(store, STATES, changes, 4, clock_ms=NOW_MS)
    return serve(store=store, states=STATES)


def counts(running: Running, section: str) -> dict[str, str]:
    text: str = running.connect().ask("INFO", section).decode()
    return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)


def calls(running: Running, command: str) -> int:
    return int(counts(running, "commandstats")[f"cmdstat_{command}"].partition("calls=")[2].partition(",")[0])


@pytest.mark.parametrize("pipeline", [1, 16, 100])
@pytest.mark.parametrize(
    "words",
    [("GET", VALUE), ("MGET", *[VALUE] * 100), ("HGETALL", MAP), ("LRANGE", LIST, "0", "99")],
    ids=lambda words: words[0],
)
def test_server_counts_requests_asked_for(running: Running, words: tuple[str, ...], pipeline: int) -> None:
    rate = load.rate(running.server.port, words, clients=50, pipeline=pipeline, requests=3000, key_range=KEYS)
    assert rate > 0
    assert 3000 <= calls(running, words[0].lower()) < 3000 + pipeline
    assert int(counts(running, "stats")["keyspace_misses"]) == 0


def test_keys_are_random_below_range(running: Running) -> None:
    load.rate(running.server.port, ("GET", VALUE), clients=5, pipeline=16, requests=16_000, key_range=2 * KEYS)
    found = counts(running, "stats")
    hits, misses = int(found["keyspace_hits"]), int(found["keyspace_misses"])
    assert hits + misses == 16_000
    assert abs(hits - misses) < 16_000 // 10  # 12 times the standard deviation


def test_every_number_of_request_is_its_own(running: Running) -> None:
    watcher = running.connect()
    watcher.expect_reply(request("MONITOR"), b"+OK\r\n")
    load.rate(running.server.port, ("MGET", VALUE, VALUE, VALUE), clients=1, pipeline=2, requests=20, key_range=10**6)
    seen = watcher.read_until(b"\r\n")
    while seen.count(b"MGET") < 20:
        seen += watcher.read_until(b"\r\n")
    asked = [line.split(b'"')[3::2] for line in seen.split(b"\r\n") if b"MGET" in line]
    assert len({key for keys in asked for key in keys}) > 50
    assert {(len(keys), *map(len, keys)) for keys in asked} == {(3, 22, 22, 22)}


def test_load_ends_at_first_error_reply(running: Running) -> None:
    with pytest.raises(load.NotMeasuredError, match=r"replied with an error: b'-WRONGTYPE .* of 100 requests"):
        load.rate(running.server.port, ("HGETALL", VALUE), clients=5, pipeline=10, requests=100, key_range=KEYS)


def test_wrong_password_of_user_is_error(running: Running) -> None:
    with pytest.raises(load.NotMeasuredError, match="first request of a connection is b'-WRONGPASS"):
        load.rate(
            running.server.port, ("GET", VALUE), clients=5, pipeline=1, requests=100, key_range=KEYS, user=("a", "b")
        )


def test_user_with_password_sends_its_allowed_requests(running: Running) -> None:
    peer = running.connect()
    assert peer.ask("ACL", "SETUSER", "tenant", "on", ">secret", "~job:value:*", "+get") == b"OK"
    assert peer.ask("ACL", "SETUSER", "default", "off") == b"OK"
    asks = partial(load.rate, running.server.port, clients=5, pipeline=1, requests=100, key_range=KEYS)
    assert asks(("GET", VALUE), user=("tenant", "secret")) > 0
    with pytest.raises(load.NotMeasuredError, match="-NOPERM"):
        asks(("HGETALL", MAP), user=("tenant", "secret"))
    with pytest.raises(load.NotMeasuredError, match="-NOAUTH"):
        asks(("GET", VALUE))


def test_port_without_listener_is_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(load.NotMeasuredError, match="Connection refused"):
        load.rate(port, ("GET", VALUE), clients=1, pipeline=1, requests=1, key_range=1)


REPLIES = b"$5\r\nhello\r\n$-1\r\n*3\r\n$0\r\n\r\n:-7\r\n*2\r\n+OK\r\n*0\r\n*-1\r\n$4\r\n\r\n\r\n\r\n"


@contextmanager
def pair(kind: socket.SocketKind) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, peer = socket.socketpair(socket.AF_UNIX, kind)
    with ours, peer:
        yield ours, peer


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(REPLIES)])
def test_replies_are_counted_in_chunks_of_any_size(size: int) -> None:
    with pair(socket.SOCK_SEQPACKET) as (ours, peer):  # what is sent at once is received at once
        for start in range(0, len(REPLIES), size):
            peer.send(REPLIES[start : start + size])
        replied, _, _ = native.send_all([ours.fileno()], b"PING\r\n", [], 5, 5, 1, 1)
        assert replied == 5
        assert peer.recv(1000) == b"PING\r\n" * 5


NEW_REPLIES = b"%1\r\n+a\r\n~2\r\n:1\r\n_\r\n,1.5\r\n#t\r\n(123\r\n=5\r\ntxt:a\r\n"
PUSH = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\na\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_replies_of_resp3_are_counted_and_pushes_between_them_are_not(size: int) -> None:
    sent = PUSH + NEW_REPLIES + PUSH + b"+OK\r\n"
    with pair(socket.SOCK_SEQPACKET) as (ours, peer):
        for start in range(0, len(sent), size):
            peer.send(sent[start : start + size])
        replied, _, received = native.send_all([ours.fileno()], b"PING\r\n", [], 6, 6, 1, 1)
        assert (replied, received) == (6, len(sent))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_push_after_last_reply_is_no_reply_of_next_load(size: int) -> None:
    with pair(socket.SOCK_SEQPACKET) as (ours, peer):
        for sent in (b"+OK\r\n" + PUSH, PUSH + b"+OK\r\n"):
            for start in range(0, len(sent), size):
                peer.send(sent[start : start + size])
            assert native.send_all([ours.fileno()], b"PING\r\n", [], 1, 1, 1, 1)[0] == 1


def test_request_may_be_several_commands_with_reply_each() -> None:
    with pair(socket.SOCK_STREAM) as (ours, peer):
        peer.send(b"+OK\r\n+QUEUED\r\n*1\r\n:1\r\n" * 2)
        replied, _, received = native.send_all([ours.fileno()], b"MULTI\r\nPING\r\nEXEC\r\n", [], 2, 2, 1, 1, replies=3)
        assert (replied, received) == (2, 44)


def test_errors_are_replies_if_they_are_expected() -> None:
    with pair(socket.SOCK_STREAM) as (ours, peer):
        peer.send(b"-ERR no\r\n*2\r\n-ERR no\r\n:1\r\n")
        replied, _, _ = native.send_all([ours.fileno()], b"PING\r\n", [], 2, 2, 1, 1, takes_errors=True)
        assert replied == 2


def test_server_may_close_connection_that_has_all_replies() -> None:
    with pair(socket.SOCK_STREAM) as (ours, peer), pair(socket.SOCK_STREAM) as (other, late):
        peer.send(b"+OK\r\n")
        peer.shutdown(socket.SHUT_WR)

        def answer() -> None:
            late.recv(100)
            late.sendall(b"+OK\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        replied, _, _ = native.send_all([ours.fileno(), other.fileno()], b"QUIT\r\n", [], 1, 2, 1, 1)
        thread.join()
        assert replied == 2


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        (b"+OK\r\n-ERR no\r\n", "replied with an error: b'-ERR no'"),
        (b"*2\r\n+OK\r\n-ERR no\r\n", "replied with an error: b'-ERR no'"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no reply: b'HTTP"),
        (b"!5\r\n", "no reply"),
        (b">-1\r\n", "no reply"),
        (b"$x\r\n", "no reply"),
        (b"*-2\r\n", "no reply"),
        (b"$\r\n", "no reply"),
        (b":1\n", "no reply"),
        (b"\r\n", "no reply"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_wrong_reply_ends_load(replies: bytes, error: str, size: int) -> None:
    with pair(socket.SOCK_SEQPACKET) as (ours, peer):
        for start in range(0, len(replies), size):
            peer.send(replies[start : start + size])
        with pytest.raises(native.LoadError, match=error):
            native.send_all([ours.fileno()], b"PING\r\n", [], 2, 4, 1, 1)


@pytest.mark.parametrize(
    ("sent", "requests", "error"),
    [
        (b"+OK\r\n:1\r\n:2\r\n", 2, "more replies than there were requests; the first of them: b':2"),
        (b"+" + b"x" * 300, 1, "no reply"),
        (b"-" + b"x" * 300, 1, "replied with an error"),
        (b"+OK\r\n", 2, "closed a connection"),
    ],
    ids=["too many replies", "endless line", "endless error", "end"],
)
def test_wrong_replies_end_load(sent: bytes, requests: int, error: str) -> None:
    with pair(socket.SOCK_STREAM) as (ours, peer):
        peer.send(sent)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(native.LoadError, match=error):
            native.send_all([ours.fileno()], b"PING\r\n", [], requests, 2 * requests, 1, 1)


def test_bytes_that_socket_does_not_take_are_sent_later() -> None:
    words = ["MGET", *["key:__rand_int__"] * 100]
    packed, numbers_at = load.request_of(words)
    taken: list[bytes] = []

    def answer() -> None:
        for _ in range(3):
            batch = b""
            while len(batch) < len(packed) * 50:
                batch += peer.recv(1000)
            taken.append(batch)
            peer.sendall(b"*0\r\n" * 50)

    with pair(socket.SOCK_STREAM) as (ours, peer):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        thread = threading.Thread(target=answer)
        thread.start()
        replied, _, _ = native.send_all([ours.fileno()], packed, numbers_at, 50, 150, 10, 1)
        thread.join()
    assert replied == 150
    zeros = [batch.translate(bytes.maketrans(b"123456789", b"0" * 9)) for batch in taken]
    assert zeros == [packed.translate(bytes.maketrans(b"123456789", b"0" * 9)) * 50] * 3
    assert len(set(taken)) == 3


def test_load_generator_places_numbers_in_requests() -> None:
    packed, numbers_at = load.request_of(["é__rand_int__:__rand_int__", "0", "__rand_int__"])
    assert packed == request("é" + "0" * 12 + ":" + "0" * 12, "0", "0" * 12)
    filled = bytearray(packed)
    for at in numbers_at:
        filled[at : at + 12] = b"1" * 12
    assert filled == request("é" + "1" * 12 + ":" + "1" * 12, "0", "1" * 12)
