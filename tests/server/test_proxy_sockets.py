"""A proxy's clients on the core's own epoll, where the forwarder reads their input first, and behind asyncio."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from compat.conformance.wire import request
from resp_server import native
from tests.server.faults import KEYS, Scene


@pytest.fixture
def scene(kind_of_sockets: str) -> Iterator[Scene]:
    made = Scene()
    yield made
    made.stop()


def conversation(dice: random.Random) -> tuple[bytes, bytes, int]:
    """Return requests, of which the forwarder asks for most, what has to be answered, and the number of requests."""
    sent, expected = [], []
    for _ in range(dice.choice([1, 3, 300, 700])):  # the forwarder takes no more than 256 at once
        number, other = dice.sample(range(len(KEYS)), 2)
        value, another = (b"$%d\r\n%b\r\n" % (len(each), each) for each in (b"v%d" % number, b"v%d" % other))
        case = dice.randrange(20)
        if case == 0:
            sent.append(request("ECHO", b"v%d" % number))
            expected.append(value)
        elif case == 1:
            sent.append(request("MGET", KEYS[number], KEYS[other]))
            expected.append(b"*2\r\n" + value + another)
        else:
            sent.append(request("GET", KEYS[number]))
            expected.append(value)
    return b"".join(sent), b"".join(expected), len(sent)


@pytest.mark.parametrize("seed", range(3))
def test_replies_keep_order_and_counts_for_any_cuts(scene: Scene, seed: int) -> None:
    dice = random.Random(seed)
    sent_bytes = expected_bytes = 0
    for _ in range(8):
        peer, before = scene.connect(scene.port("proxy")), (sent_bytes, expected_bytes)
        asked = 0
        for _ in range(3):
            sent, expected, count = conversation(dice)
            asked += count
            cuts = sorted(dice.sample(range(1, len(sent)), min(4, len(sent) - 1)))
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                peer.send(sent[start:end])
                if dice.random() < 0.5:  # what was sent is looked at before the rest is there
                    scene.call(lambda: None)
            assert peer.read(len(expected)) == expected
            sent_bytes, expected_bytes = sent_bytes + len(sent), expected_bytes + len(expected)
        session = scene.call(lambda: list(scene.proxy.context.sessions.values())[-1])
        bytes_of_client = sent_bytes - before[0], expected_bytes - before[1]
        scene.call(lambda: None)
        assert (session.calls, session.input_bytes, session.output_bytes) == (asked, *bytes_of_client)
    stats = scene.proxy.context.stats
    scene.call(lambda: None)
    scene.call(stats.collect)
    assert scene.call(lambda: (stats.input_bytes, stats.output_bytes)) == (sent_bytes, expected_bytes)
    if native.core is not None:
        assert scene.call(lambda: stats.command_stats("get").calls) > 0
