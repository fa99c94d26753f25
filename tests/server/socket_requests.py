"""Requests, and what a server of one job's values has to answer, byte by byte."""

from __future__ import annotations

import random

from state_backend.codec import packed_map
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

NOW_MS = 1_700_000_000_000
KEYS = 2_000
LARGE = bytes(range(256)) * 200  # 51,200 bytes
STATES = [
    StateDescriptor("v", key="k", value="v"),
    StateDescriptor("m", key="k", value=("a", "b")),
]
CHANGES = [
    *(Change("v", Op.PUT, b"job:v:%d" % number, value=b"%d" % number) for number in range(KEYS)),
    Change("v", Op.PUT, b"job:v:large", value=LARGE),
    *(
        Change("m", Op.PUT, b"job:m:%d" % number, value=packed_map.pack([(b"a", b"1"), (b"b", b"%d" % number)]))
        for number in range(100)
    ),
]
PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def packed(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(bulk(word) for word in words)


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def get(number: int) -> bytes:
    return packed(b"GET", b"job:v:%d" % number)


GET_LARGE = packed(b"GET", b"job:v:large")


def mixture(dice: random.Random, count: int) -> tuple[bytes, bytes]:
    """Return requests, of which the core answers some, and what has to be answered."""
    sent, expected = [], []
    for _ in range(count):
        number = dice.randrange(KEYS)
        text = b"%d" % number
        case = dice.randrange(9)
        if case < 3:
            sent.append(get(number))
            expected.append(bulk(text))
        elif case == 3:
            sent.append(packed(b"MGET", b"job:v:%d" % number, b"nope"))
            expected.append(b"*2\r\n" + bulk(text) + b"$-1\r\n")
        elif case == 4:
            sent.append(packed(b"HGET", b"job:m:7", b"b"))
            expected.append(bulk(b"7"))
        elif case == 5:  # of the general path
            sent.append(packed(b"ECHO", text))
            expected.append(bulk(text))
        elif case == 6:
            sent.append(b"GET job:v:%d\r\n" % number)
            expected.append(bulk(text))
        elif case == 7:
            sent.append(packed(b"GET", b"job:m:1"))
            expected.append(b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n")
        else:
            sent.append(packed(b"NOPE"))
            expected.append(b"-ERR unknown command 'NOPE', with args beginning with: \r\n")
    return b"".join(sent), b"".join(expected)


# A reply of 50 KiB, and a request of 30 KB.
PAIR, PAIR_REPLIES = GET_LARGE + packed(b"GET", b"job:v:" + b"x" * 30_000), bulk(LARGE) + b"$-1\r\n"
