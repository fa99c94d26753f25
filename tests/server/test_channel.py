"""The line between the master and a worker: order, sockets, large lines, the end, standing still."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from compat.waiting import WAIT_S_MAX, eventually_async
from resp_server.workers import channel
from resp_server.workers.channel import Channel


class End:
    """One end, and what came to it."""

    def __init__(self, end: socket.socket) -> None:
        self.taken: list[tuple[dict[str, Any], int | None]] = []
        self.ended = asyncio.Event()
        self.channel = Channel(end, self._take, self.ended.set)

    def _take(self, line: dict[str, Any], handed: int | None) -> None:
        if line.get("is_bad"):
            raise ValueError("could not be handled")
        self.taken.append((line, handed))

    async def wait_for(self, count: int) -> None:
        await eventually_async(lambda: len(self.taken), lambda taken: taken >= count)


def run_with_channels(body: Callable[[End, End], Awaitable[None]]) -> None:
    """Run something with both ends of a line."""

    async def with_ends() -> None:
        one, other = map(End, socket.socketpair())
        await body(one, other)
        one.channel.close()
        other.channel.close()

    uvloop.run(with_ends())


def test_lines_and_sockets_come_in_order() -> None:
    async def body(one: End, other: End) -> None:
        pairs = [socket.socketpair() for _ in range(40)]
        for number, (mine, theirs) in enumerate(pairs):
            mine.send(b"%d" % number)
            one.channel.send({"n": number})
            one.channel.send({"n": number, "text": "x" * 5000}, theirs)
        await other.wait_for(80)
        assert [line["n"] for line, _ in other.taken] == [number for number in range(40) for _ in range(2)]
        assert [handed is not None for _, handed in other.taken] == [False, True] * 40
        for number, handed in enumerate(handed for _, handed in other.taken if handed is not None):
            with socket.socket(fileno=handed) as came:
                assert came.recv(10) == b"%d" % number
        assert all(theirs.fileno() == -1 for _, theirs in pairs)  # handed over, so not kept
        for mine, _ in pairs:
            mine.close()

    run_with_channels(body)


def test_line_larger_than_socket_buffer_is_received() -> None:
    async def body(one: End, other: End) -> None:
        one.channel.send({"text": "ä" * 3_000_000})
        one.channel.send({"text": "after"})
        await other.wait_for(2)
        assert [len(line["text"]) for line, _ in other.taken] == [3_000_000, 5]

    run_with_channels(body)


def test_end_is_reported_once_and_nothing_is_sent_after_it() -> None:
    async def body(one: End, other: End) -> None:
        mine, theirs = socket.socketpair()
        one.channel.close()
        await asyncio.wait_for(other.ended.wait(), WAIT_S_MAX)
        other.channel.send({"event": "late"}, theirs)
        assert theirs.fileno() == -1
        assert mine.recv(1) == b""
        mine.close()

    run_with_channels(body)


def test_line_that_is_not_understood_does_not_stop_next_one() -> None:
    async def body(one: End, other: End) -> None:
        one.channel.send({"is_bad": True})
        one.channel.send({"n": 1})
        await other.wait_for(1)
        assert other.taken == [({"n": 1}, None)]

    run_with_channels(body)


def test_process_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "UNSENT_BYTES_MAX", 1 << 20)

    async def body(one: End, other: End) -> None:
        other.channel._loop.remove_reader(other.channel._socket)
        for _ in range(100):
            one.channel.send({"text": "x" * 100_000})
        assert one.ended.is_set()

    run_with_channels(body)


def test_blocked_loop_takes_lines_and_runs_nothing_else() -> None:
    async def body(one: End, other: End) -> None:
        did_more: list[int] = []
        asyncio.get_running_loop().call_soon(did_more.append, 1)
        one.channel.send({"n": 1})
        one.channel.send({"n": 2})
        assert other.channel.block_until(lambda: len(other.taken) == 2, WAIT_S_MAX)
        assert did_more == []
        await asyncio.sleep(0)
        assert did_more == [1]

    run_with_channels(body)


def test_blocked_loop_ends_after_its_time_or_with_channel() -> None:
    async def body(one: End, other: End) -> None:
        assert not other.channel.block_until(lambda: False, 0.01)
        one.channel.close()
        assert other.channel.block_until(lambda: False, WAIT_S_MAX)
        assert other.ended.is_set()

    run_with_channels(body)
