"""Conversations of publishers and subscribers: the same bytes to each of them, in RESP2 and RESP3."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest

from compat.conformance.pair import Pair
from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX

Step = tuple[str, str]  # who, and what it sends at once: requests with semicolons between


class Client:
    """A connection whose bytes are kept as they come."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
        self.is_closed = False

    def say(self, line: str) -> None:
        for each in line.split(" ; "):
            self._socket.sendall(request(*each.split(" ")))

    def read(self, marker: bytes) -> bytes:
        """Return what came before the answer to a PING with a marker, or before the end."""
        if self.is_closed:
            return b""
        with suppress(ConnectionError):
            self._socket.sendall(request("PING", marker))
        ends = re.compile(rb"(\*2\r\n\$4\r\npong\r\n)?\$%d\r\n%b\r\n\Z" % (len(marker), marker))
        data = b""
        while not (found := ends.search(data)):
            try:
                some = self._socket.recv(1 << 16)
            except ConnectionError:  # closed with the marker unread
                some = b""
            data += some
            if not some:
                self.is_closed = True
                return data
        return data[: found.start()]

    def close(self) -> None:
        self._socket.close()


def received(port: int, steps: Sequence[Step]) -> Iterator[tuple[Step, dict[str, bytes]]]:
    """Have a conversation; yield after each step what each of its clients was told."""
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for number, (who, line) in enumerate(steps):
            if who not in clients:
                clients[who] = Client(port)
                stack.callback(clients[who].close)
            clients[who].say(line)
            order = [who, *(each for each in clients if each != who)]
            yield (who, line), {each: clients[each].read(b"marker-%d" % number) for each in order}


GREETINGS = {"RESP2": "HELLO 2", "RESP3": "HELLO 3"}

CONVERSATIONS = {
    "channels": [
        ("a", "SUBSCRIBE x y x"),
        ("b", "PUBLISH x hello"),
        ("b", "PUBLISH y "),
        ("b", "PUBLISH z nobody"),
        ("a", "UNSUBSCRIBE x nothing"),
        ("b", "PUBLISH x unheard"),
        ("b", "PUBLISH y heard"),
        ("a", "UNSUBSCRIBE"),
        ("a", "UNSUBSCRIBE"),
        ("a", "UNSUBSCRIBE never"),
        ("b", "PUBLISH y unheard"),
        ("a", "GET job:temp:1"),
    ],
    "patterns": [
        ("a", "PSUBSCRIBE x* ?y [a-c]z"),
        ("a", "SUBSCRIBE xx"),
        ("b", "PUBLISH xx twice"),
        ("b", "PUBLISH ay once"),
        ("b", "PUBLISH bz once"),
        ("b", "PUBLISH dz never"),
        ("b", "PUBSUB NUMPAT"),
        ("a", "PUNSUBSCRIBE x*"),
        ("b", "PUBLISH xx once"),
        ("a", "PUNSUBSCRIBE no ?y"),
        ("a", "PUNSUBSCRIBE"),
        ("a", "PUNSUBSCRIBE"),
        ("b", "PUBSUB NUMPAT"),
        ("a", "UNSUBSCRIBE xx"),
    ],
    "shard channels": [
        ("a", "SSUBSCRIBE s t"),
        ("a", "SUBSCRIBE s"),
        ("b", "SPUBLISH s hello"),
        ("b", "PUBLISH s other"),
        ("b", "PUBSUB SHARDCHANNELS s*"),
        ("b", "PUBSUB SHARDNUMSUB s t u"),
        ("a", "SUNSUBSCRIBE s"),
        ("b", "SPUBLISH s unheard"),
        ("a", "SUNSUBSCRIBE"),
        ("a", "SUNSUBSCRIBE"),
        ("a", "UNSUBSCRIBE"),
    ],
    "counts": [
        ("a", "SUBSCRIBE x y"),
        ("c", "SUBSCRIBE x"),
        ("b", "PUBSUB NUMSUB x y z"),
        ("b", "PUBSUB NUMSUB"),
        ("b", "PUBSUB CHANNELS x*"),
        ("b", "PUBSUB CHANNELS nobody"),
        ("b", "PUBLISH x to-two"),
        ("b", "CLIENT KILL TYPE pubsub"),
        ("b", "PUBSUB CHANNELS"),
        ("b", "PUBSUB NUMSUB x"),
        ("b", "PUBLISH x to-nobody"),
    ],
    "what else may be said": [
        ("a", "SUBSCRIBE x"),
        ("a", "GET job:temp:1"),
        ("a", "CLIENT ID x"),
        ("a", "PUBLISH y z"),
        ("a", "MULTI ; DISCARD"),
        ("a", "NOSUCH x"),
        ("a", "GET"),
        ("a", "SUBSCRIBE"),
        ("a", "PING"),
        ("a", "PING hello"),
        ("a", "PING a b"),
        ("a", "RESET"),
        ("a", "PING"),
        ("a", "UNSUBSCRIBE"),
        ("a", "ECHO x"),
        ("b", "PUBLISH x unheard"),
        ("a", "SUBSCRIBE x"),
        ("a", "QUIT"),
        ("b", "PUBLISH x unheard"),
    ],
    "within a transaction": [
        ("a", "MULTI ; SUBSCRIBE x y ; PSUBSCRIBE x* ; GET job:temp:1 ; UNSUBSCRIBE x ; EXEC"),
        ("b", "MULTI ; PUBLISH y hello ; PUBLISH xx hello ; PUBSUB NUMSUB x y ; EXEC"),
        ("a", "MULTI ; UNSUBSCRIBE ; EXEC"),
        ("b", "MULTI ; PUBLISH y hello ; DISCARD"),
        ("b", "PUBLISH y unheard"),
    ],
    "without replies": [
        ("b", "SUBSCRIBE z"),
        ("a", "CLIENT REPLY SKIP ; SUBSCRIBE x"),
        ("c", "PUBLISH x hello"),
        ("c", "CLIENT REPLY SKIP ; PUBLISH x again"),
        ("a", "CLIENT REPLY SKIP ; UNSUBSCRIBE"),
    ],
    "mistakes": [
        ("a", "PUBLISH x"),
        ("a", "SPUBLISH x y z"),
        ("a", "PUBSUB"),
        ("a", "PUBSUB NOSUCH"),
        ("a", "PUBSUB CHANNELS a b"),
        ("a", "PUBSUB NUMPAT a"),
        ("a", "SSUBSCRIBE"),
        ("a", "PSUBSCRIBE"),
    ],
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
@pytest.mark.parametrize("steps", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversation_equals_redis(pair: Pair, steps: Sequence[Step], greeting: str) -> None:
    begun = [(who, greeting) for who in dict.fromkeys(who for who, _ in steps)]
    conversation = [*begun, *steps]
    theirs, ours = (received(server.port, conversation) for server in (pair.redis, pair.sparkis))
    for (step, redis), (_, sparkis) in zip(theirs, ours, strict=True):
        if step[1] != greeting:  # whose answer has a version, and an id
            assert sparkis == redis, step
