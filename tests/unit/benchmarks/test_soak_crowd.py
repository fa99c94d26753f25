"""What the crowd of `make soak` takes for a mistake of the server."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from benchmarks.soak_crowd import Client, CrowdError, _garbage


def read_from(replies: bytes, count: int, *, epochs: bool) -> None:
    """Read some replies as a client of the crowd does."""

    async def read() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(replies)
        stream.feed_eof()
        writer: Any = None
        client = Client(stream, writer)
        if epochs:
            for _ in range(count):
                await client.read_epoch()
        else:
            await client.read_replies(count)

    asyncio.run(read())


def test_epochs_that_rise_or_stay_are_right() -> None:
    read_from(b"$1\r\n7\r\n$1\r\n7\r\n$2\r\n12\r\n", 3, epochs=True)


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        (b"$1\r\n7\r\n$1\r\n6\r\n", "had seen epoch 7 then read epoch 6"),
        (b"$1\r\n7\r\n$-1\r\n", "the reply to GET of the epoch is"),
        (b"$1\r\n7\r\n-LOADING\r\n", "LOADING"),
        (b"$1\r\n7\r\n", "the reply to GET of the epoch is b''"),
    ],
)
def test_older_epoch_error_and_lost_connection_are_mistakes(replies: bytes, error: str) -> None:
    with pytest.raises(CrowdError, match=error):
        read_from(replies, 2, epochs=True)


def test_values_and_missing_keys_are_right_and_errors_are_not() -> None:
    read_from(b"$3\r\na\r\n\r\n$-1\r\n$0\r\n\r\n", 3, epochs=False)
    with pytest.raises(CrowdError, match="-ERR"):
        read_from(b"$-1\r\n-ERR no\r\n", 2, epochs=False)


def test_garbage_ends_program_with_line() -> None:
    assert all(_garbage(Random(seed)).endswith(b"\r\n") for seed in range(20))
