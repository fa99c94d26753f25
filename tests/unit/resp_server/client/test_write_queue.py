"""The replies of a round of the event loop are sent at its end, in order, or earlier if they are large."""

from __future__ import annotations

import asyncio

from resp_server.client.write_queue import WriteQueue
from resp_server.limits import ROUND_REPLIES_BYTES_MAX


class Client:
    def __init__(self, sent: list[tuple[str, bytes]], name: str) -> None:
        self._sent, self._name = sent, name

    def send(self, reply: bytes) -> None:
        self._sent.append((self._name, reply))


def test_replies_of_round_are_sent_at_its_end_in_order() -> None:
    async def play() -> None:
        sent: list[tuple[str, bytes]] = []
        write_queue, one, other = WriteQueue(), Client(sent, "one"), Client(sent, "other")
        for number in range(2):
            write_queue.add(one.send, b"1")
            write_queue.add(other.send, b"2")
            write_queue.add(one.send, b"3")
            assert len(sent) == 3 * number
            await asyncio.sleep(0)
            assert sent[-3:] == [("one", b"1"), ("other", b"2"), ("one", b"3")]
            assert len(sent) == 3 * (number + 1)

    asyncio.run(play())


def test_large_write_is_sent_at_once_after_waiting_ones() -> None:
    async def play() -> None:
        sent: list[tuple[str, bytes]] = []
        write_queue, one = WriteQueue(), Client(sent, "one")
        write_queue.add(one.send, b"first")
        write_queue.add(one.send, bytes(ROUND_REPLIES_BYTES_MAX))
        assert [len(reply) for _, reply in sent] == [5, ROUND_REPLIES_BYTES_MAX]
        write_queue.add(one.send, b"last")
        await asyncio.sleep(0)
        assert sent[2:] == [("one", b"last")]

    asyncio.run(play())
