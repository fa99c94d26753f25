"""An upstream that is killed, paused, back, or misbehaves: its own keys fail, states' keys never notice."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from compat.conformance.wire import Connection, request
from compat.waiting import WAIT_S_MAX, eventually
from tests.server.overlay import Overlay

# Short enough for a test, long enough for a busy machine to answer in time.
TIMEOUT_MS = "1500"
GREETING = {
    b"PING": b"+PONG\r\n",
    b"COMMAND": b"*0\r\n",
    b"CLIENT": b"+OK\r\n",
    b"HELLO": b"*0\r\n",
    b"ROLE": b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n",
}


OPTIONS = ("--upstream-timeout", TIMEOUT_MS)


def is_retryable(reply: bytes) -> bool:
    return reply.startswith(b"-TRYAGAIN the upstream 127.0.0.1:")


def test_killed_upstream_fails_only_its_keys_until_it_is_back(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other:
        assert client.call("SET", "a", "1").plain == b"OK"
        overlay.signal_upstream(signal.SIGKILL)
        eventually(lambda: is_retryable(other.call("GET", "a").raw))
        for number in range(8):
            assert is_retryable(other.call("SET", "a", "2").raw)
            assert other.call("GET", f"job:speed:{number}").plain == b"%d" % (10 * number)
        assert other.call("MGET", "a", "job:speed:1").raw.startswith(b"-TRYAGAIN")
        assert other.call("EXISTS", "job:speed:1", "job:speed:2").plain == 2
        fields = overlay.info()
        assert fields["upstream_status"] == "down" and fields["upstream_error"] and int(fields["upstream_outages"]) >= 1
        overlay.start_upstream()
        eventually(lambda: other.call("SET", "a", "3").plain == b"OK")
        assert client.call("GET", "a").plain == b"3"  # nothing of this client was lost, so it is still connected
    assert overlay.info()["upstream_status"] == "up"


def test_unanswered_write_closes_connection_after_earlier_replies(
    overlay: Overlay,
) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other:
        assert client.call("SET", "a", "1").plain == b"OK"
        overlay.signal_upstream(signal.SIGSTOP)
        client.send(request("GET", "job:speed:2") + request("INCR", "a") + request("GET", "job:speed:3"))
        # A state's key is answered while the other client waits.
        assert other.call("GET", "job:speed:1").plain == b"10"
        eventually(lambda: int(overlay.info()["upstream_waiting"]) == 1)
        overlay.signal_upstream(signal.SIGKILL)
        assert client.read_to_end() == b"$2\r\n20\r\n"
        assert other.call("GET", "job:speed:1").plain == b"10"
    overlay.start_upstream()
    overlay.wait_until_ready(overlay.proxy)


def test_paused_upstream_fails_after_timeout_and_recovers(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client, overlay.proxy.connect() as other:
        eventually(lambda: client.call("SET", "counter", "1").plain == b"OK")  # its upstream connection is open
        overlay.signal_upstream(signal.SIGSTOP)
        try:
            client.send(request("INCR", "counter"))
            with pytest.raises(EOFError):
                client.read()
            # The socket of a paused process accepts connections, so the log-in fails by its time limit.
            eventually(lambda: is_retryable(other.call("GET", "a").raw))
            assert other.call("GET", "job:speed:1").plain == b"10"
        finally:
            overlay.signal_upstream(signal.SIGCONT)
        eventually(lambda: other.call("SET", "a", "5").plain == b"OK")
        assert other.call("GET", "a").plain == b"5"


def test_clients_leaving_during_upstream_pause_are_forgotten(overlay: Overlay) -> None:
    overlay.signal_upstream(signal.SIGSTOP)
    try:
        for _ in range(20):
            with overlay.proxy.connect() as client:
                client.send(request("GET", "a") + request("GET", "job:speed:1"))
        with overlay.proxy.connect() as client:
            assert client.call("GET", "job:speed:1").plain == b"10"
    finally:
        overlay.signal_upstream(signal.SIGCONT)
    with overlay.proxy.connect() as client:
        eventually(lambda: client.call("SET", "a", "6").plain == b"OK")


def test_writes_are_not_lost_or_repeated_while_upstream_connections_are_killed(overlay: Overlay) -> None:
    """Each client counts in its own list; a client whose connection is closed does not know about its last write."""
    is_over = threading.Event()

    def count(name: str) -> tuple[int, int]:
        sure = unsure = 0
        client = overlay.proxy.connect()
        while not is_over.is_set():
            try:
                reply = client.call("RPUSH", name, sure + unsure)
                sure += not reply.is_error
                assert not reply.is_error or is_retryable(reply.raw), reply
            except EOFError:
                unsure += 1
                client = overlay.proxy.connect()
        return sure, unsure

    with ThreadPoolExecutor() as threads, overlay.upstream.connect() as direct:
        direct.call("FLUSHALL")
        running = [threads.submit(count, f"list{number}") for number in range(4)]
        try:
            for _ in range(30):
                before = direct.call("LLEN", "list0").plain
                direct.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                eventually(lambda before=before: direct.call("LLEN", "list0").plain > before)  # type: ignore[misc]
        finally:
            is_over.set()
        for number, each in enumerate(running):
            sure, unsure = each.result()
            values = direct.call("LRANGE", f"list{number}", 0, -1).plain
            assert len(values) == len(set(values)), "a write was done twice"
            assert sure <= len(values) <= sure + unsure


class FakeUpstream:
    """A server that greets as Redis does; `answer` decides what becomes of each other request."""

    def __init__(self, answer: Callable[[list[bytes], int], bytes | None]) -> None:
        self._answer = answer
        self.seen: list[list[bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as file:
            client.settimeout(WAIT_S_MAX)
            while words := _request_in(file):
                name = words[0].upper()
                reply = GREETING.get(name)
                if reply is None:
                    self.seen.append(words)
                    reply = self._answer(words, len(self.seen))
                if reply is None:
                    return
                client.sendall(reply)


def _request_in(file: object) -> list[bytes]:
    lines = file.readline  # type: ignore[attr-defined]
    header = lines()
    return [lines() and lines()[:-2] for _ in range(int(header[1:]))] if header else []


@contextmanager
def proxy_at(
    overlay: Overlay, answer: Callable[[list[bytes], int], bytes | None]
) -> Iterator[tuple[FakeUpstream, Connection]]:
    fake = FakeUpstream(answer)
    proxy = overlay.start_at(f"redis://127.0.0.1:{fake.port}")
    with proxy.connect() as client:
        eventually(lambda: client.call("GET", "job:speed:1").plain == b"10")
        yield fake, client
    fake.close()


def test_read_on_lost_connection_is_sent_again(overlay: Overlay) -> None:
    with proxy_at(overlay, lambda words, count: None if count == 1 else b"$1\r\nv\r\n") as (fake, client):
        assert client.call("GET", "k").plain == b"v"
        assert fake.seen == [[b"GET", b"k"]] * 2


def test_read_is_sent_at_most_twice(overlay: Overlay) -> None:
    with proxy_at(overlay, lambda words, count: None) as (fake, client):
        client.send(request("GET", "k"))
        with pytest.raises(EOFError):
            client.read()
        assert fake.seen == [[b"GET", b"k"]] * 2


def test_write_on_lost_connection_is_not_sent_again(overlay: Overlay) -> None:
    with proxy_at(overlay, lambda words, count: None if words[0] == b"SET" else b"+OK\r\n") as (fake, client):
        client.send(request("LPUSH", "l", "1") + request("SET", "k", "1") + request("GET", "k"))
        assert client.read_to_end() == b"+OK\r\n"
        assert [each for each in fake.seen if each[0] == b"SET"] == [[b"SET", b"k", b"1"]]


@pytest.mark.parametrize(
    "garbage", [b"nonsense\r\n", b"+OK\r\n+OK\r\n", b"$3\r\nabcde\r\n", b"*1\r\n$-5\r\n", b">1\r\n+x\r\n"]
)
def test_garbage_from_upstream_fails_only_its_keys(overlay: Overlay, garbage: bytes) -> None:
    with proxy_at(overlay, lambda words, count: garbage if count == 1 else None) as (_, client):
        client.send(request("SET", "k", "1"))
        client.read_to_end(b"+OK\r\n")  # the reply, if the garbage begins with one; else the end
    with proxy_at(overlay, lambda words, count: b"+OK\r\n") as (_, client):
        assert client.call("SET", "k", "1").plain == b"OK"
        assert client.call("GET", "job:speed:1").plain == b"10"
